import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from forethought.algos import smdp
from forethought.algos.smdp import Config, learn, learn_within, learned_model, one_step, run
from forethought.discovery import door_options
from forethought.envs.mazes import FOUR_ROOMS, Layout, four_rooms, maze
from forethought.envs.tabular import Tabular, corridor, truncated_reward
from forethought.ops.dynamic import (
    action_values,
    constrained,
    interrupted,
    option_model,
    policy_evaluation,
    primitive,
    value_iteration,
)  # fmt: skip
from forethought.option_env import OptionEnv
from forethought.options import TabularOption, primitives
from forethought.types import EndReason, PerStep
from sojourns import AT_START, Lasting

RULE = PerStep(0.9)
KEY = jax.random.key(0)
TWO = Layout(("#######", "#..#..#", "#.....#", "#..#..#", "#######"))


def exact(env, options, gamma=0.9):
    actions = env.tables(gamma)
    return _joined(actions, [(o.initiation, o.policy, o.stop) for o in options], [o.stop for o in options])


def test_one_step_options_equal_the_flat_learner_bit_for_bit():
    env, cfg = corridor(6), Config(alpha=0.3, epsilon=0.2)
    flat, seen = jax.jit(lambda k: learn(cfg, env, RULE, 600, key=k))(KEY)
    over = OptionEnv(env, primitives(env.spec), RULE)
    same, steps = jax.jit(lambda k: learn(cfg, over, RULE, 600, key=k))(KEY)
    assert np.array_equal(flat.q, same.q) and float(np.abs(flat.q).max()) > 0.5
    for name in ("reward", "discount", "duration", "last", "first"):
        assert np.array_equal(getattr(seen, name), getattr(steps, name)), name


def test_smdp_q_learning_finds_the_exact_values_of_options():
    env = maze(TWO, start=None, goal=(1, 5), time_limit=40, name="two")
    options = [*one_step(13, 4), *door_options(TWO.arrivals(), radius=2)]
    assert len(options) == 6
    model = exact(env, options)
    q = action_values(model, value_iteration(model))
    for method in ("smdp", "intra"):
        cfg = Config(method=method, alpha=0.5, epsilon=0.5)
        state, _ = jax.jit(lambda k, cfg=cfg: run(cfg, env, options, RULE, 20_000, key=k))(KEY)
        may = model.legal & ~env.terminal[:, None]
        np.testing.assert_allclose(np.asarray(state.q)[may], q[may], atol=2e-3)


def test_intra_option_learning_learns_of_options_that_were_never_chosen():
    env = maze(TWO, start=None, goal=(1, 5), time_limit=40, name="two")
    doors = door_options(TWO.arrivals(), radius=2)
    nowhere = [TabularOption(np.zeros(13, bool), o.policy, o.stop) for o in doors]
    cfg = Config(method="intra", alpha=0.5, epsilon=1.0, model=True)
    state, record = jax.jit(lambda k: run(cfg, env, [*one_step(13, 4), *nowhere], RULE, 20_000, key=k))(KEY)
    assert int(record.option.max()) == 3
    told, model = learned_model(state, [*one_step(13, 4), *doors], env.terminal), exact(env, doors)
    inside = np.stack([o.stop < 1 for o in doors], 1)  # elsewhere they may start, but are not at home
    np.testing.assert_allclose(told.reward[:, 4:][inside], model.reward[inside], atol=1e-3)
    # What arrives at the goal has a reward in place of a value.
    told_there, there = told.arrival[:, 4:][inside], (model.arrival * ~env.terminal)[inside]
    np.testing.assert_allclose(told_there, there, atol=1e-3)
    flat = env.tables(0.9)
    np.testing.assert_allclose(told.reward[:, :4], flat.reward, atol=1e-3)


def test_planning_with_learned_models_gives_the_values():
    env = maze(TWO, start=None, goal=(1, 5), time_limit=40, name="two")
    options = [*one_step(13, 4), *door_options(TWO.arrivals(), radius=2)]
    cfg = Config(method="intra", alpha=0.5, epsilon=0.7, model=True)
    state, _ = jax.jit(lambda k: run(cfg, env, options, RULE, 20_000, key=k))(KEY)
    value, _ = env.optimal_values(0.9)
    np.testing.assert_allclose(value_iteration(learned_model(state, options, env.terminal)), value, atol=2e-3)


