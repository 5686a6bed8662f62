"""Alignment losses and measures: values by hand, gradients by finite differences, invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.ops import align

A = jnp.array([3.0, 4.0, 7.0])
B = jnp.array([5.0, 0.0, -2.0])


def codes(seed, n, d):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


def test_alignment_looks_at_the_shared_parts_alone():
    # (3, 4) / 5 against (1, 0): (0.6 - 1)^2 + 0.8^2 = 0.8
    assert align.partial_alignment(A, B, 2) == pytest.approx(0.8, abs=1e-6)
    assert align.partial_alignment(A, B.at[2].set(99.0), 2) == pytest.approx(0.8, abs=1e-6)
    # All three: 2 - 2 cos, cos = (15 - 14) / sqrt(74 * 29)
    assert align.partial_alignment(A, B, 3) == pytest.approx(2 - 2 / np.sqrt(74 * 29), abs=1e-6)
    assert align.partial_alignment(A, B, 0) == 0.0


def test_alignment_is_2_minus_2_cosine_and_blind_to_lengths():
    assert align.partial_alignment(A, B, 3) == pytest.approx(2 - 2 * float(align.cosine(A, B)), abs=1e-6)
    assert align.partial_alignment(1e3 * A, 1e-3 * B, 3) == pytest.approx(
        float(align.partial_alignment(A, B, 3)), abs=1e-5
    )
    assert align.partial_alignment(A, -A, 3) == pytest.approx(4.0, abs=1e-6)


def test_the_split_may_be_traced():
    found = jax.jit(jax.vmap(lambda n: align.partial_alignment(A, B, n)))(jnp.array([0, 2, 3]))
    assert found == pytest.approx([0.0, 0.8, 2 - 2 / np.sqrt(74 * 29)], abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5))
def test_its_gradient_is_that_of_finite_differences(seed, shared):
    model, policy = codes(seed, 2, 5).astype(np.float64)
    grads = jax.grad(lambda m, p: align.partial_alignment(m, p, shared), (0, 1))(
        *(jnp.asarray(x, jnp.float32) for x in (model, policy))
    )

    def loss(model, policy):  # plain NumPy, double precision
        s, t = model[:shared], policy[:shared]
        return np.sum((s / np.linalg.norm(s) - t / np.linalg.norm(t)) ** 2)

    for side in (0, 1):
        for i in range(5):
            nudge = np.zeros((2, 5))
            nudge[side, i] = 1e-5
            slope = (loss(model + nudge[0], policy + nudge[1]) - loss(model - nudge[0], policy - nudge[1])) / 2e-5
            # float32 gradients of directions, whose size goes with 1 / |code|
            scale = 1 / min(np.linalg.norm(model[:shared]), np.linalg.norm(policy[:shared]))
            assert grads[side][i] == pytest.approx(slope, abs=1e-5 + 1e-5 * scale)


def test_a_code_of_zeros_gives_no_nan():
    zero = jnp.zeros(3)
    value, slope = jax.value_and_grad(lambda m: align.partial_alignment(m, B, 3))(zero)
    assert value == pytest.approx(1.0) and np.isfinite(slope).all()


def test_info_nce_by_hand():
    # Orthogonal pairs that agree, temperature 0.5: logits [[2, 0], [0, 2]]
    eye = jnp.eye(2)
    assert align.info_nce(eye, 3 * eye, 0.5) == pytest.approx(-np.log(np.exp(2) / (np.exp(2) + 1)), abs=1e-6)
    # Both directions: rows of a are alike, so that a finds b at log 2 and b finds a at log 2 too
    same = jnp.array([[1.0, 0.0], [1.0, 0.0]])
    assert align.info_nce(same, same, 0.5) == pytest.approx(np.log(2), abs=1e-6)
    # Swapped pairs are wrong in both directions
    assert align.info_nce(eye, eye[::-1], 0.5) == pytest.approx(-np.log(1 / (np.exp(2) + 1)), abs=1e-6)


def test_value_aware_losses_by_hand():
    predicted, real, slope = jnp.array([1.0, 2.0]), jnp.array([0.5, 4.0]), jnp.array([2.0, -3.0])
    assert align.value_weighted(predicted, real, slope) == pytest.approx((2 * 0.5) ** 2 + (3 * 2) ** 2)
    value = lambda s: s[0] ** 2 + s[1]  # noqa: E731
    assert align.value_equivalent(value, predicted, real) == pytest.approx((3.0 - 4.25) ** 2)
    # For a linear value with one dimension in error they agree.
    linear = lambda s: slope @ s  # noqa: E731
    one = predicted.at[1].set(real[1])
    assert align.value_equivalent(linear, one, real) == pytest.approx(align.value_weighted(one, real, slope))


def test_cka_knows_rotation_and_scale_and_independence():
    a = codes(0, 500, 6)
    rotation = np.linalg.qr(codes(1, 6, 6))[0]
    assert align.linear_cka(a, 3 * a @ rotation + 1) == pytest.approx(1.0, abs=1e-5)
    assert align.linear_cka(a, codes(2, 500, 6)) < 0.05
    # One dimension each: the squared correlation
    x, y = codes(3, 200, 1), codes(4, 200, 1) + 0.5 * codes(3, 200, 1)
    assert align.linear_cka(x, y) == pytest.approx(np.corrcoef(x[:, 0], y[:, 0])[0, 1] ** 2, abs=1e-5)


def test_the_probe_finds_what_is_there():
    code = codes(5, 400, 8)
    target = np.stack([code @ np.arange(8.0), codes(6, 400, 1)[:, 0], np.full(400, 2.0)], 1)
    found = align.ridge_r2(code, target)
    assert found[0] > 0.999 and found[1] < 0.1 and np.isnan(found[2])


def test_the_probe_is_ordinary_least_squares_without_penalty():
    code, target = codes(7, 60, 3), codes(8, 60, 1)
    design = np.concatenate([code, np.ones((60, 1))], 1)
    weights = np.linalg.lstsq(design[:30], target[:30], rcond=None)[0]
    missed = np.sum((target[30:] - design[30:] @ weights) ** 2)
    expected = 1 - missed / np.sum((target[30:] - target[:30].mean()) ** 2)
    assert align.ridge_r2(code, target, penalty=0.0)[0] == pytest.approx(expected, abs=1e-6)


def test_a_probe_needs_inputs():
    with pytest.raises(ValueError, match="3 inputs; a probe needs at least 4"):
        align.ridge_r2(codes(0, 3, 2), codes(1, 3, 1))


def test_angles_between_planes():
    x, y, z = np.linalg.qr(codes(9, 300, 4) - codes(9, 300, 4).mean(0))[0].T[:3]
    tilt = 0.3
    a = np.stack([x, y], 1)
    b = np.stack([x, np.cos(tilt) * y + np.sin(tilt) * z], 1) @ np.array([[2.0, 1.0], [0.0, 1.0]])
    assert align.principal_angles(a, b, variance=0.999) == pytest.approx([0.0, tilt], abs=1e-6)
    with pytest.raises(ValueError, match="constant"):
        align.principal_angles(np.ones((9, 2)), a[:9])


def test_jacobian_share_by_hand():
    # code = (3 o0, o1^2): squares 9 and 4 o1^2, and o2 is not looked at
    obs = jnp.array([[0.0, 1.0, 5.0], [0.0, 2.0, 5.0]])
    found = align.jacobian_share(lambda o: jnp.stack([3 * o[0], o[1] ** 2]), obs)
    assert found == pytest.approx([18 / 38, 20 / 38, 0.0], abs=1e-6)
