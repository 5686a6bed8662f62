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
    """weight @ x + bias."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"]

    def __init__(self, inputs: int, outputs: int, *, scale: float = 1.0, key: PRNGKeyArray):
        self.weight = _weights((outputs, inputs), inputs, scale, key=key)
        self.bias = jnp.zeros(outputs)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return x @ self.weight.T + self.bias


class BlockDense(eqx.Module):
    """A dense layer with a block-diagonal matrix: G groups of inputs, each to its own group of outputs."""

    weight: Float[Array, "G in out"]
    bias: Float[Array, "G out"]

    def __init__(self, groups: int, inputs: int, outputs: int, *, scale: float = 1.0, key: PRNGKeyArray):
        # The repository counts the inputs of all groups: an output's variance is 1 / groups, not 1.
        self.weight = _weights((groups, inputs, outputs), groups * inputs, scale, key=key)
        self.bias = jnp.zeros((groups, outputs))

    def __call__(self, x: Float[Array, "*batch G in"]) -> Float[Array, "*batch G out"]:
        return jnp.einsum("...gi,gio->...go", x, self.weight) + self.bias


class RMSNorm(eqx.Module):
    """x / rms(x) * scale over the last axes, those of the scale (Zhang & Sennrich 2019)."""

    scale: Float[Array, "*shape"]

    def __init__(self, *shape: int):
        self.scale = jnp.ones(shape)

    def __call__(self, x: Float[Array, "*batch_shape"]) -> Float[Array, "*batch_shape"]:
        axes = tuple(range(-self.scale.ndim, 0))
        return x * jax.lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) + 1e-4) * self.scale


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
