import numpy as np
import pytest
import scipy.stats
from by_hand import SPEC, rewards, trial

from forethought.auditing.calibration import coverage, disagreement, dispersion
from forethought.auditing.subject import Prediction
from forethought.types import Discrete


def intervals(model, real, **given):
    hand = trial(model, real, **given)
    return coverage(hand, [rewards(hand, mean=0.25)])


def test_dispersion_by_hand():
    hand = trial([[[1.0], [2.0], [6.0]]] * 6, [[[2.0], [5.0]]] * 6)
    table = dispersion(hand, [rewards(hand, deviation=2.0)])["reward"]
    # Over 4: spread 7, noise 4.5, error (3 - 3.5)^2 - 7 / 3 - 4.5 / 2 + 4.5 (see test_depth.py).
    spread, noise, error = 7 / 4, 4.5 / 4, (0.25 - 7 / 3 + 4.5 / 2) / 4
    hand = {"spread": spread, "noise": noise, "error": error, "short": error - 4 * spread, "over": spread - 4 * error}
    assert {name: curve["mean"] for name, curve in table.items()} == {
        name: [pytest.approx(x)] for name, x in (hand | {"less": noise - 2 * spread}).items()
    }


@pytest.mark.parametrize(
    "spread, bias, above",
    [(0.4, 0.0, {"short", "less"}), (1.0, 0.0, set()), (2.5, 0.0, {"over"}), (1.0, 2.0, {"short"})],
)
def test_a_model_is_short_of_spread_below_half_of_its_error_and_over_it_above_twice(spread, bias, above):
    rng = np.random.default_rng(1)
    # error = 1 + bias^2 and noise = 1. 0.4 < 1/2 and 0.4^2 < 1/2; 2.5 > 2; with a bias of 2, 1 < sqrt(5) / 2.
    model, real = rng.normal(size=(400, 30, 1)) * spread + bias, rng.normal(size=(400, 30, 1))
    hand = trial(model, real)
    table = dispersion(hand, [rewards(hand)])["reward"]
    assert {name for name in ("short", "over", "less") if table[name]["low"][0] > 0} == above


def test_intervals_between_samples_hold_what_is_drawn_alike_as_often_as_they_say():
    rng = np.random.default_rng(2)
    draws = rng.normal(size=(3000, 20, 2))
    found = intervals(draws[:, :19], draws[:, 19:])
    # Cuts at round(0.05 * 20), round(0.15 * 20), round(0.25 * 20): between the 1st and the 19th of 19, and so on.
    assert found["nominal"] == [18 / 20, 14 / 20, 10 / 20] and found["samples"] == 19
    for nominal, held in zip(found["nominal"], found["covered"]["reward"], strict=True):
        # A share of 3000 independent draws, within four standard errors.
        assert held == pytest.approx([nominal] * 2, abs=4 * (nominal * (1 - nominal) / 3000) ** 0.5)


def test_intervals_of_a_model_that_is_too_certain_hold_less():
    rng = np.random.default_rng(3)
    draws = rng.normal(size=(2000, 100, 1))
    found = intervals(0.5 * draws[:, :99], draws[:, 99:])
    # Of 99 samples, the 5th and the 95th are at 0.5 z(0.05) and 0.5 z(0.95) on average: 2 Phi(0.5 * 1.645) - 1.
    expected = 2 * scipy.stats.norm.cdf(0.5 * scipy.stats.norm.ppf(0.95)) - 1
    # Four standard errors of 2000 draws, 0.044, and 0.01 for the quantiles' own curvature.
    assert found["covered"]["reward"][0][0] == pytest.approx(expected, abs=0.055)
    assert found["error"]["reward"] > 0.2


@pytest.mark.parametrize("chances", [[0.5, 0.3, 0.2], [0.02, 0.0, 0.98], [1.0, 0.0, 0.0]])
def test_ties_are_held_as_often_as_if_their_order_had_been_drawn(chances):
    rng = np.random.default_rng(4)
    draws = rng.choice([-1.0, 0.25, 3.0], size=(3000, 10, 1), p=chances)
    found = intervals(draws[:, :9], draws[:, 9:])
    assert found["nominal"] == [8 / 10, 6 / 10]  # cuts at 0.5, 1.5 and 2.5, rounded to even and at least 1: 1, 2, 2
    for nominal, held in zip(found["nominal"], found["covered"]["reward"], strict=True):
        assert held == pytest.approx([nominal], abs=4 * (nominal * (1 - nominal) / 3000) ** 0.5)


