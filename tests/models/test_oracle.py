"""The exact model against the environments whose model it is, step for step under the same keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.collect import RandomPolicy
from forethought.envs.control import CartPoleSwingUp, MechanicalState, Pendulum
from forethought.envs.distractor import Distractor
from forethought.envs.tabular import corridor
from forethought.envs.trial import Balance, Grid, Hover
from forethought.imagine import open_loop
from forethought.models.oracle import Oracle

KEY = jax.random.key(0)
ENVS = {env.spec.name: env for env in (Pendulum(), CartPoleSwingUp(), Distractor(), corridor(4))}
ENVS |= {env.spec.name: env for env in (Hover(), Balance(), Grid())}


def some_actions(env, count):
    policy, (_, first) = RandomPolicy(env.spec.action), env.reset(key=KEY)
    return jax.vmap(lambda key: policy(None, first, key=key)[1].action)(jax.random.split(KEY, count))


@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS)
def test_the_imagined_steps_are_the_real_ones(env):
    """Whole turns are not observed and angles come back through arctan2, hence the tolerance: 1e-6 at the start."""
    start, first = env.reset(key=jax.random.key(1))
    actions = some_actions(env, 5)

    def real(state, row):
        state, time_step = env.step(state, row[0], key=row[1])
        return state, time_step

    keys = jax.random.split(jax.random.split(KEY)[1], 5)  # as open_loop splits its own
    expected = jax.jit(lambda s: jax.lax.scan(real, s, (actions, keys))[1])(start)
    obs = jax.tree.map(lambda x: x[None], first.obs)
    _, found = jax.jit(lambda obs: open_loop(Oracle(env), obs, actions, jnp.array([True]), key=KEY))(obs)
    for name in ("reward", "discount", "duration", "reward_delay"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5, err_msg=name)
    for name, value in expected.obs.items():
        np.testing.assert_allclose(found.obs[name], value, rtol=1e-5, atol=1e-5)
    assert found.legal is None


@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS)
def test_an_observation_shows_the_whole_state(env):
    """After three steps: the episode's decisions are forgotten, and nothing else."""
    state, _ = env.reset(key=KEY)
    for i, action in enumerate(some_actions(env, 3)):
        state, time_step = env.step(state, action, key=jax.random.fold_in(KEY, i))
    shown = jax.jit(lambda obs: env.state(obs))(time_step.obs)
    assert shown.elapsed == 0 and shown.elapsed.dtype == state.elapsed.dtype
    model = Oracle(env)
    observed = model.observe(model.initial(), action, time_step.obs, jnp.array(False), key=KEY)
    for found in (shown, observed):
        assert jax.tree.structure(found) == jax.tree.structure(state)
        for a, b in zip(jax.tree.leaves(found)[:-1], jax.tree.leaves(state)[:-1], strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_allclose(jnp.sin(a), jnp.sin(b), atol=1e-5)  # equal up to whole turns
            np.testing.assert_allclose(jnp.cos(a), jnp.cos(b), atol=1e-5)


def test_an_angle_comes_back_from_its_cosine_and_sine():
    found = Pendulum().state({"obs": jnp.array([np.cos(2.5), np.sin(2.5), -3.0])})
    assert found.position[0] == pytest.approx(2.5, abs=1e-6) and found.velocity[0] == -3
    obs = {"position": jnp.array([0.75, np.cos(-2.5), np.sin(-2.5)]), "velocity": jnp.array([1.5, -0.25])}
    found = CartPoleSwingUp().state(obs)
    np.testing.assert_allclose(found.position, [0.75, -2.5], atol=1e-6)
    np.testing.assert_allclose(found.velocity, [1.5, -0.25])


def test_a_time_limit_is_no_end_to_the_oracle():
    env = Pendulum()
    late = MechanicalState(jnp.ones(1), jnp.zeros(1), jnp.int32(199))
    assert env.step(late, jnp.zeros(1), key=KEY)[1].last
    assert Oracle(env).imagine(late, jnp.zeros(1), key=KEY)[1].discount == 1
