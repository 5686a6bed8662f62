"""DMControl's tasks: what they become, exact snapshots, and their pictures."""

import host_envs
import numpy as np
import pytest
from test_host import rows_of

from forethought.envs import make
from forethought.envs.dmc import DMCSingle, load, names
from forethought.types import Box

ONE_PER_KIND = [
    "ball_in_cup-catch",
    "cartpole-three_poles",
    "cheetah-run",
    "dog-fetch",
    "finger-spin",
    "finger-turn_easy",
    "fish-swim",
    "hopper-hop",
    "humanoid-run",
    "lqr-lqr_6_2",
    "manipulator-insert_peg",
    "point_mass-hard",
    "quadruped-escape",
    "reacher-easy",
    "stacker-stack_2",
    "swimmer-swimmer6",
    "walker-walk",
]
"""What keeps different things: models changed at reset, task attributes, terrain, many contacts."""


def single(name):
    return DMCSingle(*name.split("-", 1), {})


def equal(a, b):
    assert a[1:] == b[1:]
    for key in a.obs:
        assert a.obs[key].tobytes() == b.obs[key].tobytes(), key


def snapshots_are_exact(name):
    env, other = single(name), single(name)
    draw = np.random.default_rng(1)
    actions = [draw.uniform(-1, 1, env.spec.action.shape).astype(np.float32) for _ in range(30)]
    other.reset(9)  # another past, of which nothing may remain
    for action in actions[:4]:
        other.step(action)
    first = env.reset(3)
    for action in actions[:12]:
        env.step(action)
    state = env.state()
    went = [env.step(action) for action in actions[12:]]
    # More than what is observed in float32: every number that the next step would read.
    reached, after = env.state(), env.reset(4)
    for again in (other, env):
        again.restore(state)
        for action, frame in zip(actions[12:], went, strict=True):
            equal(again.step(action), frame)
        state_again = again.state()
        assert state_again.keys() == reached.keys()
        for part in reached:
            np.testing.assert_array_equal(state_again[part], reached[part], err_msg=part)
        equal(again.reset(4), after)
    equal(other.reset(3), first)  # a reset leaves nothing of the episodes before


@pytest.mark.parametrize("name", ONE_PER_KIND)
def test_a_snapshot_goes_on_bit_for_bit(name):
    snapshots_are_exact(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name.removeprefix("dmc/") for name in names()])
def test_a_snapshot_goes_on_bit_for_bit_on_every_task(name):
    snapshots_are_exact(name)


def test_a_batch_is_restored_in_a_fresh_one_in_the_middle_of_an_episode():
    env = make("dmc/cheetah-run", num=2, seed=3, action_repeat=2)
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 2, 6)).astype(np.float32)
    rows_of(env, actions[:10])
    saved = env.snapshot()
    fresh = make("dmc/cheetah-run", num=2, seed=8, action_repeat=2)
    fresh.restore(saved)
    for action in actions[10:]:
        env.send(action)
        fresh.send(action)
        a, b = env.recv(), fresh.recv()
        assert all(a.obs[key].tobytes() == b.obs[key].tobytes() for key in a.obs)
        np.testing.assert_array_equal(a.reward, b.reward)
    one, two = env.reset(), fresh.reset()
    assert all(one.obs[key].tobytes() == two.obs[key].tobytes() for key in one.obs)


def test_steps_are_those_of_the_suite():
    """Against the original, reset with the same random state and given the native actions."""
    suite, _ = load()
    env = make("dmc/reacher-easy", seed=2)
    from forethought.envs.seat import episode_seed

    original = suite.load("reacher", "easy", task_kwargs={"random": episode_seed(2, 0, 0)})
    original.reset()
    original.task.random.seed(episode_seed(2, 0, 0))
    theirs = original.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 1, 2)).astype(np.float32)
    for n, ts in enumerate(rows_of(env, actions)):
        if n:
            theirs = original.step(actions[n - 1, 0])
            np.testing.assert_allclose(ts.reward[0], theirs.reward, rtol=1e-6)
        for key, value in theirs.observation.items():
            np.testing.assert_allclose(ts.obs[key][0], np.reshape(value, ts.obs[key][0].shape), rtol=1e-6)


