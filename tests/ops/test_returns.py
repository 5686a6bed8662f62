"""Targets against forward-view sums in NumPy, worked examples, and what must not leak across an episode's end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.ops import returns
from forethought.replay import Replay
from forethought.types import PerStep, Step, TimeStep

T = 9
lambda_returns = jax.jit(returns.lambda_returns)
n_step_returns = jax.jit(returns.n_step_returns, static_argnums=4)


def floats(*values):
    return jnp.array(values, jnp.float32)


def bools(text):
    """'..x.' says which rows are `last`."""
    return jnp.array([mark == "x" for mark in text])


def naive_n_step(reward, factor, value, last, n):
    """G[t] = sum over the steps to come of (product of factors) * reward, + (product) * value where it stops."""
    targets = np.zeros(len(reward) - 1)
    for t in range(len(reward) - 1):
        if last[t]:
            continue
        weight = 1.0
        for k in range(t + 1, len(reward)):
            targets[t] += weight * reward[k]
            weight *= factor[k]
            if k == t + n or last[k] or k == len(reward) - 1:
                targets[t] += weight * value[k]
                break
    return targets


def naive_lambda(reward, factor, value, last, lam):
    """The forward view: n-step targets weighted (1 - lam) lam^(n-1), the longest one with all that remains."""
    targets = np.zeros(len(reward) - 1)
    for t in range(len(reward) - 1):
        ends = [k for k in range(t + 1, len(reward)) if last[k]] + [len(reward) - 1]
        longest = ends[0] - t
        for n in range(1, longest + 1):
            share = lam ** (n - 1) * (1 - lam if n < longest else 1)
            targets[t] += share * naive_n_step(reward, factor, value, last, n)[t]
    return targets


@st.composite
def windows(draw):
    """Rows with rewards and values up to 4, factors that are 0 on terminations and negative after the other player."""
    column = lambda low, high: np.array(draw(st.lists(st.floats(low, high, width=32), min_size=T, max_size=T)))  # noqa: E731
    last = np.array(draw(st.lists(st.sampled_from([False, False, False, True]), min_size=T, max_size=T)))
    terminated = last & np.array(draw(st.lists(st.booleans(), min_size=T, max_size=T)))
    return column(-4, 4), np.where(terminated, 0, column(-1, 1)), column(-4, 4), last


@settings(max_examples=80, deadline=None)
@given(window=windows(), lam=st.floats(0, 1, width=32), n=st.sampled_from([1, 2, 3, T - 1, T + 5]))
def test_targets_are_those_of_the_forward_view(window, lam, n):
    arrays = [jnp.asarray(x, jnp.float32) for x in window[:3]] + [jnp.asarray(window[3])]
    # Up to nine float32 terms of size 4: an absolute error of some 1e-5.
    np.testing.assert_allclose(lambda_returns(*arrays, lam), naive_lambda(*window, lam), rtol=0, atol=3e-5)
    np.testing.assert_allclose(n_step_returns(*arrays, n), naive_n_step(*window, n), rtol=0, atol=3e-5)


def test_three_steps_are_discounted_each():
    """F03: 1 + .9 + .81 + .729 * 10 = 10; a reward counted undiscounted or a bootstrap one step late gives 11.71."""
    reward, factor, value = floats(0, 1, 1, 1), floats(0.9, 0.9, 0.9, 0.9), floats(5, 6, 7, 10)
    assert n_step_returns(reward, factor, value, bools("...."), 3)[0] == pytest.approx(10.0, abs=1e-5)
    # 2 + .5 * 3 + .25 * 8 = 5.5, whatever stands in row 0.
    reward, factor, value = floats(99, 2, 3, 50), floats(99, 0.5, 0.5, 0.5), floats(99, 20, 8, 40)
    assert n_step_returns(reward, factor, value, bools("...."), 2)[0] == pytest.approx(5.5, abs=1e-5)


@pytest.mark.parametrize("n", [0, -1])
def test_n_must_be_positive(n):
    with pytest.raises(ValueError, match="at least 1"):
        returns.n_step_returns(floats(0, 1), floats(1, 1), floats(0, 0), bools(".."), n)


@pytest.mark.parametrize("limit, gamma", [(5, 0.9), (3, 0.9), (1, 0.5)])
@pytest.mark.parametrize("lam", [0.0, 0.25, 1.0])
def test_a_time_limit_is_no_termination(limit, gamma, lam):
    """F01: one state and reward 1 for ever are worth 1 / (1 - gamma); with a termination at 5, (1 - .9^5) / .1."""
    rows = np.arange(2 * (limit + 1)) % (limit + 1)
    first, last = rows == 0, rows == limit
    reward = jnp.asarray(~first, jnp.float32)

    def evaluated(factor):
        value = np.zeros(rows.size, np.float32)
        for _ in range(400):
            target = np.asarray(lambda_returns(reward, factor, jnp.asarray(value), jnp.asarray(last), lam))
            value[:-1] = np.where(last[:-1], value[:-1], target)
            # Every row shows the one state: a truncated row has the value of the first.
            value[last] = value[0]
        return target[0]

    factor = jnp.where(first, 1.0, gamma).astype(jnp.float32)
    assert evaluated(factor) == pytest.approx(1 / (1 - gamma), abs=1e-4)
    wrong = evaluated(jnp.where(jnp.asarray(last), 0.0, factor))
    assert wrong == pytest.approx((1 - gamma**limit) / (1 - gamma), abs=1e-4)


def test_lambda_is_cut_at_a_truncation_and_not_before():
    """Rows: 0, 1, 2 (truncated), 3 (first), 4. lam .25, gamma .9; V = 8, 6, 4, 1000, 1000.

    G[1] = 2 + .9 * 4 = 5.6
    G[0] = 1 + .9 * (.75 * 6 + .25 * 5.6) = 1 + .9 * 5.9 = 6.31
    G[3] = 100 + .9 * 1000 = 1000, and a lambda that leaks would bring a quarter of it to G[1].
    """
    reward, factor = floats(0, 1, 2, 0, 100), floats(1, 0.9, 0.9, 1, 0.9)
    found = lambda_returns(reward, factor, floats(8, 6, 4, 1000, 1000), bools("..x.."), 0.25)
    np.testing.assert_allclose(found, [6.31, 5.6, 0, 1000], atol=1e-4)


@pytest.mark.parametrize("bad", [1e30, np.inf, np.nan])
@pytest.mark.parametrize("ending", [0.9, 0.0])
def test_nothing_leaks_from_the_next_episode(bad, ending):
    reward, factor = np.array([0, 1, 2, 0, 7], np.float32), np.array([1, 0.9, ending, 1, 0.9], np.float32)
    value, last = np.array([5, 6, 4, 3, 2], np.float32), bools("..x..")
    other = [np.where(np.arange(5) > 2, bad, x).astype(np.float32) for x in (reward, factor, value)]
    for target in (lambda *x: lambda_returns(*x, last, 0.25), lambda *x: n_step_returns(*x, last, 3)):
        np.testing.assert_array_equal(target(*other)[:2], target(reward, factor, value)[:2])
        gradient = jax.jacobian(lambda x: target(reward, factor, x)[:2])(jnp.asarray(value))  # noqa: B023
        np.testing.assert_array_equal(gradient[:, 3:], 0)


def test_windows_over_a_wrapped_ring_keep_episodes_apart():
    """F04: A is truncated after rewards 1, 1, B is rewarded with 100, and the ring of 6 rows has gone round."""
    reward = np.array([100, 100, 100, 100, 0, 1, 1, 0, 100, 100], np.float32)
    first = np.isin(np.arange(10), [4, 7])
    last = np.isin(np.arange(10), [3, 6])
    ones = np.ones(10, np.float32)
    value = 10.0 * np.arange(10, dtype=np.float32)
    step = TimeStep({"value": value}, reward, ones, first, last, 1.0 * ~first.astype(bool), 0 * ones)
    step = jax.tree.map(lambda x: np.asarray(x, np.float32) if x.dtype == np.float64 else x, step)
    rows = Step(step, 0 * ones, None, np.zeros(10, np.int32), np.zeros(10, np.int32))
    rows = jax.tree.map(lambda x: x[:, None], rows)
    replay = Replay(jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype), rows), 6, 1)
    for start in range(0, 10, 5):
        replay.add(jax.tree.map(lambda x: x[start : start + 5], rows))  # noqa: B023
    held = jax.tree.map(lambda x: x[0], replay.windows(np.array([0]), np.array([4]), 6))
    reward, factor = PerStep(0.9)(jax.tree.map(jnp.asarray, held.time_step))
    found = n_step_returns(reward, factor, held.time_step.obs["value"], held.time_step.last, 3)
    # From A: 1 + .9 + .81 * V(A's last row, 60) = 50.5 and 1 + .9 * 60 = 55; its last row is void.
    # From B: 100 + .9 * 100 + .81 * 90 = 262.9 with two steps left in the window, then 100 + .9 * 90 = 181.
    np.testing.assert_allclose(found, [50.5, 55, 0, 262.9, 181], rtol=1e-6)
    assert list(replay.data.time_step.obs["value"][0]) == [60, 70, 80, 90, 40, 50]  # so it had wrapped


def test_the_other_players_value_is_turned_round():
    """discount -1: G[1] = 3 - .9 * 2 = 1.2 and G[0] = 1 - .9 * (.75 * 5 + .25 * 1.2) = -2.645"""
    found = lambda_returns(floats(0, 1, 3), floats(1, -0.9, -0.9), floats(0, 5, 2), bools("..."), 0.25)
    np.testing.assert_allclose(found, [-2.645, 1.2], atol=1e-6)


def test_an_options_backup_is_that_of_its_primitive_steps():
    """F07: three steps of reward 1, V = 10: 1 + .9 + .81 + .729 * 10 = 10."""
    reward, factor = floats(1, 1, 1, np.nan), floats(0.9, 0.9, 0.9, np.nan)
    total = returns.smdp_return(reward, factor, jnp.array(3))
    np.testing.assert_allclose(total, [2.71, 0.729], rtol=1e-6)
    assert returns.smdp_target(*total, floats(10)[0]) == pytest.approx(10, abs=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("ending", [0.8, 0.0, -0.8])
def test_smdp_equals_the_k_step_backup(steps, ending):
    rng = np.random.default_rng(steps)
    reward, factor = rng.normal(size=(2, 8)).astype(np.float32)
    factor[steps - 1], value = ending, rng.normal(size=8).astype(np.float32)
    total = jax.jit(returns.smdp_return)(jnp.asarray(reward), jnp.asarray(factor), jnp.array(steps))
    # As rows: the k-th transition's consequences stand at row k, and the option ended at row k = steps.
    rows = [jnp.concatenate([jnp.full(1, np.nan), jnp.asarray(x)]) for x in (reward, factor)]
    values = jnp.concatenate([jnp.full(1, np.nan), jnp.asarray(value)])
    expected = n_step_returns(*rows, values, jnp.zeros(9, bool), steps)[0]
    assert returns.smdp_target(*total, values[steps]) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


def test_a_run_of_one_step_is_that_step():
    assert returns.smdp_return(floats(3, 5), floats(0.7, 0.6), jnp.array(1)) == (3.0, pytest.approx(0.7))


def test_options_stack():
    """An option over options has the return of all their primitive steps, in either order of folding."""
    reward, factor = floats(1, -2, 3, 4, 0.5), floats(0.9, 0.8, 0.7, 0.6, 0.5)
    inner = [returns.smdp_return(reward[a:b], factor[a:b], jnp.array(b - a)) for a, b in ((0, 2), (2, 5))]
    outer = returns.smdp_return(*(jnp.stack(x) for x in zip(*inner, strict=True)), jnp.array(2))
    np.testing.assert_allclose(outer, returns.smdp_return(reward, factor, jnp.array(5)), rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_termination_takes_nothing_from_the_value_after_it(value):
    target, gradient = jax.value_and_grad(lambda v: returns.smdp_target(floats(2)[0], floats(0)[0], v))(
        floats(value)[0]
    )
    assert (target, gradient) == (2, 0)


def test_survival_ends_at_a_zero_factor():
    np.testing.assert_allclose(returns.survival(floats(1, 0.9, 0, 0.9, 0.5)), [1, 0.9, 0, 0, 0])
    np.testing.assert_array_equal(returns.survival(floats(0, 0.9, 0.9)), 0)
    np.testing.assert_allclose(returns.survival(floats(1, 0.5, -0.5)), [1, 0.5, -0.25])
    # Row 2's weight is f0 f1 f2, so its slope at f1 = 0 is f0 f2; a quotient of products would give NaN.
    slope = jax.grad(lambda f: returns.survival(f)[2])(floats(0.5, 0, 0.8))
    np.testing.assert_allclose(slope, [0, 0.4, 0], atol=1e-7)
