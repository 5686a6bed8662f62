"""Exact values against closed forms and value iteration; the tables against what is sampled from them; F01."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.envs import tabular
from forethought.envs.tabular import Tabular
from forethought.ops.returns import lambda_returns
from forethought.types import Discrete, PerStep

KEY = jax.random.key(0)


def random_env(seed, states=6, actions=3):
    """A random environment whose last state is terminal, with zeros among the probabilities."""
    rng = np.random.default_rng(seed)
    transition = rng.dirichlet(np.ones(states), (states, actions)) * (rng.random((states, actions, states)) < 0.6)
    transition[..., 0] += 1e-3
    transition /= transition.sum(-1, keepdims=True)
    start = np.append(rng.dirichlet(np.ones(states - 1)), 0)
    terminal = np.arange(states) == states - 1
    return Tabular(transition, rng.normal(size=transition.shape), start=start, terminal=terminal)


def value_iteration(env, gamma, policy=None):
    """Sweeps of Bellman's equation, written as loops over single probabilities, until nothing moves."""
    states, actions, _ = env.transition.shape
    value = np.zeros(states)
    for _ in range(10_000):
        q = np.zeros((states, actions))
        for s in range(states):
            for a in range(actions):
                if not env.terminal[s]:
                    goes_on = [0 if env.terminal[p] else value[p] for p in range(states)]
                    q[s, a] = sum(
                        env.transition[s, a, p] * (env.reward[s, a, p] + gamma * goes_on[p]) for p in range(states)
                    )
        new = q.max(1) if policy is None else (policy * q).sum(1)
        if np.abs(new - value).max() < 1e-15:
            return new, q
        value = new
    raise AssertionError("no fixed point")


@pytest.mark.parametrize("seed, gamma", [(0, 0.9), (1, 0.6), (2, 0.0)])
def test_values_are_those_of_value_iteration(seed, gamma):
    env = random_env(seed)
    for found, expected in zip(env.optimal_values(gamma), value_iteration(env, gamma), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    policy = np.random.default_rng(seed).dirichlet(np.ones(3), 6)
    for found, expected in zip(env.policy_values(policy, gamma), value_iteration(env, gamma, policy), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length, gamma", [(2, 0.9), (5, 0.8), (40, 0.97)])
def test_corridor_has_its_closed_form(length, gamma):
    env = tabular.corridor(length)
    value, action_value = env.optimal_values(gamma)
    expected = np.array([gamma ** (length - 2 - s) for s in range(length - 1)] + [0])
    left = np.append(gamma * expected[np.maximum(np.arange(length - 1) - 1, 0)], 0)
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(action_value, np.stack([left, expected], 1), rtol=0, atol=1e-12)
    # A policy that always goes left never arrives.
    np.testing.assert_array_equal(env.policy_values(np.eye(2)[np.zeros(length, int)], gamma)[0], 0)


def test_corridor_under_a_random_policy_has_the_gamblers_closed_form():
    """With equal odds v(s) = gamma (v(s-1) + v(s+1)) / 2 and v(-1) = v(0): v is a multiple of x^(s+1) + x^-s for
    x + 1/x = 2 / gamma, which the reward of 1 on arrival scales so that its continuation to the end is 1 / gamma."""
    length, gamma = 6, 0.9
    x = 1 / gamma + np.sqrt(1 / gamma**2 - 1)
    shape = np.array([x ** (s + 1) + x**-s for s in range(length)])
    value, _ = tabular.corridor(length).policy_values(np.full((length, 2), 0.5), gamma)
    np.testing.assert_allclose(value[:-1], shape[:-1] / shape[-1] / gamma, rtol=1e-12)


@pytest.mark.parametrize(
    "make, values, action_values",
    [
        (tabular.constant_reward, [1], [[1]]),
        (tabular.obs_reward, [-1, 2], [[-1], [2]]),
        (tabular.delayed_reward, [0.9, 1], [[0.9], [1]]),
        (tabular.action_reward, [1], [[-1, 1]]),
        (tabular.action_obs_reward, [1, 1], [[1, -1], [-1, 1]]),
        (tabular.truncated_reward, [10], [[10]]),
    ],
)
def test_probes_have_the_values_that_they_say(make, values, action_values):
    env = make()
    going_on = ~env.terminal
    value, action_value = env.optimal_values(0.9)
    np.testing.assert_allclose(value[going_on], values, rtol=0, atol=1e-12)
    np.testing.assert_allclose(action_value[going_on], action_values, rtol=0, atol=1e-12)
    assert (value[env.terminal] == 0).all() and (action_value[env.terminal] == 0).all()


def play(env, policy, ticks, seed=0):
    """One stream of rows [T] that spans episodes: the time steps, and the actions taken at them."""

    def tick(carry, n):
        state, time_step = carry
        act_key, env_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), n))
        action = jax.random.categorical(act_key, jnp.log(jnp.asarray(policy))[state.state]).astype(jnp.int32)
        stepped, started = env.step(state, action, key=env_key), env.reset(key=env_key)
        carry = jax.tree.map(lambda a, b: jnp.where(time_step.last, a, b), started, stepped)
        return carry, (time_step, action)

    rows = jax.jit(lambda: jax.lax.scan(tick, env.reset(key=jax.random.key(seed + 1)), jnp.arange(ticks))[1])()
    return jax.tree.map(np.asarray, rows)


