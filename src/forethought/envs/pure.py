"""What the pure environments share: how their time steps are made, and what they can be asked for besides."""

from __future__ import annotations

import abc
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from forethought.protocols import AbstractEnv
from forethought.tree import select
from forethought.types import Spec, TimeStep


class SketchedEnv(AbstractEnv):
    """A pure environment whose observations can be drawn."""

    @abc.abstractmethod
    def sketch(self, obs: dict[str, Array | np.ndarray]) -> Float[np.ndarray, "n 5"]:
        """Line segments (x0, y0, x1, y1, radius) in metres, y up, that draw one unbatched observation."""


class ObservedEnv(AbstractEnv):
    """A pure environment whose observation shows its whole state, so that its exact model can be asked from any row."""

    @abc.abstractmethod
    def state(self, obs: dict[str, Array]) -> PyTree:
        """The state that shows this observation, with the decisions of the episode so far set to 0."""


class Repeated(AbstractEnv):
    """Takes every action `times` times: rewards are summed, and the end of an episode ends the repetition.

    A decision lasts 1 whatever was repeated, so that gamma is per decision.
    """

    env: AbstractEnv
    times: int = eqx.field(static=True)

    def __check_init__(self):
        spec = self.env.spec
        if (spec.unit, spec.duration) != ("decision", 1):
            raise ValueError(
                f"{spec.name}: its decisions last {spec.duration} in unit '{spec.unit}'; only an environment whose "
                "decisions last 1 in unit 'decision' can be repeated"
            )

    @property
    def spec(self) -> Spec:
        limit = self.env.spec.time_limit
        return dataclasses.replace(self.env.spec, time_limit=limit and -(-limit // self.times))

    def reset(self, *, key: PRNGKeyArray) -> tuple[PyTree, TimeStep]:
        return self.env.reset(key=key)

    def step(self, state: PyTree, action: Array, *, key: PRNGKeyArray) -> tuple[PyTree, TimeStep]:
        keys = jax.random.split(key, self.times)
        begun = self.env.step(state, action, key=keys[0])

        def again(now: tuple[PyTree, TimeStep], key: PRNGKeyArray) -> tuple[tuple[PyTree, TimeStep], None]:
            state, time_step = now
            later_state, later = self.env.step(state, action, key=key)
            later = dataclasses.replace(later, reward=time_step.reward + later.reward)
            return select(time_step.last, now, (later_state, later)), None

        return jax.lax.scan(again, begun, keys[1:])[0]


def within_bounds(action: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Turns action elements outside [-1, 1] into NaN.

    Compiled code cannot raise, and clipping would hide the fault: the NaN reaches reward and observation, where
    whoever collects them stops.
    """
    return jnp.where(jnp.abs(action) <= 1, action, jnp.nan)


def first_step(obs: PyTree[Array]) -> TimeStep:
    """Makes an episode's first time step, on which reward, duration and their like are void."""
    zero = jnp.zeros((), jnp.float32)
    return TimeStep(
        obs=obs,
        reward=zero,
        discount=jnp.ones((), jnp.float32),
        first=jnp.ones((), bool),
        last=jnp.zeros((), bool),
        duration=zero,
        reward_delay=zero,
    )


def next_step(
    obs: PyTree[Array],
    reward: Float[Array, ""],
    *,
    elapsed: Int[Array, ""],
    time_limit: int | None,
    terminated: Bool[Array, ""] | bool = False,
) -> TimeStep:
    """Makes the time step after `elapsed` decisions of an episode.

    The episode ends where it terminated (discount 0) and at its time limit (truncated: discount stays 1).
    """
    terminated = jnp.asarray(terminated)
    return TimeStep(
        obs=obs,
        reward=reward.astype(jnp.float32),
        discount=jnp.where(terminated, 0, 1).astype(jnp.float32),
        first=jnp.zeros((), bool),
        last=terminated if time_limit is None else terminated | (elapsed >= time_limit),
        duration=jnp.ones((), jnp.float32),
        reward_delay=jnp.zeros((), jnp.float32),
    )
