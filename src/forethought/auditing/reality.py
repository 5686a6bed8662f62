"""The real side of an audit: episodes that a policy plays, and the same actions again from a moment within them.

PureReality     a pure environment: any row can be gone back to, as often as one likes, with fresh noise
HostReality     host environments: back to the rows of which a snapshot was taken, with the same noise
LoggedReality   recorded episodes alone: nothing can be tried
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from forethought import collect, tree
from forethought.auditing.subject import in_blocks
from forethought.protocols import AbstractEnv, AbstractPolicy, HostEnv
from forethought.types import Spec, Step

ENDLESS = 1000
"""Decisions after which an episode without a time limit is cut."""


class Played(NamedTuple):
    """Whole episodes of one policy, [E, T] with what comes after an episode's end repeated from it."""

    rows: Step
    length: np.ndarray
    """[E], rows of each episode that happened."""
    back: Any
    """How the reality gets back to these rows."""


class Future(NamedTuple):
    """What really followed N starts, R times each."""

    obs: dict[str, np.ndarray]
    """{key: [N, R, H, ...]}"""
    reward: np.ndarray
    going: np.ndarray
    """[N, R, H]: 1 where the step was reached, as the product of the discounts before it."""
    survived: np.ndarray
    """[N, R, H]: 1 unless the episode terminated at this step or before."""
    taken: np.ndarray
    """[N, R, H]: False from the step on at which the episode had been truncated: the model is not asked for these."""


@runtime_checkable
class Reality(Protocol):
    spec: Spec
    fresh: bool
    """A replay draws fresh noise, so that irreducible error can be measured."""

    def play(self, policy: AbstractPolicy, episodes: int, *, seed: int) -> Played: ...

    def places(self, played: Played) -> np.ndarray | None:
        """Rows [M, 2] (episode, row) that can be gone back to, none where nothing can be; None: all."""
        ...

    def replay(self, played: Played, places: np.ndarray, action: np.ndarray, *, times: int, seed: int) -> Future | None:
        """What follows rows `places` [N, 2] under actions [N, H, ...]; None: nothing can be gone back to."""
        ...


class PureReality:
    """A pure environment, whose states are kept beside the rows."""

    fresh = True

    def __init__(self, env: AbstractEnv):
        self.env, self.spec = env, env.spec

    def play(self, policy: AbstractPolicy, episodes: int, *, seed: int) -> Played:
        ticks = (self.spec.time_limit or ENDLESS) + 1
        found = _play(self.env, policy, jax.random.split(jax.random.key(seed), episodes), ticks)
        rows, states = jax.tree.map(np.asarray, found)
        last = rows.time_step.last
        length = np.where(last.any(1), last.argmax(1) + 1, ticks)
        return Played(rows, length, states)

    def places(self, played: Played) -> None:
        return None

    def replay(self, played: Played, places: np.ndarray, action: np.ndarray, *, times: int, seed: int) -> Future:
        every = np.repeat(places, times, 0)
        state = jax.tree.map(lambda x: x[every[:, 0], every[:, 1]], played.back)
        key = jax.random.key(seed)
        call = lambda i, state, action: _replay(self.env, state, action, jax.random.fold_in(key, i))  # noqa: E731
        found = in_blocks(call, state, np.repeat(action, times, 0))
        return Future(*jax.tree.map(lambda x: x.reshape(len(places), times, *x.shape[1:]), found))


@eqx.filter_jit
def _play(env: AbstractEnv, policy: AbstractPolicy, keys: Any, ticks: int) -> Any:
    def one(key: Any) -> Any:
        reset_key, key = jax.random.split(key)

        def tick(at: Any, t: Any) -> Any:
            state, time_step, carry = at
            act_key, env_key = jax.random.split(jax.random.fold_in(key, t))
            carry, decision = policy(carry, time_step, key=act_key)
            row = collect.row_of(time_step, decision, jnp.zeros((), jnp.int32))
            later = env.step(state, decision.action, key=env_key)
            return (*tree.select(time_step.last, (state, time_step), later), carry), (row, state)

        return jax.lax.scan(tick, (*env.reset(key=reset_key), policy.initial()), jnp.arange(ticks))[1]

    return jax.vmap(one)(keys)


@eqx.filter_jit
def _replay(env: AbstractEnv, state: Any, action: Any, key: Any) -> Any:
    def one(state: Any, action: Any, key: Any) -> Any:
        def step(at: Any, row: Any) -> Any:
            state, ended, going = at
            later, found = env.step(state, row[0], key=row[1])
            survived = jnp.where(ended, going, going * found.discount)
            out = (found.obs, jnp.where(ended, 0.0, found.reward), going, survived, ~ended | (going == 0))
            return (tree.select(ended, state, later), ended | found.last, survived), out

        start = (state, jnp.zeros((), bool), jnp.ones(()))
        return jax.lax.scan(step, start, (action, jax.random.split(key, action.shape[0])))[1]

    return jax.vmap(one)(state, action, jax.random.split(key, action.shape[0]))