@pytest.mark.parametrize("method", ["smdp", "intra"])
def test_a_time_limit_inside_an_option_bootstraps(method):
    # One state, reward 1 for ever, cut every 5 steps: V = 10 whatever the option's length.
    stay = [TabularOption(np.ones(1, bool), np.ones((1, 1)), np.zeros(1)), *one_step(1, 1)]
    cfg = Config(method=method, alpha=0.3, epsilon=0.5, max_steps=3)
    state, record = jax.jit(lambda k: run(cfg, truncated_reward(5), stay, RULE, 3000, key=k))(KEY)
    np.testing.assert_allclose(state.q, [[10.0, 10.0]], rtol=1e-3)
    reasons = set(np.asarray(record.reason).tolist())
    assert reasons == {EndReason.RUNNING, EndReason.LIMIT, EndReason.EPISODE, EndReason.STOPPED}


def test_levels_are_recorded_apart_and_agree():
    env = four_rooms(time_limit=200)
    options = [*one_step(104, 4), *door_options(FOUR_ROOMS.arrivals())]
    cfg = Config(epsilon=0.3, alpha=0.2)
    _, record = jax.jit(lambda k: run(cfg, env, options, RULE, 4000, key=k))(KEY)
    r = jax.tree.map(np.asarray, record)
    begun = np.flatnonzero(r.started)
    over = np.flatnonzero(r.reason != EndReason.RUNNING)
    assert len(over) in (len(begun), len(begun) - 1)
    for start, end in zip(begun, over, strict=False):
        rewards = r.reward[start : end + 1]
        assert r.acted[start : end + 1].all() and r.duration[end] == end - start + 1
        assert r.rbar[end] == pytest.approx(float(np.sum(0.9 ** np.arange(len(rewards)) * rewards)), rel=1e-5)
        assert (r.option[start : end + 1] == r.option[start]).all()
        assert len(set(r.option_log_prob[start : end + 1])) == len(set(r.version[start : end + 1])) == 1
    assert (r.reason[r.ended] == EndReason.EPISODE).all() and (np.diff(r.version) >= 0).all()
    assert r.option_log_prob[begun].max() <= 0 and set(r.log_prob[r.acted]) == {0.0}
    assert not r.acted[1:][r.ended[:-1]].any()  # the tick of a reset


def test_the_interrupted_policy_is_nowhere_worse_on_random_problems():
    rng = np.random.default_rng(0)
    better = 0
    for _ in range(200):
        states, actions = 8, 3
        transition = rng.dirichlet(np.full(states, 0.3), size=(states, actions))
        flat = primitive(transition, rng.normal(size=(states, actions, states)), np.zeros(states, bool), 0.9)
        options = [
            (np.ones(states, bool), rng.dirichlet(np.ones(actions), size=states), rng.uniform(0, 0.5, states))
            for _ in range(3)
        ]
        before = _joined(flat, options, [s for *_, s in options])
        policy = rng.dirichlet(np.ones(3), size=states)
        value = policy_evaluation(before, policy)
        q = action_values(before, value)
        after = _joined(flat, options, [interrupted(s, q[:, k], value) for k, (*_, s) in enumerate(options)])
        gain = policy_evaluation(after, policy) - value
        assert gain.min() > -1e-10
        better += gain.max() > 1e-6
    assert better > 150  # and somewhere better, in most


def _joined(flat, options, stops):
    pairs = zip(options, stops, strict=True)
    first, *rest = [option_model(flat, begin, policy, stop) for (begin, policy, _), stop in pairs]
    for model in rest:
        first = first.beside(model)
    return first