def test_samples_follow_the_tables():
    env = random_env(3, states=4, actions=2)
    time_step, action = play(env, np.full((4, 2), 0.5), 40_000)
    state = time_step.obs["state"]
    pairs = np.flatnonzero(~time_step.last[:-1])
    counts = np.zeros((4, 2, 4))
    np.add.at(counts, (state[pairs], action[pairs], state[pairs + 1]), 1)
    total = counts.sum(-1, keepdims=True)
    expected = env.transition[:3]
    deviation = np.abs(counts / np.maximum(total, 1) - env.transition)[:3]
    assert (deviation < 4.5 * np.sqrt(expected * (1 - expected) / total[:3]) + 1e-12).all()
    assert (total[:3] > 500).all() and counts[3].sum() == 0
    np.testing.assert_allclose(
        time_step.reward[pairs + 1], env.reward[state[pairs], action[pairs], state[pairs + 1]], rtol=1e-6
    )
    np.testing.assert_array_equal(time_step.discount == 0, state == 3)  # no time limit: it ends by terminating
    np.testing.assert_array_equal(time_step.last, state == 3)
    starts = np.bincount(state[time_step.first], minlength=4) / time_step.first.sum()
    error = 4.5 * np.sqrt(env.start * (1 - env.start) / time_step.first.sum())
    assert (np.abs(starts - env.start) <= error + 1e-12).all()


def test_a_time_limit_truncates_and_a_termination_on_it_terminates():
    env = tabular.corridor(3, time_limit=2)
    state, time_step = env.reset(key=KEY)
    seen = []
    for action in (1, 1):
        state, time_step = env.step(state, jnp.int32(action), key=KEY)
        seen.append((int(time_step.obs["state"]), bool(time_step.last), float(time_step.discount)))
    assert seen == [(1, False, 1.0), (2, True, 0.0)] and time_step.reward == 1
    state, time_step = env.reset(key=KEY)
    for _ in range(2):
        state, time_step = env.step(state, jnp.int32(0), key=KEY)
    assert time_step.last and time_step.discount == 1 and time_step.reward == 0
    assert time_step.duration == 1 and not time_step.first


def td_values(env, gamma, lam, ticks, sweeps):
    """Tabular TD(lambda) on rows of the environment: V moves to the mean target of each state, exactly backed up."""
    policy = np.full(env.transition.shape[:2], 1 / env.transition.shape[1])
    time_step = jax.tree.map(jnp.asarray, play(env, policy, ticks)[0])
    reward, factor = jax.vmap(PerStep(gamma))(time_step)
    state = time_step.obs["state"]
    acted = np.asarray(state[:-1])[going_on := ~np.asarray(time_step.last[:-1])]
    backup = jax.jit(lambda value: lambda_returns(reward, factor, value[state], time_step.last, lam))
    value = np.zeros(len(env.start))
    for _ in range(sweeps):
        targets = np.asarray(backup(jnp.asarray(value, jnp.float32)))
        total = np.bincount(acted, targets[going_on], minlength=len(value))
        value = total / np.maximum(np.bincount(acted, minlength=len(value)), 1)
    return value


