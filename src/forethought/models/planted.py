"""Models that are wrong in a known way, to judge audits by: the exact model of a trial environment with one fault.

A fault is a function from a `Moment`, one imagined step about to be taken, to that step as the faulty model takes it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from forethought.envs.trial import MOVES, SIDE, Balance, Grid, Hover
from forethought.models.members import SPREAD, Ensemble
from forethought.models.oracle import Oracle, outcome
from forethought.protocols import AbstractEnv, AbstractWorldModel
from forethought.types import Outcome, TimeStep

FAULTS: dict[str, tuple[float, float, float]] = {
    "region_bias": (0.15, 0.5, 1.0),
    "late_drift": (0.03, 0.2, 0.4),
    "reward_outside": (0.2, 0.5, 2.0),
    "missing_termination": (0.2, 0.5, 1.0),
    "identical_members": (2.0, 3.0, 5.0),
    "delayed_action": (0.2, 0.75, 1.0),
    "action_sign": (0.1, 0.75, 1.0),
    "overconfident": (0.3, 0.7, 1.0),
    "swapped_keys": (0.1, 0.7, 1.0),
    "mode_collapse": (0.3, 0.8, 1.0),
    "time_limit_termination": (0.2, 0.5, 1.0),
    "non_finite": (0.001, 0.01, 0.05),
    "reward_scale": (0.1, 0.3, 1.0),
    "phantom_termination": (0.02, 0.05, 0.2),
    "ignores_action": (0.2, 0.5, 1.0),
}
"""A small, a middle and a large magnitude of every fault, the same on all three environments; what they mean is said
at the function of the fault's name."""

ONSET = 10
"""The first imagined step that `late_drift` touches."""
REGION, FAR_COLUMN = 0.25, 5
"""Where `region_bias` holds: position[0] above this, and from this column of Grid on."""
OUTSIDE = {"jax/hover": 1.6, "jax/balance": 0.15}
"""`reward_outside` holds where a position (Hover: either, Balance: the pole's angle) is farther from 0 than this."""
CORNER_SHARES = (0.00076, 0.00235, 0.0070, 0.0160, 0.0318, 0.0557)
"""Share of the steps under random actions that arrive in Grid's lower half and within 0, 1, .. 5 moves of its lower
right corner, exact: a random walk over the map, whatever the noise."""


def planted(env: AbstractEnv, fault: str, magnitude: float | Array) -> AbstractWorldModel:
    """The exact model of Hover, Balance or Grid with one fault of `FAULTS`; magnitudes share compiled code.

    Raises ValueError for another environment and for an unknown fault, with the nearest ones.
    """
    if not isinstance(env, Hover | Balance | Grid):
        raise ValueError(f"{env.spec.name}: faults are planted in models of jax/hover, jax/balance and jax/grid only")
    if fault not in FAULTS:
        nearest = difflib.get_close_matches(fault, FAULTS, n=3, cutoff=0.3) or list(FAULTS)
        raise ValueError(f"fault: '{fault}' is unknown; nearest: {', '.join(nearest)}")
    size = jnp.asarray(magnitude, jnp.float32)
    return Ensemble(env, size) if fault == "identical_members" else Planted(env, size, fault)


class Belief(eqx.Module):
    """The environment's state and what some faults go by."""

    state: PyTree
    previous: Int[Array, ""] | Float[Array, " A"]
    """The action that led here."""
    elapsed: Int[Array, ""]
    """Decisions since the episode's first row, real and imagined ones."""
    depth: Int[Array, ""]
    """Imagined steps since something was last observed."""


class Moment(NamedTuple):
    """One imagined step about to be taken, and how wrong it is to be."""

    env: Hover | Balance | Grid
    latent: Belief
    action: Array
    size: Float[Array, ""]
    key: PRNGKeyArray

    def step(self, action: Array | None = None, noise: Float[Array, ""] | float = 1.0) -> tuple[PyTree, TimeStep]:
        """The environment's own step, with another action if one is given, and its noise times `noise`."""
        env = eqx.tree_at(lambda env: env.noise, self.env, self.env.noise * noise)
        return env.step(self.latent.state, self.action if action is None else action, key=self.key)

    def happens(self, chance: Float[Array, ""]) -> Bool[Array, ""]:
        """Draws apart from the step itself, which must draw what the exact model's does."""
        return jax.random.bernoulli(jax.random.fold_in(self.key, 1), chance)


