import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from forethought import data

OBS = spaces.Dict({"angle": spaces.Box(-2.0, 2.0, (2,), np.float32), "gear": spaces.Discrete(3, start=1)})
ACTION = spaces.Box(np.float32([-1, 0]), np.float32([3, 4]))


def episode(steps=3, **changed):
    rng = np.random.default_rng(steps)
    made = {
        "observations": [
            {"angle": rng.uniform(-2, 2, 2).astype(np.float32), "gear": np.int64(1 + t % 3)} for t in range(steps + 1)
        ],
        "actions": np.array([[3.0, 1.0]] * steps, np.float32),
        "rewards": np.arange(1.0, steps + 1),
        "terminations": np.arange(steps) == steps - 1,
        "truncations": np.zeros(steps, bool),
    }
    return made | changed


def read(*episodes, obs=OBS, action=ACTION):
    return data.from_gymnasium(obs, action, episodes)


def test_rows_have_the_final_frame_a_void_action_and_what_led_to_them():
    (rows,), spec = read(episode())
    step = rows.time_step
    assert list(spec.obs) == ["angle", "gear"] and spec.obs["gear"].n == 3
    assert step.obs["angle"].shape == (4, 2) and step.obs["gear"].tolist() == [0, 1, 2, 0]  # counted from 0
    assert step.reward.tolist() == [0, 1, 2, 3] and step.discount.tolist() == [1, 1, 1, 0]
    assert step.first.tolist() == [True, False, False, False] and step.last.tolist() == [False, False, False, True]
    assert step.duration.tolist() == [0, 1, 1, 1] and (rows.depth == 0).all()
    # The bounds -1..3 and 0..4 become -1..1: (3 - 1) / 2 = 1, (1 - 2) / 2 = -0.5; then the void action.
    np.testing.assert_allclose(rows.action, [[1, -0.5]] * 3 + [[0, 0]])


def test_a_truncated_episode_goes_on_being_worth_something():
    (rows,), _ = read(episode(terminations=np.zeros(3, bool), truncations=np.array([False, False, True])))
    assert rows.time_step.discount.tolist() == [1, 1, 1, 1] and rows.time_step.last[-1]


def test_observations_may_be_stacked_by_leaf():
    made = episode()
    stacked = {name: np.stack([row[name] for row in made["observations"]]) for name in ("angle", "gear")}
    (a,), _ = read(made)
    (b,), _ = read(made | {"observations": stacked})
    for name in stacked:
        np.testing.assert_array_equal(a.time_step.obs[name], b.time_step.obs[name])


@pytest.mark.parametrize("space, native, ours, n", [
    (spaces.Discrete(4, start=2), [2, 5, 3], [0, 3, 1], 4),
    (spaces.MultiDiscrete([2, 3]), [[0, 2], [1, 0], [1, 2]], [2, 3, 5], 6),  # first part slowest
    (spaces.MultiBinary(2), [[0, 1], [1, 0], [1, 1]], [1, 2, 3], 4),
])  # fmt: skip
def test_discrete_actions_are_counted_from_0(space, native, ours, n):
    (rows,), spec = read(episode(actions=np.array(native)), action=space)
    assert rows.action.tolist() == [*ours, 0] and spec.action.n == n


@pytest.mark.parametrize("changed, match", [
    ({"rewards": np.array([1.0, np.nan, 2.0])}, "recorded: episode 1: a reward is not finite"),
    ({"actions": np.array([[3.1, 1.0]] * 3)}, "episode 1: an action is not finite or outside of Box"),
    ({"actions": np.array([[3.0, 1.0]] * 2)}, "episode 1: 2 actions and 3 terminations for 3 rewards"),
    ({"terminations": np.array([True, False, False])}, "episode 1: goes on after a termination"),
    ({"observations": episode()["observations"][:3]}, "episode 1: 3 observations for 3 rewards; there must be 4"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_episode(changed, match):
    with pytest.raises(ValueError, match=match):
        read(episode(), episode(**changed))


def test_a_missing_part_is_named():
    made = episode()
    del made["truncations"]
    with pytest.raises(ValueError, match="episode 0: has no 'truncations'"):
        read(made)


def test_recorded_actions_are_those_that_the_environment_took():
    env = gymnasium.make("Pendulum-v1")
    obs, actions, rewards = [env.reset(seed=3)[0]], [], []
    for value in (-2.0, 0.5, 1.5):
        now, reward, *_ = env.step(np.array([value], np.float32))
        obs.append(now), actions.append([value]), rewards.append(reward)
    ends = np.zeros(3, bool)
    made = {
        "observations": obs,
        "actions": np.array(actions),
        "rewards": np.array(rewards),
        "terminations": ends,
        "truncations": ends,
    }
    (rows,), spec = read(made, obs=env.observation_space, action=env.action_space)
    np.testing.assert_allclose(rows.action[:3, 0], [-1, 0.25, 0.75])
    np.testing.assert_allclose(np.asarray(spec.action.native(rows.action[:3])), actions, rtol=1e-6)
