"""Real experience: the only place, beside logged data, where steps of depth 0 are made.

Two twins with equal results: `collect` is a scan over a pure environment (unbatched, the caller vmaps),
`collect_host` a Python loop over a batch of host environments. One tick is one row: a running environment is
stepped, an ended one is reset, and an ended one is never stepped.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from forethought import tree
from forethought.protocols import AbstractEnv, AbstractPolicy, HostEnv
from forethought.types import Box, Decision, Discrete, Spec, Step, TimeStep


class Stream(eqx.Module):
    """Where collection stands in one environment: its pending time step is the next row (the bootstrap row)."""

    env_state: PyTree
    time_step: TimeStep
    carry: PyTree
    tick: Int[Array, ""]
    env_key: PRNGKeyArray
    policy_key: PRNGKeyArray


def begin(env: AbstractEnv, policy: AbstractPolicy, index: int | Int[Array, ""], *, key: PRNGKeyArray) -> Stream:
    """Resets environment number `index` of a batch; its keys are functions of (key, index, tick)."""
    env_key, policy_key = jax.random.split(key)
    env_key, policy_key = jax.random.fold_in(env_key, index), jax.random.fold_in(policy_key, index)
    state, time_step = env.reset(key=jax.random.fold_in(env_key, 0))
    return Stream(state, time_step, policy.initial(), jnp.ones((), jnp.int32), env_key, policy_key)


def collect(
    env: AbstractEnv, policy: AbstractPolicy, stream: Stream, ticks: int, *, policy_version: Int[Array, ""]
) -> tuple[Stream, Step]:
    """Collects `ticks` rows [T] from one environment and returns the stream, whose time step is the row after."""

    def tick(stream: Stream, _: None) -> tuple[Stream, Step]:
        env_key = jax.random.fold_in(stream.env_key, stream.tick)
        policy_key = jax.random.fold_in(stream.policy_key, stream.tick)
        carry, decision = policy(stream.carry, stream.time_step, key=policy_key)
        row = row_of(stream.time_step, decision, policy_version)
        state, time_step = jax.lax.cond(
            stream.time_step.last,
            lambda: env.reset(key=env_key),
            lambda: env.step(stream.env_state, row.action, key=env_key),
        )
        return Stream(state, time_step, carry, stream.tick + 1, stream.env_key, stream.policy_key), row

    return jax.lax.scan(tick, stream, length=ticks)


def episode(env: AbstractEnv, policy: AbstractPolicy, *, policy_version: Int[Array, ""], key: PRNGKeyArray) -> Step:
    """Collects one whole episode, rows [time_limit + 1], of an environment that ends at its time limit and not before.

    Raises ValueError where the environment declares no time limit."""
    limit = env.spec.time_limit
    if limit is None:
        raise ValueError(f"{env.spec.name}: it declares no time limit, so how long an episode is cannot be said")
    stream = begin(env, policy, 0, key=key)
    return collect(env, policy, stream, limit + 1, policy_version=policy_version)[1]


class HostStream(eqx.Module):
    """The host twin of `Stream`, for a batch of B environments; `env` itself holds their state."""

    time_step: TimeStep
    carry: PyTree
    tick: Int[Array, ""]
    policy_key: PRNGKeyArray


def decide(policy: AbstractPolicy, stream: HostStream, policy_version: Int[Array, ""]) -> tuple[PyTree, Step]:
    """Acts in all B environments at once; jit this. Returns the policy's carry and the batch's rows [B]."""
    batch = stream.time_step.last.shape[0]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(stream.policy_key, jnp.arange(batch))
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, stream.tick)
    carry, decisions = jax.vmap(lambda c, t, k: policy(c, t, key=k))(stream.carry, stream.time_step, keys)
    version = jnp.broadcast_to(policy_version, (batch,))
    return carry, row_of(stream.time_step, decisions, version)


def begin_host(env: HostEnv, policy: AbstractPolicy, *, seed: int | None, key: PRNGKeyArray) -> HostStream:
    """Resets all environments; the policy's keys are those of the scan twin under the same key."""
    policy_key = jax.random.split(key)[1]
    carry = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], env.num, 0), policy.initial())
    return HostStream(env.reset(seed=seed), carry, jnp.ones((), jnp.int32), policy_key)


