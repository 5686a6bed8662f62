"""Exact models with faults the audit was not made with: `python bench/planted.py --faults further_faults:FAULTS`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt

from forethought.envs.trial import EDGE, FALLEN, GOAL, PITS, RAIL_END, Balance, Grid, Hover
from forethought.models.oracle import Oracle, outcome
from forethought.protocols import AbstractEnv, AbstractWorldModel
from forethought.tree import select
from forethought.types import Outcome, TimeStep

FAULTS: dict[str, tuple[float, float, float]] = {
    "saturated_action": (0.2, 0.6, 0.9),
    "friction": (0.05, 0.25, 0.6),
    "stale_observation": (0.2, 0.6, 1.0),
    "late_reward": (0.2, 0.6, 1.0),
    "reward_sign": (0.05, 0.6, 1.0),
    "early_edge": (0.05, 0.25, 0.5),
    "wall": (0.2, 0.8, 1.0),
    "extra_noise": (0.2, 1.0, 3.0),
    "lopsided_noise": (0.3, 0.7, 1.0),
    "frozen_noise": (0.3, 0.7, 1.0),
}
"""A small, a middle and a large magnitude, the same on all three environments; 0 is the exact model."""
MEANS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("saturated_action", "friction", "stale_observation"), ("error",)),
    **dict.fromkeys(("late_reward", "reward_sign"), ("reward",)),
    "early_edge": ("false_termination",),
    "wall": ("error", "region"),
    **dict.fromkeys(("extra_noise", "frozen_noise"), ("underconfident",)),
    "lopsided_noise": ("overconfident", "underconfident"),
}
"""The kinds of finding any of which names the fault."""
WALLS = {"jax/hover": 0.5, "jax/balance": 0.1, "jax/grid": 3}
"""`wall` holds where `position[0]`, or Grid's column, would pass from here or below to above."""


def planted(env: AbstractEnv, fault: str, magnitude: float | Array) -> AbstractWorldModel:
    """The exact model of Hover, Balance or Grid with one of `FAULTS`; raises ValueError for another fault or env."""
    if not isinstance(env, Hover | Balance | Grid) or fault not in FAULTS:
        raise ValueError(f"{env.spec.name}, '{fault}': there are {', '.join(FAULTS)} for {', '.join(WALLS)}")
    return Further(env, jnp.asarray(magnitude, jnp.float32), fault)


class Belief(eqx.Module):
    """The environment's state and what some faults go by."""

    state: PyTree
    shown: PyTree  # the state that the latest row showed
    noise: UInt[Array, " words"]  # the first imagined step's key, once there was one
    depth: Int[Array, ""]  # imagined steps since a row was seen


class Moment(NamedTuple):
    """One imagined step about to be taken, and how wrong it is to be."""

    env: Hover | Balance | Grid
    latent: Belief
    action: Array
    size: Float[Array, ""]
    key: PRNGKeyArray

    def step(self, *, noise: Array | float = 1.0, **other: Any) -> tuple[Any, TimeStep]:
        """The environment's own step, with `noise` times its noise, and another state, action or key if given."""
        env = eqx.tree_at(lambda env: env.noise, self.env, self.env.noise * noise)
        taken = {"state": self.latent.state, "action": self.action, "key": self.key} | other
        return env.step(taken["state"], taken["action"], key=taken["key"])

    def happens(self) -> Bool[Array, ""]:
        """True with probability `size`, drawn apart from the step itself, which draws what the exact model's does."""
        return jax.random.bernoulli(jax.random.fold_in(self.key, 1), self.size)


class Further(AbstractWorldModel):
    """The exact model of `env` but for one fault of a magnitude."""

    env: Hover | Balance | Grid
    magnitude: Float[Array, ""]
    fault: str = eqx.field(static=True)

    def initial(self) -> Belief:
        state = Oracle(self.env).initial()
        return Belief(state, state, jax.random.key_data(jax.random.key(0)), jnp.zeros((), jnp.int32))

    def observe(self, latent: Belief, action: Array, obs: PyTree, first: Array, *, key: PRNGKeyArray) -> Belief:
        state = shown = self.env.state(obs)
        if self.fault == "stale_observation":  # m of the row before, in Grid that row with probability m
            stale = jnp.where(first, 0.0, self.magnitude)
            late = jax.random.bernoulli(key, stale) if isinstance(self.env, Grid) else stale
            state = jax.tree.map(lambda old, new: (new + late * (old - new)).astype(new.dtype), latent.shown, shown)
        return Belief(state, shown, latent.noise, jnp.zeros((), jnp.int32))

    def imagine(self, latent: Belief, action: Array, *, key: PRNGKeyArray) -> tuple[Belief, Outcome]:
        action = jnp.asarray(action, self.env.spec.action.dtype)
        state, time_step = _TAKEN[self.fault](Moment(self.env, latent, action, self.magnitude, key))
        noise = jnp.where(latent.depth == 0, jax.random.key_data(key), latent.noise)
        return Belief(state, latent.shown, noise, latent.depth + 1), outcome(time_step)


def saturated_action(now: Moment) -> tuple[PyTree, TimeStep]:
    """Actions beyond 1 - m act as 1 - m; in Grid, with one action too few, right is up with probability m."""
    if isinstance(now.env, Grid):
        return now.step(action=jnp.where((now.action == 3) & now.happens(), 0, now.action))
    return now.step(action=jnp.clip(now.action, now.size - 1, 1 - now.size))