def test_one_tie_by_hand():
    # Five samples, intervals 1st .. 5th and 2nd .. 4th. The value is one of three alike, two are below it: taken in any
    # order it has 2, 3, 4 or 5 samples below itself; the intervals ask for 1 .. 4 and for 2 .. 3.
    found = intervals([[[-2.0], [-1.0], [3.0], [3.0], [3.0]]], [[[3.0]]])
    assert found["nominal"] == [4 / 6, 2 / 6] and found["covered"]["reward"] == [[3 / 4], [2 / 4]]
    # Above all samples: 5 are below.
    assert intervals([[[-2.0], [-1.0], [3.0], [3.0], [2.0]]], [[[3.5]]])["covered"]["reward"] == [[0.0], [0.0]]


def test_samples_that_have_ended_lie_at_the_mean():
    # Two of five end at the first step and lie at the mean, 0.25, at the second: they and the 3 are below 3.5, and
    # three is between 1 and 4 and between 2 and 3. Nothing is below -1.
    discount = [[[g, 1.0] for g in (0.0, 0.0, 1.0, 1.0, 1.0)]]
    samples = [[[9.0, x] for x in (7.0, 7.0, 3.0, 4.0, 5.0)]]
    found = intervals(samples, [[[9.0, 3.5]]], discount=discount)
    assert [held[1] for held in found["covered"]["reward"]] == [1.0, 1.0]
    found = intervals(samples, [[[9.0, -1.0]]], discount=discount)
    assert [held[1] for held in found["covered"]["reward"]] == [0.0, 0.0]


@pytest.mark.parametrize("drawn", [True, False], ids=["ends are drawn", "ends are probabilities"])
def test_an_exact_model_is_covered_where_episodes_end(drawn):
    rng = np.random.default_rng(5)
    # Of every future a share 0.3 ends at each step; values lie far from the mean, 0.25, which counts after an end.
    num, k, h = 2500, 20, 3
    values = 4 + rng.normal(size=(num, k, h))
    goes = (rng.random((num, k, h)) < 0.7).astype(float)
    real = np.cumprod(goes[:, 19:], -1)
    discount = goes[:, :19] if drawn else np.full((num, 19, h), 0.7)
    found = intervals(values[:, :19], values[:, 19:], discount=discount, survived=real)
    for nominal, held in zip(found["nominal"], found["covered"]["reward"], strict=True):
        assert held == pytest.approx([nominal] * h, abs=4 * (nominal * (1 - nominal) / num) ** 0.5)


def test_intervals_need_samples_order_and_steps():
    rng = np.random.default_rng(6)
    draws = rng.normal(size=(4, 5, 2))
    assert intervals(draws[:, :3], draws[:, 4:]) is None
    hand = trial(draws[:, :4], draws[:, 4:], valid=[[True, False]] * 4)
    found = coverage(hand, [rewards(hand)])
    assert found is not None and [held[1] for held in found["covered"]["reward"]] == [None]
    assert coverage(hand, [rewards(hand)._replace(space=Discrete(1))]) is None
    assert coverage(hand, []) is None  # nothing but ends is predicted


def members(*rewards_):
    return [Prediction(None, np.asarray(x, float), None) for x in rewards_]


def test_disagreement_against_scipy():
    rng = np.random.default_rng(7)
    spread, wrong = rng.gamma(2.0, size=(40, 2)), rng.normal(size=(40, 2))
    middle = rng.normal(size=(40, 2)) * 3
    told = members(middle - spread, middle + 2 * spread, middle - spread)
    real = middle + spread * wrong
    valid = np.ones((40, 2), bool)
    valid[25:, 1] = False
    found = disagreement(SPEC, trial(np.zeros((40, 1, 2)), real[:, None], valid=valid), told)
    assert (found["members"], found["copies"]) == (3, 1)
    for h, n in ((0, 40), (1, 25)):
        # The members' mean is the middle; (wrong spread)^2 is its squared error, 3 spread^2 their variance.
        x, y = spread[:n, h], np.abs(wrong * spread)[:n, h]
        assert found["rank_correlation"][h] == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
        upper = y > np.quantile(y, 0.8)
        pairs = [a > b for a in x[upper] for b in x[~upper]]
        assert found["auroc"][h] == pytest.approx(np.mean(pairs))


def test_members_that_agree_say_nothing_and_copies_are_counted():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(9, 1))
    real = trial(np.zeros((9, 1, 1)), x[:, None] + 1)
    copies = disagreement(SPEC, real, members(x, x, x))
    assert copies["copies"] == 2 and copies["rank_correlation"] == copies["auroc"] == [None]
    assert disagreement(SPEC, real, members(x, x + 0.01, x, x + 1e-12))["copies"] == 2


def test_copies_that_break_alike_are_copies():
    x = np.where(np.arange(9) < 3, np.nan, 1.5)[:, None]
    assert disagreement(SPEC, trial(np.zeros((9, 1, 1)), np.ones((9, 1, 1))), members(x, x, x + 1))["copies"] == 1
