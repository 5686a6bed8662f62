import numpy as np
import pytest

from forethought.auditing.support import FEW, Support, by_depth, flat
from forethought.types import Box, Discrete, MultiDiscrete, Spec, TimeStep

SPEC = Spec("plane", {"x": Box((2,))}, Discrete(2))


def rows(x, **more):
    n = len(x)
    zero, no = np.zeros(n, np.float32), np.zeros(n, bool)
    return TimeStep({"x": np.asarray(x, np.float32), **more}, zero, zero + 1, no, no, zero, zero)


def grid(offset=(0.0, 0.0)):
    """The hundred points (i, 3 j), i and j in 0 .. 9: their variances are 99 / 12 and 9 * 99 / 12."""
    i, j = np.meshgrid(np.arange(10), np.arange(10))
    return np.stack([i.ravel(), 3.0 * j.ravel()], -1) + offset


UNIT = (99 / 12) ** 0.5


def near(*episodes, spec=SPEC):
    return Support(spec, list(episodes), np.random.default_rng(0))


def test_distances_are_in_units_of_the_farthest_real_rows_by_hand():
    # Every row of the second episode lies (0.25, 0) from one of the first: 0.25 / UNIT, over sqrt(2) elements.
    found = near(rows(grid()), rows(grid((0.25, 0.0))))
    assert found.radius == pytest.approx(0.25 / UNIT / 2**0.5, rel=1e-5)
    # 0.1, 0.5 and the diagonal of (2, 3 * 2) beyond the corner, where the second element counts a third.
    asked = np.array([[4.1, 3.0], [4.5, 3.0], [11.0, 33.0]])
    assert found.distance({"x": asked}) == pytest.approx([0.1 / 0.25, 0.5 / 0.25, 8**0.5 / 0.25], rel=1e-5)


def test_half_of_the_episodes_are_compared_with_and_the_other_half_says_how_far():
    found = near(rows(grid()), rows(grid((0.5, 0.0))), rows(grid((0.4, 0.0))), rows(grid()))
    # The third lies 0.1 from the second, the fourth in the first: 0.1 at the quantile 0.99.
    assert found.radius == pytest.approx(0.1 / (99 / 12 + 0.25**2) ** 0.5 / 2**0.5, rel=1e-5)


def test_distances_keep_the_batch_and_are_infinite_for_what_is_not_finite():
    found = near(rows(grid()), rows(grid((0.25, 0.0))))
    x = np.tile(np.array([4.25, 3.0]), (3, 5, 1))
    x[1, 2, 0], x[2, 4, 1] = np.nan, -np.inf
    distance = found.distance({"x": x})
    assert distance.shape == (3, 5) and np.isinf(distance[[1, 2], [2, 4]]).all()
    finite = np.isfinite(x).all(-1)
    assert distance[finite] == pytest.approx(np.ones(13), rel=1e-5)


def test_keys_stand_side_by_side_discrete_ones_one_hot_and_scalars_too():
    spec = Spec("mixed", {"n": Discrete(3), "x": Box(()), "pair": MultiDiscrete((2, 2))}, Discrete(2))
    obs = {"x": np.array([0.5, -4.0]), "n": np.array([2, 0]), "pair": np.array([[0, 1], [1, 1]])}
    np.testing.assert_array_equal(flat(spec, obs), [[0, 0, 1, 0.5, 1, 0, 0, 1], [1, 0, 0, -4, 0, 1, 0, 1]])


def test_a_cell_that_was_never_seen_is_out_of_support():
    spec = Spec("cells", {"n": Discrete(5)}, Discrete(2))
    n = np.array([0, 1, 2, 3, 0, 1])
    zero, no = np.zeros(6, np.float32), np.zeros(6, bool)
    step = TimeStep({"n": n}, zero, zero + 1, no, no, zero, zero)
    distance = near(step, step, spec=spec).distance({"n": np.array([3, 4])})
    assert distance[0] == 0 and distance[1] > 1


def test_shares_and_medians_by_depth_of_what_is_likelier_reached_than_not():
    found = near(rows(grid()), rows(grid((0.25, 0.0))))
    away = np.array([[0.1, 0.1], [0.2, 0.1], [0.3, 0.1], [0.4, 0.1], [0.35, 0.1], [0.45, 0.1]])
    x = np.stack([4 + away, np.full(away.shape, 3.0)], -1)
    going = np.ones(away.shape)
    going[5, 0], going[:2, 1] = 0.5, 0.25
    table = by_depth(found, {"x": x}, going)
    # Five are left at the first step, over 0.25: 0.4, 0.8, 1.2, 1.6, 1.4; four at the second, too few.
    assert FEW == 5 and table["outside"] == [3 / 5, None] and table["median"] == [pytest.approx(1.2, rel=1e-4), None]
    assert table["radius"] == found.radius


def test_one_episode_says_nothing_of_how_far_apart_episodes_are():
    with pytest.raises(ValueError, match="plane: how far apart real rows are takes two episodes"):
        near(rows(grid()))
