import numpy as np
import pytest
import scipy.stats
from by_hand import trial

from forethought.auditing.depth import termination


def ends(real, model, **given):
    """Of rewards that do not matter: real survival [N, R, H], the model's discounts [N, K, H]."""
    real, model = np.asarray(real, float), np.asarray(model, float)
    return termination(trial(np.zeros(model.shape), np.zeros(real.shape), discount=model, survived=real, **given))


def test_termination_by_hand():
    # One of two futures ends at the second step. The model expects 0.9 and 0.9 * 0.5 to be left.
    found = ends([[[1, 0], [1, 1]]], [[[0.9, 0.5]]])
    assert found["real"]["mean"] == [0, 0.5] and found["model"]["mean"] == pytest.approx([0.1, 0.55])
    assert found["missed"]["mean"] == pytest.approx([-0.1, -0.05])  # more ends than there are
    # Less a quarter of the real ones: -0.1 - 0, -0.05 - 0.25 * 0.5.
    assert found["many_missed"]["mean"] == pytest.approx([-0.1, -0.175])
    # (0.9 - 1)^2; (0.45 - 0.5)^2 - 0.5 / 2; over 0.25 * 0.75, the variance of the quarter that had ended.
    assert found["excess"]["mean"] == pytest.approx([0.01 / 0.1875, (0.0025 - 0.25) / 0.1875])
    table = {"both": 0.5 * 0.55, "missed": 0.5 * 0.45, "false": 0.5 * 0.55, "neither": 0.5 * 0.45}
    assert found["confusion"] == pytest.approx(table)
    assert termination(trial([[[0.0]]], [[[0.0]]])) is None  # no discount is predicted


def test_a_start_is_counted_at_its_last_recorded_step():
    found = ends([[[1, 0]], [[0, 0]]], [[[1.0, 0.0]], [[0.0, 1.0]]], valid=[[True, False], [True, False]])
    # At the first step of both: nothing ends and none is expected; what ends is expected.
    assert found["confusion"] == {"both": 0.5, "missed": 0.0, "false": 0.0, "neither": 0.5}


def test_a_time_limit_that_is_taken_for_an_end_shows_there_and_not_elsewhere():
    limit = np.array([[False, False, True]] * 14)
    model = np.array([[[1.0, 0.95, 0.2]]] * 14)
    found = ends(np.ones((14, 2, 3)), model, limit=limit, episode=np.arange(14) // 2)
    # 0.8 at the limit, and 0 and 0.05 at the two steps before it. All alike: the lower bound is the mean itself.
    assert found["at_limit"] == pytest.approx(0.8) == found["at_limit_low"]
    assert found["elsewhere"] == pytest.approx(0.025)
    # What ends there in reality is not held against the model: of two futures, one.
    half = ends(np.tile([[1, 1, 1], [1, 1, 0]], (14, 1, 1)), model, limit=limit)
    assert half["at_limit"] == pytest.approx(0.8 - 0.5)
    none = ends(np.ones((2, 1, 3)), model[:2])
    assert none["at_limit"] is None and none["at_limit_low"] is None


def test_the_bound_at_time_limits_is_over_episodes():
    stops = np.array([0.1, 0.3, 0.2, 0.6, 0.4, 0.5, 0.9])
    model = np.repeat(1 - stops, 3)[:, None, None]
    found = ends(np.ones((21, 1, 1)), model, limit=np.ones((21, 1)), episode=np.repeat(np.arange(7), 3))
    low, _ = scipy.stats.t.interval(0.98, 6, stops.mean(), scipy.stats.sem(stops))  # one-sided at 1 in 100
    assert found["at_limit"] == pytest.approx(stops.mean()) and found["at_limit_low"] == pytest.approx(low)
    limits = [ends(np.ones((n, 1, 1)), model[:n], limit=np.ones((n, 1)))["at_limit_low"] for n in (2, 3)]
    assert limits[0] is None and limits[1] is not None


def test_samples_that_ended_before_a_time_limit_do_not_end_again_there():
    # Three of four samples end at the first step and say 0 for ever, as a state out of bounds does; so do the futures.
    model, real = np.ones((1, 4, 2)), np.ones((1, 4, 2))
    model[0, 1:], real[0, :3] = 0, 0
    found = ends(real, model, limit=[[False, True]])
    assert found["at_limit"] == 0 and found["missed"]["mean"] == [0, 0]
