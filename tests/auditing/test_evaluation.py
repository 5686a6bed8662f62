import json

import jax.numpy as jnp
import numpy as np
import pytest

from forethought.auditing.evaluation import CONTEXT, HORIZON, evaluate
from forethought.collect import ZeroPolicy
from forethought.envs import make
from forethought.envs.control import Pendulum
from forethought.envs.hosted import Hosted
from forethought.protocols import AbstractWorldModel
from forethought.types import Outcome


class ExactPendulum(AbstractWorldModel):
    """Gymnasium's pendulum from its observation: angle and velocity in the latent. Wrong rewards if asked."""

    reward_bias: float = 0.0

    def initial(self):
        return jnp.zeros(2)

    def observe(self, latent, action, obs, first, *, key):
        cos, sin, velocity = obs["obs"]
        return jnp.stack([jnp.arctan2(sin, cos), velocity])

    def imagine(self, latent, action, *, key):
        angle, velocity = latent
        torque = 2 * action[0]
        wrapped = jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi
        reward = -(wrapped**2 + 0.1 * velocity**2 + 0.001 * torque**2) + self.reward_bias
        velocity = jnp.clip(velocity + (15 * jnp.sin(angle) + 3 * torque) * 0.05, -8, 8)
        angle = angle + velocity * 0.05
        obs = {"obs": jnp.stack([jnp.cos(angle), jnp.sin(angle), velocity])}
        one = jnp.ones(())
        return jnp.stack([angle, velocity]), Outcome(obs, reward, one, one, 0 * one)


@pytest.fixture(scope="module")
def result():
    closed = []

    def env(num):
        host = make("Pendulum-v1", num=num)
        close = host.close
        host.close = lambda: (closed.append(num), close())
        return host

    found = evaluate(ZeroPolicy(Pendulum().spec.action), ExactPendulum(0.5), env, 3, seed=11, drawn=Pendulum())
    assert closed == [3]
    return found


def test_three_policies_play_the_same_seeds(result):
    assert set(result["returns"]) == {"agent", "zero action", "random"}
    assert all(len(values) == 3 for values in result["returns"].values())
    assert result["returns"]["agent"] == result["returns"]["zero action"]  # the agent here is that policy
    assert result["returns"]["random"] != result["returns"]["agent"]


def test_the_open_loop_shows_context_then_what_was_imagined(result):
    loop = result["open_loop"]
    assert (loop["context"], loop["horizon"]) == (CONTEXT, HORIZON)
    true, predicted = (np.array(loop["keys"]["obs"][side]) for side in ("true", "predicted"))
    assert true.shape == predicted.shape == (CONTEXT + HORIZON, 3)
    assert np.array_equal(true[:CONTEXT], predicted[:CONTEXT])  # this model reconstructs nothing: what was seen
    np.testing.assert_allclose(predicted[CONTEXT:], true[CONTEXT:], atol=0.02)
    rewards = np.array(loop["reward"]["predicted"]) - np.array(loop["reward"]["true"])
    np.testing.assert_allclose(rewards[:CONTEXT], 0, atol=1e-6)
    np.testing.assert_allclose(rewards[CONTEXT:], 0.5, atol=0.02)


def test_the_episode_is_whole_and_its_imagined_twin_is_drawn(result):
    assert np.array(result["episode"]["obs"]["obs"]).shape == (201, 3)
    assert sum(result["episode"]["reward"]) == pytest.approx(result["returns"]["agent"][0], rel=1e-5)
    assert len(result["imagined_episode"]["sketch"]) == CONTEXT + HORIZON
    json.dumps(result, allow_nan=False)


def test_pure_environments_are_evaluated_behind_the_hosts_interface():
    import jax

    env = lambda num: Hosted(Pendulum(), num, key=jax.random.key(0))  # noqa: E731
    found = evaluate(ZeroPolicy(Pendulum().spec.action), ExactPendulum(), env, 2, seed=5)
    assert np.array(found["episode"]["sketch"]).shape == (201, 1, 5)
    assert found["imagined_episode"]["sketch"] is None  # nobody was given who could draw it


class Still(AbstractWorldModel):
    """Predicts that nothing changes."""

    def initial(self):
        return {"state": jnp.zeros((), jnp.int32)}

    def observe(self, latent, action, obs, first, *, key):
        return obs

    def imagine(self, latent, action, *, key):
        one = jnp.ones(())
        return latent, Outcome(latent, one, one, one, 0 * one)


def test_episodes_too_short_to_imagine_are_said_to_be():
    import jax

    env = make("jax/delayed-reward")
    host = lambda num: Hosted(env, num, key=jax.random.key(0))  # noqa: E731
    found = evaluate(ZeroPolicy(env.spec.action), Still(), host, 2, seed=0)
    assert found["open_loop"] is found["imagined_episode"] is None
    assert len(found["returns"]["agent"]) == 2
