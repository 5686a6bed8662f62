"""A small deterministic model over a code of the observation, for the agents that keep two codes (algos/aligned.py)."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from forethought import nets
from forethought.protocols import HeadedModel
from forethought.types import Outcome


class Net(eqx.Module):
    """One hidden layer with ReLU and no normalisation, so that nothing but what is studied keeps it in bounds."""

    hidden: nets.Dense
    output: nets.Dense

    def __init__(self, inputs: int, units: int, outputs: int, *, key: PRNGKeyArray):
        hidden_key, output_key = jax.random.split(key)
        self.hidden = nets.Dense(inputs, units, key=hidden_key)
        self.output = nets.Dense(units, outputs, key=output_key)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return self.output(jax.nn.relu(self.hidden(x)))


class Encoder(eqx.Module):
    """An observation's code."""

    net: Net
    layer_norm: bool = eqx.field(static=True)

    def __call__(self, obs: Float[Array, "*batch O"]) -> Float[Array, "*batch D"]:
        code = self.net(obs)
        if not self.layer_norm:
            return code
        centred = code - code.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


class Latent(eqx.Module):
    """Where an imagined rollout is: the model's code, and the policy's code of the last real observation."""

    code: Float[Array, "*batch D"]
    seen: Float[Array, "*batch D"]


class Model(HeadedModel):
    """Predicts the next code from a code and an action, and from a code what is observed and earned there."""

    encoder: Encoder
    step: Net
    decoder: Net
    reward: Net
    policy_encoder: Encoder
    """Encodes for the policy what is really seen; no part of the model's parameters."""

    def initial(self) -> Latent:
        width = self.step.output.bias.shape[0]
        return Latent(jnp.zeros(width), jnp.zeros(width))

    def observe(self, latent: Latent, action: Array, obs: PyTree, first: Array, *, key: PRNGKeyArray) -> Latent:
        return Latent(self.encoder(obs["obs"]), self.policy_encoder(obs["obs"]))

    def advance(self, latent: Latent, action: Float[Array, "*batch A"], *, key: PRNGKeyArray) -> Latent:
        return Latent(self.predict(latent.code, action), latent.seen)

    def predict(self, code: Float[Array, "*batch D"], action: Float[Array, "*batch A"]) -> Float[Array, "*batch D"]:
        return self.step(jnp.concatenate([code, action], -1))

    def outcome(self, latent: Latent) -> Outcome:
        constant = jnp.ones(latent.code.shape[:-1])
        obs = {"obs": self.decoder(latent.code)}
        return Outcome(obs, self.reward(latent.code)[..., 0], constant, constant, 0.0 * constant)
