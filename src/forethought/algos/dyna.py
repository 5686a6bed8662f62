"""Dyna: Q-learning whose one update serves real and imagined transitions (Sutton 1990; Sutton & Barto 2018, ch. 8).

    act      state --action--> reward, discount, arrived        in the environment
    learn    q moves towards reward + gamma discount max_a q(arrived, a)
    model    remembers the transition
    plan     `planning` times: a pair that was tried before, what the model says of it, the same update

Where a transition comes from is data; the form of its target never changes. Three methods differ in what is planned:

    q          pairs drawn uniformly from those that were tried (Dyna-Q)
    plus       pairs of all visited states; the imagined reward grows by kappa sqrt(tau), tau the real steps since the
               pair was last tried, so that what may have changed is looked at again (Dyna-Q+)
    sweeping   the pairs whose values would change most, first, and then those that lead to them (prioritised sweeping)

All of a run is one scan, and the caller vmaps over seeds. `loop.py` cannot train this: it collects batches of rows
into a replay for updates that are decoupled from them, whereas here every real step is learned from once, when it is
made, and the model is all that is remembered. docs/dyna.md explains the choices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from forethought.envs.mazes import Changing
from forethought.envs.tabular import Tabular, TabularState
from forethought.models.tabular import Counts, Deterministic, draw
from forethought.protocols import AbstractPolicy
from forethought.tree import select
from forethought.types import Decision, TimeStep


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run is made of; the defaults are those of the book's Dyna maze."""

    method: Literal["q", "plus", "sweeping"] = "q"
    """Which pairs are planned, and with what bonus."""
    planning: int = 50
    """Imagined updates per real step (n); of 'sweeping' the most, since its queue may be empty. 0: Q-learning."""
    gamma: float = 0.95
    """Discount per decision."""
    alpha: float = 0.1
    """Step size, for real and imagined updates."""
    epsilon: float = 0.1
    """Probability of an action drawn uniformly; otherwise a greedy one, ties broken at random."""
    kappa: float = 1e-3
    """Of the bonus of 'plus', in reward per square root of a step."""
    theta: float = 1e-4
    """Errors up to this are not queued by 'sweeping'."""
    model: Literal["deterministic", "counts"] = "deterministic"
    """What is learned of a pair: its last outcome, or counts of all of them, from which outcomes are drawn."""
    prior: float = 0.0
    """Pseudo-counts of every arrival in the model of counts."""

    def __post_init__(self):
        within = {"gamma": (0, 1), "alpha": (0, 1), "epsilon": (0, 1)}
        for name, (low, high) in within.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from {low} to {high}")
        for name in ("planning", "kappa", "theta", "prior"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.method == "sweeping" and self.model != "deterministic":
            raise ValueError("method 'sweeping' looks for what led to a state: it needs model 'deterministic'")


class Transition(NamedTuple):
    """One step, whoever tells of it; reward, discount and arrived are the consequence of state and action."""

    state: Int[Array, ""]
    action: Int[Array, ""]
    reward: Float[Array, ""]
    discount: Float[Array, ""]
    """0.0 on true termination only."""
    arrived: Int[Array, ""]


class State(eqx.Module):
    """Every array needed to go on."""

    q: Float[Array, "S A"]
    model: Deterministic | Counts
    pairs: Int[Array, "N 2"]
    """State and action that may be planned, in the order of their coming; void from `num_pairs` on."""
    num_pairs: Int[Array, ""]
    priority: Float[Array, "S A"]
    """The queue of 'sweeping': how much an update is expected to change; 0: not queued."""
    steps: Int[Array, ""]
    """Real steps."""
    real: Int[Array, ""]
    """Updates from transitions of depth 0."""
    imagined: Int[Array, ""]
    """Updates from transitions of depth 1."""


class Record(NamedTuple):
    """What is kept of every real step."""

    reward: Float[Array, " T"]
    last: Bool[Array, " T"]
    """The episode ended here for any reason."""
    elapsed: Int[Array, " T"]
    """Steps of the episode so far: its length where `last`."""
    real: Int[Array, " T"]
    imagined: Int[Array, " T"]
    """Updates so far, of either kind."""


class Policy(AbstractPolicy):
    """Epsilon-greedy on a table, ties broken at random."""

    q: Float[Array, "S A"]
    epsilon: Float[Array, ""]

    def initial(self) -> None:
        return None

    def __call__(self, carry: None, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[None, Decision]:
        row = self.q[time_step.obs["state"]]
        action, best = choose(row, self.epsilon, jax.random.uniform(key, (row.size + 1,))), row == row.max()
        chance = self.epsilon / row.size + (1 - self.epsilon) * best[action] / best.sum()
        return None, Decision(action, jnp.log(chance))


def choose(row: Float[Array, " A"], epsilon: float | Array, chance: Float[Array, " A+1"]) -> Int[Array, ""]:
    """An epsilon-greedy action, ties broken at random: the candidate with the largest random number.

    The last of `chance`, all uniform in [0, 1), says whether every action is a candidate."""
    candidate = (row == row.max()) | (chance[-1] < epsilon)
    return jnp.argmax(jnp.where(candidate, chance[:-1], -1.0)).astype(jnp.int32)


def init(cfg: Config, states: int, actions: int) -> State:
    """Values of 0, and a model of nothing."""
    empty = Deterministic.empty(states, actions) if cfg.model == "deterministic" else None
    model = empty or Counts.empty(states, actions, cfg.prior)
    table, zero = jnp.zeros((states, actions)), jnp.zeros((), jnp.int32)
    # One row more than there are pairs, so that what is not kept can be written behind those that are.
    pairs = jnp.zeros(((states + 1) * actions, 2), jnp.int32)
    return State(table, model, pairs, zero, table, zero, zero, zero)


def policy(cfg: Config, state: State, *, greedy: bool = False) -> Policy:
    """The acting policy, or the greedy one."""
    return Policy(state.q, jnp.asarray(0.0 if greedy else cfg.epsilon))


def backup(cfg: Config, q: Float[Array, "S A"], step: Transition) -> Float[Array, "S A"]:
    """Q-learning's update (Watkins 1989; Sutton & Barto 2018, eq. 6.8), from real and imagined transitions alike."""
    error = step.reward + cfg.gamma * step.discount * q[step.arrived].max() - q[step.state, step.action]
    return q.at[step.state, step.action].add(cfg.alpha * error)


def draws(cfg: Config) -> tuple[int, int]:
    """The shape of the random numbers that an update takes: per planning step one for a pair, and with counts one for
    its outcome."""
    return (0 if cfg.method == "sweeping" else cfg.planning), (1 if cfg.model == "deterministic" else 2)


def update(cfg: Config, state: State, step: Transition, chance: Float[Array, "n k"]) -> State:
    """Learns from one real transition, teaches it to the model, and plans.

    `chance`: of shape `draws(cfg)`, uniform in [0, 1)."""
    pairs, num_pairs = _remember(cfg, state, step)
    steps = state.steps + 1
    model = state.model.learn(*step, steps)
    known = dataclasses.replace(state, model=model, pairs=pairs, num_pairs=num_pairs, steps=steps)
    if cfg.method == "sweeping":
        return _sweep(cfg, known, step)
    known = dataclasses.replace(known, q=backup(cfg, state.q, step), real=state.real + 1)
    return plan(cfg, known, chance) if cfg.planning else known


def plan(cfg: Config, state: State, chance: Float[Array, "n k"]) -> State:
    """Imagines n transitions, and learns from one after the other."""
    imagined = dream(cfg, state, chance)
    q, _ = jax.lax.scan(lambda q, step: (backup(cfg, q, step), None), state.q, imagined)
    return dataclasses.replace(state, q=q, imagined=state.imagined + len(chance))


def dream(cfg: Config, state: State, chance: Float[Array, "n k"]) -> Transition:
    """What the model says of n pairs, drawn uniformly from those that may be planned: leaves [n].

    They come all at once, since the model does not change while it is planned with."""
    pair = state.pairs[(chance[:, 0] * state.num_pairs).astype(jnp.int32)]
    at = pair[:, 0], pair[:, 1]
    reward, discount, arrived = jax.vmap(state.model.sample)(*at, chance[:, -1])
    if cfg.method == "plus":
        reward += cfg.kappa * jnp.sqrt((state.steps - state.model.tried_at[at]).astype(jnp.float32))
    return Transition(*at, reward, discount, arrived)


def _remember(cfg: Config, state: State, step: Transition) -> tuple[Int[Array, "N 2"], Int[Array, ""]]:
    """Adds the pair that was tried (of 'plus': all pairs of its state) to those that may be planned, once."""
    tried = state.model.tried[step.state]
    if cfg.method == "plus":
        action, known = jnp.arange(tried.size, dtype=jnp.int32), tried.any()
    else:
        action, known = step.action[None], tried[step.action]
    new = jnp.stack([jnp.broadcast_to(step.state, action.shape), action], 1)
    pairs = jax.lax.dynamic_update_slice(state.pairs, new, (state.num_pairs, 0))
    return pairs, state.num_pairs + jnp.where(known, 0, action.size)


def _sweep(cfg: Config, state: State, step: Transition) -> State:
    """Prioritised sweeping (Moore & Atkeson 1993; Sutton & Barto 2018, p. 170).

    The real transition is queued like any other pair, and learned from when its turn comes. Each turn takes O(S A):
    the queue is a table, of which the largest entry is next."""
    model, actions = state.model, state.q.shape[1]
    assert isinstance(model, Deterministic)

    def queued(priority: Array, error: Array, where: Array) -> Array:
        error = jnp.abs(error)
        return jnp.where(where & (error > cfg.theta), jnp.maximum(priority, error), priority)

    def error(q: Array, value: Array) -> Array:
        """Of all pairs, if all of them arrived at a state of this value."""
        return model.reward + cfg.gamma * model.discount * value - q

    def once(_: Array, held: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        q, priority, done = held
        pair = jnp.argmax(priority).astype(jnp.int32)
        at = pair // actions, pair % actions
        waiting = priority[at] > 0
        q = jnp.where(waiting, backup(cfg, q, Transition(*at, *model.sample(*at, jnp.zeros(())))), q)
        leads = waiting & model.tried & (model.arrived == at[0])
        priority = queued(priority.at[at].set(0.0), error(q, q[at[0]].max()), leads)
        return q, priority, done + waiting

    here = jnp.zeros(state.q.shape, bool).at[step.state, step.action].set(True)
    priority = queued(state.priority, error(state.q, state.q[step.arrived].max()), here)
    q, priority, imagined = jax.lax.fori_loop(0, cfg.planning, once, (state.q, priority, state.imagined))
    return dataclasses.replace(state, q=q, priority=priority, imagined=imagined)


class World(NamedTuple):
    """What K environments do, each in force from its step of `since` on: the M outcomes that a pair may have."""

    arrived: Int[np.ndarray, "K S A M"]
    arrival: Float[np.ndarray, "K S A M"]
    """Cumulative probabilities."""
    reward: Float[np.ndarray, "K S A M"]
    terminal: Bool[np.ndarray, "K S A M"]
    begun: Int[np.ndarray, " N"]
    start: Float[np.ndarray, " N"]
    """Where an episode may begin, and cumulative probabilities."""
    since: Int[np.ndarray, " K"]
    time_limit: int | None

    @classmethod
    def of(cls, env: Tabular | Changing) -> World:
        """Exactly the environment's probabilities, without the outcomes that none of its pairs needs."""
        several, since = (env.mazes, env.since) if isinstance(env, Changing) else ((env,), (0,))
        arrived, arrival = _outcomes(np.stack([np.asarray(each.transition) for each in several]))
        reward = np.stack([np.asarray(each.reward, np.float32) for each in several])
        reward = np.take_along_axis(reward, arrived, -1)
        terminal = np.asarray(several[0].terminal)[arrived]
        limit = several[0].time_limit
        return cls(arrived, arrival, reward, terminal, *_outcomes(np.asarray(several[0].start)), np.array(since), limit)

    def begin(self, chance: Float[Array, ""]) -> TabularState:
        """The first place of an episode."""
        return TabularState(jnp.asarray(self.begun)[draw(jnp.asarray(self.start), chance)], jnp.zeros((), jnp.int32))

    def move(
        self, place: TabularState, action: Array, steps: Array, chance: Float[Array, "2"]
    ) -> tuple[TabularState, Transition, Bool[Array, ""]]:
        """One step from a place: where the next one begins, the transition, and whether the episode ended."""
        which, state, elapsed = jnp.sum(steps >= self.since) - 1, place.state, place.elapsed + 1
        arrived, arrival, reward, terminal = (jnp.asarray(table)[which, state, action] for table in self[:4])
        outcome = draw(arrival, chance[0])
        ended = terminal[outcome]
        step = Transition(state, action, reward[outcome], 1.0 - ended, arrived[outcome])
        last = ended if self.time_limit is None else ended | (elapsed >= self.time_limit)
        return select(last, self.begin(chance[1]), TabularState(step.arrived, elapsed)), step, last


def _outcomes(probability: Float[np.ndarray, "*rows S"]) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest states of every row, as many as any row needs, and their cumulative probabilities."""
    most = int((probability > 0).sum(-1).max())
    states = np.argsort(-probability, -1, kind="stable")[..., :most].astype(np.int32)
    return states, np.cumsum(np.take_along_axis(probability, states, -1), -1).astype(np.float32)


Held = tuple[State, TabularState]


def begin(cfg: Config, env: Tabular | Changing, *, key: PRNGKeyArray) -> Held:
    """Nothing learned, and a first place."""
    world = World.of(env)
    return init(cfg, *world.arrived.shape[1:3]), world.begin(jax.random.uniform(key))


def run(
    cfg: Config, env: Tabular | Changing, steps: int, *, key: PRNGKeyArray, held: Held | None = None
) -> tuple[Held, Record]:
    """Acts, learns and plans for `steps` real steps, over as many episodes as come; a scan, to be vmapped over keys.

    A run that goes on from `held` with the same key is the longer run. A time limit ends an episode without ending its
    return: the update bootstraps there."""
    world, shape = World.of(env), draws(cfg)
    actions = world.arrived.shape[2]
    begin_key, steps_key = jax.random.split(key)

    def step(held: Held, _: None) -> tuple[Held, Record]:
        state, place = held
        # One call for all: each costs as much as several updates; in this form, one block makes two numbers.
        with jax.threefry_partitionable(False):
            chance = jax.random.uniform(jax.random.fold_in(steps_key, state.steps), (actions + 3 + math.prod(shape),))
        to_act, to_move, to_plan = jnp.split(chance, [actions + 1, actions + 3])
        action = choose(state.q[place.state], cfg.epsilon, to_act)
        again, transition, last = world.move(place, action, state.steps, to_move)
        state = update(cfg, state, transition, to_plan.reshape(shape))
        return (state, again), Record(transition.reward, last, place.elapsed + 1, state.real, state.imagined)

    return jax.lax.scan(step, begin(cfg, env, key=begin_key) if held is None else held, None, steps)
