"""The batch of host environments: its ticks, seeds, action repeat, faults and snapshots."""

import gymnasium
import host_envs
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from forethought.envs import EnvironmentFault, HostBatch, make
from forethought.envs.seat import episode_seed
from forethought.protocols import HostEnv


def act(value, num=1):
    return np.full((num, 1), value, np.float32)


def rows_of(env, actions, seed=None):
    """Time steps of a loop as a collector runs it, one per tick; actions [T, B, ...]."""
    time_steps = [env.reset(seed=seed)]
    for action in actions:
        ts = time_steps[-1]
        env.send(action, where=~ts.last)
        if ts.last.any():
            env.reset(where=ts.last)
        time_steps.append(env.recv())
    return time_steps


def equal(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for name in ("reward", "discount", "first", "last", "duration", "reward_delay"):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name), err_msg=name)
        for key in x.obs:
            np.testing.assert_array_equal(x.obs[key], y.obs[key], err_msg=key)


def test_an_episode_by_hand():
    env = make(host_envs.Line)
    assert isinstance(env, HostBatch) and isinstance(env, HostEnv)
    rows = rows_of(env, [act(0.0)] * 5)
    # Action 0 is the middle of [-1, 3]: a = 1, so x grows by 0.1 and the reward is 10 t + 1.
    start = rows[0].obs["obs"][0, 0]
    assert [float(ts.reward[0]) for ts in rows] == [0, 11, 21, 31, 41, 0]
    np.testing.assert_allclose([ts.obs["obs"][0, 0] for ts in rows[:5]], start + 0.1 * np.arange(5), atol=1e-6)
    assert [bool(ts.first[0]) for ts in rows] == [True, False, False, False, False, True]
    assert [bool(ts.last[0]) for ts in rows] == [False, False, False, False, True, False]
    assert [float(ts.discount[0]) for ts in rows] == [1] * 6  # a limit is a truncation
    assert [float(ts.duration[0]) for ts in rows] == [0, 1, 1, 1, 1, 0]
    assert rows[0].reward.dtype == rows[0].discount.dtype == rows[0].duration.dtype == np.float32


def test_terminated_wins_over_truncated():
    rows = rows_of(make(host_envs.BothAtOnce), [act(0.0)] * 4)
    assert rows[4].last[0] and rows[4].discount[0] == 0


def test_rows_that_are_not_stepped_keep_their_time_step_and_old_ones_are_not_written_to():
    env = make(host_envs.Line, num=3)
    before = env.reset()
    kept = before.obs["obs"].copy()
    env.send(act(0.5, 3), where=np.array([True, False, True]))
    after = env.recv()
    assert after.first.tolist() == [False, True, False]
    np.testing.assert_array_equal(after.obs["obs"][1], kept[1])
    np.testing.assert_array_equal(before.obs["obs"], kept)


def test_misuse_is_refused():
    env = make(host_envs.Line, num=2)
    with pytest.raises(ValueError, match="environment 0 is at no step"):
        env.send(act(0.0, 2))
    env.reset()
    with pytest.raises(ValueError, match=r"action is float32\[1, 1\]; give floats of shape \[2, 1\]"):
        env.send(act(0.0))
    with pytest.raises(ValueError, match="bool"):
        env.send(act(0.0, 2), where=np.array([1, 0]))
    with pytest.raises(ValueError, match=r"1.5\] of environment 1 is outside \[-1, 1\]"):
        env.send(np.array([[0.0], [1.5]], np.float32))
    with pytest.raises(EnvironmentFault, match="Line: action of environment 1 is not finite"):
        env.send(np.array([[0.0], [np.nan]], np.float32))
    env.send(np.array([[0.0], [np.nan]], np.float32), where=np.array([True, False]))  # void rows are not looked at
    with pytest.raises(ValueError, match="twice"):
        env.send(act(0.0, 2))
    with pytest.raises(ValueError, match="environment 0 is being stepped"):
        env.reset(where=np.array([True, False]))
    with pytest.raises(ValueError, match="after recv"):
        env.snapshot()
    env.recv()
    with pytest.raises(ValueError, match="where=None"):
        env.reset(where=np.array([True, False]), seed=3)
    ended = rows_of(env, [act(0.0, 2)] * 4)[-1]
    assert ended.last.all()
    with pytest.raises(ValueError, match="environment 0 is at no step"):
        env.send(act(0.0, 2))


