"""Finite environments given by exact tables, with exact values; probes that each test one thing; a corridor."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from forethought.envs.pure import ObservedEnv, first_step, next_step
from forethought.ops.dynamic import Tables, action_values, policy_evaluation, policy_iteration, primitive
from forethought.types import Discrete, Spec, TimeStep


class TabularState(eqx.Module):
    """The present state's index and the decisions of the episode so far."""

    state: Int[Array, ""]
    elapsed: Int[Array, ""]


class Tabular(ObservedEnv):
    """A Markov decision process of S states and A actions, given by its tables.

    Observation 'state': the state's index. In state s, action a leads to state p with probability
    `transition[s, a, p]` and is rewarded with exactly `reward[s, a, p]`. Arriving where `terminal` holds ends the
    episode for good (discount 0); the time limit truncates it and is no part of the values below. An action that
    is not in 0 .. A - 1 makes the reward NaN.
    """

    transition: Float[Array | np.ndarray, "S A S"]
    reward: Float[Array | np.ndarray, "S A S"]
    start: Float[Array | np.ndarray, " S"]
    terminal: Bool[Array | np.ndarray, " S"]
    time_limit: int | None = eqx.field(static=True)
    name: str = eqx.field(static=True)

    def __init__(
        self,
        transition: Float[np.ndarray, "S A S"],
        reward: Float[np.ndarray, "S A S"],
        *,
        start: Float[np.ndarray, " S"],
        terminal: Bool[np.ndarray, " S"],
        time_limit: int | None = None,
        name: str = "tabular",
    ):
        """Raises ValueError for a table of the wrong shape, for what is no probability, for a reward that is not
        finite and for an episode that could start in a terminal state."""
        self.transition, self.reward = np.asarray(transition, np.float64), np.asarray(reward, np.float64)
        self.start, self.terminal = np.asarray(start, np.float64), np.asarray(terminal, bool)
        self.time_limit, self.name = time_limit, name
        states, actions = self.transition.shape[:2]
        shapes = {
            "transition": (states, actions, states),
            "reward": (states, actions, states),
            "start": (states,),
            "terminal": (states,),
        }
        for field, shape in shapes.items():
            if getattr(self, field).shape != shape:
                raise ValueError(f"{name}: {field} has shape {getattr(self, field).shape}, not {shape}")
        _check_probabilities(f"{name}: transition", self.transition)
        _check_probabilities(f"{name}: start", self.start)
        if not np.isfinite(self.reward).all():
            raise ValueError(f"{name}: reward holds values that are not finite")
        if self.start[self.terminal].any():
            raise ValueError(f"{name}: start gives probability to a terminal state")
        if time_limit is not None and time_limit < 1:
            raise ValueError(f"{name}: time_limit is {time_limit}, at least 1 is needed")

    @property
    def spec(self) -> Spec:
        states, actions, _ = self.transition.shape
        return Spec(
            name=self.name, obs={"state": Discrete(states)}, action=Discrete(actions), time_limit=self.time_limit
        )

    def reset(self, *, key: PRNGKeyArray) -> tuple[TabularState, TimeStep]:
        state = TabularState(_draw(self.start, key=key), jnp.zeros((), jnp.int32))
        return state, first_step({"state": state.state})

    def step(self, state: TabularState, action: Int[Array, ""], *, key: PRNGKeyArray) -> tuple[TabularState, TimeStep]:
        arrived = _draw(jnp.asarray(self.transition)[state.state, action], key=key)
        reward = jnp.asarray(self.reward)[state.state, action, arrived]
        exists = (action >= 0) & (action < self.transition.shape[1])  # an index beyond the table would be clamped
        terminated = jnp.asarray(self.terminal)[arrived]
        state = TabularState(arrived, state.elapsed + 1)
        return state, next_step(
            {"state": arrived},
            jnp.where(exists, reward, jnp.nan),
            elapsed=state.elapsed,
            time_limit=self.time_limit,
            terminated=terminated,
        )

    def state(self, obs: dict[str, Array]) -> TabularState:
        return TabularState(obs["state"], jnp.zeros((), jnp.int32))

    def tables(self, gamma: float) -> Tables:
        """The exact model, with this discount per decision; the time limit does not enter."""
        return primitive(np.asarray(self.transition), np.asarray(self.reward), np.asarray(self.terminal), gamma)

    def policy_values(
        self, policy: Float[np.ndarray, "S A"], gamma: float
    ) -> tuple[Float[np.ndarray, " S"], Float[np.ndarray, "S A"]]:
        """Returns V and Q of a policy (a distribution over actions per state), exact up to rounding.

        The time limit does not enter. Raises ValueError for gamma outside [0, 1) and for a policy of another shape.
        """
        if np.shape(policy) != self.transition.shape[:2]:
            raise ValueError(f"{self.name}: policy has shape {np.shape(policy)}, not {self.transition.shape[:2]}")
        _check_probabilities(f"{self.name}: policy", np.asarray(policy))
        model = self._discounted(gamma)
        value = policy_evaluation(model, np.asarray(policy))
        return value, action_values(model, value)

    def optimal_values(self, gamma: float) -> tuple[Float[np.ndarray, " S"], Float[np.ndarray, "S A"]]:
        """Returns V* and Q*, exact up to rounding; errors as `policy_values`."""
        model = self._discounted(gamma)
        value, _ = policy_iteration(model)
        return value, action_values(model, value)

    def _discounted(self, gamma: float) -> Tables:
        if not 0 <= gamma < 1:
            raise ValueError(f"{self.name}: gamma is {gamma}, exact values need 0 <= gamma < 1")
        return self.tables(gamma)


