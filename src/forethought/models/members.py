"""An ensemble of nearly exact models of a trial environment, some of which may be copies of one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from forethought.envs.trial import SIDE, Balance, Grid, Hover
from forethought.models.oracle import Oracle
from forethought.protocols import AbstractEnv, AbstractWorldModel, EnsembleModel
from forethought.types import Outcome

COUNT = 5
SPREAD = {"jax/hover": (0.5, 0.5, 0.4, 0.4), "jax/balance": (0.5, 0.06, 0.7, 0.3)}
"""Round standard deviations of positions and velocities along episodes of policies that are good but not perfect."""
ERROR = 0.02
"""A member's error at a step, in standard deviations, where the state is one of them from 0: 0.04% of the variance."""
WRONG_MOVES = 0.03
"""In Grid, the largest probability of a wrong move."""

_RNG = np.random.default_rng(0)
WAVES = _RNG.normal(size=(COUNT, 4, 5)).astype(np.float32)
"""Each member's four waves over the state and a constant."""
CHANCES = _RNG.uniform(0, WRONG_MOVES, (COUNT, SIDE, SIDE)).astype(np.float32)
"""Each member's probability of a wrong move, by cell."""


class Member(AbstractWorldModel):
    """The exact model but for a small error of its own, which is larger the farther the state is from 0.

    With z the state over `SPREAD` and W of the member, its next state is off by 0.02 min(rms(z), 2) sin(W [z, 1])
    standard deviations. In Grid it goes against the action with a probability of its own in each cell, 3% at most.
    """

    env: Hover | Balance | Grid
    index: Int[Array, ""]

    def initial(self) -> PyTree:
        return Oracle(self.env).initial()

    def observe(self, latent: PyTree, action: Array, obs: PyTree, first: Array, *, key: PRNGKeyArray) -> PyTree:
        return self.env.state(obs)

    def imagine(self, latent: PyTree, action: Array, *, key: PRNGKeyArray) -> tuple[PyTree, Outcome]:
        if isinstance(self.env, Grid):
            chance = jnp.asarray(CHANCES)[self.index, latent.row, latent.column]
            wrong = jax.random.bernoulli(jax.random.fold_in(key, 1), chance)  # the step itself draws by the key alone
            return Oracle(self.env).imagine(latent, jnp.where(wrong, action ^ 1, action), key=key)
        spread = jnp.asarray(SPREAD[self.env.spec.name])
        z = jnp.concatenate([latent.position, latent.velocity]) / spread
        size = ERROR * jnp.minimum(jnp.sqrt(jnp.mean(z**2)), 2.0)
        off = size * spread * jnp.sin(jnp.asarray(WAVES)[self.index] @ jnp.append(z, 1.0))
        state, exact = Oracle(self.env).imagine(latent, action, key=key)
        position, velocity = state.position + off[:2], state.velocity + off[2:]
        state = dataclasses.replace(state, position=position, velocity=velocity)
        return state, dataclasses.replace(exact, obs={"position": position, "velocity": velocity})


class Ensemble(EnsembleModel):
    """Five members; a step is imagined by one drawn for it. The first `copies` of them are the same one."""

    env: Hover | Balance | Grid
    copies: Float[Array, ""]

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._member(jnp.asarray(i)) for i in range(COUNT))

    def initial(self) -> PyTree:
        return Oracle(self.env).initial()

    def observe(self, latent: PyTree, action: Array, obs: PyTree, first: Array, *, key: PRNGKeyArray) -> PyTree:
        return self.env.state(obs)

    def imagine(self, latent: PyTree, action: Array, *, key: PRNGKeyArray) -> tuple[PyTree, Outcome]:
        drawn = jax.random.randint(jax.random.fold_in(key, 2), (), 0, COUNT)
        return self._member(drawn).imagine(latent, action, key=key)

    def _member(self, place: Int[Array, ""]) -> Member:
        return Member(self.env, jnp.where(place < self.copies, 0, place))


def ensemble(env: AbstractEnv) -> Ensemble:
    """Five honest members, which an audit should find nothing wrong with.

    Raises ValueError for an environment that is not Hover, Balance or Grid."""
    if not isinstance(env, Hover | Balance | Grid):
        raise ValueError(f"{env.spec.name}: ensembles are made of models of jax/hover, jax/balance and jax/grid only")
    return Ensemble(env, jnp.zeros(()))
