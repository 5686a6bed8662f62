"""What each loss trains and what it leaves alone, the two time scales of the returns, and what both levels record."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from forethought import collect, devices, levels
from forethought.algos import director
from forethought.envs import tabular
from forethought.envs.distractor import Distractor
from forethought.models.goals import Goals, similarity
from forethought.ops import loops
from forethought.tree import named_arrays
from forethought.types import Box, EndReason, PerStep, Spec

KEY = jax.random.key(0)
RULE = PerStep(0.9)
TINY = director.Config(
    deter=16, hidden=16, stoch=4, classes=4, units=16, blocks=2, layers=1, bins=21, bin_limit=4.0, goal_variables=2,
    goal_classes=3, span=3, envs=2, ticks=4, updates=2, prefill=64, capacity=512, batch=4, length=6, horizon=7,
    starts=3, gamma=0.9, learning_rate=3e-3, warmup=0, free_nats=0.0, scale_rate=1.0,
)  # fmt: skip
CASES = {
    "two levels": (tabular.corridor(4, time_limit=6), TINY),
    "two levels, continuous": (Distractor(action_bound=1.0), TINY),
    "flat": (tabular.corridor(4, time_limit=6), dataclasses.replace(TINY, goals=False)),
}
cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture
def losses_with_gradients(monkeypatch):
    """Losses as `update` returns them, not only their sum, have gradients where all rows are one chunk."""

    def whole(loss, params, inputs, data):
        rows = jax.tree.leaves(inputs)[0].shape[0]
        return loss(params, inputs, jax.tree.map(lambda x: x[:rows], data))

    monkeypatch.setattr(loops, "chunked", whole)


@functools.cache
def begun(case):
    """(cfg, a fresh agent, windows [B, T] of its own play, the compiled update, and the agent after three)."""
    env, cfg = CASES[case]
    agent = before = fresh(cfg, env)
    _, rows = played(env, cfg, agent, cfg.batch * cfg.length)
    rows = jax.tree.map(lambda x: x.reshape(cfg.batch, cfg.length, *x.shape[1:]), rows)
    update = jax.jit(lambda agent, rows, key: director.update(cfg, agent, rows, RULE, key=key))
    for i in range(3):
        agent, metrics = update(agent, rows, jax.random.key(i))
    assert metrics.keys() == director.METRICS.keys()
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    return cfg, before, rows, update, agent


def fresh(cfg, env):
    return jax.jit(lambda: director.init(cfg, env.spec, key=KEY))()


def played(env, cfg, agent, count, reach=2.0):
    """The sampling policy of an agent, and rows of its play."""
    policy = director.policy(cfg, agent)
    policy = dataclasses.replace(policy, pursuing=dataclasses.replace(policy.pursuing, reach=reach))

    @jax.jit
    def play(policy):
        stream = collect.begin(env, policy, 0, key=KEY)
        return collect.collect(env, policy, stream, count, policy_version=agent.updates)[1]

    return policy, play(policy)


@cases
def test_every_array_moves(case):
    _, before, _, _, after = begun(case)
    was, now = named_arrays(before), named_arrays(after)
    for name in was:
        if name.startswith(("params", "slow", "scales")):
            assert not np.array_equal(was[name], now[name]), f"{name} has not moved"
    assert now["updates"] == 3


@cases
def test_each_loss_trains_what_it_says(case, losses_with_gradients):
    """The header of `director`: no gradient passes from one of the four that learn to another."""
    cfg, _, rows, _, agent = begun(case)
    seen = {"model/recurrence", "model/encoder", "model/posterior"}
    reach = {
        "real/loss/dynamics": seen | {"model/prior"},
        "real/loss/representation": seen,
        "real/loss/obs": seen | {"model/decoder"},
        "real/loss/reward": seen | {"model/reward"},
        "real/loss/discount": seen | {"model/discount"},
        "real/loss/goal": {"levels/goals"},
        "imagined/loss/high": {"levels/high"} if cfg.goals else {"levels/low"},
        "imagined/loss/low": {"levels/low"} if cfg.goals else set(),
        "imagined/loss/task": {"critics/task"},
        "imagined/loss/novelty": {"critics/novelty"},
        "imagined/loss/goal": {"critics/goal"} if cfg.goals else set(),
    }
    assert set(reach) == {name for name in director.METRICS if "/loss/" in name}

    def losses(params):
        metrics = director.update(cfg, dataclasses.replace(agent, params=params), rows, RULE, key=KEY)[1]
        return jnp.stack([metrics[name] for name in reach])

    slopes = named_arrays(jax.jit(jax.jacrev(losses))(agent.params))
    for place, (name, expected) in enumerate(reach.items()):
        moved = {"/".join(array.split("/")[:2]) for array, slope in slopes.items() if np.any(slope[place] != 0)}
        assert moved == expected, name


def test_two_devices_that_share_a_batch_make_the_same_update():
    cfg, _, rows, _, agent = begun("two levels")
    # Which rollouts practise depends on their place among a device's own.
    cfg = dataclasses.replace(cfg, practice=0.0)
    alone = jax.jit(lambda agent, rows, key: director.update(cfg, agent, rows, RULE, key=key))(agent, rows, KEY)[1]
    shared = devices.replicated(
        lambda agent, rows, key: director.update(
            cfg, agent, devices.SHARED.share(rows), RULE, key=key, axis=devices.SHARED
        ),
        2,
    )
    together = jax.jit(shared)(agent, rows, KEY)[1]
    for name in alone:
        np.testing.assert_allclose(together[name], alone[name], rtol=2e-5, atol=1e-5, err_msg=name)


def test_similarity_is_one_at_the_goal_alone():
    """max-cosine: of (3, 4) to itself 1; to twice itself 50 / 100; to a perpendicular 0; to its opposite -1."""
    goal = jnp.array([3.0, 4.0])
    states = jnp.array([[3.0, 4.0], [6.0, 8.0], [-4.0, 3.0], [-3.0, -4.0]])
    np.testing.assert_allclose(jax.vmap(similarity, (None, 0))(goal, states), [1.0, 0.5, 0.0, -1.0], atol=1e-6)
    assert similarity(jnp.zeros(2), jnp.zeros(2)) == 0


def test_goals_learn_to_stand_for_states():
    """Four clusters of states and nine codes: each cluster's code stands for it, and what lies elsewhere is novel."""
    goals = Goals(8, 2, 3, 32, 1, key=KEY)
    centres = jnp.concatenate([jnp.eye(4), -jnp.eye(4)], 1)
    optimiser = optax.adam(3e-3)

    @jax.jit
    def step(goals, held, key):
        states = centres[jax.random.randint(key, (64,), 0, 4)]
        slope = eqx.filter_grad(lambda g: g.loss(states, 1e-3, key=key).mean())(goals)
        moves, held = optimiser.update(slope, held)
        return eqx.apply_updates(goals, moves), held

    held = optimiser.init(eqx.filter(goals, eqx.is_inexact_array))
    for i in range(800):
        goals, held = step(goals, held, jax.random.key(i))
    assert len({tuple(x.tolist()) for x in goals.code(centres)}) == 4
    np.testing.assert_allclose(goals.target(goals.code(centres)), centres, atol=0.1)
    assert goals.novelty(centres).max() < 0.01 < 0.1 < goals.novelty(jnp.full(8, 1.0))


