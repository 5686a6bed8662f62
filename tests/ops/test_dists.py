"""Distributions against SciPy, samples against probabilities, and the gradients that samples pass on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from forethought.ops import dists

KEY = jax.random.key(0)
LOGITS = jnp.array([[0.0, 1.0, -2.0, 30.0], [0.5, 0.5, 0.5, -40.0]])


def probabilities(logits, share):
    soft = np.exp(np.asarray(logits, np.float64))
    return (1 - share) * soft / soft.sum(-1, keepdims=True) + share / logits.shape[-1]


@pytest.mark.parametrize("share", [0.01, 0.25, 1.0])
def test_unimix_leaves_every_class_its_share(share):
    found = dists.unimix(LOGITS, share)
    np.testing.assert_allclose(found, probabilities(LOGITS, share), rtol=1e-5)
    assert found.min() >= share / 4 * 0.999
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)


def test_straight_through_samples_have_the_probabilities():
    probs = jnp.broadcast_to(dists.unimix(LOGITS, 0.3), (3000, 2, 4))
    samples = np.asarray(jax.jit(dists.straight_through)(probs, key=KEY))
    # Five standard deviations of a frequency over 3000 draws: at most 5 * sqrt(.25 / 3000) = 0.046.
    np.testing.assert_allclose(samples.mean(0), probabilities(LOGITS, 0.3), atol=0.046)


def test_straight_through_is_exact_for_any_probabilities():
    """(1 + p) - p need not be 1 in floating point."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1000, 4)), jnp.float32)
    for draw in (jax.jit(dists.straight_through), dists.straight_through):
        samples = np.asarray(draw(dists.unimix(logits, 0.01), key=KEY))
        np.testing.assert_array_equal(np.sort(samples, -1), np.broadcast_to([0, 0, 0, 1], samples.shape))


def test_straight_through_passes_the_gradient_of_the_probabilities():
    worth = jnp.arange(8.0).reshape(2, 4)
    through = jax.grad(lambda x: jnp.sum(worth * dists.straight_through(dists.unimix(x, 0.1), key=KEY)))(LOGITS)
    exact = jax.grad(lambda x: jnp.sum(worth * dists.unimix(x, 0.1)))(LOGITS)
    np.testing.assert_allclose(through, exact, rtol=1e-5, atol=1e-9)
    assert np.abs(exact).max() > 0.1


def test_categorical_is_that_of_scipy():
    dist = dists.Categorical(jnp.log(dists.unimix(LOGITS, 0.2)))
    probs = probabilities(LOGITS, 0.2)
    np.testing.assert_allclose(dist.log_prob(jnp.array([3, 1])), np.log(probs[[0, 1], [3, 1]]), rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(), scipy.stats.entropy(probs, axis=-1), rtol=1e-5)
    assert dist.mode()[0] == 3 and dist.mode().dtype == jnp.int32
    draws = jax.vmap(lambda k: dist.sample(key=k))(jax.random.split(KEY, 3000))
    counts = np.stack([np.bincount(draws[:, i], minlength=4) for i in range(2)])
    np.testing.assert_allclose(counts / 3000, probs, atol=0.046)


def test_normal_is_that_of_scipy():
    mean, scale = np.array([[0.3, -1.0], [2.0, 0.0]]), np.array([[0.5, 2.0], [0.1, 1.0]])
    dist = dists.Normal(jnp.asarray(mean, jnp.float32), jnp.asarray(scale, jnp.float32))
    x = np.array([[0.0, 1.0], [2.1, -3.0]])
    reference = scipy.stats.norm(mean, scale)
    np.testing.assert_allclose(dist.log_prob(jnp.asarray(x, jnp.float32)), reference.logpdf(x).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(), reference.entropy().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(dist.mode(), dist.mean)
    draws = np.asarray(jax.vmap(lambda k: dist.sample(key=k))(jax.random.split(KEY, 4000)))
    # Five standard errors: of the mean 5 / sqrt(4000) = 0.08 scales, of the scale 5 / sqrt(8000) = 0.056.
    np.testing.assert_allclose((draws.mean(0) - mean) / scale, 0, atol=0.08)
    np.testing.assert_allclose(draws.std(0) / scale, 1, atol=0.056)


def test_bounded_normal_keeps_its_bounds():
    dist = dists.bounded_normal(jnp.array([0.0, 50.0, -0.5]), jnp.array([-2.0, 50.0, -50.0]), 0.1, 0.9)
    np.testing.assert_allclose(dist.mean, [0, 1, np.tanh(-0.5)], rtol=1e-6)
    np.testing.assert_allclose(dist.scale, [0.1 + 0.8 / 2, 0.9, 0.1], rtol=1e-6)  # sigmoid(-2 + 2) is a half


def test_into_bounds_divides_by_a_constant():
    raw = jnp.array([0.3, -1.0, 2.5, -7.3, 1e30, 0.0])
    found = jax.jit(dists.into_bounds)(raw)
    np.testing.assert_array_equal(found, np.array([0.3, -1, 1, -1, 1, 0], np.float32))
    slope = jax.grad(lambda x: dists.into_bounds(x).sum())(raw)
    np.testing.assert_allclose(slope, 1 / np.maximum(1, np.abs(raw)), rtol=1e-6)
