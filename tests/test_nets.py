"""Layers against their formulas in NumPy, leading axes, and the spread of initial weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.special
import scipy.stats

from forethought import nets

KEY = jax.random.key(0)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_dense_is_a_matrix_product():
    layer = nets.Dense(3, 2, key=KEY)
    x = normal(4, 5, 3)
    np.testing.assert_allclose(layer(jnp.asarray(x)), x @ np.asarray(layer.weight).T, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(layer.bias, 0)


def test_block_dense_is_a_block_diagonal_matrix():
    bias, x = normal(3, 2, seed=1), normal(5, 3, 4)
    layer = eqx.tree_at(lambda m: m.bias, nets.BlockDense(3, 4, 2, key=KEY), jnp.asarray(bias))
    whole = scipy.linalg.block_diag(*np.asarray(layer.weight))
    expected = x.reshape(5, 12) @ whole + bias.ravel()
    np.testing.assert_allclose(layer(jnp.asarray(x)).reshape(5, 6), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_over_two_axes_is_that_of_the_flattened_array():
    x = jnp.asarray(normal(5, 3, 4))
    np.testing.assert_allclose(nets.RMSNorm(3, 4)(x).reshape(5, 12), nets.RMSNorm(12)(x.reshape(5, 12)), rtol=1e-6)


def test_rms_norm_by_hand():
    """rms(3, -4) = sqrt(12.5); at 0 it stays 0 with a finite slope."""
    norm = nets.RMSNorm(2)
    np.testing.assert_allclose(norm(jnp.array([3.0, -4.0])), np.array([3, -4]) / np.sqrt(12.5 + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(jax.jacobian(norm)(jnp.zeros(2)), 100 * np.eye(2), rtol=1e-5)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_mlp_is_its_layers_one_after_another(depth):
    mlp = nets.MLP(3, 8, depth, 2, key=KEY)
    x = y = normal(2, 4, 3)
    for layer in mlp.trunk.layers:
        y = y @ np.asarray(layer.dense.weight).T + np.asarray(layer.dense.bias)
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-4) * np.asarray(layer.norm.scale)
        y = y * scipy.special.expit(y)
    found = mlp(jnp.asarray(x))
    assert len(mlp.trunk.layers) == depth and found.shape == (2, 4, 2)
    np.testing.assert_allclose(found, y @ np.asarray(mlp.output.weight).T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(jax.vmap(mlp))(jnp.asarray(x)), found, rtol=1e-4, atol=1e-5)


def test_an_output_of_scale_zero_puts_out_zero():
    mlp = nets.MLP(3, 8, 2, 5, scale=0.0, key=KEY)
    np.testing.assert_array_equal(mlp(jnp.asarray(normal(7, 3))), 0)
    assert np.abs(mlp.trunk.layers[0].dense.weight).max() > 0


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_weights_have_variance_one_over_fan_in(scale):
    weight = np.asarray(nets.Dense(100, 400, scale=scale, key=KEY).weight) * 10
    # 40,000 draws: the standard deviation of their standard deviation is below 0.5 %.
    assert weight.std() == pytest.approx(scale, rel=0.02)
    assert np.abs(weight).max() <= scale * 2 / scipy.stats.truncnorm(-2, 2).std() * (1 + 1e-6)
    # The fan-in is that of all groups, 400.
    blocks = np.asarray(nets.BlockDense(4, 100, 100, key=KEY).weight)
    assert blocks.std() * 20 == pytest.approx(1, rel=0.02)


def test_parts_are_drawn_independently():
    trunk = nets.Trunk(8, 8, 2, key=KEY)
    first, second = (np.asarray(layer.dense.weight).ravel() for layer in trunk.layers)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.5
    blocks = np.asarray(nets.BlockDense(2, 8, 8, key=KEY).weight)
    assert abs(np.corrcoef(*blocks.reshape(2, -1))[0, 1]) < 0.5