@pytest.mark.parametrize("reach, why, durations", [(2.0, EndReason.LIMIT, {3}), (-2.0, EndReason.GOAL, {1})])
def test_a_goal_is_over_when_it_is_reached_or_late(reach, why, durations):
    """Of span 3, never reached or reached at once: every run but an episode's last ends so, and after so long."""
    env, cfg = CASES["two levels"]
    policy, rows = played(env, cfg, fresh(cfg, env), 60, reach)
    record, own = director.recorded(policy, rows, RULE, key=KEY)
    found = levels.runs(record, own)
    by_itself = found.reason != EndReason.EPISODE
    assert set(found.reason[by_itself]) == {why} and set(found.steps[by_itself]) == durations
    assert (found.reason == EndReason.EPISODE).sum() == rows.time_step.last.sum()
    np.testing.assert_array_equal(found.steps, found.duration)
    # The corridor pays 1 at its end alone: what a run is worth is gamma^(k - 1) of it.
    paid = found.task == 1
    assert paid.any()
    np.testing.assert_allclose(found.reward[paid], 0.9 ** (found.steps[paid] - 1), rtol=1e-6)
    assert np.isfinite(found.log_prob).all() and (found.log_prob < 0).all()


def test_training_data_is_known_by_the_policy_that_made_it():
    """Log-probabilities of both levels, recorded and now: nearly all weight for the policy itself, less for another.

    Latents are drawn anew, so that even the same policy's differ a little."""
    env, cfg = CASES["two levels"]
    agent = begun("two levels")[-1]
    other = eqx.tree_at(lambda a: a.params.levels.high, agent, jax.tree.map(lambda x: 30 * x, agent.params.levels.high))
    policy, rows = played(env, cfg, agent, 200)
    says = jax.jit(director.log_probs)
    high, low = (np.asarray(x) for x in says(policy, rows, key=KEY))
    acted, started = ~np.asarray(rows.time_step.last), np.asarray(rows.extras.started)
    same = levels.same_policy(np.asarray(rows.extras.log_prob)[started], high[started])
    assert same["effective"] > 0.95
    assert levels.same_policy(np.asarray(rows.log_prob)[acted], low[acted])["effective"] > 0.95
    high = np.asarray(says(director.policy(cfg, other), rows, key=KEY)[0])
    assert levels.same_policy(np.asarray(rows.extras.log_prob)[started], high[started])["effective"] < 0.9


