"""Network parts: dense and block-diagonal layers, RMS norm, the normed SiLU perceptron.

Everything works on the last axis and leaves leading axes alone, so that a whole trajectory or batch passes as
one matrix product. Weights are drawn as in the dreamerv3 repository: a truncated normal with variance 1 / fan-in.
"""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def _weights(shape: tuple[int, ...], fan_in: int, scale: float, *, key: PRNGKeyArray) -> Array:
    # 0.87962566 is the standard deviation of a unit normal truncated at +-2.
    spread = scale / 0.87962566 / fan_in**0.5
    return spread * jax.random.truncated_normal(key, -2.0, 2.0, shape)


class Dense(eqx.Module):
    """x @ weight + bias."""

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    def __init__(self, inputs: int, outputs: int, *, scale: float = 1.0, key: PRNGKeyArray):
        self.weight = _weights((inputs, outputs), inputs, scale, key=key)
        self.bias = jnp.zeros(outputs)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return x @ self.weight + self.bias


class BlockDense(eqx.Module):
    """A dense layer with a block-diagonal matrix: G groups of inputs, each to its own group of outputs."""

    weight: Float[Array, "G in out"]
    bias: Float[Array, "G out"]

    def __init__(self, groups: int, inputs: int, outputs: int, *, key: PRNGKeyArray):
        self.weight = _weights((groups, inputs, outputs), inputs, 1.0, key=key)
        self.bias = jnp.zeros((groups, outputs))

    def __call__(self, x: Float[Array, "*batch G in"]) -> Float[Array, "*batch G out"]:
        return jnp.einsum("...gi,gio->...go", x, self.weight) + self.bias


class RMSNorm(eqx.Module):
    """x / rms(x) * scale (Zhang & Sennrich 2019)."""

    scale: Float[Array, " D"]

    def __init__(self, size: int):
        self.scale = jnp.ones(size)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-4) * self.scale


class Layer(eqx.Module):
    """A dense layer, RMS norm and SiLU."""

    dense: Dense
    norm: RMSNorm

    def __init__(self, inputs: int, outputs: int, *, key: PRNGKeyArray):
        self.dense, self.norm = Dense(inputs, outputs, key=key), RMSNorm(outputs)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return jax.nn.silu(self.norm(self.dense(x)))


class Trunk(eqx.Module):
    """`depth` layers of `units`."""

    layers: tuple[Layer, ...]

    def __init__(self, inputs: int, units: int, depth: int, *, key: PRNGKeyArray):
        sizes = [inputs] + [units] * depth
        keys = jax.random.split(key, depth)
        self.layers = tuple(Layer(*io, key=k) for io, k in zip(itertools.pairwise(sizes), keys, strict=True))

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        for layer in self.layers:
            x = layer(x)
        return x


class MLP(eqx.Module):
    """A trunk and a dense output whose initial weights are scaled by `scale` (0: it puts out 0)."""

    trunk: Trunk
    output: Dense

    def __init__(self, inputs: int, units: int, depth: int, outputs: int, *, scale: float = 1.0, key: PRNGKeyArray):
        trunk_key, output_key = jax.random.split(key)
        self.trunk = Trunk(inputs, units, depth, key=trunk_key)
        self.output = Dense(units if depth else inputs, outputs, scale=scale, key=output_key)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return self.output(self.trunk(x))
