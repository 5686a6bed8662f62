"""Training loops: real steps go to replay, windows of replay go to the learner, round and round.

An iteration collects `ticks` rows in each of `envs` environments and makes `updates` updates. On pure
environments that is one compiled program (`PureLoop`):

    collect -> add -> (sample -> update) x updates

On host environments (`HostLoop`) the device learns while the environments step, so the acting parameters are one
iteration old:

    device   |  learn i-1            |  learn i                |
    host     |  collect i (params    |  collect i+1 (params    |
             |  after learn i-2)     |  after learn i-1)       |

A learner is a module such as `algos.dreamer` with Config, PRESETS, METRICS, init, policy and update. Everything
random in iteration n is a function of (seed, n), so a loop that is saved and restored goes on bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from forethought import collect, devices, tree
from forethought.devices import ALONE, Axis
from forethought.envs.single import EnvironmentFault
from forethought.protocols import AbstractEnv, HostEnv
from forethought.replay import Replay, Ring
from forethought.types import Discount, Step, TimeStep, check_unit

CHUNK = 32
"""Iterations per call of the compiled program on pure environments; fewer run when fewer are asked for."""


@runtime_checkable
class Learner(Protocol):
    """The contract of a module in `algos`."""

    Config: Any
    PRESETS: dict[str, dict[str, Any]]
    METRICS: dict[str, tuple[str, str]]

    def init(self, cfg: Any, spec: Any, *, key: PRNGKeyArray) -> Any: ...
    def policy(self, cfg: Any, state: Any, *, greedy: bool = False) -> Any: ...
    def update(self, cfg: Any, state: Any, rows: Step, rule: Discount, *, key: PRNGKeyArray, axis: Axis) -> Any: ...
    def codes(self, policy: Any) -> Callable[[Any], tuple[Any, Any]] | None:
        """From observations [M] to the codes [M, D] of the model's and of the policy's encoders; None: there is one."""
        ...


class Chunk(NamedTuple):
    """What some iterations brought."""

    metrics: dict[str, float]
    """Averages over the updates made."""
    episodes: list[tuple[float, int]]
    """Return and length, in decisions, of every episode that ended."""


@dataclasses.dataclass
class Tally:
    """Adds up returns and lengths of the episodes of B streams."""

    returns: np.ndarray
    lengths: np.ndarray
    decisions: np.ndarray
    """Actions taken in all, a scalar."""

    @classmethod
    def empty(cls, streams: int) -> Tally:
        return cls(np.zeros(streams), np.zeros(streams, np.int64), np.zeros((), np.int64))

    def add(self, time_step: TimeStep) -> list[tuple[float, int]]:
        """Takes rows [T, B] and returns the episodes that ended in them."""
        ended = []
        # An array again, not a NumPy scalar, which would be saved as one kind and restored as another.
        self.decisions = np.asarray(self.decisions + np.sum(~np.asarray(time_step.first)))
        reward, first, last = (np.asarray(x) for x in (time_step.reward, time_step.first, time_step.last))
        for r, f, end in zip(reward, first, last, strict=True):
            self.returns = np.where(f, 0.0, self.returns + r)
            self.lengths = np.where(f, 0, self.lengths + 1)
            ended += [(float(self.returns[b]), int(self.lengths[b])) for b in np.flatnonzero(end)]
        return ended


class Pure(eqx.Module):
    """All of a pure loop but its replay."""

    agent: PyTree
    streams: collect.Stream
    iteration: Int[Array, ""]
    key: PRNGKeyArray


def begin(learner: Learner, cfg: Any, env: AbstractEnv, *, key: PRNGKeyArray) -> tuple[Pure, Ring, Step]:
    """Draws an agent and fills a ring with the random policy's rows; pure, so that it may be vmapped over seeds.

    Returns the loop's state, its ring, and the rows [T, B] collected so far."""
    agent_key, stream_key, loop_key = jax.random.split(key, 3)
    agent = learner.init(cfg, env.spec, key=agent_key)
    policy = learner.policy(cfg, agent)
    random = collect.RandomPolicy.beside(policy, env.spec)
    streams = jax.vmap(lambda i: collect.begin(env, random, i, key=stream_key))(jnp.arange(cfg.envs))
    streams, rows = _collect(env, random, streams, prefill_ticks(cfg), jnp.zeros((), jnp.int32))
    carry = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], cfg.envs, 0), policy.initial())
    streams = eqx.tree_at(lambda s: s.carry, streams, carry, is_leaf=lambda x: x is None)
    ring = Ring.empty(jax.tree.map(lambda x: x[0, 0], rows), cfg.capacity // cfg.envs, cfg.envs).add(rows)
    return Pure(agent, streams, jnp.zeros((), jnp.int32), loop_key), ring, rows


def iterate(
    learner: Learner, cfg: Any, env: AbstractEnv, rule: Discount, loop: Pure, ring: Ring, axis: Axis = ALONE
) -> tuple[Pure, Ring, tuple[dict[str, Array], Step]]:
    """One iteration on a pure environment; may be scanned, and vmapped over seeds.

    Raises ValueError where the rule discounts in another unit than the environment's."""
    check_unit(rule, env.spec)
    policy = learner.policy(cfg, loop.agent)
    streams, rows = _collect(env, policy, loop.streams, cfg.ticks, loop.agent.updates)
    ring = ring.add(rows)

    def drawn(key: PRNGKeyArray) -> tuple[Step, PRNGKeyArray]:
        sample_key, update_key = jax.random.split(key)
        return ring.sample(cfg.batch, cfg.length, key=sample_key), update_key

    keys = jax.random.split(jax.random.fold_in(loop.key, loop.iteration), cfg.updates)
    agent, metrics = _learn(learner, cfg, rule, loop.agent, keys, drawn, axis)
    return Pure(agent, streams, loop.iteration + 1, loop.key), ring, (metrics, rows)


class PureLoop:
    """Training on a pure environment, a chunk of iterations per call of one compiled program.

    With several devices everything but an update's batch is on all of them, collecting included."""

    def __init__(
        self, learner: Learner, cfg: Any, env: AbstractEnv, rule: Discount, *, seed: int, num_devices: int = 1
    ):
        check_unit(rule, env.spec)
        self.spec, self.cfg, self.env, self.num_devices = env.spec, cfg, env, num_devices
        axis = devices.axis(num_devices)
        self.tally = Tally.empty(cfg.envs)
        self._episodes: list[tuple[float, int]] = []
        start = eqx.filter_jit(lambda key: begin(learner, cfg, env, key=key))
        loop, self.ring, rows = start(jax.random.key(seed))
        arrays, self._static = eqx.partition(loop, eqx.is_array)
        self._arrays, self.ring = devices.spread((arrays, self.ring), num_devices)
        self._observe(rows)

        @jax.jit  # so that it is traced once, not for its shapes and again for the loop
        def once(arrays: Any, ring: Ring) -> Any:
            loop, ring, new = iterate(learner, cfg, env, rule, eqx.combine(arrays, self._static), ring, axis)
            return eqx.filter(loop, eqx.is_array), ring, new

        def chunk(arrays: Any, ring: Ring, count: Array) -> Any:
            def body(i: Array, carry: Any) -> Any:
                arrays, ring, out = carry
                arrays, ring, new = once(arrays, ring)
                return arrays, ring, jax.tree.map(lambda xs, x: xs.at[i].set(x), out, new)

            shapes = jax.eval_shape(once, arrays, ring)[2]
            out = jax.tree.map(lambda x: jnp.zeros((CHUNK, *x.shape), x.dtype), shapes)
            return jax.lax.fori_loop(0, count, body, (arrays, ring, out))

        self._chunk = jax.jit(devices.replicated(chunk, num_devices), donate_argnums=(0, 1))

    @property
    def agent(self) -> Any:
        return eqx.combine(self._arrays, self._static).agent

    def advance(self, iterations: int) -> Chunk:
        """Runs at most CHUNK iterations. Raises EnvironmentFault or FloatingPointError, naming what was not finite."""
        count = min(iterations, CHUNK)
        self._arrays, self.ring, out = self._chunk(self._arrays, self.ring, count)
        metrics, rows = jax.tree.map(lambda x: np.asarray(x)[:count], out)
        self._observe(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows))
        episodes, self._episodes = self._episodes, []
        return Chunk(_means(metrics), episodes)

    def _observe(self, rows: Step) -> None:
        rows = jax.tree.map(np.asarray, rows)
        bad = {
            name: np.argwhere(~np.isfinite(x))[0]
            for name, x in tree.named_arrays({"action": rows.action, "time_step": rows.time_step}).items()
            if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all()
        }
        if bad:  # what came first is the cause: an action leads to the row after it
            name, (tick, stream, *_) = min(bad.items(), key=lambda item: (item[1][0], item[0] == "action"))
            if name == "action":
                raise FloatingPointError("training diverged: the policy's action is not finite")
            raise EnvironmentFault(
                "non-finite",
                f"{self.spec.name}: '{name.removeprefix('time_step/')}' is not finite at row "
                f"{tick} after decision {int(self.tally.decisions)}, environment {stream}",
            )
        self._episodes += self.tally.add(rows.time_step)

    def save(self) -> tuple[PyTree, Ring, dict[str, bytes]]:
        """State, replay and files for a checkpoint."""
        return self._state(), self.ring, {}

    def like(self) -> tuple[PyTree, Ring]:
        """Templates to load a checkpoint into."""
        return self._state(), self.ring

    def restore(self, state: PyTree, ring: Ring, files: dict[str, bytes]) -> None:
        """Goes on from a checkpoint: `state` and `ring` loaded into the templates, `files` as saved."""
        arrays = dataclasses.replace(state["loop"], agent=state["agent"])
        self._arrays, self.ring = devices.spread((arrays, ring), self.num_devices)
        self.tally, self._episodes = Tally(**state["tally"]), []

    def _state(self) -> PyTree:
        rest = dataclasses.replace(self._arrays, agent=None)
        return {"agent": self._arrays.agent, "loop": rest, "tally": dataclasses.asdict(self.tally)}