def test_the_time_limit_is_a_truncation():
    env = make("dmc/pendulum-swingup", action_repeat=100)  # 1000 control steps are 10 decisions
    rows = rows_of(env, [np.zeros((1, 1), np.float32)] * 11)
    assert env.spec.time_limit == 10
    assert [bool(ts.last[0]) for ts in rows] == [False] * 10 + [True, False]
    assert rows[10].discount[0] == 1 and rows[11].first[0]


def test_termination_has_discount_zero():
    # The linear-quadratic task ends once its state is as good as zero; put there at rest, it stays.
    env = single("lqr-lqr_2_1")
    env.reset(0)
    env._env.physics.data.qpos[:] = 0
    env._env.physics.data.qvel[:] = 0
    env._env.physics.forward()
    frame = env.step(np.zeros(1, np.float32))
    assert frame.terminated and not frame.truncated


def test_spaces_and_bounds():
    spec = make("dmc/quadruped-walk").spec
    assert {key: space.shape for key, space in spec.obs.items()} == {
        "egocentric_state": (44,),
        "torso_velocity": (3,),
        "torso_upright": (1,),
        "imu": (6,),
        "force_torque": (24,),
    }
    # Its actuators lift in [-1, 1.1] and yaw and extend in [-1, 1]: middle and half range per dimension.
    assert isinstance(spec.action, Box)
    _, mujoco = load()
    env = single("quadruped-walk")
    low, high = env._raw_model.actuator_ctrlrange.T
    assert len(np.unique(high)) > 1
    np.testing.assert_allclose(spec.action.native(np.ones(12, np.float32)), high, rtol=1e-6)
    np.testing.assert_allclose(spec.action.native(-np.ones(12, np.float32)), low, rtol=1e-6)
    unbounded = single("lqr-lqr_2_1").spec
    assert np.isinf(unbounded.action.high).all() and unbounded.time_limit is None


def test_tasks_that_draw_their_model_have_the_same_one_in_every_environment():
    a, b = single("lqr-lqr_6_2"), single("lqr-lqr_6_2")
    np.testing.assert_array_equal(a._raw_model.jnt_stiffness, b._raw_model.jnt_stiffness)


def test_the_sketch_of_a_cart_and_pole_is_where_mujoco_has_them():
    env = single("cartpole-swingup")
    env.reset(0)
    env._env.physics.data.qpos[:] = 0.5, np.pi / 2
    env._env.physics.forward()
    figure = env.sketch()
    # The cart is at x = 0.5 on a rail 1 m high; the pole, 1 m long with its hinge at the cart, lies along x.
    pole = figure[-1]
    assert sorted(np.round(pole[[0, 2]], 3).tolist()) == [0.5, 1.5]
    np.testing.assert_allclose(pole[[1, 3]], 1.0, atol=1e-5)
    assert pole[4] == np.float32(0.045)


def test_the_sketch_of_what_moves_in_a_plane_is_seen_from_above():
    env = single("reacher-easy")
    env.reset(0)
    env._env.physics.data.qpos[:] = 0, np.pi / 2
    env._env.physics.forward()
    figure = env.sketch()
    length = np.hypot(figure[:, 2] - figure[:, 0], figure[:, 3] - figure[:, 1])
    arm = figure[length > 0.1]
    # The upper arm, 0.12 m, lies along x and the lower along y, which the view from the side would not show.
    assert any(abs(x1 - x0) > 0.1 and abs(y1 - y0) < 1e-6 for x0, y0, x1, y1, _ in arm)
    assert make("CartPole-v1").sketch() is None


def test_a_gymnasium_environment_over_mujoco_is_drawn_too():
    _, mujoco = load()
    xml = """<mujoco><worldbody><geom type="plane" size="1 1 1"/><body pos="1 0 2"><joint type="hinge" axis="0 1 0"/>
    <geom type="capsule" size=".1 .5"/><geom type="sphere" size=".2" pos="0 0 1"/></body></worldbody></mujoco>"""

    class Physical(host_envs.Line):
        def __init__(self):
            self.model = mujoco.MjModel.from_xml_string(xml)
            self.data = mujoco.MjData(self.model)
            mujoco.mj_forward(self.model, self.data)

    # A capsule of half-length 0.5 upright at (1, 2), and a ball 1 m above its middle; the ground is left out.
    figure = make(Physical).sketch()
    np.testing.assert_allclose(figure, [[1, 1.5, 1, 2.5, 0.1], [1, 3, 1, 3, 0.2]], atol=1e-6)
