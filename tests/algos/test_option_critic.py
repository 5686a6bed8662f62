import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought import collect
from forethought.algos import option_critic as oc
from forethought.envs.control import Pendulum
from forethought.envs.tabular import corridor
from forethought.types import PerStep

RULE = PerStep(0.9)
update = jax.jit(oc.update, static_argnums=0)
TABLE = oc.Config(options=2, layers=0, envs=2, ticks=6, epsilon=0.2)


def tables(cfg, env, q, stop, logits=None):
    """A state whose heads are these tables: [S, O], [S, O] of probabilities and [S, O, A]."""
    state = oc.init(cfg, env.spec, key=jax.random.key(0))
    head = lambda x: jnp.asarray(np.reshape(x, (len(x), -1)), jnp.float32).T  # noqa: E731
    chances = np.clip(np.asarray(stop, float), 1e-6, 1 - 1e-6)
    net = eqx.tree_at(
        lambda n: (n.q.weight, n.stop.weight), state.net, (head(q), head(np.log(chances / (1 - chances))))
    )
    if logits is not None:
        net = eqx.tree_at(lambda n: n.act.weight, net, head(logits))
    return dataclasses.replace(state, net=net)


def rows(cfg, env, state, ticks, seed=0):
    policy = oc.policy(cfg, state)
    stream = collect.begin(env, policy, 0, key=jax.random.key(seed))
    stream, found = collect.collect(env, policy, stream, ticks, policy_version=jnp.int32(0))
    return found, stream.time_step


def test_an_option_runs_until_it_stops_and_both_levels_stand_in_the_rows():
    env = corridor(6)
    q = np.tile([1.0, 2.0], (6, 1))
    state = tables(TABLE, env, q, np.tile([0.0, 0.5], (6, 1)))
    found, _ = rows(TABLE, env, state, 400)
    option, started, chance = (
        np.asarray(x) for x in (found.extras.option, found.extras.started, found.extras.log_prob)
    )
    first, last = np.asarray(found.time_step.first), np.asarray(found.time_step.last)
    assert (
        started[first].all() and (option[1:][~started[1:] & ~last[1:]] == option[:-1][~started[1:] & ~last[1:]]).all()
    )
    after = np.flatnonzero(started & ~first & ~last)
    assert (option[after - 1] == 1).all() and len(after) > 30  # option 0 never stops
    # Stopping at 1/2 and choosing 1 greedily: 0.5 * 0.9; going on: 0.5; at an episode's start: 0.9 or 0.1.
    for i in after:
        assert np.exp(chance[i]) == pytest.approx(0.5 * (0.9 if option[i] == 1 else 0.1), rel=1e-4)
    goes_on = ~started & ~last & (option == 1)
    np.testing.assert_allclose(np.exp(chance[goes_on]), 0.5, rtol=1e-4)
    begun = first & (option == 1)
    np.testing.assert_allclose(np.exp(chance[begun]), 0.9, rtol=1e-4)


def by_hand(cfg, env, state, found, pending):
    """Losses of the equations in the file's head, one step after the other, from the tables."""
    net, spec = state.net, cfg
    obs = np.append(np.asarray(found.time_step.obs["state"]), int(pending.obs["state"]))
    weight = lambda head: np.asarray(head.weight, float).T  # noqa: E731
    q, stop = weight(net.q)[obs], 1 / (1 + np.exp(-weight(net.stop)[obs]))
    logits = weight(net.act)[obs].reshape(len(obs), cfg.options, -1)
    pi = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    join = lambda name: np.append(np.asarray(getattr(found.time_step, name)), np.asarray(getattr(pending, name)))  # noqa: E731
    reward, discount, last = join("reward"), join("discount"), join("last")
    option, action = np.asarray(found.extras.option), np.asarray(found.action)
    v = (1 - spec.epsilon) * q.max(1) + spec.epsilon * q.mean(1)
    count, target = len(option), np.zeros(len(option))
    for t in reversed(range(count)):
        b = stop[t + 1, option[t]]
        u = (1 - b) * q[t + 1, option[t]] + b * v[t + 1]
        later = u if t + 1 == count or last[t + 1] else (1 - spec.lam) * u + spec.lam * target[t + 1]
        target[t] = reward[t + 1] + 0.9 * discount[t + 1] * later
    named = dict.fromkeys(("critic", "actor", "termination"), 0.0)
    for t in range(count):
        if last[t]:
            continue
        o, own = option[t], pi[t, option[t]]
        named["critic"] += (q[t, o] - target[t]) ** 2 / count
        gain = -np.log(own[action[t]]) * (target[t] - q[t, o]) + spec.entropy * np.sum(own * np.log(own))
        named["actor"] += gain / count
        if discount[t + 1] != 0:
            named["termination"] += stop[t + 1, o] * (q[t + 1, o] - v[t + 1] + spec.deliberation) / count
    return named


