"""What the pure environments share: how their time steps are made, and what they can be asked for besides."""

from __future__ import annotations

import abc

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from forethought.protocols import AbstractEnv
from forethought.types import TimeStep


class SketchedEnv(AbstractEnv):
    """A pure environment whose observations can be drawn."""

    @abc.abstractmethod
    def sketch(self, obs: dict[str, Array | np.ndarray]) -> Float[np.ndarray, "n 5"]:
        """Line segments (x0, y0, x1, y1, radius) in metres, y up, that draw one unbatched observation."""


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