def _check_probabilities(what: str, table: np.ndarray) -> None:
    if not (table >= 0).all() or not np.allclose(table.sum(-1), 1, rtol=0, atol=1e-9):
        raise ValueError(f"{what} holds negative probabilities or ones that do not sum to 1")


def _draw(probabilities: Float[Array | np.ndarray, " S"], *, key: PRNGKeyArray) -> Int[Array, ""]:
    return jax.random.categorical(key, jnp.log(jnp.asarray(probabilities))).astype(jnp.int32)


def _deterministic(arrives: list[list[int]], reward: list[list[int]], **rest) -> Tabular:
    """Builds an environment from the state and the reward that each state's actions lead to."""
    transition = np.eye(len(arrives))[np.array(arrives)]
    return Tabular(transition, np.array(reward, np.float64)[..., None] * transition, **rest)


def constant_reward() -> Tabular:
    """One decision, reward 1: V = 1. Probes the critic alone."""
    return _deterministic(
        [[1], [1]], [[1], [0]], start=np.array([1.0, 0]), terminal=np.array([False, True]), name="jax/constant-reward"
    )


def obs_reward() -> Tabular:
    """One decision, reward -1 in state 0 and 2 in state 1, equally likely: V is the reward. Probes what the critic
    makes of its input."""
    return _deterministic(
        [[2], [2], [2]],
        [[-1], [2], [0]],
        start=np.array([0.5, 0.5, 0]),
        terminal=np.array([False, False, True]),
        name="jax/obs-reward",
    )


def delayed_reward() -> Tabular:
    """Two decisions, reward 0 and then 1: V = gamma, 1. Probes the discount and the backup."""
    return _deterministic(
        [[1], [2], [2]],
        [[0], [1], [0]],
        start=np.array([1.0, 0, 0]),
        terminal=np.array([False, False, True]),
        name="jax/delayed-reward",
    )


def action_reward() -> Tabular:
    """One decision, reward -1 for action 0 and 1 for action 1. Probes the actor."""
    return _deterministic(
        [[1, 1], [1, 1]],
        [[-1, 1], [0, 0]],
        start=np.array([1.0, 0]),
        terminal=np.array([False, True]),
        name="jax/action-reward",
    )


def action_obs_reward() -> Tabular:
    """One decision, reward 1 where the action equals the state (0 or 1, equally likely), else -1. Probes that actor
    and critic see the same observation."""
    return _deterministic(
        [[2, 2], [2, 2], [2, 2]],
        [[1, -1], [-1, 1], [0, 0]],
        start=np.array([0.5, 0.5, 0]),
        terminal=np.array([False, False, True]),
        name="jax/action-obs-reward",
    )


def truncated_reward(time_limit: int = 5) -> Tabular:
    """One state, reward 1 for ever, truncated: V = 1 / (1 - gamma), so 10 at gamma 0.9. Probes that a time limit is
    no termination: whoever takes it for one finds 4.0951 with the limit of 5."""
    return _deterministic(
        [[0]],
        [[1]],
        start=np.array([1.0]),
        terminal=np.array([False]),
        time_limit=time_limit,
        name="jax/truncated-reward",
    )


def corridor(length: int = 8, time_limit: int = 50) -> Tabular:
    """States 0 .. length - 1 in a row, from the first to the last, which is terminal; action 0 goes left (and stays
    at the wall), 1 right; reward 1 on arrival, else 0.

    From d steps before the end V* = gamma^(d - 1), and Q* = V* to the right, gamma V*(one to the left) to the left.
    """
    if length < 2:
        raise ValueError(f"corridor: length is {length}, at least 2 is needed")
    end = length - 1
    arrives = [[max(s - 1, 0), s + 1] for s in range(end)] + [[end, end]]
    reward = [[0, int(s + 1 == end)] for s in range(length)]
    return _deterministic(
        arrives,
        reward,
        start=np.eye(length)[0],
        terminal=np.arange(length) == end,
        time_limit=time_limit,
        name="jax/corridor",
    )