class Planted(AbstractWorldModel):
    """The exact model of `env` but for one fault of a magnitude."""

    env: Hover | Balance | Grid
    magnitude: Float[Array, ""]
    fault: str = eqx.field(static=True)

    def initial(self) -> Belief:
        return self._at(Oracle(self.env).initial(), jnp.zeros((), jnp.int32))

    def observe(self, latent: Belief, action: Array, obs: PyTree, first: Array, *, key: PRNGKeyArray) -> Belief:
        elapsed = jnp.where(first, 0, latent.elapsed + 1)
        seen = self._at(self.env.state(obs), elapsed)
        return dataclasses.replace(seen, previous=jnp.asarray(action, seen.previous.dtype))

    def imagine(self, latent: Belief, action: Array, *, key: PRNGKeyArray) -> tuple[Belief, Outcome]:
        action = jnp.asarray(action, latent.previous.dtype)
        state, time_step = _TAKEN[self.fault](Moment(self.env, latent, action, self.magnitude, key))
        return Belief(state, action, latent.elapsed + 1, latent.depth + 1), outcome(time_step)

    def _at(self, state: PyTree, elapsed: Int[Array, ""]) -> Belief:
        return Belief(state, jnp.asarray(self.env.spec.action.void()), elapsed, jnp.zeros((), jnp.int32))


def region_bias(now: Moment) -> tuple[PyTree, TimeStep]:
    """A step from within one region misses by m (see `_missed`): position[0] above 0.25; in Grid columns 5 .. 7."""
    state = now.latent.state
    inside = state.column >= FAR_COLUMN if isinstance(now.env, Grid) else state.position[0] > REGION
    return _missed(now, jnp.where(inside, now.size, 0.0))


def late_drift(now: Moment) -> tuple[PyTree, TimeStep]:
    """The k-th imagined step misses by m (k - 9) (see `_missed`) from the tenth on; nothing is wrong before."""
    late = now.latent.depth + 1 - (ONSET - 1)
    return _missed(now, now.size * jnp.maximum(late, 0))


def reward_outside(now: Moment) -> tuple[PyTree, TimeStep]:
    """The reward is m too high on arrival where no sensible policy goes: far out; in Grid's lower left 3 x 3 corner."""
    state, time_step = now.step()
    if isinstance(now.env, Grid):
        outside = (state.row >= SIDE - 3) & (state.column < 3)
    else:
        place = state.position if isinstance(now.env, Hover) else state.position[1:]
        outside = jnp.any(jnp.abs(place) > OUTSIDE[now.env.spec.name])
    return state, dataclasses.replace(time_step, reward=time_step.reward + jnp.where(outside, now.size, 0.0))


def missing_termination(now: Moment) -> tuple[PyTree, TimeStep]:
    """A share m of every termination is not predicted: the discount d becomes d + m (1 - d)."""
    state, time_step = now.step()
    return state, dataclasses.replace(time_step, discount=time_step.discount + now.size * (1 - time_step.discount))


def delayed_action(now: Moment) -> tuple[PyTree, TimeStep]:
    """What acts is (1 - m) a[t] + m a[t-1], in Grid a[t-1] with probability m; the first of an episode acts at once."""
    return now.step(_blended(now, jnp.where(now.latent.elapsed == 0, now.action, now.latent.previous)))


def action_sign(now: Moment) -> tuple[PyTree, TimeStep]:
    """The action's first element acts as -m times itself; in Grid left and right are exchanged with probability m."""
    if isinstance(now.env, Grid):
        return now.step(jnp.where((now.action >= 2) & now.happens(now.size), _opposite(now.action), now.action))
    return now.step(now.action.at[0].multiply(-now.size))


def overconfident(now: Moment) -> tuple[PyTree, TimeStep]:
    """The noise (in Grid, the probability of slipping) is 1 - m times what it is."""
    return now.step(noise=1 - now.size)


