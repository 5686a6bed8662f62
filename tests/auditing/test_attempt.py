import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import SLOPE, SPEC, episode, line, rewards, trial

from forethought.auditing.reality import LoggedReality, PureReality, padded
from forethought.auditing.subject import HostModel, ModelSubject, Prediction
from forethought.auditing.trial import attempt, elements, going, parts, quantities, random, starts
from forethought.collect import RandomPolicy
from forethought.envs import make
from forethought.envs.trial import Hover
from forethought.models.oracle import Oracle
from forethought.types import Box, Discrete, MultiDiscrete


def logged(*episodes, horizon, count, model=None):
    played = padded(list(episodes))
    subject = model or line()
    latents = subject.filter(played.rows, seed=0)
    reality = LoggedReality(SPEC, list(episodes))
    return attempt(subject, latents, reality, played, horizon, count=count, samples=3, seed=0)


def test_half_of_the_starts_have_the_whole_horizon_ahead_and_half_reach_the_last_step():
    found = starts(np.array([11, 6, 2]), 4, 12)
    rows = {e: sorted(found[found[:, 0] == e, 1].tolist()) for e in range(3)}
    # Of 11 rows the last with 4 steps ahead is row 6, the last with any row 9; of 6 rows 1 and 4; of 2 rows row 0.
    assert rows == {0: [0, 0, 6, 9], 1: [0, 0, 1, 4], 2: [0, 0, 0, 0]}
    assert sorted(found[:3, 0].tolist()) == [0, 1, 2]  # in turns, so that what is cut off is cut off of every episode
    assert len(starts(np.array([11, 6, 2]), 4, 7)) == 7


def test_two_starts_per_episode_are_its_first_row_and_its_last_step():
    assert sorted(map(tuple, starts(np.array([11, 6]), 20, 4).tolist())) == [(0, 0), (0, 9), (1, 0), (1, 4)]


def test_against_recorded_episodes_steps_count_up_to_the_end():
    found = logged(episode([0.5, 0.25, -1.0]), episode([1.0], terminates=True), horizon=2, count=6)
    places = [tuple(x) for x in found.starts.tolist()]
    assert not found.fresh and found.real.reward.shape[1] == 1 == found.predicted.reward.shape[1]
    # Rows of the first: x[0] = 0, 0.5, 0.75, -0.25. From row 2 there is one step left, and that one is only cut.
    late, early, other = places.index((0, 2)), places.index((0, 0)), places.index((1, 0))
    np.testing.assert_array_equal(found.valid[[early, late, other]], [[True, True], [True, False], [True, False]])
    np.testing.assert_array_equal(found.limit[[early, late, other]], [[False, False], [True, False], [False, False]])
    np.testing.assert_array_equal(found.real.reward[early, 0], [0.5, 0.75])
    assert found.real.reward[late, 0, 0] == -0.25 and found.action[late, 0] == -1.0
    np.testing.assert_array_equal(found.real.obs["x"][early, 0], [0.5 * SLOPE, 0.75 * SLOPE])
    np.testing.assert_array_equal(found.real.going[[early, late, other], 0], [[1, 1], [1, 1], [1, 0]])
    assert found.real.survived[other, 0, 0] == 0 and found.obs["x"][late].tolist() == [0.75, -1.5]
    np.testing.assert_array_equal(found.reward[[early, late]], [0, 0.75])  # of the step that led there
    np.testing.assert_array_equal(np.where(found.valid[:, None], found.predicted.reward - found.real.reward, 0), 0)


def test_a_model_that_draws_is_asked_several_times_and_a_pure_environment_too():
    assert logged(episode([0.5] * 9), horizon=2, count=4, model=line(noise=0.1)).predicted.reward.shape == (4, 3, 2)
    for env, drawn in ((Hover(), 5), (make("jax/corridor"), 1)):
        subject, reality = ModelSubject(Oracle(env)), PureReality(env)
        played = reality.play(RandomPolicy(env.spec.action), 2, seed=0)
        latents = subject.filter(played.rows, seed=0)
        found = attempt(subject, latents, reality, played, 3, count=6, samples=5, seed=0)
        assert found.predicted.reward.shape == (6, drawn, 3) and found.real.reward.shape == (6, 5, 3) and found.fresh
        assert random(subject, latents, found.starts, found.action) == (drawn > 1)


def test_the_probability_of_being_reached_is_the_product_of_what_came_before():
    # 1, 0.9, 0.9 * 0.5; a discount beyond [0, 1] counts as its nearest bound.
    discount = np.array([[[0.9, 0.5, 0.25], [1.5, -0.25, 1.0]]])
    np.testing.assert_allclose(going(Prediction(None, None, discount)), [[[1, 0.9, 0.45], [1, 1, 0]]])


