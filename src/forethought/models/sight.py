"""What a policy sees: the features of the model's latent, or the code that an encoder of its own makes of observations.

An agent with an encoder of its own keeps two codes of an observation, the model's and the policy's, which may be tied
(ops/align.py). For real it reads the observation, in imagination what the model decodes; nothing here knows what model
that is, only the vector of numbers that stands for an observation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from forethought import nets
from forethought.ops import align

Alignment = Literal["none", "partial", "contrast"]


class Sight(eqx.Module):
    """A view of a moment, from a model's features and an observation's vector."""

    encoder: nets.Trunk | None
    """None: the model's features are the view, and its encoder is shared."""

    @classmethod
    def own(cls, inputs: int, units: int, layers: int, *, key: PRNGKeyArray) -> Sight:
        """An encoder for observation vectors of so many numbers."""
        return cls(nets.Trunk(inputs, units, layers, key=key))

    def __call__(self, features: Float[Array, "*batch F"], observation: Callable[[], Any]) -> Float[Array, "*batch V"]:
        """The view; `observation`, which returns Float[Array, "*batch O"], is asked only where it is looked at."""
        return features if self.encoder is None else self.encoder(observation())


def alignment(
    how: Alignment,
    model: Float[Array, "N D"],
    policy: Float[Array, "N D"],
    *,
    shared: int,
    temperature: float = 0.1,
) -> Float[Array, ""]:
    """The alignment loss of N pairs of codes: of the first `shared` dimensions (all: full soft alignment), or by
    contrast, for which each row's negatives are the other rows. Raises ValueError for 'none'."""
    if how == "none":
        raise ValueError("alignment: 'none' has no loss")
    if how == "contrast":
        return align.info_nce(model, policy, temperature)
    return jnp.mean(jax.vmap(align.partial_alignment, (0, 0, None))(model, policy, shared))