@pytest.mark.parametrize(
    "settings", [{"action_repeat": 0}, {"unit": "second"}, {"time_limit": 0}, {"num": 0}, {"seed": -1}]
)
def test_settings_that_do_not_fit_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        make(host_envs.Line, **settings)


def test_actions_are_mapped_per_dimension_to_the_environments_own_bounds():
    box = gymnasium.spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), (2,), np.float64)

    class Sees(host_envs.Line):
        action_space = box

        def reward(self, action):
            assert action.dtype == np.float64 and box.contains(action)
            return 100 * action[0] + action[1]

    env = make(Sees, num=4)
    env.reset()
    # Middle 0 and 5, halves 2 and 5: (1, -1) is (2, 0); (-1, 1) is (-2, 10); (0.5, 0.2) is (1, 6); (0, 0) is (0, 5).
    env.send(np.array([[1, -1], [-1, 1], [0.5, 0.2], [0, 0]], np.float32))
    np.testing.assert_allclose(env.recv().reward, [200, -190, 106, 5], rtol=1e-6)


@pytest.mark.parametrize("low, high", [(-2.1, 0.3), (0.1, 0.7), (-1e-3, 3e5)])
def test_the_ends_of_the_action_range_stay_inside_the_bounds(low, high):
    box = gymnasium.spaces.Box(low, high, (1,), np.float32)

    class Strict(host_envs.Line):
        action_space = box

        def reward(self, action):
            assert box.contains(action)
            return float(action[0])

    env = make(Strict, num=2)
    env.reset()
    env.send(np.array([[-1.0], [1.0]], np.float32))
    np.testing.assert_allclose(env.recv().reward, [low, high], rtol=1e-6, atol=1e-2 * (high > 1))


def test_unbounded_actions_pass_through_and_half_bounded_ones_are_held_to_their_bound():
    top = np.finfo(np.float32).max  # how some environments write "no bound"
    low, high = np.float32([-np.inf, 0.0, -top]), np.float32([np.inf, np.inf, top])
    box = gymnasium.spaces.Box(low, high, (3,), np.float32)

    class Free(host_envs.Line):
        action_space = box

        def reward(self, action):
            return float(action.sum())

    env = make(Free)
    env.reset()
    env.send(np.array([[-30.0, 4.0, 500.0]], np.float32))
    assert env.recv().reward[0] == 474
    with pytest.raises(ValueError, match="outside"):
        env.send(np.array([[0.0, -0.5, 0.0]], np.float32))


def test_action_repeat_sums_rewards_stops_at_the_end_and_states_its_duration():
    # Rewards 11, 21, 31, 41 at action 0; episodes of 4 steps. Repeat 3: 11 + 21 + 31 = 63, then 41 and the end.
    for unit, ordinary, durations in (("decision", 1, [0, 1, 1]), ("simulator step", 3, [0, 3, 1])):
        env = make(host_envs.Line, action_repeat=3, unit=unit)
        rows = rows_of(env, [act(0.0)] * 2)
        assert [float(ts.reward[0]) for ts in rows] == [0, 63, 41]
        assert [float(ts.duration[0]) for ts in rows] == durations
        assert rows[2].last[0] and rows[2].discount[0] == 1
        assert (env.spec.unit, env.spec.duration) == (unit, ordinary)


def test_time_limits_count_decisions():
    assert make("CartPole-v1").spec.time_limit == 500
    assert make("Pendulum-v1", action_repeat=3).spec.time_limit == 67  # 200 / 3, rounded up
    env = make("Pendulum-v1", action_repeat=2, time_limit=3)
    rows = rows_of(env, [act(0.25)] * 3)
    assert env.spec.time_limit == 3 and [bool(ts.last[0]) for ts in rows] == [False, False, False, True]
    assert rows[3].discount[0] == 1
    with pytest.raises(ValueError, match="Pendulum-v1 itself ends after 200; give 200 or fewer"):
        make("Pendulum-v1", time_limit=201)


