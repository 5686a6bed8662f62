"""Running statistics against NumPy over everything seen, the percentile scale with its floor, and what is said of
many seeds, against values by hand and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from forethought.ops import stats
from forethought.ops.stats import ReturnScale, RunningStats
from forethought.packing import pack, unpack


def drawn(sizes, dims=3, seed=0, mean=100.0, spread=5.0):
    """Batches of N(mean, spread), with a second dimension a hundred times smaller and a constant third."""
    rng = np.random.default_rng(seed)
    scale = np.array([1, 0.01, 0])[:dims]
    return [(rng.normal(mean, spread, (n, dims)) * scale + [0, 0, 7]).astype(np.float32) for n in sizes]


def after(batches):
    stats = RunningStats.empty(3)
    for batch in batches:
        stats = stats.add(jnp.asarray(batch))
    return stats


def test_stats_are_those_of_all_that_was_added():
    batches = drawn([1, 17, 400, 2, 80])
    stats, everything = after(batches), np.concatenate(batches).astype(np.float64)
    assert stats.count == 500
    np.testing.assert_allclose(stats.mean, everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.scale()[:2], everything.std(0)[:2], rtol=1e-4)  # float32 at an offset of 20 scales
    assert stats.scale()[2] == pytest.approx(1e-3)  # a constant is not blown up
    normal = np.asarray(stats.normalize(jnp.asarray(everything, jnp.float32)))
    np.testing.assert_allclose(normal.mean(0)[:2], 0, atol=1e-4)
    np.testing.assert_allclose(normal.std(0)[:2], 1, atol=1e-4)


def test_batches_may_come_in_any_grouping():
    batches = drawn([3, 5, 8])
    for one, other in zip(
        jax.tree.leaves(after(batches)), jax.tree.leaves(after([np.concatenate(batches)])), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_empty_stats_leave_things_as_they_are():
    x = jnp.array([[1.0, -200.0, 3.0]])
    np.testing.assert_array_equal(RunningStats.empty(3).normalize(x), x)


def test_evaluation_changes_nothing_and_saving_loses_nothing():
    """F20: observations ~ N(100, 5); the same action before and after, and after 100 evaluation steps."""
    stats = after(drawn([64, 64]))
    weight = jnp.array([[0.5], [-1.0], [0.25]])

    def act(stats, obs):
        return stats.normalize(obs) @ weight

    loaded = unpack(pack(stats), RunningStats.empty(3))
    obs, before = jnp.asarray(drawn([100], seed=1)[0]), pack(stats)
    action = act(stats, obs)
    assert np.abs(action).max() < 20  # of normal size, though observations are about 100
    for _ in range(100):
        np.testing.assert_array_equal(act(loaded, obs), action)
    assert pack(stats) == pack(loaded) == before


@pytest.mark.parametrize("returns", [np.zeros(40), np.full(40, 500.0), np.full(40, -3e5), np.linspace(0, 0.5, 40)])
def test_the_return_scale_has_a_floor(returns):
    """F21: without a spread of more than 1 nothing is scaled up."""
    scale = ReturnScale.initial()
    for _ in range(3):
        scale = scale.add(jnp.asarray(returns, jnp.float32), 1.0)
    assert scale.value() == 1.0


def test_the_return_scale_is_the_percentile_range():
    returns = np.random.default_rng(0).normal(3, 20, (8, 50)).astype(np.float32)
    low, high = np.percentile(returns, [5, 95])
    scale = ReturnScale.initial().add(jnp.asarray(returns), 1.0)
    assert scale.value() == pytest.approx(high - low, rel=1e-5)
    # From 0 at rate .25, twice: 1 - .75^2 = .4375 of the way.
    scale = ReturnScale.initial().add(jnp.asarray(returns), 0.25).add(jnp.asarray(returns), 0.25)
    np.testing.assert_allclose([scale.low, scale.high], [0.4375 * low, 0.4375 * high], rtol=1e-5)


def test_scaled_advantages_forget_the_unit_of_reward():
    """F21: returns times 1000 give the same advantages, once the average has arrived."""
    returns = jnp.asarray(np.random.default_rng(1).normal(2, 30, 200), jnp.float32)
    advantages = []
    for unit in (1.0, 1000.0):
        scale = ReturnScale.initial()
        for _ in range(60):
            scale = scale.add(unit * returns, 0.2)  # 0.8^60 = 1.5e-6 of the way are left
        advantages.append((unit * returns - unit * 2) / scale.value())
    np.testing.assert_allclose(*advantages, rtol=1e-4)
    assert np.isfinite(advantages[0]).all()


def test_iqm_is_the_mean_of_the_middle_half():
    assert stats.iqm(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == pytest.approx((2 + 3 + 4 + 5) / 4)


def test_its_interval_is_the_percentile_bootstraps():
    x = np.random.default_rng(0).standard_normal(40)
    found = stats.iqm_interval(x, rng=np.random.default_rng(1))
    expected = scipy.stats.bootstrap(
        (x,), stats.iqm, vectorized=False, method="percentile", n_resamples=2000, rng=np.random.default_rng(2)
    ).confidence_interval
    assert found == pytest.approx((expected.low, expected.high), abs=0.05)  # two draws of 2,000
    assert stats.iqm_interval(x[:4], rng=np.random.default_rng(1)) is None


def test_the_optimality_gap_counts_nothing_above_one():
    assert stats.optimality_gap(np.array([0.25, 1.5, 0.7])) == pytest.approx((0.75 + 0 + 0.3) / 3)


def test_a_profile_is_the_share_above():
    x = np.array([[0.2, 3], [0.9, 3], [1.4, 0.9]])
    shares = stats.profile(x, np.array([0, 0.5, 0.9, 2.0]))
    np.testing.assert_allclose(shares, [[1, 1], [2 / 3, 1], [1 / 3, 2 / 3], [0, 2 / 3]])  # 0.9 is not above 0.9


def test_improvement_counts_ties_half_and_tasks_alike():
    # On one task 3 beats 2 and 1, and 1 ties with 1: 2.5 of 6 pairs; on the other 4 beats 0 and ties with 4: 1.5 of 2.
    x, y = [np.array([3.0, 1]), np.array([4.0])], [np.array([2.0, 1, 5]), np.array([0.0, 4])]
    assert stats.improvement(x, y) == pytest.approx((2.5 / 6 + 1.5 / 2) / 2)
    assert stats.improvement(y, x) == pytest.approx((3.5 / 6 + 0.5 / 2) / 2)


def test_improvement_is_mann_and_whitneys():
    x, y = np.random.default_rng(0).integers(0, 9, (2, 13, 4)).astype(float)  # with ties
    u = [scipy.stats.mannwhitneyu(a, b).statistic for a, b in zip(x.T, y[:7].T, strict=True)]
    np.testing.assert_allclose(stats.improvement([x], [y[:7]]), np.array(u) / (13 * 7))


def test_seeds_are_drawn_within_their_task():
    drawn = stats.resample([np.arange(6.0), np.arange(10.0, 15)], rng=np.random.default_rng(0))
    assert drawn is not None and [x.shape for x in drawn] == [(6, 2000), (5, 2000)]
    assert set(drawn[0].ravel()) == set(range(6)) and set(drawn[1].ravel()) == set(range(10, 15))
    assert stats.resample([np.arange(6.0), np.arange(4.0)], rng=np.random.default_rng(0)) is None
    # Tasks of one value each leave nothing to chance: draws from all runs together would.
    tasks = stats.resample([np.full(5, 0.2), np.full(5, 0.8)], rng=np.random.default_rng(0))
    assert stats.interval(lambda x: np.concatenate(x).mean(0), tasks) == pytest.approx((0.5, 0.5))
    assert stats.interval(lambda x, y: x[0][0], tasks, None) is None


def test_the_interval_over_tasks_is_scipys_of_several_samples():
    rng = np.random.default_rng(3)
    tasks = [rng.normal(0, 1, 9), rng.normal(2, 0.3, 14)]
    found = stats.interval(lambda x: stats.iqm(np.concatenate(x)), stats.resample(tasks, rng=rng))
    expected = scipy.stats.bootstrap(
        tasks, lambda *x: stats.iqm(np.concatenate(x)), vectorized=False, method="percentile", n_resamples=2000, rng=rng
    ).confidence_interval
    assert found == pytest.approx((expected.low, expected.high), abs=0.05)  # two draws of 2,000


def test_the_interval_of_an_improvement_is_scipys_of_two_samples():
    rng = np.random.default_rng(4)
    x, y = rng.normal(0.4, 1, 12), rng.normal(0, 1, 17)
    found = stats.interval(stats.improvement, stats.resample([x], rng=rng), stats.resample([y], rng=rng))
    expected = scipy.stats.bootstrap(
        (x, y), lambda a, b: scipy.stats.mannwhitneyu(a, b).statistic / (len(a) * len(b)),
        vectorized=False, method="percentile", n_resamples=2000, rng=rng,
    ).confidence_interval  # fmt: skip
    assert found == pytest.approx((expected.low, expected.high), abs=0.02)  # two draws of 2,000


def test_mcnemars_exact_test():
    a = np.array([True] * 7 + [False] * 5)
    b = np.array([False] * 6 + [True] + [True] + [False] * 4)
    # Six and one of seven discordant pairs: 2 (1 + 7) / 2^7
    assert stats.discordant(a, b) == (6, 1, pytest.approx(16 / 128))
    assert stats.discordant(a, a) == (0, 0, 1.0)
