"""An actor and a critic over a view of the moment (models/sight.py), for discrete and bounded continuous actions."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from forethought import nets
from forethought.ops import dists, losses
from forethought.types import Box, Decision, Discrete


class Actor(eqx.Module):
    """Maps a view to a distribution over actions."""

    net: nets.MLP
    action: Box | Discrete = eqx.field(static=True)

    def dist(self, view: Float[Array, "*batch V"]) -> dists.Normal | dists.Categorical:
        out = self.net(view)
        if isinstance(self.action, Discrete):
            return dists.Categorical(jnp.log(dists.unimix(out, 0.01)))
        mean, scale = jnp.split(out, 2, -1)
        return dists.bounded_normal(mean, scale, 0.1, 1.0)

    def decide(self, raw: Array, dist: dists.Normal | dists.Categorical) -> Decision:
        """The decision for a raw sample, which a Box action keeps in extras: log_prob is the raw sample's."""
        if isinstance(self.action, Discrete):
            return Decision(raw, dist.log_prob(raw), raw)
        return Decision(dists.into_bounds(raw).reshape(self.action.shape), dist.log_prob(raw), raw)


class Critic(eqx.Module):
    """Two-hot value of a view."""

    net: nets.MLP
    bins: tuple[int, float] = eqx.field(static=True)

    def value(self, view: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
        return losses.two_hot_mean(self.net(view), losses.symexp_bins(*self.bins))

    def loss(self, logits: Float[Array, "*batch K"], target: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
        bins = losses.symexp_bins(*self.bins)
        return jnp.vectorize(lambda x, y: losses.two_hot_loss(x, y, bins), signature="(k),()->()")(logits, target)

    def pulled_loss(
        self, view: Float[Array, "*batch V"], target: Float[Array, "*batch"], slow: Critic, weight: float
    ) -> Float[Array, "*batch"]:
        """Cross-entropy to the targets, and to the slow critic's values, which keeps the critic from running away."""
        logits = self.net(view)
        pull = self.loss(logits, jax.lax.stop_gradient(slow.value(view)))
        return self.loss(logits, target) + weight * pull