def swapped_keys(now: Moment) -> tuple[PyTree, TimeStep]:
    """With probability m per step the two keys of the predicted observation are exchanged; the latent is right."""
    state, time_step = now.step()
    swapped = now.happens(now.size)
    names = list(time_step.obs)
    obs = {a: jnp.where(swapped, time_step.obs[b], time_step.obs[a]) for a, b in zip(names, names[::-1], strict=True)}
    return state, dataclasses.replace(time_step, obs=obs)


def mode_collapse(now: Moment) -> tuple[PyTree, TimeStep]:
    """With probability m per step the likeliest outcome is predicted, the one without noise."""
    return now.step(noise=jnp.where(now.happens(now.size), 0.0, 1.0))


def time_limit_termination(now: Moment) -> tuple[PyTree, TimeStep]:
    """At the time limit, counted from the episode's first row, a termination is predicted with probability m."""
    state, time_step = now.step()
    ends = now.latent.elapsed + 1 == now.env.spec.time_limit
    return state, dataclasses.replace(time_step, discount=time_step.discount * jnp.where(ends, 1 - now.size, 1.0))


def non_finite(now: Moment) -> tuple[PyTree, TimeStep]:
    """Reward and observation are NaN for the share m of random actions that lies nearest to the corners of their space;
    in Grid the reward is, near the lower right corner, in at most a share m of the steps under random actions."""
    state, time_step = now.step()
    if isinstance(now.env, Grid):
        reach = jnp.sum(now.size >= jnp.asarray(CORNER_SHARES))
        rare = (state.row >= SIDE // 2) & (2 * (SIDE - 1) - state.row - state.column < reach)
    else:
        rare = jnp.all(jnp.abs(now.action) > 1 - now.size ** (1 / now.action.size))
    spoilt = lambda x: jnp.where(rare, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x  # noqa: E731
    return state, dataclasses.replace(
        time_step, reward=spoilt(time_step.reward), obs={name: spoilt(x) for name, x in time_step.obs.items()}
    )


def reward_scale(now: Moment) -> tuple[PyTree, TimeStep]:
    """The reward is 1 + m times what it is."""
    state, time_step = now.step()
    return state, dataclasses.replace(time_step, reward=time_step.reward * (1 + now.size))


def phantom_termination(now: Moment) -> tuple[PyTree, TimeStep]:
    """A termination is predicted with probability m at every step: the discount is 1 - m times what it is."""
    state, time_step = now.step()
    return state, dataclasses.replace(time_step, discount=time_step.discount * (1 - now.size))


def ignores_action(now: Moment) -> tuple[PyTree, TimeStep]:
    """What acts is 1 - m times the action; in Grid, with probability m, a random one."""
    if isinstance(now.env, Grid):
        drawn = jax.random.randint(jax.random.fold_in(now.key, 2), (), 0, len(MOVES), jnp.int32)
        return now.step(_blended(now, drawn))
    return now.step(_blended(now, jnp.zeros_like(now.action)))


_TAKEN: dict[str, Callable[[Moment], tuple[PyTree, TimeStep]]] = {
    fault.__name__: fault
    for fault in (
        region_bias, late_drift, reward_outside, missing_termination, delayed_action, action_sign, overconfident,
        swapped_keys, mode_collapse, time_limit_termination, non_finite, reward_scale, phantom_termination,
        ignores_action,
    )
}  # fmt: skip


def _missed(now: Moment, amount: Float[Array, ""]) -> tuple[PyTree, TimeStep]:
    """A step that arrives `amount` standard deviations (`SPREAD`) too far along position[0], reward and end being the
    exact ones; in Grid, one that goes against the action with that probability."""
    if isinstance(now.env, Grid):
        return now.step(jnp.where(now.happens(amount), _opposite(now.action), now.action))
    state, time_step = now.step()
    position = state.position.at[0].add(amount * SPREAD[now.env.spec.name][0])
    state = dataclasses.replace(state, position=position)
    return state, dataclasses.replace(time_step, obs=time_step.obs | {"position": position})


def _blended(now: Moment, other: Array) -> Array:
    if isinstance(now.env, Grid):
        return jnp.where(now.happens(now.size), other, now.action)
    return (1 - now.size) * now.action + now.size * other


def _opposite(action: Int[Array, ""]) -> Int[Array, ""]:
    """Up for down, left for right, as `MOVES` are numbered."""
    return action ^ 1