def test_streams_are_a_function_of_seed_environment_and_episode():
    def starts(env, seed=None):
        return np.stack([env.reset(seed=seed if n == 0 else None).obs["obs"][:, 0] for n in range(3)])

    one = starts(make(host_envs.Line, num=4, seed=0))
    np.random.uniform(size=5)  # foreign draws reach no stream
    again = starts(make(host_envs.Line, num=4, seed=0))
    np.testing.assert_array_equal(one, again)
    assert len(np.unique(one)) == 12  # four different streams of three different episodes
    other = make(host_envs.Line, num=4, seed=1)
    assert not np.isin(starts(other), one).any()
    np.testing.assert_array_equal(starts(other, seed=0), one)  # a seed begins every stream anew
    np.testing.assert_array_equal(starts(make(host_envs.Line, num=2, seed=0)), one[:, :2])  # whatever the batch size
    # The environment's own generator, seeded with the documented seed, draws the same start.
    assert one[2, 3] == np.float32(np.random.default_rng(episode_seed(0, 3, 2)).uniform(-1, 1))


def test_nothing_of_an_episode_shows_up_after_its_reset():
    """A frame stack over an environment: its first stack holds nothing of the truncated episode before."""

    def stacked():
        return gymnasium.wrappers.FrameStackObservation(host_envs.Line(), 2, padding_type="zero")

    env = make(stacked)
    rows = rows_of(env, [act(0.5)] * 5)
    assert rows[4].last[0] and rows[5].first[0]
    np.testing.assert_array_equal(rows[4].obs["obs"][0, :, 1], [3, 4])  # t of the last two frames
    np.testing.assert_array_equal(rows[5].obs["obs"][0, 0], [0, 0])
    fresh = make(host_envs.Line)
    second = [fresh.reset(), fresh.reset()][1].obs["obs"][0]
    np.testing.assert_array_equal(rows[5].obs["obs"][0, 1], second)


def test_every_auto_reset_mode_gives_the_same_transitions_with_every_final_observation():
    num, ticks = 3, 24
    actions = np.random.default_rng(5).uniform(-1, 1, (ticks, num, 1)).astype(np.float32)
    vectors = [SyncVectorEnv([host_envs.Uneven] * num, autoreset_mode=mode) for mode in AutoresetMode]
    vectors.append(AsyncVectorEnv([host_envs.Uneven] * num, context="forkserver"))
    runs = [rows_of(make(vector, seed=4), actions) for vector in vectors]
    for run in runs[1:]:
        equal(runs[0], run)
    # The same by Gymnasium's interface alone, one environment after another.
    ended = 0
    for i in range(num):
        env, episode, over = host_envs.Uneven(), -1, True
        for tick, ts in enumerate(runs[0]):
            if over:
                episode += 1
                obs, _ = env.reset(seed=episode_seed(4, i, episode))
                reward, terminated, over = 0.0, False, False
            else:
                # The action of [-1, 1] in [-1, 3] is 1 + 2 a.
                obs, reward, terminated, truncated, _ = env.step(1 + 2 * actions[tick - 1, i])
                over = terminated or truncated
                ended += over
            np.testing.assert_array_equal(ts.obs["obs"][i], obs)
            assert (ts.reward[i], ts.discount[i], ts.last[i]) == (np.float32(reward), 1 - terminated, over)
            if over:
                assert obs[1] == env.length
    assert ended >= 12


def test_a_vector_environment_that_cannot_be_taken_apart_is_refused():
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
    with pytest.raises(ValueError, match="CartPoleVectorEnv: this vector environment cannot be taken apart"):
        make(vector.unwrapped)


FAULTS = {
    host_envs.NotFinite: ("non-finite", "step 3: observation 'obs' holds nan, which is not finite"),
    host_envs.TooLarge: ("non-finite", "step 2: observation 'big' holds 1e\\+300, which is beyond float32's range"),
    host_envs.InfiniteReward: ("non-finite", "step 1: reward holds inf"),
    host_envs.WrongShape: ("shape", r"step 0: observation 'obs' has shape \(3,\), declared is \(2,\)"),
    host_envs.WrongDtype: ("dtype", "step 0: observation 'obs' is float64, declared is float32"),
    host_envs.MissingKey: ("missing", "step 0: observation 'gone' is missing"),
    host_envs.OutOfRange: ("value", r"step 3: observation 'obs' is 3, outside Discrete\(3\)"),
    host_envs.ArrayReward: ("shape", r"step 1: reward has shape \(1,\)"),
    host_envs.NoReward: ("dtype", "step 1: reward is a NoneType"),
    host_envs.IntegerTermination: ("dtype", "step 1: terminated is a int, not a bool"),
    host_envs.Raises: ("raised", "step 1: raised KeyError: 'absent'"),
}


