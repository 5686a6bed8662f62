"""The host interface over a pure environment: the same rows as the pure functions, its rules, and snapshots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.envs.control import Pendulum
from forethought.envs.distractor import Distractor
from forethought.envs.hosted import Hosted
from forethought.envs.pure import first_step, next_step
from forethought.envs.single import EnvironmentFault
from forethought.envs.tabular import corridor, truncated_reward
from forethought.protocols import AbstractEnv, HostEnv
from forethought.types import Box, Spec


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def tick(host, time_step, action):
    """What the host loop does: steps those that run, resets those that ended."""
    host.send(action, where=~time_step.last)
    if time_step.last.any():
        host.reset(where=time_step.last)
    return host.recv()


def run(host, time_step, actions):
    rows = []
    for action in actions:
        time_step = tick(host, time_step, action)
        rows.append(time_step)
    return time_step, rows


def test_it_is_a_host_environment():
    assert isinstance(Hosted(Pendulum(), 2, key=jax.random.key(0)), HostEnv)


def test_rows_are_those_of_the_pure_functions_under_the_documented_keys():
    env, key = Distractor(horizon=3, action_bound=1.5), jax.random.key(7)
    actions = np.random.default_rng(0).uniform(-1, 1, (9, 3, 1)).astype(np.float32)
    host = Hosted(env, 3, key=key)
    first = host.reset()
    assert first.first.all() and not first.last.any()
    _, rows = run(host, first, actions)
    for i in range(3):
        # 1 reset, 3 steps, 1 reset, 3 steps, 1 reset, 1 step: ten ticks, each with its own key.
        stream = jax.random.fold_in(key, i)
        state, expected = env.reset(key=jax.random.fold_in(stream, 0))
        for n, row in enumerate(rows, start=1):
            tick_key = jax.random.fold_in(stream, n)
            if expected.last:
                state, expected = env.reset(key=tick_key)
            else:
                state, expected = env.step(state, jnp.asarray(actions[n - 1, i]), key=tick_key)
            assert bool(row.first[i]) == (n in (4, 8)) and bool(row.last[i]) == (n in (3, 7))
            # Compiled for a batch and one by one: sums may be contracted differently, by a rounding.
            np.testing.assert_allclose(row.obs["obs"][i], expected.obs["obs"], rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(row.reward[i], expected.reward, rtol=1e-5, atol=1e-6)


def test_time_steps_are_numpy_in_the_declared_dtypes():
    host = Hosted(corridor(4), 2, key=jax.random.key(0))
    host.reset()
    host.send(np.array([1, 0]))
    time_step = host.recv()
    assert all(isinstance(leaf, np.ndarray) and leaf.shape == (2,) for leaf in jax.tree.leaves(time_step))
    assert time_step.obs["state"].dtype == np.int32 and time_step.obs["state"].tolist() == [1, 0]
    for name in ("reward", "discount", "duration", "reward_delay"):
        assert getattr(time_step, name).dtype == np.float32
    assert time_step.first.dtype == time_step.last.dtype == bool


def test_streams_differ_repeat_under_a_seed_and_begin_anew_with_one():
    host = Hosted(Pendulum(), 4, key=jax.random.key(0))
    first = host.reset()
    again = host.reset()
    assert len(np.unique(np.concatenate([first.obs["obs"], again.obs["obs"]]), axis=0)) == 8
    assert_same(host.reset(seed=0), first)
    assert not np.allclose(host.reset(seed=1).obs["obs"], first.obs["obs"])
    np.random.seed(3)  # what others draw from NumPy's global generator changes nothing
    assert_same(Hosted(Pendulum(), 4, key=jax.random.key(0)).reset(), first)


def test_a_stream_does_not_depend_on_what_the_others_do():
    alone, together = (Hosted(Pendulum(), n, key=jax.random.key(5)) for n in (1, 3))
    alone.reset()
    together.reset()
    together.reset(where=np.array([False, True, True]))
    for _ in range(3):
        alone.send(np.full((1, 1), 0.5, np.float32))
        together.send(np.full((3, 1), 0.5, np.float32), where=np.array([True, False, False]))
        np.testing.assert_array_equal(alone.recv().obs["obs"][0], together.recv().obs["obs"][0])


def test_rows_left_alone_keep_their_time_step():
    host = Hosted(Pendulum(), 3, key=jax.random.key(1))
    before = host.reset()
    host.send(np.zeros((3, 1), np.float32), where=np.array([False, True, False]))
    after = host.recv()
    assert after.first.tolist() == [True, False, True]
    np.testing.assert_array_equal(after.obs["obs"][[0, 2]], before.obs["obs"][[0, 2]])
    partly = host.reset(where=np.array([False, False, True]))
    np.testing.assert_array_equal(partly.obs["obs"][:2], after.obs["obs"][:2])
    assert not np.allclose(partly.obs["obs"][2], before.obs["obs"][2])


def test_what_may_not_be_stepped_is_refused():
    host = Hosted(truncated_reward(time_limit=2), 2, key=jax.random.key(0))
    with pytest.raises(ValueError, match="environment 0 cannot be stepped: it was never reset"):
        host.send(np.array([0, 0]))
    host.reset()
    host.send(np.array([0, 0]))
    with pytest.raises(ValueError, match="not received"):
        host.send(np.array([0, 0]))
    host.recv()
    host.send(np.array([0, 0]), where=np.array([False, True]))
    assert host.recv().last.tolist() == [False, True]
    with pytest.raises(ValueError, match="environment 1 cannot be stepped: it ended"):
        host.send(np.array([0, 0]))
    host.send(np.array([0, 0]), where=np.array([True, False]))
    assert host.recv().last.all()


@pytest.mark.parametrize(
    "action", [[[0.5], [1.01]], [[0.5], [-1.01]], [[0.5], [np.nan]], [[0.5]], [0.5, 0.5], [[0, 0], [0, 0]], [[0], [0]]]
)
def test_actions_outside_the_space_are_refused(action):
    host = Hosted(Pendulum(), 2, key=jax.random.key(0))
    host.reset()
    with pytest.raises(ValueError, match="jax/pendulum: .*action"):
        host.send(np.array(action))


def test_actions_are_checked_only_where_they_act_and_unbounded_ones_only_for_being_finite():
    host = Hosted(Distractor(), 2, key=jax.random.key(0))
    host.reset()
    host.send(np.array([[40.0], [np.nan]], np.float32), where=np.array([True, False]))
    # s0' = 0.8 s0 + 0.5 * 40 + e with |0.8 s0 + e| well under 4
    assert abs(host.recv().obs["obs"][0, 0] - 20) < 4
    with pytest.raises(ValueError, match="environment 1 got action"):
        host.send(np.array([[40.0], [np.inf]], np.float32))
    discrete = Hosted(corridor(4), 2, key=jax.random.key(0))
    discrete.reset()
    for wrong in ([0, 2], [-1, 0], [0.0, 1.0]):
        with pytest.raises(ValueError, match="jax/corridor"):
            discrete.send(np.array(wrong))


def test_masks_and_seeds_that_say_nothing_clear_are_refused():
    host = Hosted(Pendulum(), 2, key=jax.random.key(0))
    for where in (np.array([1, 0]), np.array([True])):
        with pytest.raises(ValueError, match=r"not bool\[2\]"):
            host.reset(where=where)
    with pytest.raises(ValueError, match="needs where=None"):
        host.reset(where=np.array([True, False]), seed=1)
    with pytest.raises(ValueError, match="num is 0"):
        Hosted(Pendulum(), 0, key=jax.random.key(0))


@pytest.mark.parametrize("env", [Distractor(horizon=3, action_bound=2.0), corridor(3, time_limit=4)])
def test_a_snapshot_goes_on_bit_for_bit_in_a_fresh_host(env):
    rng = np.random.default_rng(1)
    continuous = isinstance(env.spec.action, Box)
    actions = rng.uniform(-1, 1, (20, 3, 1)).astype(np.float32) if continuous else rng.integers(0, 2, (20, 3))
    host = Hosted(env, 3, key=jax.random.key(2))
    middle, _ = run(host, host.reset(), actions[:8])
    snapshot = host.snapshot()
    _, expected = run(host, middle, actions[8:])
    fresh = Hosted(env, 3, key=jax.random.key(99))
    restored = fresh.restore(snapshot)
    assert_same(restored, middle)
    assert fresh.snapshot() == snapshot
    _, found = run(fresh, restored, actions[8:])
    assert_same(found, expected)
    back = host.restore(snapshot)  # and the same host can go back
    assert_same(run(host, back, actions[8:])[1], expected)


def test_foreign_snapshots_are_refused():
    snapshot = Hosted(Pendulum(), 2, key=jax.random.key(0)).snapshot()
    with pytest.raises(ValueError, match="jax/distractor: the snapshot's environment is jax/pendulum"):
        Hosted(Distractor(), 2, key=jax.random.key(0)).restore(snapshot)
    with pytest.raises(ValueError, match=r"'started' is bool\[2\] in the snapshot and bool\[3\]"):
        Hosted(Pendulum(), 3, key=jax.random.key(0)).restore(snapshot)


class Fragile(AbstractEnv):
    """Keeps a key in its state, and shows NaN from its third step on."""

    @property
    def spec(self):
        return Spec(name="fragile", obs={"x": Box((2,))}, action=Box((1,)))

    def reset(self, *, key):
        return (key, jnp.zeros((), jnp.int32)), first_step({"x": jnp.zeros(2)})

    def step(self, state, action, *, key):
        state = (jax.random.fold_in(state[0], 1), state[1] + 1)
        x = jnp.where(state[1] >= 3, jnp.nan, jax.random.uniform(state[0], (2,)))
        return state, next_step({"x": x}, jnp.zeros(()), elapsed=state[1], time_limit=None)


def test_a_non_finite_observation_is_a_fault_and_keys_in_a_state_survive_a_snapshot():
    host = Hosted(Fragile(), 2, key=jax.random.key(0))
    host.reset()
    host.send(np.zeros((2, 1), np.float32))
    host.recv()
    snapshot = host.snapshot()
    host.send(np.zeros((2, 1), np.float32))
    expected = host.recv()
    host.restore(snapshot)
    host.send(np.zeros((2, 1), np.float32))
    assert_same(host.recv(), expected)
    host.send(np.zeros((2, 1), np.float32), where=np.array([False, True]))
    with pytest.raises(EnvironmentFault, match="fragile: environment 1, tick 3: obs/x holds values"):
        host.recv()
    assert np.isfinite(host.reset(where=np.array([False, True])).obs["x"]).all()


def test_sketches_come_from_the_present_observation():
    host = Hosted(Pendulum(), 2, key=jax.random.key(0))
    time_step = host.reset()
    np.testing.assert_array_equal(
        host.sketch(1), Pendulum().sketch({"obs": time_step.obs["obs"][1]}), err_msg="of environment 1"
    )
    assert Hosted(Distractor(), 1, key=jax.random.key(0)).sketch() is None
