"""The exact model of an environment that shows its whole state: what every audit should find nothing wrong with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from forethought.envs.pure import ObservedEnv
from forethought.protocols import AbstractWorldModel
from forethought.types import Outcome, TimeStep


class Oracle(AbstractWorldModel):
    """The environment itself as a model: the latent is its state, and the imagined step is its step under the same key.

    It foresees terminations as they will be drawn and knows of no time limit, since truncation keeps the discount at 1.
    """

    env: ObservedEnv

    def initial(self) -> PyTree:
        state = jax.eval_shape(lambda: self.env.reset(key=jax.random.key(0))[0])
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)

    def observe(self, latent: PyTree, action: Array, obs: PyTree, first: Array, *, key: PRNGKeyArray) -> PyTree:
        """The state that shows `obs`, whatever came before."""
        return self.env.state(obs)

    def imagine(self, latent: PyTree, action: Array, *, key: PRNGKeyArray) -> tuple[PyTree, Outcome]:
        state, time_step = self.env.step(latent, action, key=key)
        return state, outcome(time_step)


def outcome(time_step: TimeStep) -> Outcome:
    """What a model says that expects exactly this time step."""
    return Outcome(
        obs=time_step.obs,
        reward=time_step.reward,
        discount=time_step.discount,
        duration=time_step.duration,
        reward_delay=time_step.reward_delay,
        legal=time_step.legal,
    )