def test_rewards_of_the_high_level_are_summed_over_its_goals():
    """Without practice a goal of span 3 is chosen in rows 0, 3, 6 of a dream of 7 steps. With gamma .9, lam 1 and a
    reward of 1 a step, a value of 0 everywhere: 7 steps from row 0 are worth (1 - .9^7) / (1 - .9)."""
    env, _ = CASES["two levels"]
    cfg = dataclasses.replace(TINY, practice=0.0, lam=1.0)
    agent = fresh(cfg, env)
    model = agent.params.model
    latent = jax.tree.map(lambda x: jnp.repeat(x[None], 5, 0), model.initial())
    acts = director.policy(cfg, agent)
    void = jax.jit(lambda: acts(acts.initial(), collect.blank(env.spec), key=KEY)[1])()
    begin = lambda key: collect.row_of(env.reset(key=key)[1], void, jnp.int32(0))  # noqa: E731
    rows = jax.vmap(begin)(jax.random.split(KEY, 5))

    class One(PerStep):
        def __call__(self, time_step):
            return jnp.ones_like(time_step.reward), jnp.full_like(time_step.reward, 0.9)

    dreaming = jax.jit(
        lambda *at: director._dream(agent.params, cfg, One(0.9), *at, jax.random.split(KEY, 5), version=jnp.int32(0))
    )
    dream, returns = dreaming(latent, rows)
    np.testing.assert_array_equal(np.flatnonzero(dream.started[:-1, 0]), [0, 3, 6])
    expected = [(1 - 0.9 ** (7 - t)) / 0.1 for t in range(7)]
    np.testing.assert_allclose(returns["task"][:, 0], expected, rtol=1e-5)


@cases
def test_acting_changes_nothing_but_its_carry(case):
    env, cfg = CASES[case]
    agent = begun(case)[-1]
    policy = director.policy(cfg, agent, greedy=True)
    play = jax.jit(lambda key: collect.episode(env, policy, policy_version=agent.updates, key=key))
    for one, other in zip(jax.tree.leaves(play(KEY)), jax.tree.leaves(play(KEY)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "field, value", [("starts", 7), ("span", 0), ("goal_classes", 0), ("gamma", 1.1), ("batch", 0)]
)
def test_fields_that_cannot_be_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(TINY, **{field: value})


def test_unbounded_actions_are_refused():
    with pytest.raises(ValueError, match="toy: .*bound"):
        director.init(TINY, Spec("toy", {"x": Box((2,))}, Box((1,))), key=KEY)


@pytest.mark.parametrize("preset", director.PRESETS)
def test_presets_are_configurations(preset):
    assert isinstance(director.Config(**director.PRESETS[preset]), director.Config)