@pytest.mark.parametrize("lam", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("gamma, limit", [(0.9, 5), (0.9, 1), (0.7, 3)])
def test_a_time_limit_is_not_a_termination(gamma, limit, lam):
    """Faulty backups, which take the limit for the end, find sum gamma^k up to the limit: 4.0951 for 0.9 and 5."""
    env = tabular.truncated_reward(limit)
    found = td_values(env, gamma, lam, ticks=97, sweeps=200)
    np.testing.assert_allclose(found, [1 / (1 - gamma)], rtol=1e-5)


def test_learned_values_of_a_truncated_corridor_ignore_its_limit():
    """Deterministic rows: TD(0) from them is exact up to how often each action was drawn."""
    env = tabular.corridor(4, time_limit=6)
    found = td_values(env, 0.9, 0.0, ticks=30_000, sweeps=60)
    expected, _ = env.policy_values(np.full((4, 2), 0.5), 0.9)
    np.testing.assert_allclose(found, expected, atol=0.02)  # action frequencies: 0.5 +- 0.01 of values up to 1


def test_what_it_declares_is_what_it_does():
    env = tabular.corridor(5)
    assert env.spec.obs["state"] == Discrete(5) and env.spec.action == Discrete(2) and env.spec.time_limit == 50
    _, time_step = env.reset(key=KEY)
    assert time_step.obs["state"].dtype == np.int32 and time_step.first and time_step.obs["state"] == 0


def test_an_action_that_does_not_exist_shows_as_nan():
    env = tabular.corridor(5)
    state, _ = env.reset(key=KEY)
    for action, finite in ((0, True), (1, True), (2, False), (-1, False)):
        assert np.isfinite(env.step(state, jnp.int32(action), key=KEY)[1].reward) == finite


def test_the_tables_may_be_traced_or_closed_over():
    env = random_env(4)
    state, _ = env.reset(key=KEY)
    step = eqx.filter_jit(lambda e, s, k: e.step(s, jnp.int32(1), key=k))
    closure = jax.jit(lambda s, k: env.step(s, jnp.int32(1), key=k))
    for key in jax.random.split(KEY, 5):
        traced, closed = step(env, state, key), closure(state, key)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), traced, closed))


def bad(**changes):
    fields = {
        "transition": np.array([[[0.5, 0.5]], [[0.0, 1.0]]]),
        "reward": np.zeros((2, 1, 2)),
        "start": np.array([1.0, 0.0]),
        "terminal": np.array([False, True]),
    } | changes
    return Tabular(fields.pop("transition"), fields.pop("reward"), **fields)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"transition": np.array([[[0.5, 0.4]], [[0.0, 1.0]]])}, "transition holds"),
        ({"transition": np.array([[[1.5, -0.5]], [[0.0, 1.0]]])}, "transition holds"),
        ({"transition": np.array([[[np.nan, 1]], [[0.0, 1.0]]])}, "transition holds"),
        ({"start": np.array([0.7, 0.0])}, "start holds"),
        ({"start": np.array([0.5, 0.5])}, "terminal state"),
        ({"reward": np.full((2, 1, 2), np.inf)}, "reward holds"),
        ({"time_limit": 0}, "time_limit is 0"),
    ],
)
def test_bad_tables_are_refused(changes, says):
    bad()
    with pytest.raises(ValueError, match=says):
        bad(**changes)


def test_bad_questions_are_refused():
    env = tabular.corridor(3)
    for gamma in (1.0, -0.1, np.nan):
        with pytest.raises(ValueError, match="gamma"):
            env.optimal_values(gamma)
    with pytest.raises(ValueError, match="policy"):
        env.policy_values(np.full((3, 2), 0.6), 0.9)
    with pytest.raises(ValueError, match="length is 1"):
        tabular.corridor(1)