def friction(now: Moment) -> tuple[PyTree, TimeStep]:
    """Every step begins with a share m of the velocity lost; in Grid it stays where it was with probability m."""
    if isinstance(now.env, Grid):
        return _stayed(now, *now.step(), now.happens())
    return now.step(state=dataclasses.replace(now.latent.state, velocity=(1 - now.size) * now.latent.state.velocity))


def late_reward(now: Moment) -> tuple[PyTree, TimeStep]:
    """A share m of the reward is for being where the step departs, by its action, not for where it arrives."""
    (state, time_step), old = now.step(), now.latent.state
    if isinstance(now.env, Grid):
        late = jnp.asarray(-0.02)
    elif isinstance(now.env, Hover):
        late = jnp.exp(-jnp.sum(old.position**2)) - 0.05 * jnp.sum(now.action**2)
    else:
        late = 1 - 0.1 * old.position[0] ** 2 - 0.01 * now.action[0] ** 2
    return state, dataclasses.replace(time_step, reward=(1 - now.size) * time_step.reward + now.size * late)


def reward_sign(now: Moment) -> tuple[PyTree, TimeStep]:
    """The reward is 1 - 2 m times what it is on arrival where `position[1]` is above 0, in Grid in a pit."""
    state, time_step = now.step()
    there = jnp.any(_distances(state, PITS) == 0) if isinstance(now.env, Grid) else state.position[1] > 0
    return state, dataclasses.replace(time_step, reward=time_step.reward * jnp.where(there, 1 - 2 * now.size, 1.0))


def early_edge(now: Moment) -> tuple[PyTree, TimeStep]:
    """It ends beyond 1 - m times the bounds already; in Grid with probability m in the cells next to an end."""
    state, time_step = now.step()
    if isinstance(now.env, Grid):
        goes_on = 1 - now.size * jnp.any(_distances(state, (GOAL, *PITS)) == 1)
    else:
        edges = jnp.asarray((EDGE, EDGE) if isinstance(now.env, Hover) else (RAIL_END, FALLEN))
        goes_on = jnp.all(jnp.abs(state.position) <= (1 - now.size) * edges)
    return state, dataclasses.replace(time_step, discount=time_step.discount * goes_on)


def wall(now: Moment) -> tuple[PyTree, TimeStep]:
    """With probability m a step that would pass `WALLS` ends at it, at rest, at the exact reward; in Grid it stays."""
    (state, time_step), old, place = now.step(), now.latent.state, WALLS[now.env.spec.name]
    if isinstance(now.env, Grid):
        return _stayed(now, state, time_step, now.happens() & (old.column == place) & (state.column > place))
    held = now.happens() & (old.position[0] <= place) & (state.position[0] > place)
    position = state.position.at[0].set(jnp.where(held, place, state.position[0]))
    velocity = state.velocity.at[0].set(jnp.where(held, 0.0, state.velocity[0]))
    state = dataclasses.replace(state, position=position, velocity=velocity)
    return state, dataclasses.replace(time_step, obs={"position": position, "velocity": velocity})


def extra_noise(now: Moment) -> tuple[PyTree, TimeStep]:
    """The noise (in Grid, the probability of slipping) is 1 + m times what it is."""
    return now.step(noise=1 + now.size)


def lopsided_noise(now: Moment) -> tuple[PyTree, TimeStep]:
    """The noise is 1 - m times what it is in the first and 1 + m times in the second dimension; in Grid these are the
    probabilities of slipping up or left and of slipping down or right."""
    if not isinstance(now.env, Grid):
        return now.step(noise=jnp.stack([1 - now.size, 1 + now.size]))
    turned = (jax.random.uniform(now.key) < now.env.noise) & now.happens()  # Grid's own draw: it slips up or left
    other = jnp.where(turned, jnp.where(now.action < 2, 3, 1), now.action)
    return now.step(action=other, noise=jnp.where(turned, 0.0, 1.0))


def frozen_noise(now: Moment) -> tuple[PyTree, TimeStep]:
    """With probability m an imagined step draws the noise that the first one drew, so that it adds up over steps."""
    words = jnp.where(now.happens() & (now.latent.depth > 0), now.latent.noise, jax.random.key_data(now.key))
    return now.step(key=jax.random.wrap_key_data(words, impl=jax.random.key_impl(now.key)))


_TAKEN: dict[str, Callable[[Moment], tuple[PyTree, TimeStep]]] = {
    "saturated_action": saturated_action, "friction": friction, "stale_observation": lambda now: now.step(),
    "late_reward": late_reward, "reward_sign": reward_sign, "early_edge": early_edge, "wall": wall,
    "extra_noise": extra_noise, "lopsided_noise": lopsided_noise, "frozen_noise": frozen_noise,
}  # fmt: skip


def _distances(state: Any, cells: tuple[tuple[int, int], ...]) -> Int[Array, " cells"]:
    return jnp.sum(jnp.abs(jnp.asarray(cells) - jnp.stack([state.row, state.column])), axis=1)


def _stayed(now: Moment, state: Any, time_step: TimeStep, stays: Bool[Array, ""]) -> tuple[PyTree, TimeStep]:
    """Grid's step, or none at all where it `stays`."""
    state = select(stays, dataclasses.replace(now.latent.state, elapsed=state.elapsed), state)
    reward, discount = jnp.where(stays, -0.02, time_step.reward), jnp.where(stays, 1.0, time_step.discount)
    obs = {"row": state.row, "column": state.column}
    return state, dataclasses.replace(time_step, reward=reward, discount=discount, obs=obs)
