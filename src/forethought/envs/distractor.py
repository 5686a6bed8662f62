"""The environment of the alignment study: half of what is observed is no part of the reward."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from forethought.envs.pure import ObservedEnv, first_step, next_step, within_bounds
from forethought.types import Box, Spec, TimeStep


class DistractorState(eqx.Module):
    """The four dimensions and the decisions of the episode so far."""

    vector: Float[Array, " 4"]
    elapsed: Int[Array, ""]


class Distractor(ObservedEnv):
    """Four dimensions, of which 0 (controlled) and 1 (left alone) are rewarded and 2 and 3 distract.

    Observation 'obs' [4] is the state s. With action a [1] and independent e ~ N(0, noise^2) per dimension,

        s0' = 0.8 s0 + 0.5 a + e0         s2' = sin(s2 + 0.5) + e2
        s1' = persistence s1 + e1         s3' = cos(s3 + shift) + e3         reward = 1 - s0'^2 - s1'^2

    An episode starts at s ~ N(0, spread^2) and is truncated after `horizon` decisions; it never terminates.
    """

    action_bound: float | None = eqx.field(static=True, default=None)
    """a is the action in [-1, 1] times this; None: a is the action itself, without bounds."""
    persistence: float = eqx.field(static=True, default=0.9)
    shift: float = eqx.field(static=True, default=0.5)
    spread: float = eqx.field(static=True, default=0.577)
    noise: float = eqx.field(static=True, default=0.1)
    horizon: int = eqx.field(static=True, default=5)

    def __check_init__(self):
        if self.action_bound is not None and not 0 < self.action_bound < np.inf:
            raise ValueError(f"jax/distractor: action_bound is {self.action_bound}, not positive and finite or None")
        if self.spread < 0 or self.noise < 0 or self.horizon < 1:
            raise ValueError("jax/distractor: spread and noise must be at least 0 and horizon at least 1")

    @property
    def spec(self) -> Spec:
        bound = np.inf if self.action_bound is None else self.action_bound
        return Spec(
            name="jax/distractor",
            obs={"obs": Box((4,))},
            action=Box((1,), low=-bound, high=bound),
            time_limit=self.horizon,
        )

    def reset(self, *, key: PRNGKeyArray) -> tuple[DistractorState, TimeStep]:
        state = DistractorState(self.spread * jax.random.normal(key, (4,)), jnp.zeros((), jnp.int32))
        return state, first_step({"obs": state.vector})

    def step(
        self, state: DistractorState, action: Float[Array, " 1"], *, key: PRNGKeyArray
    ) -> tuple[DistractorState, TimeStep]:
        push = action[0] if self.action_bound is None else self.action_bound * within_bounds(action)[0]
        s0, s1, s2, s3 = state.vector
        means = [0.8 * s0 + 0.5 * push, self.persistence * s1, jnp.sin(s2 + 0.5), jnp.cos(s3 + self.shift)]
        vector = jnp.stack(means) + self.noise * jax.random.normal(key, (4,))
        state = DistractorState(vector, state.elapsed + 1)
        reward = 1 - vector[0] ** 2 - vector[1] ** 2
        return state, next_step({"obs": vector}, reward, elapsed=state.elapsed, time_limit=self.horizon)

    def state(self, obs: dict[str, Array]) -> DistractorState:
        return DistractorState(obs["obs"], jnp.zeros((), jnp.int32))

    def open_loop_return(self, spread: float = 0.0) -> float:
        """The expected undiscounted return of actions a ~ N(0, spread^2) whatever is seen: 0 does nothing."""
        lost, variances = 0.0, np.full(2, self.spread**2)
        for _ in range(self.horizon):
            variances = np.array([0.8, self.persistence]) ** 2 * variances + [0.25 * spread**2, 0] + self.noise**2
            lost += variances.sum()
        return float(self.horizon - lost)

    def optimal_return(self) -> float:
        """The expected undiscounted return of an episode under the best policy, exact to about 1e-6.

        No action can change s1, nor gain by anything but a small |s0'|, so the best one takes 0.8 s0 as near to 0
        as the bound lets it: a = clip(-1.6 s0, -bound, bound). Without a bound that is what Riccati's equation
        gives (the cost to go is then a constant); with one the cost to go is computed backwards on a grid.
        """
        uncontrolled, variance = 0.0, self.spread**2
        for _ in range(self.horizon):
            variance = self.persistence**2 * variance + self.noise**2
            uncontrolled += variance
        reach = np.inf if self.action_bound is None else 0.5 * self.action_bound
        points = np.linspace(-8, 8, 161)
        weights = np.exp(-(points**2) / 2)
        weights /= weights.sum()
        grid = (8 * self.spread + 16 * self.noise + 1e-3) * np.linspace(-1, 1, 4001)
        resting = np.sign(grid) * np.maximum(0.8 * np.abs(grid) - reach, 0)
        arrived = resting[:, None] + self.noise * points
        cost = np.zeros_like(grid)
        for _ in range(self.horizon):
            cost = (arrived**2 + np.interp(arrived, grid, cost)) @ weights
        starts = self.spread * np.linspace(-8, 8, 4001)
        likely = np.exp(-(np.linspace(-8, 8, 4001) ** 2) / 2)
        controlled = np.interp(starts, grid, cost) @ likely / likely.sum()
        return float(self.horizon - controlled - uncontrolled)
