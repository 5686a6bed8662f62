import numpy as np
import pytest
from by_hand import SLOPE, SPEC, episode, line

from forethought.auditing.drift import EPISODES, SHUFFLES, _change, drift


def recorded(count, *, changes=None, steps=12, noise=0.05, short=()):
    """Episodes of actions +-0.7; from number `changes` on the first element answers half as much to them.

    The episodes numbered in `short` have one step."""
    rng, episodes = np.random.default_rng(count), []
    for number in range(count):
        slope = SLOPE * ([0.5, 1.0] if changes is not None and number >= changes else [1.0, 1.0])
        actions = rng.choice([-0.7, 0.7], 1 if number in short else steps)
        episodes.append(episode(actions, slope=slope, noise=noise, seed=number))
    return episodes


@pytest.mark.parametrize("changes, short", [(12, ()), (5, (1, 9)), (14, (3, 4, 17))])
def test_a_change_of_the_environment_is_found_at_its_episode(changes, short):
    found = drift(line(), SPEC, recorded(20, changes=changes, short=short), seed=0)
    assert found is not None and found["change"] == changes
    assert found["episode"] == [number for number in range(20) if number not in short]
    # No shuffle of 2000 may do as well by chance: the cut of 5 of 18 is one of 8568.
    assert found["p"] <= 4 / (SHUFFLES + 1) and found["after"] > 4 * found["before"]


def test_errors_are_the_squared_bias_per_episode_over_the_variance():
    episodes = recorded(10, changes=6, noise=0.0)
    found = drift(line(), SPEC, episodes, seed=0)
    assert found is not None and found["error"][:6] == pytest.approx([0] * 6, abs=1e-9)
    # One step ahead of rows 0 .. 11, four of them evenly spaced: 0, 4, 7 and 11 (3.67 and 7.33 rounded).
    rows = [0, 4, 7, 11]
    x = np.concatenate([e.time_step.obs["x"][1:] for e in episodes]).astype(np.float64)
    reward = np.concatenate([e.time_step.reward[1:] for e in episodes]).astype(np.float64)
    for number in range(6, 10):
        # x[0] is off by a - a / 2, in a key of two elements whose variances are summed, and so is the reward, x[0].
        off = np.mean((0.5 * episodes[number].action[rows, 0]) ** 2)
        assert found["error"][number] == pytest.approx(off / x.var(0).sum() + off / reward.var(), rel=1e-4)
    assert found["before"] == np.mean(found["error"][:6]) and found["after"] == np.mean(found["error"][6:])


def test_stationary_data_have_no_small_p():
    # p is uniform: of ten, the smallest is below 0.002 with probability 1 - 0.998^10 = 0.02.
    for model in (line(), line(bias=0.3), line(noise=0.2)):
        p = [drift(model, SPEC, recorded(16 + n), seed=n)["p"] for n in range(3)]
        assert min(p) > 0.002
    exact = drift(line(), SPEC, recorded(9, noise=0.0), seed=0)
    assert exact is not None and exact["p"] > 0.05


def test_too_few_episodes_and_more_than_are_looked_at():
    assert drift(line(), SPEC, recorded(7), seed=0) is None
    assert drift(line(), SPEC, recorded(10, short=(0, 4, 5)), seed=0) is None
    found = drift(line(), SPEC, recorded(79, steps=3, changes=50), seed=0)
    # 40 of 79 evenly spaced: every second one; the first after the change is number 50.
    assert found is not None and found["episode"] == list(range(0, 79, 2)) and len(found["error"]) == EPISODES
    assert found["change"] == 50


def test_predictions_that_are_not_finite_are_large_errors():
    found = drift(line(bias=np.nan), SPEC, recorded(9), seed=0)
    assert found is not None and min(found["error"]) > 1e3 and np.isfinite(found["error"]).all() and found["p"] == 1


def test_the_change_point_by_hand():
    # Of six values the cuts may fall after 2, 3 or 4: differences 3.5 + 3.5, 4 + 5 / 3, 3 - 0.25, times
    # sqrt(2 * 4 / 6), sqrt(3 * 3 / 6), sqrt(4 * 2 / 6). After 1 it would be 3.2 + 9, times sqrt(1 * 5 / 6).
    cut, statistic = _change(np.array([-9.0, 2.0, 2.0, 6.0, 4.0, 2.0]))
    assert (cut, statistic) == (2, pytest.approx(7 * (8 / 6) ** 0.5))
    assert _change(np.array([1.0, 2.0, 2.0, 6.0, 4.0, 2.0])) == (3, pytest.approx((4 - 5 / 3) * 1.5**0.5))