class HostLoop:
    """Training on host environments: collecting and learning overlap."""

    def __init__(self, learner: Learner, cfg: Any, env: HostEnv, rule: Discount, *, seed: int, num_devices: int = 1):
        check_unit(rule, env.spec)
        self.spec, self.cfg, self.env, self.seed, self.num_devices = env.spec, cfg, env, seed, num_devices
        axis = devices.axis(num_devices)
        agent_key, stream_key, self._key = jax.random.split(jax.random.key(seed), 3)
        agent = eqx.filter_jit(lambda key: learner.init(cfg, env.spec, key=key))(agent_key)
        policy = learner.policy(cfg, agent)
        self._random = collect.RandomPolicy.beside(policy, env.spec)
        arrays, self._static = eqx.partition(agent, eqx.is_array)
        self._arrays = devices.spread(arrays, num_devices)
        acting, acting_static = eqx.partition(policy, eqx.is_array)
        self._acting = (tree.copy(acting), jnp.zeros((), jnp.int32))  # parameters and their version
        self._pending = tree.copy(self._acting)  # what the learning now in flight starts from
        self.stream = collect.begin_host(env, policy, seed=seed, key=stream_key)
        self.tally, self.iteration = Tally.empty(env.num), 0

        def learn(arrays: Any, batches: Step, key: PRNGKeyArray) -> Any:
            draws = (batches, jax.random.split(key, cfg.updates))
            agent = eqx.combine(arrays, self._static)
            agent, metrics = _learn(learner, cfg, rule, agent, draws, lambda draw: draw, axis)
            acting = (eqx.filter(learner.policy(cfg, agent), eqx.is_array), agent.updates)
            # A copy, since the next call is given `arrays` to overwrite.
            return eqx.filter(agent, eqx.is_array), tree.copy(acting), metrics

        def decide(acting: Any, stream: collect.HostStream) -> tuple[PyTree, Step]:
            return collect.decide(eqx.combine(acting[0], acting_static), stream, acting[1])

        self._learn = jax.jit(devices.replicated(learn, num_devices), donate_argnums=0)
        self._decide = jax.jit(decide)
        example = jax.eval_shape(decide, self._acting, self.stream)[1]
        example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), example)
        self.replay = Replay(example, cfg.capacity // env.num, env.num)

    @property
    def agent(self) -> Any:
        return eqx.combine(self._arrays, self._static)

    def advance(self, iterations: int) -> Chunk:
        """Runs some iterations; the first call fills replay at random before. Raises EnvironmentFault,
        ValueError or FloatingPointError, naming what was not finite."""
        episodes = [] if self.replay.count else self._prefill()
        metrics = []
        for _ in range(iterations):
            self.stream, rows = collect.collect_host(self.env, self._act, self.stream, self.cfg.ticks)
            self.replay.add(rows)
            episodes += self.tally.add(rows.time_step)
            rng = np.random.Generator(np.random.Philox(key=[self.seed, self.iteration]))
            windows = [self.replay.sample(self.cfg.batch, self.cfg.length, rng=rng) for _ in range(self.cfg.updates)]
            batches = jax.tree.map(lambda *xs: np.stack(xs), *windows)
            key = jax.random.fold_in(self._key, self.iteration)
            self._acting = devices.first(self._pending)  # deciding is too little work to share
            self._arrays, self._pending, new = self._learn(self._arrays, batches, key)
            metrics.append(new)
            self.iteration += 1
        return Chunk(_means(jax.tree.map(lambda *xs: np.stack(xs), *jax.device_get(metrics))), episodes)

    def _act(self, stream: collect.HostStream) -> tuple[PyTree, Step]:
        """Decides; metrics are looked at only after the call, so a policy that diverged is seen here first."""
        carry, row = self._decide(self._acting, stream)
        for name, x in tree.named_arrays({"action": row.action, "log_prob": row.log_prob}).items():
            if not np.isfinite(x).all():
                raise FloatingPointError(f"training diverged: the policy's {name} is not finite")
        return carry, row

    def _prefill(self) -> list[tuple[float, int]]:
        decide = jax.jit(lambda stream: collect.decide(self._random, stream, jnp.zeros((), jnp.int32)))
        stream = dataclasses.replace(self.stream, carry=None)
        stream, rows = collect.collect_host(self.env, decide, stream, prefill_ticks(self.cfg))
        self.stream = dataclasses.replace(stream, carry=self.stream.carry)
        self.replay.add(rows)
        return self.tally.add(rows.time_step)

    def save(self) -> tuple[PyTree, Replay, dict[str, bytes]]:
        snapshot = self.env.snapshot()
        if snapshot is None:
            raise ValueError(f"{self.spec.name}: this environment cannot be saved, so the run could not be resumed")
        return self._state(), self.replay, {"environment": snapshot}

    def like(self) -> tuple[PyTree, Replay]:
        return self._state(), self.replay

    def restore(self, state: PyTree, replay: Replay, files: dict[str, bytes]) -> None:
        self._arrays = devices.spread(state["agent"], self.num_devices)
        self._acting, self._pending = state["acting"], state["pending"]
        self.tally, self.iteration, self.replay = Tally(**state["tally"]), int(state["iteration"]), replay
        # Acting goes on from the very arrays that were saved: the environment's own are equal to them.
        self.env.restore(files["environment"])
        self.stream = state["stream"]

    def _state(self) -> PyTree:
        return {
            "agent": self._arrays,
            "acting": self._acting,
            "pending": self._pending,
            "stream": self.stream,
            "tally": dataclasses.asdict(self.tally),
            "iteration": np.asarray(self.iteration),
        }


def prefill_ticks(cfg: Any) -> int:
    """Rows per environment that the random policy collects: `prefill` in all, and at least one window."""
    return max(-(-cfg.prefill // cfg.envs), cfg.length)


def _collect(
    env: AbstractEnv, policy: Any, streams: collect.Stream, ticks: int, version: Int[Array, ""]
) -> tuple[collect.Stream, Step]:
    """Collects rows [T, B] from streams [B]."""
    one = lambda stream: collect.collect(env, policy, stream, ticks, policy_version=version)  # noqa: E731
    return jax.vmap(one, out_axes=(0, 1))(streams)


def _learn(
    learner: Learner,
    cfg: Any,
    rule: Discount,
    agent: Any,
    draws: PyTree,
    drawn: Callable[[Any], tuple[Step, Any]],
    axis: Axis,
) -> tuple[Any, dict[str, Array]]:
    """One update per draw, which `drawn` turns into windows and a key; returns the agent and the mean metrics."""
    arrays, static = eqx.partition(agent, eqx.is_array)

    def update(arrays: Any, draw: Any) -> tuple[Any, dict[str, Array]]:
        rows, key = drawn(draw)
        agent = eqx.combine(arrays, static)
        agent, metrics = learner.update(cfg, agent, axis.share(rows), rule, key=key, axis=axis)
        return eqx.filter(agent, eqx.is_array), metrics

    arrays, metrics = jax.lax.scan(update, arrays, draws)
    return eqx.combine(arrays, static), jax.tree.map(lambda x: x.mean(0), metrics)


def _means(metrics: dict[str, np.ndarray]) -> dict[str, float]:
    """The mean of every metric over its iterations; raises FloatingPointError, naming those that are not finite."""
    bad = [name for name, values in metrics.items() if not np.isfinite(values).all()]
    if bad:
        raise FloatingPointError(f"training diverged: {', '.join(bad)} not finite")
    return {name: float(values.mean()) for name, values in metrics.items()}
