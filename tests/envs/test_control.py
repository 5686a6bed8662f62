"""Pendulum and cart-pole against Gymnasium's and DMControl's own, step by step and over rollouts."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_control import suite

from forethought.envs import control
from forethought.envs.control import CartPoleSwingUp, MechanicalState, Pendulum

KEY = jax.random.key(0)


def stepper(env):
    return jax.jit(lambda state, action: env.step(state, action, key=KEY))


def rollout(env, position, velocity, actions):
    """The states [T, joints] and the time steps [T] that actions [T, 1] lead to, in float64 where jax has it."""

    def body(state, action):
        state, time_step = env.step(state, action, key=KEY)
        return state, (state.position, state.velocity, time_step)

    position, velocity, actions = (jnp.array(x, jnp.result_type(float)) for x in (position, velocity, actions))
    start = MechanicalState(position, velocity, jnp.zeros((), jnp.int32))
    return jax.tree.map(np.asarray, jax.jit(lambda s, a: jax.lax.scan(body, s, a)[1])(start, actions))


def gymnasium_pendulum():
    env = gymnasium.make("Pendulum-v1", disable_env_checker=True)  # which would refuse actions in float64
    env.reset(seed=0)
    return env


def dm_cartpole(seed=0):
    return suite.load("cartpole", "swingup", task_kwargs={"random": seed})


def put(dm, position, velocity):
    with dm.physics.reset_context():
        dm.physics.data.qpos[:], dm.physics.data.qvel[:] = position, velocity


def test_pendulum_steps_as_gymnasium_from_random_states():
    original, rng = gymnasium_pendulum(), np.random.default_rng(0)
    with jax.enable_x64(True):
        step = stepper(Pendulum())
        for _ in range(300):
            angle, speed, action = rng.uniform([-20, -8, -1], [20, 8, 1])
            original.unwrapped.state = np.array([angle, speed])
            obs, reward, *_ = original.unwrapped.step(np.array([2 * action]))
            state, time_step = step(
                MechanicalState(jnp.array([angle]), jnp.array([speed]), jnp.int32(0)), jnp.array([action])
            )
            found = np.concatenate([state.position, state.velocity])
            np.testing.assert_allclose(found, original.unwrapped.state, rtol=0, atol=1e-12)
            np.testing.assert_allclose(time_step.obs["obs"], obs, rtol=0, atol=1e-6)
            np.testing.assert_allclose(time_step.reward, reward, rtol=1e-6, atol=1e-6)  # a float32


@pytest.mark.parametrize("x64, state_tolerance, reward_tolerance", [(True, 1e-9, 1e-5), (False, 2e-3, 1.6e-2)])
def test_pendulum_follows_gymnasium_for_an_episode(x64, state_tolerance, reward_tolerance):
    """Rounding (1e-7 of an angle of up to 10, in float32) grows with e^(t sqrt(15)) while near upright only.

    The reward's slope is at most 2 pi in the angle and 0.2 * 8 in the speed, so its error is below 8 of the state's.
    """
    original, rng = gymnasium_pendulum(), np.random.default_rng(1)
    for _ in range(5):
        angle, speed = rng.uniform([-np.pi, -1], [np.pi, 1])
        actions = rng.uniform(-1, 1, (200, 1))
        with jax.enable_x64(x64):
            positions, velocities, time_step = rollout(Pendulum(), [angle], [speed], actions)
        original.reset()
        original.unwrapped.state = np.array([angle, speed])
        states, rows = [], []
        for action in actions:
            rows.append(original.step(2 * action))
            states.append(original.unwrapped.state)
        obs, reward, terminated, truncated, _ = map(np.array, zip(*rows, strict=True))
        found = np.concatenate([positions, velocities], axis=1)
        np.testing.assert_allclose(found, states, rtol=0, atol=state_tolerance)
        np.testing.assert_allclose(time_step.obs["obs"], obs, rtol=0, atol=state_tolerance + 1e-6)
        np.testing.assert_allclose(time_step.reward, reward, rtol=0, atol=reward_tolerance)
        np.testing.assert_array_equal(time_step.last, terminated | truncated)
        np.testing.assert_array_equal(np.flatnonzero(time_step.last), [199])
        assert (time_step.discount == 1).all() and not time_step.first.any()
        assert (time_step.duration == 1).all() and (time_step.reward_delay == 0).all()


def test_pendulum_maps_the_action_as_its_space_says():
    env = Pendulum()
    assert env.spec.action.native(np.float32([-1])).tolist() == [-2] and env.spec.time_limit == 200
    # From hanging at rest torque u gives w = 3 u dt = 0.15 u, and the reward is -(pi^2 + 0.001 u^2).
    hanging = MechanicalState(jnp.array([np.pi]), jnp.zeros(1), jnp.int32(0))
    _, time_step = env.step(hanging, jnp.array([-0.75]), key=KEY)
    assert time_step.obs["obs"][2] == pytest.approx(-0.225, abs=1e-5)
    assert time_step.reward == pytest.approx(-(np.pi**2 + 0.001 * 2.25), rel=1e-6)


def test_pendulum_starts_as_gymnasium():
    state, time_step = jax.vmap(lambda k: Pendulum().reset(key=k))(jax.random.split(KEY, 4000))
    for sample, bound in ((state.position, np.pi), (state.velocity, 1.0)):
        quantiles = np.quantile(np.asarray(sample)[:, 0], [0.1, 0.5, 0.9]) / bound
        # Uniform: -0.8, 0, 0.8 with standard errors below 2 sqrt(0.25 / 4000) = 0.016
        np.testing.assert_allclose(quantiles, [-0.8, 0, 0.8], atol=0.064)
        assert np.abs(sample).max() <= bound
    assert abs(np.corrcoef(state.position[:, 0], state.velocity[:, 0])[0, 1]) < 0.064
    assert time_step.first.all() and not time_step.last.any()
    np.testing.assert_allclose(time_step.obs["obs"][:, 0], np.cos(state.position[:, 0]), atol=1e-6)
    voids = (time_step.reward, time_step.duration, time_step.reward_delay, 1 - time_step.discount)
    assert all((np.asarray(void) == 0).all() for void in voids)


def test_the_model_has_the_numbers_of_cartpole_xml():
    model = dm_cartpole().physics.model
    assert model.body_inertia[2, 0] == pytest.approx(control.HINGE_INERTIA - control.LEVER * 0.5, rel=1e-12)
    assert model.dof_invweight0[0] == pytest.approx(control.UPRIGHT_MOBILITY, rel=1e-12)
    assert model.dof_damping.tolist() == [control.SLIDER_DAMPING, control.HINGE_DAMPING]
    assert (model.dof_armature == 0).all() and (model.dof_frictionloss == 0).all()
    assert model.opt.gravity[2] == -control.GRAVITY and model.opt.timestep == control.TIMESTEP


def test_cartpole_steps_as_dmcontrol_from_random_states():
    """A fifth of the states lie beyond an end of the rail, where the limit pushes back, some moving fast."""
    dm, rng = dm_cartpole(), np.random.default_rng(2)
    dm.reset()
    beyond = 0
    with jax.enable_x64(True):
        step = stepper(CartPoleSwingUp())
        for n in range(400):
            position = rng.uniform([-2.25, -7], [2.25, 7]) if n % 4 else rng.uniform([1.7999, -7], [1.8012, 7])
            velocity, action = rng.normal(size=2) * [2, 5], rng.uniform(-1, 1, 1)
            put(dm, position, velocity)
            expected = dm.step(action)
            beyond += abs(position[0]) > control.RAIL_END
            state, time_step = step(
                MechanicalState(jnp.array(position), jnp.array(velocity), jnp.int32(0)), jnp.array(action)
            )
            np.testing.assert_allclose(state.position, dm.physics.data.qpos, rtol=0, atol=1e-11)
            np.testing.assert_allclose(state.velocity, dm.physics.data.qvel, rtol=0, atol=1e-9)
            np.testing.assert_allclose(time_step.reward, expected.reward, rtol=0, atol=1e-6)  # a float32
            for name in ("position", "velocity"):
                np.testing.assert_allclose(time_step.obs[name], expected.observation[name], rtol=1e-6, atol=1e-6)
    assert beyond > 100


@pytest.mark.parametrize("x64, tolerance", [(True, 1e-8), (False, 1e-3)])
def test_cartpole_follows_dmcontrol_for_200_steps(x64, tolerance):
    """Half the rollouts push one way for long, so that the cart runs into the ends of the rail.

    In float32 the two part by up to 6e-5 on such rollouts; the tolerance leaves a factor of 16.
    """
    dm, rng, furthest = dm_cartpole(), np.random.default_rng(3), 0.0
    for n in range(6):
        dm.reset()
        start = dm.physics.data.qpos.copy(), dm.physics.data.qvel.copy()
        held = np.repeat(rng.choice([-1.0, 1.0], (8, 1)), 25, axis=0)
        actions = held if n % 2 else rng.uniform(-1, 1, (200, 1))
        with jax.enable_x64(x64):
            positions, velocities, time_step = rollout(CartPoleSwingUp(), *start, actions)
        rows = []
        for action in actions:
            reward = dm.step(action).reward
            rows.append([*dm.physics.data.qpos, *dm.physics.data.qvel, reward])
        found = np.concatenate([positions, velocities], axis=1)
        np.testing.assert_allclose(found, np.array(rows)[:, :4], rtol=0, atol=tolerance)
        np.testing.assert_allclose(time_step.reward, np.array(rows)[:, 4], rtol=0, atol=max(tolerance / 10, 1e-6))
        furthest = max(furthest, np.abs(positions[:, 0]).max())
    assert furthest > control.RAIL_END


def test_cartpole_episodes_end_where_dmcontrols_do():
    dm, actions = dm_cartpole(), np.zeros((1000, 1), np.float32)
    dm.reset()
    _, _, time_step = rollout(CartPoleSwingUp(), np.float32([0, np.pi]), np.zeros(2, np.float32), actions)
    for t in range(1000):
        expected = dm.step(actions[t])
        assert expected.last() == time_step.last[t] == (t == 999)
        assert expected.discount == time_step.discount[t] == 1
    assert (time_step.duration == 1).all() and not time_step.first.any()


def test_cartpole_starts_as_dmcontrol():
    state, time_step = jax.vmap(lambda k: CartPoleSwingUp().reset(key=k))(jax.random.split(KEY, 4000))
    found = np.concatenate([state.position - np.array([0, np.pi]), state.velocity], axis=1)
    dm = dm_cartpole()
    original = []
    for _ in range(300):
        dm.reset()
        original.append([*dm.physics.data.qpos - [0, np.pi], *dm.physics.data.qvel])
    # Normal with standard deviation 0.01: that of the mean of n is 0.01 / sqrt(n), of the deviation 0.01 / sqrt(2n).
    for sample in (found, np.array(original)):
        n = len(sample)
        np.testing.assert_allclose(sample.mean(0), 0, atol=4.5 * 0.01 / np.sqrt(n))
        np.testing.assert_allclose(sample.std(0), 0.01, atol=4.5 * 0.01 / np.sqrt(2 * n))
    assert np.abs(np.corrcoef(found.T) - np.eye(4)).max() < 4.5 / np.sqrt(4000)
    assert time_step.first.all() and (time_step.duration == 0).all()


@pytest.mark.parametrize("env", [Pendulum(), CartPoleSwingUp()])
def test_an_action_beyond_the_bounds_shows_as_nan_and_one_on_them_does_not(env):
    state, first = env.reset(key=KEY)
    step = stepper(env)
    for action, finite in ((1.0, True), (-1.0, True), (1.0001, False), (-1.5, False), (np.nan, False)):
        _, time_step = step(state, jnp.array([action]))
        assert np.isfinite(time_step.reward) == finite
        assert all(np.isfinite(x).all() == finite for x in time_step.obs.values())
    for name, space in env.spec.obs.items():
        assert first.obs[name].shape == space.shape and first.obs[name].dtype == space.dtype


@pytest.mark.parametrize("env", [Pendulum(), CartPoleSwingUp()])
def test_a_rollout_can_be_differentiated(env):
    """The slope of the states' sum by one action against a central difference, in float64."""
    with jax.enable_x64(True):
        joints = env.reset(key=KEY)[0].position.shape
        start = MechanicalState(jnp.full(joints, 2.0), jnp.full(joints, 0.3), jnp.int32(0))

        def total(shift):
            def body(state, action):
                state, _ = env.step(state, action, key=KEY)
                return state, state.position.sum() + state.velocity.sum()

            actions = jnp.full((20, 1), 0.2).at[3].add(shift)
            return jax.lax.scan(body, start, actions)[1].sum()

        slope, total = jax.jit(jax.grad(total))(0.0), jax.jit(total)
        expected = (total(1e-5) - total(-1e-5)) / 2e-5
        assert abs(expected) > 0.01 and slope == pytest.approx(float(expected), rel=1e-6)


def test_sketches_have_the_lengths_and_angles_of_the_bodies():
    cos, sin = np.cos(0.6), np.sin(0.6)
    rod = Pendulum().sketch({"obs": np.float32([cos, sin, 3])})
    np.testing.assert_allclose(rod, [[0, 0, -sin, cos, 0.1]], rtol=1e-6)
    lines = CartPoleSwingUp().sketch({"position": np.float32([0.5, cos, sin]), "velocity": np.zeros(2)})
    assert lines.shape == (3, 5)
    # The pole's tip as MuJoCo places it: its geom's centre is half way, at (x + sin / 2, 1 + cos / 2).
    dm = dm_cartpole()
    dm.reset()
    put(dm, [0.5, 0.6], [0, 0])
    centre = dm.physics.named.data.geom_xpos["pole_1"][[0, 2]]
    np.testing.assert_allclose((lines[2, :2] + lines[2, 2:4]) / 2, centre, rtol=1e-6)
    np.testing.assert_allclose((lines[1, :2] + lines[1, 2:4]) / 2, dm.physics.named.data.xpos["cart"][[0, 2]])