def collect_host(
    env: HostEnv,
    decide: Callable[[HostStream], tuple[PyTree, Step]],
    stream: HostStream,
    ticks: int,
) -> tuple[HostStream, Step]:
    """Collects rows [T, B] from host environments.

    Args:
        decide: `decide` above, jitted, with policy and version bound.
        stream: from `begin_host` or an earlier call.
        ticks: rows to collect per environment.
    """
    rows = []
    for _ in range(ticks):
        carry, row = decide(stream)
        row = jax.tree.map(np.asarray, row)
        ended = np.asarray(stream.time_step.last)
        if not ended.all():
            env.send(row.action, where=~ended)
        if ended.any():
            env.reset(where=ended)
        time_step = env.recv()
        stream = HostStream(time_step, carry, stream.tick + 1, stream.policy_key)
        rows.append(row)
    return stream, jax.tree.map(lambda *xs: np.stack(xs), *rows)


class RandomPolicy(AbstractPolicy):
    """Uniform over discrete actions, or over [-1, 1] per dimension; what agents are compared with."""

    action: Box | Discrete = eqx.field(static=True)
    extras: PyTree = None
    """Void extras of a learner, so that its rows and these are of one structure."""

    def initial(self) -> None:
        return None

    def __call__(self, carry: None, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[None, Decision]:
        check_legal(time_step)
        if isinstance(self.action, Discrete):
            action, log_prob = jax.random.randint(key, (), 0, self.action.n), jnp.log(1.0 / self.action.n)
        else:
            action = jax.random.uniform(key, self.action.shape, minval=-1.0, maxval=1.0)
            log_prob = -jnp.log(2.0) * action.size
        return None, Decision(action, log_prob, self.extras)

    @classmethod
    def beside(cls, policy: AbstractPolicy, spec: Spec) -> RandomPolicy:
        """The random policy whose rows have the structure of those of `policy`."""
        shapes = jax.eval_shape(lambda: policy(policy.initial(), blank(spec), key=jax.random.key(0))[1].extras)
        return cls(spec.action, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


class ZeroPolicy(AbstractPolicy):
    """Always discrete action 0, or what the environment takes for 0; what agents are compared with."""

    action: Box | Discrete = eqx.field(static=True)

    def initial(self) -> None:
        return None

    def __call__(self, carry: None, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[None, Decision]:
        check_legal(time_step)
        return None, Decision(jnp.asarray(self.action.rest()), jnp.zeros(()))


def blank(spec: Spec) -> TimeStep:
    """A time step of an environment, all of it 0: an example of its structure."""
    zero, off = jnp.zeros((), jnp.float32), jnp.zeros((), bool)
    obs = {name: jnp.zeros(space.shape, space.dtype) for name, space in spec.obs.items()}
    return TimeStep(obs, zero, zero, off, off, zero, zero)


def check_legal(time_step: TimeStep) -> None:
    """Raises ValueError where an environment masks actions: no policy here respects a mask yet."""
    if time_step.legal is not None:
        raise ValueError("time_step.legal: this policy would ignore the mask of legal actions; it needs None")


def row_of(time_step: TimeStep, decision: Decision, policy_version: Array) -> Step:
    """A real row; where the episode has ended, action, log_prob and extras are void."""
    decided = (decision.action, decision.log_prob, decision.extras)
    void = jax.tree.map(jnp.zeros_like, decided)
    action, log_prob, extras = tree.select(time_step.last, void, decided)
    return Step(time_step, action, log_prob, jnp.zeros_like(policy_version), policy_version, extras)
