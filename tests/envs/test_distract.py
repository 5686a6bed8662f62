"""Distractors: the four kinds, three dynamics, and the same on both sides of the host boundary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought import envs
from forethought.envs.check import check
from forethought.envs.control import Pendulum
from forethought.envs.distract import DYNAMICS, KEY, KINDS, Distractors, distract

KEYS = jax.random.key(0)


def roll(env, action, ticks=30, key=KEYS):
    """The distractor [T + 1, dims] and the rewards [T + 1] under a constant action."""

    def tick(carry, key):
        state, time_step = env.step(carry[0], action, key=key)
        return (state, time_step), time_step

    begin = env.reset(key=key)
    rest = jax.lax.scan(tick, begin, jax.random.split(key, ticks))[1]
    rows = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), begin[1], rest)
    return np.asarray(rows.obs[KEY]), np.asarray(rows.reward)


@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_controllable_are_moved_and_only_the_relevant_paid(kind, dynamics):
    base = Pendulum()
    env = distract(base, kind, 5, dynamics=dynamics, reward_scale=0.25, scale=2.0)
    still, reward = roll(env, jnp.zeros(1))
    pushed, _ = roll(env, jnp.ones(1))
    assert still.shape == (31, 5) and np.isfinite(still).all()
    np.testing.assert_array_equal(still[0], pushed[0])
    assert (still[1:] != pushed[1:]).any() == ("controllable" in kind)
    bare = roll(distract(base, "irrelevant", 5, dynamics=dynamics), jnp.zeros(1))[1]
    paid = 0.25 * still.mean(1) / 2.0 * (np.arange(31) > 0) if "relevant" in kind.split() else 0.0
    np.testing.assert_allclose(reward, bare + paid, atol=2e-5)


def test_the_environment_below_is_left_as_it_was():
    base = Pendulum()
    env = distract(base, "irrelevant", 3)
    env_key = jax.random.split(KEYS, 3)[0]
    state, time_step = env.reset(key=KEYS)
    own, alone = base.reset(key=env_key)
    assert (time_step.obs["obs"] == alone.obs["obs"]).all() and list(time_step.obs) == ["obs", KEY]
    _, stepped = env.step(state, jnp.full(1, 0.5), key=KEYS)
    _, alone = base.step(own, jnp.full(1, 0.5), key=env_key)
    assert (stepped.obs["obs"] == alone.obs["obs"]).all() and stepped.reward == alone.reward


def test_a_sine_by_hand():
    about = Distractors("controllable", 2, "sine", seed=3)
    drawn = about.drawn(Pendulum().spec)
    state = about.begin(np.array([0.1, -0.2]), np.asarray(0.0))
    for _ in range(2):
        state = about.advance(drawn, state, np.array([0.5]), np.zeros(2), np.zeros(2), np)
    phase = np.array([0.2, -0.4]) + 2 * (drawn["speed"] + 0.5 * drawn["push"][:, 0])
    np.testing.assert_allclose(about.seen(state, np)[0], np.sin(phase), rtol=1e-6)


def test_switching_by_hand():
    about = Distractors("irrelevant", 2, "switching")
    drawn = about.drawn(Pendulum().spec)
    x, normal = np.array([0.3, -0.1]), np.array([1.0, -2.0])
    stayed = about.advance(drawn, (x, np.asarray(2)), np.zeros(1), normal, np.array([0.06, 0.0]), np)
    np.testing.assert_allclose(stayed[0], np.tanh(drawn["matrix"][2] @ x + drawn["bias"][2]) + 0.05 * normal, rtol=1e-6)
    assert stayed[1] == 2
    switched = about.advance(drawn, (x, np.asarray(2)), np.zeros(1), normal, np.array([0.04, 0.5]), np)
    assert switched[1] == 1  # 0.5 of three modes


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_both_twins_go_the_same_way(dynamics):
    about = Distractors("controllable", 4, dynamics)
    drawn, rng = about.drawn(Pendulum().spec), np.random.default_rng(0)
    plain = about.begin(rng.standard_normal(4).astype(np.float32), np.asarray(0.9))
    device = jax.tree.map(jnp.asarray, plain)
    for _ in range(5):
        action, normal = rng.uniform(-1, 1, 1).astype(np.float32), rng.standard_normal(4).astype(np.float32)
        coins = rng.random(2)
        plain = about.advance(drawn, plain, action, normal, coins, np)
        device = about.advance(jax.tree.map(jnp.asarray, drawn), device, action, normal, coins, jnp)
    np.testing.assert_allclose(about.seen(plain, np)[0], about.seen(device, jnp)[0], rtol=1e-4)


@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize("name", ["CartPole-v1", "dmc/cartpole-swingup"])
def test_host_environments_are_reproducible_and_restored(name, dynamics):
    settings = dict(kind="controllable and relevant", dims=3, dynamics=dynamics)
    batch = envs.make(name, num=2, seed=7, distract=settings)
    space = batch.spec.action
    action = np.ones((2, *space.shape), space.dtype)

    def go(ticks):
        steps = []
        for _ in range(ticks):
            batch.send(action)
            steps.append(batch.recv())
        return steps

    batch.reset(seed=7)
    go(2)
    snapshot = batch.snapshot()
    once = go(3)
    batch.restore(snapshot)
    again = go(3)
    for a, b in zip(once, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    assert not np.array_equal(once[0].obs[KEY][0], once[0].obs[KEY][1])  # every environment has its own
    batch.close()


def test_checked_like_any_environment():
    for name in ("jax/pendulum", "CartPole-v1"):
        assert check(name, steps=50, distract=dict(kind="relevant", dims=2, dynamics="switching")).ok


def test_repeated_above_it_moves_with_every_simulator_step():
    once, twice = (envs.make("jax/pendulum", action_repeat=n, distract=dict(dims=1)) for n in (1, 2))
    speed = Distractors(dims=1).drawn(Pendulum().spec)["speed"]
    for env, steps in ((once, 1), (twice, 2)):
        state, first = env.reset(key=KEYS)
        _, later = env.step(state, jnp.zeros(1), key=KEYS)
        phase = np.arcsin(np.clip(first.obs[KEY], -1, 1))
        ways = [np.sin(start + steps * speed) for start in (phase, np.pi - phase)]  # arcsin has two
        assert min(np.abs(way - later.obs[KEY])[0] for way in ways) < 1e-5
    with pytest.raises(ValueError, match="has an observation 'distractor' already"):
        distract(distract(Pendulum())).spec  # noqa: B018


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(kind="useful"), "kind is 'useful'; it must be one of irrelevant"),
        (dict(dynamics="waltz"), "dynamics is 'waltz'; it must be one of noise"),
        (dict(dims=0), "dims must be at least 1"),
        (dict(size=3), "'size' is unknown; the settings are kind"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        envs.make("jax/pendulum", distract=settings)


def test_specs_say_what_was_added():
    spec = distract(Pendulum(), "relevant", 4, dynamics="noise").spec
    assert spec.obs[KEY].shape == (4,) and not spec.obs[KEY].bounded
    assert spec.name == "jax/pendulum+4 relevant noise"