def test_losses_are_the_equations():
    env = corridor(4, time_limit=5)
    rng = np.random.default_rng(1)
    cfg = dataclasses.replace(TABLE, ticks=40, lam=0.7, deliberation=0.05)
    state = tables(cfg, env, rng.normal(size=(4, 2)), rng.uniform(0.1, 0.9, (4, 2)), rng.normal(size=(4, 2, 2)))
    found, pending = rows(cfg, env, state, 40)
    ends = np.asarray(found.time_step.last)
    assert ends.sum() > 3 and (np.asarray(found.time_step.discount)[ends] != 0).any()  # truncations among them
    _, metrics = oc.losses(cfg, state.net, found, pending, RULE)
    for name, value in by_hand(cfg, env, state, found, pending).items():
        assert float(metrics[f"real/loss/{name}"]) == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_trace_is_not_cut_on_the_step_that_reaches_the_goal():
    # F10: three steps to the reward; with lambda 1 one episode moves all three state-actions.
    env = corridor(4)
    cfg = dataclasses.replace(TABLE, options=1, ticks=4, envs=1, lam=1.0, learning_rate=0.1)
    right = np.zeros((4, 1, 2))
    right[..., 1] = 50.0
    state = tables(cfg, env, np.zeros((4, 1)), np.zeros((4, 1)), right)
    found, pending = rows(cfg, env, state, 4)
    assert found.time_step.last.tolist() == [False, False, False, True]
    after, _ = update(cfg, state, *jax.tree.map(lambda x: x[None], (found, pending)), RULE)
    moved = np.asarray(after.net.q.weight)[0] - np.asarray(state.net.q.weight)[0]
    assert (moved[:3] > 0).all() and moved[3] == 0


def test_every_part_learns():
    env = corridor(4, time_limit=5)
    cfg = dataclasses.replace(TABLE, layers=1, units=8, ticks=20)
    state = oc.init(cfg, env.spec, key=jax.random.key(1))
    found, pending = rows(cfg, env, state, 20)
    batch = jax.tree.map(lambda x: x[None], (found, pending))
    once, _ = update(cfg, state, *batch, RULE)
    twice, _ = update(cfg, once, *batch, RULE)  # q is 0 at first, so that terminations have nothing to prefer
    for name in ("torso", "q", "act", "stop"):
        before, after = (
            jax.tree.leaves(eqx.filter(getattr(s.net, name), eqx.is_inexact_array)) for s in (state, twice)
        )
        assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True)), name


def test_it_learns_a_corridor_with_one_option_and_with_several():
    env = corridor(8)
    for options in (1, 3):
        cfg = oc.Config(options=options, layers=0, envs=8, ticks=16, learning_rate=0.05)
        state, metrics = jax.jit(lambda key, cfg=cfg: oc.run(cfg, env, RULE, 250, key=key))(jax.random.key(2))
        found, _ = rows(cfg, env, dataclasses.replace(state), 200, seed=5)
        ends = np.flatnonzero(np.asarray(found.time_step.last))
        lengths = np.diff(ends) - 1  # a reset takes a row
        assert lengths[:10].mean() < 9  # 7 is the shortest
        # The start is worth gamma^6 = 0.531 at best.
        assert 0.4 < float(state.net(jax.tree.map(lambda x: x[0], found.time_step))[0].max()) < 0.56
        assert metrics["real/reward"].shape == (250,)


def test_bad_settings_are_refused():
    for wrong in ({"options": 0}, {"lam": 1.5}, {"epsilon": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            oc.Config(**wrong)
    with pytest.raises(ValueError, match="its are continuous"):
        oc.init(TABLE, Pendulum().spec, key=jax.random.key(0))
    assert set(oc.METRICS) >= {f"real/loss/{x}" for x in ("critic", "actor", "termination")}
