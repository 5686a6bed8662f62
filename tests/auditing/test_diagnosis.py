import jax
import numpy as np
import pytest
import scipy.stats
from by_hand import SPEC, episode, line, rewards, trial

from forethought.auditing.diagnosis import AHEAD, SURE, broken, first_steps, hypotheses, region
from forethought.auditing.reality import LoggedReality, PureReality, padded
from forethought.auditing.subject import HostModel, ModelSubject, Prediction
from forethought.auditing.trial import attempt
from forethought.collect import RandomPolicy
from forethought.envs.trial import Controller, Grid, Hover
from forethought.models.oracle import Oracle
from forethought.models.planted import planted
from forethought.types import Box, Spec


def asked(env, model, horizon=AHEAD, samples=8):
    """Two policies' trials and everything that the questions need."""
    reality, subject, trials = PureReality(env), ModelSubject(model), {}
    for name, policy in (("random", RandomPolicy(env.spec.action)), ("controller", Controller(env.spec.name))):
        episodes = reality.play(policy, 8, seed=0)
        latents = subject.filter(episodes.rows, seed=0)
        found = attempt(subject, latents, reality, episodes, horizon, count=48, samples=samples, seed=1)
        trials[name] = episodes, found
    rows = jax.tree.map(lambda x: x[:, 1:].reshape(-1, *x.shape[2:]), trials["random"][0].rows.time_step)
    return subject, env.spec, trials, rows


@pytest.mark.parametrize(
    "fault, kind, where",
    [
        ("delayed_action", "delayed", "action"),
        ("action_sign", "sign", "action[0]"),
        ("swapped_keys", "keys", "position and velocity"),
        (None, None, None),
    ],
)
def test_a_planted_fault_of_hover_is_named_and_an_exact_model_has_none(fault, kind, where):
    env = Hover()
    found = hypotheses(*asked(env, planted(env, fault, 1.0) if fault else Oracle(env)), seed=0)
    # Delayed; two dimensions of the action; the two keys exchanged in what it sees, what it says, and in both.
    assert sorted(h["kind"] for h in found) == ["delayed", "keys", "keys", "keys", "sign", "sign"]
    sure = [h for h in found if h["p"] < SURE and h["explained"] > 0.5]
    assert [(h["kind"], h["where"]) for h in sure] == ([(kind, where)] if fault else [])
    assert sure == found[: len(sure)]  # the best first
    if fault:
        # What an exact model leaves is noise of either sign, a quarter of the smallest of these errors with 8 samples.
        assert abs(found[0]["explained"] - 1) < 0.4 and found[0]["error"] > 0.03


def test_exchanged_actions_of_grid_are_named():
    env = Grid()
    found = hypotheses(*asked(env, planted(env, "action_sign", 1.0)), seed=0)
    assert (found[0]["kind"], found[0]["where"]) == ("sign", "actions 2 and 3") and found[0]["p"] < SURE
    assert len([h for h in found if h["kind"] == "sign"]) == 4 * 3 / 2


TWO = Spec("two", {"x": Box((2,)), "y": Box((2,))}, SPEC.action)


def two(see=("x", "y"), say=("x", "y"), moves=(0.5, -2.0)):
    """Of two keys that move apart, under the names by which it sees and says them; both keys of `say` None: neither."""

    def step(latent, action, rng):
        x, y = latent
        x, y = x + moves[0] * action, y + moves[1] * action
        return (x, y), {"obs": {name: value for name, value in zip(say, (x, y), strict=True) if name}}

    observe = lambda latent, action, obs, first: tuple(obs[name].astype(float) for name in see)  # noqa: E731
    return HostModel(lambda n: (np.zeros((n, 2)), np.zeros((n, 2))), observe, step)


def logged_two(horizon=3):
    """Sixteen episodes in which x moves half as far as the action and y twice, the other way."""
    episodes = []
    for number in range(16):
        actions = np.random.default_rng(number).uniform(-1, 1, 9)
        one = episode(actions, slope=np.array([0.5, 0.5]))
        other = episode(actions, slope=np.array([-2.0, -2.0]), start=(1.0, -1.0)).time_step.obs["x"]
        one.time_step.obs["y"] = other
        episodes.append(one)
    return LoggedReality(TWO, episodes), padded(episodes), horizon


def questioned(model):
    reality, table, horizon = logged_two()
    found = attempt(model, model.filter(table.rows, seed=0), reality, table, horizon, count=64, samples=2, seed=0)
    rows = jax.tree.map(lambda x: x[:, 1:].reshape(-1, *x.shape[2:]), table.rows.time_step)
    return hypotheses(model, TWO, {"recorded": (table, found)}, rows, seed=0)


@pytest.mark.parametrize("see, say", [("xy", "yx"), ("yx", "xy"), ("yx", "yx")], ids=["says", "sees", "both"])
def test_keys_exchanged_on_either_side_are_named(see, say):
    found = questioned(two(see, say))  # over a horizon shorter than AHEAD
    assert (found[0]["kind"], found[0]["where"]) == ("keys", "x and y") and found[0]["p"] < SURE
    assert found[0]["explained"] == pytest.approx(1)