def test_values_are_taken_from_their_mean_and_weigh_nothing_after_an_end():
    hand = trial(
        [[[5.0, 7.0, 8.0]]], [[[4.0, 6.0, 9.0], [3.0, 6.5, 9.5]]], now=[2.0],
        discount=[[[0.5, 0.25, 1.0]]], survived=[[[1, 0, 0], [1, 1, 1]]],
    )  # fmt: skip
    found = rewards(hand, mean=1.0, deviation=2.0)
    # Model: (5 - 1), (7 - 1) 0.5, (8 - 1) 0.5 0.25. The first real future terminates at its second step.
    np.testing.assert_allclose(found.model[0, 0, :, 0], [4, 3, 0.875])
    np.testing.assert_allclose(found.real[0, :, :, 0], [[3, 5, 0], [2, 5.5, 8.5]])
    np.testing.assert_allclose(found.still[0, :, :, 0], [[1, 1, 0], [1, 1, 1]])  # the reward at the start is 2
    assert found.scale.tolist() == [2.0]


def test_a_model_that_says_nothing_of_ends_is_not_charged_with_them():
    real = [[[4.0, 4.0]] * 2]
    found = rewards(trial([[[4.0, 4.0]]], real, survived=[[[0, 0], [1, 1]]]))
    # Half of the futures reach the second step, so half of the model's 4 is held against their mean, (0 + 4) / 2.
    np.testing.assert_allclose(found.model[0, :, :, 0], [[4, 2]])
    np.testing.assert_allclose(found.real[0, :, :, 0].mean(0), [4, 2])


def test_an_element_that_hardly_varies_is_not_divided_by_its_rounding():
    # std 0: of a reward a hundredth of the mean, but at least a thousandth.
    hand = trial([[[1.0]]], [[[1.0]]])
    assert rewards(hand, mean=-40.0, deviation=0.0).scale.tolist() == [0.4]
    assert rewards(hand, mean=0.05, deviation=0.0).scale.tolist() == [0.001]


def test_discrete_values_are_one_hot_and_equally_far_from_each_other():
    x = elements(Discrete(4), np.array([0, 3, 1], np.int32))
    np.testing.assert_array_equal(x, np.eye(4)[[0, 3, 1]])
    assert np.sum((x[0] - x[1]) ** 2) == np.sum((x[0] - x[2]) ** 2) == 2
    pair = elements(MultiDiscrete((2, 3)), np.array([[[1, 0], [0, 2]]], np.int32))
    np.testing.assert_array_equal(pair, [[[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]])


@pytest.mark.parametrize(
    "space, shape, size",
    [(Box(()), (3, 2), 1), (Box((4, 5), "uint8", 0.0, 255.0), (3, 2, 4, 5), 20), (MultiDiscrete((2, 3)), (3, 2, 2), 5)],
)
def test_numpy_and_jax_agree_on_elements_of_every_space(space, shape, size):
    x = np.random.default_rng(0).integers(0, 2, shape).astype(space.dtype)
    found = elements(space, x)
    assert found.shape == (3, 2, size) and found.dtype == np.float64
    np.testing.assert_array_equal(elements(space, jnp.asarray(x)), found)


def test_small_boxes_are_judged_by_element_discrete_and_wide_ones_whole():
    hand = rewards(trial([[[1.0]]], [[[1.0]]]))
    named = lambda space, size: [  # noqa: E731
        (name, which.tolist()) for name, which in parts(hand._replace(name="k", space=space, scale=np.ones(size)))
    ]
    assert named(Box((3,)), 3) == [("k[0]", [0]), ("k[1]", [1]), ("k[2]", [2])]
    assert named(Box((1,)), 1) == [("k", [0])] == named(None, 1)
    assert named(Discrete(3), 3) == [("k", [0, 1, 2])] == named(MultiDiscrete((2, 1)), 3)
    assert named(Box((33,)), 33) == [("k", list(range(33)))]


def test_a_model_that_writes_in_its_own_arrays_changes_nothing_that_it_said_before():
    def step(x, action, rng):
        x += SLOPE * action
        return x, {"obs": {"x": x}, "reward": x[:, 0]}

    def observe(x, action, obs, first):
        x[:] = obs["x"]
        return x

    told = episode([0.5, 0.25, -1.0, 0.75])
    found, exact = (
        logged(told, horizon=3, count=4, model=model)
        for model in (HostModel(lambda n: np.zeros((n, 2)), observe, step), line())
    )
    np.testing.assert_array_equal(found.predicted.obs["x"], exact.predicted.obs["x"])
    np.testing.assert_array_equal(found.predicted.reward, exact.predicted.reward)


def test_only_what_the_model_predicts_is_a_quantity():
    rows = episode([0.5, -1.0]).time_step
    for says in (("obs",), ("reward",), ("obs", "reward")):
        found = quantities(SPEC, logged(episode([0.5] * 4), horizon=2, count=2, model=line(says=says)), rows)
        assert [q.name for q in found] == [{"obs": "x", "reward": "reward"}[name] for name in says]
