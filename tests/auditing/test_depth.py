import json

import jax
import numpy as np
import pytest
import scipy.stats
from by_hand import rewards, trial

from forethought.auditing.depth import FEW, LEVEL, as_lists, by_depth, error_by_depth, split, termination
from forethought.auditing.reality import PureReality
from forethought.auditing.subject import ModelSubject
from forethought.auditing.trial import Quantity, attempt, quantities
from forethought.collect import ZeroPolicy
from forethought.envs.trial import Balance
from forethought.models.oracle import Oracle
from forethought.types import Discrete

ALL = np.array([0])
NUM = 20_000


def test_excess_noise_and_spread_by_hand():
    found = split(rewards(trial([[[1.0], [2.0], [6.0]]], [[[2.0], [5.0]]], now=[4.0]), deviation=2.0), ALL)
    # Model: mean 3, variance ((-2)^2 + (-1)^2 + 3^2) / 2 = 7. Real: mean 3.5, variance (1.5^2 + 1.5^2) / 1 = 4.5.
    # All over the scale's square, 4.
    hand = {
        "excess": ((3 - 3.5) ** 2 - 7 / 3 - 4.5 / 2) / 4,
        "noise": 4.5 / 4,
        "spread": 7 / 4,
        "copy last": ((4 - 2) ** 2 + (4 - 5) ** 2) / 2 / 4,
        "mean": (2**2 + 5**2) / 2 / 4,
    }
    assert {name: x.tolist() for name, x in found.items()} == {name: [[pytest.approx(x)]] for name, x in hand.items()}


def test_elements_are_summed_before_they_are_divided():
    one_hot = lambda i: np.eye(3)[np.array(i)][None, :, None]  # noqa: E731
    scale = np.sqrt([0.25, 0.1875, 0.25])  # p (1 - p) of shares 1/2, 1/4, 1/2
    model, real = one_hot([0, 0]), one_hot([2])
    found = split(Quantity("n", Discrete(3), model, real, real, scale), np.arange(3))
    assert found["excess"] == pytest.approx(2 / (0.25 + 0.1875 + 0.25))  # two elements are off by 1


@pytest.mark.parametrize("times, futures", [(3, 2), (1, 4), (5, 1)])
def test_the_excess_is_the_squared_bias_whatever_the_noise(times, futures):
    rng = np.random.default_rng(times)
    model = 0.7 + 1.5 * rng.normal(size=(NUM, times, 1))
    real = 0.3 * rng.normal(size=(NUM, futures, 1))
    excess = split(rewards(trial(model, real), deviation=0.5), ALL)["excess"]
    # What a single sample cannot show of its own variance stays in: 1.5^2 where K is 1, 0.3^2 where R is 1.
    left = 1.5**2 * (times == 1) + 0.3**2 * (futures == 1)
    # Within four standard errors of 20,000 starts.
    assert abs(excess.mean() - (0.7**2 + left) / 0.25) < 4 * excess.std() / NUM**0.5


def test_error_is_what_is_left_of_the_real_value():
    rng = np.random.default_rng(7)
    hand = trial(np.full((NUM, 1, 1), 0.4), 0.3 * rng.normal(size=(NUM, 8, 1)), episode=np.arange(NUM) % 50)
    curves = error_by_depth(hand, [rewards(hand)])["parts"]["reward"]
    # 0.4^2 + 0.3^2; 160,000 futures make four standard errors smaller than 0.004.
    assert curves["error"]["mean"] == [pytest.approx(0.4**2 + 0.3**2, abs=0.004)]
    assert curves["noise"]["mean"] == [pytest.approx(0.3**2, abs=0.004)] and curves["of"] == "reward"


def test_bounds_are_students_over_episodes_not_over_starts():
    rng = np.random.default_rng(1)
    per_episode = [3, 1, 4, 1, 5, 2, 6]
    starts = np.repeat(np.arange(7), per_episode)
    x = rng.normal(size=(len(starts), 2)) + starts[:, None]
    valid = np.ones(x.shape, bool)
    valid[:4, 1] = False  # of the first two episodes nothing is known at the second step
    table = by_depth(x, trial(x[:, None], x[:, None], episode=starts, valid=valid))
    for h, episodes in ((0, range(7)), (1, range(2, 7))):
        means = [x[starts == e, h].mean() for e in episodes]
        sem = scipy.stats.sem(means)
        low, high = scipy.stats.t.interval(1 - 2 * LEVEL, len(means) - 1, np.mean(means), sem)
        assert table["mean"][h] == pytest.approx(np.mean(means)) and table["sem"][h] == pytest.approx(sem)
        few = len(means) < FEW
        assert (table["low"][h], table["high"][h]) == (
            (None, None) if few else (pytest.approx(low), pytest.approx(high))
        )


def test_what_was_not_reached_or_not_finite_is_no_number():
    x = np.array([[1.0, np.nan, 3.0], [2.0, 5.0, np.inf]])
    valid = [[True, True, False], [True, True, False]]
    table = by_depth(x, trial(x[:, None], x[:, None], valid=valid))
    # The mean of NaN and 5 is not 5: leaving the first out would make the model look better than it is.
    assert table["mean"] == [1.5, None, None] and table["high"] == [None] * 3
    json.dumps(table, allow_nan=False)


def test_errors_are_over_the_variance_at_their_depth_where_it_is_larger():
    # Real rewards 1 and 3 at the first step, mean square 5; 0.5 at the second, less than the variance of all rows, 1.
    real = [[[1.0, 0.5]], [[3.0, 0.5]]]
    model = [[[1.5, 1.0]], [[3.5, 1.0]]]
    hand = trial(model, real)
    curves = error_by_depth(hand, [rewards(hand)])["parts"]["reward"]
    assert curves["excess"]["mean"] == pytest.approx([0.25 / 5, 0.25])
    assert curves["mean"]["mean"] == pytest.approx([1, 0.25])


def test_an_exact_model_without_noise_has_no_error_at_any_depth_and_no_wrong_end():
    env = Balance(noise=0.0)
    subject, reality = ModelSubject(Oracle(env)), PureReality(env)
    played = reality.play(ZeroPolicy(env.spec.action), 6, seed=3)
    assert (played.length < 101).all()  # the pole falls
    found = attempt(subject, subject.filter(played.rows, seed=0), reality, played, 8, count=24, samples=2, seed=1)
    rows = jax.tree.map(lambda x: x[0, 1 : played.length[0]], played.rows.time_step)
    for curves in error_by_depth(found, quantities(env.spec, found, rows))["parts"].values():
        assert curves["excess"]["mean"] == curves["noise"]["mean"] == curves["error"]["mean"] == [0.0] * 8
        assert min(curves["copy last"]["mean"]) > 0
    ends = termination(found)
    assert ends is not None and ends["missed"]["mean"] == ends["excess"]["mean"] == [0.0] * 8
    assert ends["confusion"]["both"] > 0 == ends["confusion"]["missed"] == ends["confusion"]["false"]


def test_lists_hold_no_number_that_json_has_not():
    tree = {"a": np.array([1.5, np.inf, np.nan], np.float32), "b": [np.array([[1, 2]]), np.array(True)]}
    assert as_lists(tree) == {"a": [1.5, None, None], "b": [[[1, 2]], True]}
    assert type(as_lists(np.array([np.nan, 2], np.float32))[1]) is float
