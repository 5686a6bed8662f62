"""The interfaces: environments, world models and policies, pure and on the host."""

from __future__ import annotations

import abc
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from forethought.types import Decision, Outcome, Spec, TimeStep


class AbstractEnv(eqx.Module):
    """A pure JAX environment: unbatched (the caller vmaps), and it never resets itself."""

    @property
    @abc.abstractmethod
    def spec(self) -> Spec: ...

    @abc.abstractmethod
    def reset(self, *, key: PRNGKeyArray) -> tuple[PyTree, TimeStep]:
        """Begins an episode: (state, first time step)."""

    @abc.abstractmethod
    def step(self, state: PyTree, action: Array, *, key: PRNGKeyArray) -> tuple[PyTree, TimeStep]:
        """Takes one action in an episode that has not ended."""


@runtime_checkable
class HostEnv(Protocol):
    """A batch of B stateful environments on the host (NumPy). It never resets itself either.

    `send` starts the steps of the environments in `where` and returns at once; `recv` waits for them and
    returns the whole batch's time step, in which the rows that were neither stepped nor reset keep their
    latest one. A reset takes one tick, and an ended environment is never stepped (ValueError).
    """

    spec: Spec
    num: int

    def reset(self, where: np.ndarray | None = None, *, seed: int | None = None) -> TimeStep:
        """Resets the environments in `where` (bool [B]; None: all). With a seed, every stream begins anew:
        an episode's seed is a function of (seed, environment, episode)."""
        ...

    def send(self, action: np.ndarray, where: np.ndarray | None = None) -> None: ...

    def recv(self) -> TimeStep: ...

    def snapshot(self) -> bytes | None:
        """All that `restore` needs to go on exactly here; None: this environment cannot."""
        ...

    def restore(self, snapshot: bytes) -> TimeStep: ...

    def close(self) -> None: ...


class AbstractWorldModel(eqx.Module):
    """A learned or exact model of an environment, unbatched: anybody's model can be audited behind these three."""

    @abc.abstractmethod
    def initial(self) -> PyTree:
        """The latent before anything was seen."""

    @abc.abstractmethod
    def observe(self, latent: PyTree, action: Array, obs: PyTree, first: Array, *, key: PRNGKeyArray) -> PyTree:
        """The latent at t from the latent and action at t - 1 and what was seen at t.

        Where `first`, latent and action are void and forgotten."""

    @abc.abstractmethod
    def imagine(self, latent: PyTree, action: Array, *, key: PRNGKeyArray) -> tuple[PyTree, Outcome]:
        """One imagined step: the latent at t + 1 and what the model expects to see there."""


class HeadedModel(AbstractWorldModel):
    """A world model whose outcome is a function of the latent alone, so that rollouts may compute it afterwards."""

    @abc.abstractmethod
    def advance(self, latent: PyTree, action: Array, *, key: PRNGKeyArray) -> PyTree:
        """The latent of the next imagined step."""

    @abc.abstractmethod
    def outcome(self, latent: PyTree) -> Outcome:
        """What the model expects to see at a latent."""

    def imagine(self, latent: PyTree, action: Array, *, key: PRNGKeyArray) -> tuple[PyTree, Outcome]:
        latent = self.advance(latent, action, key=key)
        return latent, self.outcome(latent)


class EnsembleModel(AbstractWorldModel):
    """A world model of several that were learned apart, each of which can be asked alone.

    All members keep latents of the structure that the ensemble's own methods take and return."""

    @property
    @abc.abstractmethod
    def members(self) -> tuple[AbstractWorldModel, ...]: ...


class ValuedModel(AbstractWorldModel):
    """A world model that knows what a latent is worth to the policy it was learned for."""

    @abc.abstractmethod
    def value(self, latent: PyTree) -> Array:
        """The discounted return that the model's policy expects from here on."""


class AbstractPolicy(eqx.Module):
    """Acts with a carry, which holds filters, plans and running options; unbatched."""

    @abc.abstractmethod
    def initial(self) -> PyTree: ...

    @abc.abstractmethod
    def __call__(self, carry: PyTree, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[PyTree, Decision]: ...


class AbstractOption(eqx.Module):
    """A way to act for a while (Sutton, Precup & Singh 1999): where it may start, a policy with a carry, when it stops.

        obs0 --a0--> obs1 --a1--> obs2        started at obs0 if can_start(obs0); whether it stops is drawn at obs1,
                                              then at obs2, each time from stop_prob, never at obs0

    Unbatched. It sees time steps of the environment it acts in, not those of the level above.
    """

    @abc.abstractmethod
    def can_start(self, time_step: TimeStep) -> Bool[Array, ""]: ...

    @abc.abstractmethod
    def initial(self) -> PyTree:
        """The carry with which it starts."""

    @abc.abstractmethod
    def act(self, carry: PyTree, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[PyTree, Decision]: ...

    @abc.abstractmethod
    def stop_prob(self, carry: PyTree, time_step: TimeStep) -> Float[Array, ""]:
        """The probability of stopping at a time step that it has led to, with the carry of the action before."""

    def failed(self, carry: PyTree, time_step: TimeStep) -> Bool[Array, ""]:
        """Whether what it was started for cannot be reached any more, asked where it does not stop; never, unless an
        option says so."""
        return jnp.zeros((), bool)


@runtime_checkable
class Actor(Protocol):
    """Maps a latent to a decision; what acts inside a model."""

    def __call__(self, latent: Any, *, key: PRNGKeyArray) -> Decision: ...