def test_interrupting_while_acting_cuts_an_option_that_passes_the_goal_by():
    # A line of 9; the option goes right to the end, the goal's branch is left of it: with values known it gives way.
    length = 9
    arrives = np.array([[max(s - 1, 0), min(s + 1, length - 1)] for s in range(length)])
    pays = np.zeros((length, 2, length))
    pays[4, 0, 3] = 1.0  # only a step left from 4 pays
    env = Tabular(np.eye(length)[arrives], pays, start=np.eye(length)[0], terminal=np.arange(length) == 8,
                  time_limit=60, name="branch")  # fmt: skip
    right = TabularOption(np.arange(length) < 8, np.eye(2)[np.ones(length, int)], (np.arange(length) == 8) * 1.0)
    options = [*one_step(length, 2), right]
    cfg = Config(alpha=0.3, epsilon=0.3, interrupt=True)
    _, record = jax.jit(lambda k: run(cfg, env, options, RULE, 6000, key=k))(KEY)
    cut = np.asarray(record.reason) == EndReason.INTERRUPTED
    assert cut[3000:].sum() > 20 and (np.asarray(record.option)[cut] == 2).all()
    _, plain = jax.jit(lambda k: run(Config(alpha=0.3, epsilon=0.3), env, options, RULE, 6000, key=k))(KEY)
    assert float(record.reward.sum()) > float(plain.reward.sum())


def test_bad_settings_and_stochastic_options_are_refused():
    for wrong in ({"alpha": 2.0}, {"epsilon": -0.1}, {"max_steps": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Config(**wrong)
    drawn = TabularOption(np.ones(6, bool), np.full((6, 2), 0.5), np.zeros(6))
    with pytest.raises(ValueError, match="one draws it"):
        run(Config(method="intra"), corridor(6), [drawn], RULE, 10, key=KEY)
    with pytest.raises(ValueError, match="'second'"):
        run(Config(), corridor(6), [drawn], PerStep(0.9, "second"), 10, key=KEY)
    assert smdp.best(jnp.array([1.0, 3.0]), jnp.array([True, False])) == 1


def test_a_budget_of_expected_time_is_learned():
    """Success pays 1 and waiting costs nothing; steps last uniformly long about their means, and an option stands
    beside the actions. The budget is half-way between the quickest policy's time and the best one's."""
    rng = np.random.default_rng(0)
    transition, terminal, means = rng.dirichlet(np.full(5, 0.4), (5, 2)), np.arange(5) < 2, rng.gamma(2.0, 0.7, (5, 2))
    paid = np.zeros((5, 2, 5)) + (np.arange(5) == 0)
    table = Tabular(transition, paid, start=np.array([0, 0, 0.5, 0.3, 0.2]), terminal=terminal, name="success")
    lasts = Partial(lambda mean, s, a, key: 2 * mean[s, a] * jax.random.uniform(key), jnp.asarray(means, jnp.float32))
    env = Lasting(table, lasts, AT_START)
    option = TabularOption(np.ones(5, bool), np.eye(2)[[0, 0, 1, 0, 1]], np.array([1, 1, 0.5, 0, 0.5]))
    over = OptionEnv(env, [*primitives(env.spec), option], PerStep(1.0, "second"))

    beside = lambda x: x.beside(option_model(x, option.initiation, option.policy, option.stop))  # noqa: E731
    actions = table.tables(1.0)
    model, times = beside(actions), beside(actions._replace(reward=means * ~terminal[:, None]))
    quickest = -float(table.start @ value_iteration(times._replace(reward=-times.reward)))
    best = constrained(model, times.reward, table.start, 100.0)
    budget = (quickest + best.time) / 2
    exact = constrained(model, times.reward, table.start, budget)
    assert best.time - quickest > 0.7 and exact.multiplier > 0.05 and 0.2 < exact.slow < 0.8

    cfg, learned = Config(alpha=0.005, epsilon=0.3), lambda key: learn_within(
        cfg, over, budget, "second", 60_000, dual_rate=0.001, key=key)[1]  # fmt: skip
    starts = jax.tree.map(lambda x: np.asarray(x)[:, 30_000:], jax.jit(jax.vmap(learned))(jax.random.split(KEY, 8)))
    reward, time, multiplier = (np.average(x, weights=starts.first) for x in starts[1:])
    # The dual variable integrates what is over the budget, so time is right; reward and price keep alpha's bias.
    assert time == pytest.approx(budget, rel=2e-3)
    assert reward == pytest.approx(exact.value, rel=0.012)
    assert multiplier == pytest.approx(exact.multiplier, rel=0.08)
    with pytest.raises(ValueError, match="'decision'.*'second'"):
        learn_within(cfg, over, budget, "decision", 10, dual_rate=0.001, key=KEY)