@pytest.mark.parametrize("move, sure", [(-0.05, False), (-0.1, True)])
def test_more_than_half_of_the_error_has_to_go(move, sure):
    found = next(h for h in questioned(two(say=("x", None), moves=(move, 0.0))) if h["kind"] == "sign")
    # The error goes with the square of 0.5 - move, and of 0.5 + move under the hypothesis, in every episode.
    assert found["explained"] == pytest.approx(1 - ((0.5 + move) / (0.5 - move)) ** 2, rel=1e-4)
    assert (found["p"] < SURE) == sure


def test_a_model_of_one_of_two_alike_keys_can_be_asked():
    found = questioned(two(say=("x", None)))
    assert found[0]["error"] == pytest.approx(0, abs=1e-9) and not any(h["p"] < SURE for h in found)


def test_one_step_episodes_leave_nothing_to_ask():
    episodes = [episode([0.5]), episode([-0.25])]
    table, model = padded(episodes), line(bias=0.5)
    latents = model.filter(table.rows, seed=0)
    found = attempt(model, latents, LoggedReality(SPEC, episodes), table, 2, count=4, samples=2, seed=0)
    told = hypotheses(model, SPEC, {"recorded": (table, found)}, episodes[0].time_step, seed=0)
    assert all(h["p"] == 1 and h["explained"] == 0 for h in told)


def halves(errors, spec=SPEC, valid=None):
    """Starts at x = (i, -i) for i = 0, 1, .., each with this error of the first step, 5 more in the second."""
    num = len(errors)
    model = np.stack([np.sqrt(errors), np.sqrt(errors) + 5], -1)[:, None]
    hand = trial(model, np.zeros((num, 1, 2)), valid=valid)
    i = np.arange(num, dtype=float)
    return region([hand._replace(obs={"x": np.stack([i, -i], -1)})], [[rewards(hand)]], spec)


def test_the_region_of_the_largest_error_by_hand():
    # Rows 30 .. 39 of 40 err by 0.5 +- 0.1, the others by 0.02 +- 0.01.
    high, turn = np.arange(40) >= 30, np.where(np.arange(40) % 2, 1, -1)
    errors = np.where(high, 0.5 + 0.1 * turn, 0.02 + 0.01 * turn)
    found = halves(errors)
    # Tenths of 0 .. 39 are 3.9, 7.8, .., 31.2, 35.1; all but the first and the last leave 8 on either side.
    tenths = [3.9 * k for k in range(2, 9)]
    welch = [scipy.stats.ttest_ind(errors[n:], errors[:n], equal_var=False) for n in (int(q) + 1 for q in tenths)]
    best = int(np.argmax([x.statistic for x in welch]))
    n = int(tenths[best]) + 1
    assert found is not None and found["where"] == f"x[0] > {tenths[best]:.3g}" and found["share"] == (40 - n) / 40
    assert (found["inside"], found["outside"]) == (pytest.approx(errors[n:].mean()), pytest.approx(errors[:n].mean()))
    # One-sided, for seven tenths of two elements from either side.
    assert found["p"] == pytest.approx(welch[best].pvalue / 2 * 7 * 2 * 2)


def test_a_region_needs_steps_on_either_side_and_counts_its_trials():
    assert halves(np.linspace(0.1, 0.5, 15)) is None  # 8 and 7
    same = halves(np.full(40, 0.3))
    assert same is not None and same["p"] == 1
    unseen = halves(np.linspace(0.1, 0.5, 40), valid=[[i < 15, False] for i in range(40)])
    assert unseen is None
    some = np.random.default_rng(1).gamma(0.5, size=40)
    assert halves(some, valid=[[i < 30, False] for i in range(40)]) == halves(some[:30]) != halves(some)
    noise = [halves(np.random.default_rng(n).gamma(0.5, size=60)) for n in range(20)]
    assert min(found["p"] for found in noise if found is not None) > SURE


def test_starts_of_several_policies_count_together_however_many_samples_each_has():
    one, other = (trial(np.full((8, k, 1), value), np.zeros((8, 1, 1))) for k, value in ((1, 0.5), (3, 0.2)))
    low, high = np.arange(8.0), np.arange(8.0) + 20
    pair = [hand._replace(obs={"x": np.stack([x, x], -1)}) for hand, x in ((one, high), (other, low))]
    found = region(pair, [[rewards(one)], [rewards(other)]], SPEC)
    # All 8 rows of either policy are alike, so the t is infinite where they are parted: medians 7 and 20, at 13.5.
    assert found is not None and found["where"] == "x[0] > 13.5" and found["share"] == 0.5
    assert (found["inside"], found["outside"]) == (pytest.approx(0.25), pytest.approx(0.04))


def test_the_first_steps_of_a_trial():
    hand = trial(np.arange(6.0).reshape(1, 2, 3), np.arange(3.0).reshape(1, 1, 3), discount=np.ones((1, 2, 3)))
    cut = first_steps(hand, 2)
    assert cut.predicted.reward.tolist() == [[[0, 1], [3, 4]]] and cut.real.reward.tolist() == [[[0, 1]]]
    assert cut.valid.shape == cut.limit.shape == (1, 2) and cut.action.shape == (1, 2, 1)


def test_what_is_not_finite_is_counted_by_name():
    x = np.array([[1.0, np.nan], [np.inf, 2.0]])
    first = Prediction({"x": x, "n": np.array([1, 2])}, np.array([np.nan, 1.0]), None)
    assert broken(first, Prediction({"x": x[:1], "n": np.array([3])}, None, np.ones(1))) == {"x": 3, "reward": 1}
    assert broken(Prediction(None, np.ones(2), np.ones(2))) == {}