class HostReality:
    """As many host environments as episodes; snapshots are taken at some rows, the same of every episode."""

    fresh = False

    def __init__(self, make: Any, marks: int = 4):
        """`make(num)` gives a HostEnv of so many copies; `marks` snapshots are taken of an episode, if it can be."""
        self.make, self.marks, self.spec = make, marks, _spec(make)
        self._envs: dict[int, HostEnv] = {}

    def play(self, policy: AbstractPolicy, episodes: int, *, seed: int) -> Played:
        env = self._env(episodes)
        stream = collect.begin_host(env, policy, seed=seed, key=jax.random.key(seed))
        limit = self.spec.time_limit
        marks = {int(t) for t in np.linspace(0, 0.75 * (limit or 200), self.marks)}
        rows, snapshots, ended, length = [], {}, np.zeros(episodes, bool), np.ones(episodes, int)
        while True:
            if len(rows) in marks and not ended.all():
                snapshots[len(rows)] = env.snapshot()
            carry, row = _decide(policy, stream)
            row = jax.tree.map(np.asarray, row)
            rows.append(row)
            ended = ended | row.time_step.last
            if ended.all() or len(rows) > (limit or ENDLESS):
                break
            env.send(row.action, where=~ended)
            stream = collect.HostStream(env.recv(), carry, stream.tick + 1, stream.policy_key)
            length += ~ended
        rows += rows[-1:] * ((limit or 0) + 1 - len(rows))  # one length, so that a model is compiled for it once
        table = jax.tree.map(lambda *xs: np.stack(xs, 1), *rows)
        return Played(table, length, {t: x for t, x in snapshots.items() if x is not None})

    def places(self, played: Played) -> np.ndarray:
        there = [(e, t) for t in played.back for e in range(len(played.length)) if t < played.length[e] - 1]
        return np.array(there, int).reshape(-1, 2)

    def replay(self, played: Played, places: np.ndarray, action: np.ndarray, *, times: int, seed: int) -> Future | None:
        """The environments' own randomness is part of a snapshot, so that each start is replayed once.

        A start may stand in `places` several times, with other actions."""
        if not played.back:
            return None
        env, horizon = self._env(len(played.length)), action.shape[1]
        found: list[Any] = [None] * len(places)
        for turn, t in _turns(places):
            env.restore(played.back[t])
            episode = places[turn, 0]
            doing = np.zeros((env.num, *action.shape[1:]), action.dtype)
            doing[episode] = action[turn]
            running = np.isin(np.arange(env.num), episode)
            steps, survived = [], np.ones(env.num)
            for h in range(horizon):
                going = survived
                if running.any():
                    env.send(doing[:, h], where=running)
                step = env.recv()
                survived = np.where(running, survived * step.discount, survived)
                taken = running | (going == 0)
                steps.append((step.obs, np.where(running, step.reward, 0.0), going, survived, taken))
                running = running & ~step.last
            table = jax.tree.map(lambda *xs: np.stack(xs, 1), *steps)
            for i, e in zip(turn, episode, strict=True):
                found[i] = jax.tree.map(lambda x, e=e: x[None, e], table)
        return Future(*jax.tree.map(lambda *xs: np.stack(xs), *found))

    def close(self) -> None:
        for env in self._envs.values():
            env.close()

    def _env(self, num: int) -> HostEnv:
        if num not in self._envs:
            self._envs[num] = self.make(num)
        return self._envs[num]


def _spec(make: Any) -> Spec:
    env = make(1)
    env.close()
    return env.spec


_decide = eqx.filter_jit(lambda policy, stream: collect.decide(policy, stream, jnp.zeros((), jnp.int32)))


def _turns(places: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Cuts the starts into turns: of one row each, and no episode twice."""
    turns = []
    for t in np.unique(places[:, 1]):
        left = np.flatnonzero(places[:, 1] == t)
        while len(left):
            _, once = np.unique(places[left, 0], return_index=True)
            turns.append((left[once], int(t)))
            left = np.delete(left, once)
    return turns


class LoggedReality:
    """Recorded episodes: what they hold can be compared with, and nothing can be tried."""

    fresh = False

    def __init__(self, spec: Spec, episodes: list[Step]):
        if not episodes:
            raise ValueError(f"{spec.name}: there is no episode; an audit of logged data needs at least one")
        self.spec, self.episodes = spec, episodes

    def play(self, policy: PyTree, episodes: int, *, seed: int) -> Played:
        """At most `episodes` of the recorded ones, drawn without order; whose policy it was is not asked."""
        drawn = np.random.default_rng(seed).permutation(len(self.episodes))[:episodes]
        chosen = [self.episodes[i] for i in drawn]
        return padded(chosen)

    def places(self, played: Played) -> np.ndarray:
        return np.zeros((0, 2), int)

    def replay(self, played: Played, places: np.ndarray, action: np.ndarray, *, times: int, seed: int) -> None:
        return None


def padded(episodes: list[Step]) -> Played:
    """Episodes of several lengths as one table."""
    length = np.array([len(episode.depth) for episode in episodes])
    place = np.arange(length.max())
    cut = [
        jax.tree.map(lambda x, n=n: np.asarray(x)[np.minimum(place, n - 1)], e)
        for e, n in zip(episodes, length, strict=True)
    ]
    return Played(jax.tree.map(lambda *xs: np.stack(xs), *cut), length, {})