@pytest.mark.parametrize("broken", FAULTS, ids=lambda cls: cls.__name__)
def test_a_fault_names_environment_key_and_step(broken):
    kind, message = FAULTS[broken]
    with pytest.raises(EnvironmentFault, match=f"{broken.__name__}: environment 0, episode 0, {message}") as caught:
        rows_of(make(broken, num=2), [act(0.0, 2)] * 4)
    assert caught.value.kind == kind


def test_a_step_that_faulted_cannot_be_stepped_from():
    env = make(host_envs.NotFinite)
    with pytest.raises(EnvironmentFault):
        rows_of(env, [act(0.0)] * 4)
    with pytest.raises(ValueError, match="reset it first"):
        env.send(act(0.0))
    assert env.reset().first[0]


@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_a_snapshot_goes_on_exactly_in_a_fresh_batch(name):
    env = make(name, num=3, seed=7, action_repeat=2)
    discrete = not hasattr(env.spec.action, "low")
    draw = np.random.default_rng(1)
    size = (40, 3, *env.spec.action.shape)
    actions = draw.integers(0, env.spec.action.n, size) if discrete else draw.uniform(-1, 1, size).astype(np.float32)
    rows = rows_of(env, actions[:15])
    saved = env.snapshot()
    where = rows[-1].last

    def go_on(env, ts):
        rows = []
        for action in actions[15:]:
            env.send(action, where=~ts.last)
            if ts.last.any():
                env.reset(where=ts.last)
            ts = env.recv()
            rows.append(ts)
        return rows

    continued = go_on(env, rows[-1])
    fresh = make(name, num=3, seed=99, action_repeat=2)
    restored = fresh.restore(saved)
    equal([restored], [rows[-1]])
    equal(go_on(fresh, restored), continued)
    equal(go_on(env, env.restore(saved)), continued)  # and in the batch that had gone on
    assert any(ts.first.any() for ts in continued) or name == "Pendulum-v1"
    assert where.shape == (3,)


def test_a_snapshot_of_something_else_is_refused():
    saved = rows_of(env := make("Pendulum-v1", num=2), []) and env.snapshot()
    for other, what in [
        (make("CartPole-v1", num=2), "name is Pendulum-v1, this batch has CartPole-v1"),
        (make("Pendulum-v1", num=3), "num is 2, this batch has 3"),
        (make("Pendulum-v1", num=2, action_repeat=2), "action_repeat is 1, this batch has 2"),
        (make("Pendulum-v1", num=2, unit="simulator step"), "unit is decision, this batch has simulator step"),
    ]:
        with pytest.raises(ValueError, match=what):
            other.restore(saved)


def test_an_environment_that_is_no_function_of_seed_and_actions_is_not_restored_in_silence():
    env = make(host_envs.GlobalRandom)
    rows_of(env, [act(0.0)] * 2)
    with pytest.raises(EnvironmentFault, match="the same seed and actions led to another row") as caught:
        env.restore(env.snapshot())
    assert caught.value.kind == "not reproducible"


def test_instances_and_functions():
    assert make(host_envs.Line()).spec.name == "Line"
    assert make(lambda length: gymnasium.wrappers.TimeLimit(host_envs.Line(), length), length=3).spec.time_limit == 3
    with pytest.raises(ValueError, match="an instance takes no num"):
        make(host_envs.Line(), num=2)
    with pytest.raises(ValueError, match="a int is no environment"):
        make(3)


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("Pendlum-v1", "Pendulum-v1"),
        ("dmc/cartpole-swngup", "dmc/cartpole-swingup"),
        ("jax/pendulm", "jax/pendulum"),
        ("pendulum", "jax/pendulum"),
        ("CartPole-v9", "CartPole-v1"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"env: '{name}' is unknown; nearest: .*{nearest}") as caught:
        make(name)
    assert "\n" not in str(caught.value)
