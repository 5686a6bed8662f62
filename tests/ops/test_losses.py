"""Codes against exact fractions and float64, the KL against SciPy, and where its two halves send their gradients."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.ops import dists, losses

BINS = np.array([-10, -1, 0, 0.5, 4], np.float32)
two_hot = jax.jit(losses.two_hot)
two_hot_mean = jax.jit(losses.two_hot_mean)


def scalar(x, dtype=jnp.float32):
    return jnp.asarray(x, jnp.float32).astype(dtype)


@pytest.mark.parametrize("x", [0.0, 1e-6, 0.3, 1.0, 50.0, 1e4, 3e8])
@pytest.mark.parametrize("sign", [1, -1])
def test_symlog_is_odd_and_symexp_undoes_it(x, sign):
    assert losses.symlog(scalar(sign * x)) == pytest.approx(sign * np.log1p(x), rel=1e-6)
    # float32 has 6e-8 of symlog's value, up to 19.5, so 1.2e-6 of what it is the logarithm of.
    assert losses.symexp(losses.symlog(scalar(sign * x))) == pytest.approx(sign * x, rel=3e-6, abs=1e-12)
    assert jax.grad(losses.symlog)(scalar(sign * x)) == pytest.approx(1 / (1 + x) if x else 0, rel=1e-6)


@pytest.mark.parametrize("n, limit", [(255, 20.0), (63, 20.0), (5, 1.5)])
def test_bins_are_symexp_of_equal_steps(n, limit):
    bins = losses.symexp_bins(n, limit)
    steps = np.linspace(-limit, limit, n)
    np.testing.assert_allclose(bins, np.sign(steps) * np.expm1(np.abs(steps)), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(bins, -bins[::-1])
    assert bins[n // 2] == 0 and (np.diff(bins) > 0).all() and bins.dtype == np.float32


@pytest.mark.parametrize("n, limit", [(254, 20.0), (1, 20.0), (63, 0.0), (63, -20.0), (63, 100.0), (63, np.nan)])
def test_bins_that_cannot_be_are_refused(n, limit):
    with pytest.raises(ValueError, match="symexp_bins"):
        losses.symexp_bins(n, limit)


@pytest.mark.parametrize(
    "target, weights",
    [
        (0.0, [0, 0, 1, 0, 0]),
        (-0.0, [0, 0, 1, 0, 0]),
        (0.5, [0, 0, 0, 1, 0]),
        (0.125, [0, 0, 0.75, 0.25, 0]),
        (-3.25, [0.25, 0.75, 0, 0, 0]),  # -10 + 6.75 of the 9 to -1
        (4.0, [0, 0, 0, 0, 1]),
        (4.5, [0, 0, 0, 0, 1]),
        (1e9, [0, 0, 0, 0, 1]),
        (np.inf, [0, 0, 0, 0, 1]),
        (-10.0, [1, 0, 0, 0, 0]),
        (-1e9, [1, 0, 0, 0, 0]),
        (-np.inf, [1, 0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_two_hot_by_hand(target, weights, dtype):
    """F30, on uneven bins; float16 holds up to 65504, so 1e9 becomes infinite there."""
    np.testing.assert_array_equal(losses.two_hot(scalar(target, dtype), BINS), np.array(weights, np.float32))


def test_nan_has_no_code():
    with pytest.raises(ValueError, match="NaN"):
        losses.two_hot(scalar(np.nan), BINS)
    assert np.isnan(two_hot(scalar(np.nan), BINS)).all()


@settings(max_examples=150, deadline=None)
@given(
    target=st.floats(-6e8, 6e8, width=32) | st.floats(-3, 3, width=32) | st.sampled_from(range(255)),
    n=st.sampled_from([255, 63]),
)
def test_two_hot_is_a_code_of_the_target(target, n):
    """Exact fractions: at most two adjacent weights, at least 0, sum 1, and their mean is the target."""
    bins = losses.symexp_bins(n, 20.0)
    target = bins[target % n] if isinstance(target, int) else np.float32(target)
    weights = np.asarray(two_hot(scalar(target), bins))
    held = np.flatnonzero(weights)
    assert (weights >= 0).all() and 1 <= held.size <= 2 and np.ptp(held) <= 1
    assert abs(sum(Fraction(float(w)) for w in weights) - 1) <= Fraction(1, 2**23)
    decoded = sum(Fraction(float(w)) * Fraction(float(b)) for w, b in zip(weights, bins, strict=True))
    inside = Fraction(float(np.clip(target, bins[0], bins[-1])))
    # A weight is good to 2^-23 or so, and it multiplies the distance of two bins.
    gap = Fraction(float(np.diff(bins)[max(min(held[0], n - 2), 0)])) + abs(inside)
    assert abs(decoded - inside) <= gap * Fraction(1, 2**21)


@pytest.mark.parametrize("n", [255, 63])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_the_mean_of_symmetric_logits_is_exactly_zero(n, dtype):
    bins = losses.symexp_bins(n, 20.0)
    half = np.random.default_rng(n).normal(size=n // 2)
    for logits in (np.zeros(n), np.full(n, 3.7), np.concatenate([half, [1.0], half[::-1]])):
        assert two_hot_mean(jnp.asarray(logits, dtype), bins) == 0.0
    assert losses.two_hot_mean(jnp.zeros((2, 4)), np.array([-3, -1, 1, 3], np.float32)).tolist() == [0, 0]


@pytest.mark.parametrize("n", [255, 63])
@pytest.mark.parametrize("floor", [1e-6, 2e-9])
def test_the_mean_is_precise_under_outer_bins_of_half_a_billion(n, floor):
    """Logits as a trained head has them: a target's code over a floor, against the same softmax in float64.

    The floor's mirrored pairs cancel, but each of their terms is up to 4.9e8 * 1e-6 = 490, whose rounding to 3e-5
    would drown a value of 0.01."""
    bins = losses.symexp_bins(n, 20.0)
    for target in (0.0, 0.01, -0.3, 1.0, -20.0, 3e4, -2e8):
        code = np.asarray(two_hot(scalar(target), bins), np.float64)
        logits = np.log(code + floor).astype(np.float32)
        exact = scipy.special.softmax(logits.astype(np.float64)) @ bins.astype(np.float64)
        for mean in (two_hot_mean, losses.two_hot_mean):
            assert mean(jnp.asarray(logits), bins) == pytest.approx(exact, rel=2e-6, abs=1e-8), target


def test_two_hot_loss_is_the_cross_entropy():
    """Target .125 has weights .75 and .25 at bins 2 and 3; logits ln(1..5) are probabilities k / 15."""
    logits = jnp.log(jnp.arange(1.0, 6.0))
    expected = -(0.75 * np.log(3 / 15) + 0.25 * np.log(4 / 15))
    assert losses.two_hot_loss(logits, scalar(0.125), BINS) == pytest.approx(expected, rel=1e-6)
    slope = jax.grad(losses.two_hot_loss)(logits, scalar(0.125), BINS)
    np.testing.assert_allclose(slope, np.arange(1, 6) / 15 - [0, 0, 0.75, 0.25, 0], atol=1e-6)


def random_logits(seed, shape=(3, 5)):
    return jnp.log(dists.unimix(jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32), 0.01))


def test_kl_is_that_of_scipy():
    p, q = random_logits(0), random_logits(1)
    expected = scipy.stats.entropy(np.exp(p), np.exp(q), axis=-1)
    np.testing.assert_allclose(losses.categorical_kl(p, q), expected, rtol=1e-5)
    np.testing.assert_array_equal(losses.categorical_kl(p, p), 0)


def test_the_halves_of_the_kl_are_equal_and_train_one_side_each():
    post, prior = random_logits(0), random_logits(1)
    whole = losses.categorical_kl(post, prior).sum()
    dynamics, representation = losses.balanced_kl(post, prior, 0.0)
    assert dynamics == representation == pytest.approx(float(whole), rel=1e-6)
    slopes = jax.jacobian(losses.balanced_kl, (0, 1))(post, prior, 0.0)
    np.testing.assert_array_equal(slopes[0][0], 0)
    np.testing.assert_array_equal(slopes[1][1], 0)
    # d/dq_logits of sum p (ln p - q) is -p.
    np.testing.assert_allclose(slopes[0][1], -np.exp(post), rtol=1e-6)
    assert (np.abs(slopes[1][0]).max(-1) > 1e-3).all()


def test_under_the_free_nats_there_is_no_gradient():
    post, prior = random_logits(0), random_logits(1)
    whole = float(losses.categorical_kl(post, prior).sum())
    assert losses.balanced_kl(post, prior, 1.5 * whole) == (pytest.approx(1.5 * whole), pytest.approx(1.5 * whole))
    for slope in jax.tree.leaves(jax.jacobian(losses.balanced_kl, (0, 1))(post, prior, 1.5 * whole)):
        np.testing.assert_array_equal(slope, 0)
    slopes = jax.jacobian(losses.balanced_kl, (0, 1))(post, prior, 0.5 * whole)
    assert np.abs(slopes[0][1]).max() > 1e-3 and np.abs(slopes[1][0]).max() > 1e-3
