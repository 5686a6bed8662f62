import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.envs.tabular import Tabular, corridor, truncated_reward
from forethought.ops.returns import smdp_target
from forethought.option_env import OptionEnv
from forethought.options import Primitive, TabularOption, primitives
from forethought.protocols import AbstractOption
from forethought.types import Decision, EndReason, PerStep, PerTime

RULE = PerStep(0.9)


def line(length=5, *, reward=1.0, time_limit=None, terminal=True):
    """States in a row; action 1 steps right for `reward`, action 0 stays for nothing; the last one terminates."""
    arrives = np.array([[s, min(s + 1, length - 1)] for s in range(length)])
    transition = np.eye(length)[arrives]
    pays = np.zeros((length, 2, length))
    pays[:, 1] = reward
    ends = (np.arange(length) == length - 1) & terminal
    return Tabular(transition, pays, start=np.eye(length)[0], terminal=ends, time_limit=time_limit, name="line")


def walk(length=5, stop_at=(), initiation=None):
    """Goes right and stops at these states."""
    stop = np.isin(np.arange(length), stop_at).astype(float)
    begin = np.ones(length, bool) if initiation is None else np.asarray(initiation, bool)
    return TabularOption(begin, np.eye(2)[np.ones(length, int)], stop)


def ran(env, index=0, seed=0):
    state, first = env.reset(key=jax.random.key(seed))
    return (first, *jitted(env)(state, jnp.int32(index), key=jax.random.key(seed + 1)))


def jitted(env):
    return jax.jit(lambda state, action, key: env.step(state, action, key=key))


def test_three_steps_of_reward_1_back_up_to_10():
    _, state, step = ran(OptionEnv(line(9), [walk(9, stop_at=[3])], RULE))
    # 1 + 0.9 + 0.81; with V = 10 there, 2.71 + 0.729 * 10 = 10 (F07: 12 and 10.29 are the faults).
    assert (int(state.run.steps), float(step.duration), int(state.run.reason)) == (3, 3.0, EndReason.STOPPED)
    assert float(step.reward) == pytest.approx(2.71)
    reward, factor = RULE(step)
    assert float(smdp_target(reward, factor, jnp.float32(10.0))) == pytest.approx(10.0)
    assert int(step.obs["state"]) == 3 and not step.last and float(step.discount) == 1


def test_where_it_begins_it_does_not_stop_and_where_it_arrives_it_does():
    # F09: it stops for sure at state 0, where it begins, and at 1; it still takes its one step and ends at 1.
    _, state, step = ran(OptionEnv(line(), [walk(stop_at=[0, 1])], RULE))
    assert int(state.run.steps) == 1 and int(step.obs["state"]) == 1


def test_termination_inside_an_option_ends_it_and_bootstraps_nothing():
    _, state, step = ran(OptionEnv(line(3), [walk(3)], RULE))
    assert (int(state.run.steps), int(state.run.reason)) == (2, EndReason.EPISODE)
    assert step.last and float(step.discount) == 0 and float(step.reward) == pytest.approx(1.9)
    reward, factor = RULE(step)
    assert float(smdp_target(reward, factor, jnp.float32(jnp.nan))) == pytest.approx(1.9)


def test_truncation_inside_an_option_ends_it_and_bootstraps():
    # F01's kind: one state, reward 1, cut after 2 of the option's steps; V = 10 = 1.9 + 0.81 * 10.
    for_ever = TabularOption(np.ones(1, bool), np.ones((1, 1)), np.zeros(1))
    _, state, step = ran(OptionEnv(truncated_reward(2), [for_ever], RULE))
    assert (int(state.run.steps), int(state.run.reason)) == (2, EndReason.EPISODE)
    assert step.last and float(step.discount) == 1
    reward, factor = RULE(step)
    assert float(smdp_target(reward, factor, jnp.float32(10.0))) == pytest.approx(10.0)


def test_limits_of_steps_and_of_time_end_an_option_but_no_episode():
    for given, steps in (({"max_steps": 3}, 3), ({"max_time": 2.5}, 3), ({"max_time": 2.0}, 2)):
        _, state, step = ran(OptionEnv(line(9), [walk(9)], RULE, **given))
        assert (int(state.run.steps), int(state.run.reason)) == (steps, EndReason.LIMIT)
        assert not step.last and float(step.discount) == 1
    with pytest.raises(ValueError, match="max_steps is 0"):
        OptionEnv(line(), [walk()], RULE, max_steps=0)


def test_an_ended_option_is_not_resumed_and_the_next_episode_chooses_anew():
    env = OptionEnv(line(6), [walk(6, stop_at=[2]), walk(6, stop_at=[5])], RULE)
    state, _ = env.reset(key=jax.random.key(0))
    state, one = env.step(state, jnp.int32(0), key=jax.random.key(1))
    state, two = env.step(state, jnp.int32(1), key=jax.random.key(2))
    assert (int(one.obs["state"]), int(two.obs["state"])) == (2, 5) and two.last
    assert (int(state.run.steps), float(two.duration)) == (3, 3.0)  # not 5: the first one's steps are its own
    state, first = env.reset(key=jax.random.key(3))
    assert first.first and int(state.run.steps) == 0 and float(first.reward) == 0


def test_options_start_only_where_they_may():
    only_0 = walk(stop_at=[1], initiation=[1, 0, 0, 0, 0])
    env = OptionEnv(line(), [only_0, walk(stop_at=[2], initiation=[0, 1, 0, 0, 0])], RULE)
    state, first = env.reset(key=jax.random.key(0))
    assert first.legal.tolist() == [True, False]
    wrong = env.step(state, jnp.int32(1), key=jax.random.key(1))[1]
    assert jnp.isnan(wrong.reward)
    assert jnp.isnan(env.step(state, jnp.int32(-1), key=jax.random.key(1))[1].reward)
    state, step = env.step(state, jnp.int32(0), key=jax.random.key(1))
    assert step.legal.tolist() == [False, True] and float(step.reward) == 1


def test_where_no_option_may_start_the_fallback_may_or_the_reward_is_nan():
    # F11: at state 1 nothing may start.
    only_0 = walk(stop_at=[1], initiation=[1, 0, 0, 0, 0])
    assert jnp.isnan(ran(OptionEnv(line(), [only_0], RULE))[2].reward)
    env = OptionEnv(line(), [only_0], RULE, fallback=Primitive(np.asarray(1)))
    first, state, step = ran(env)
    assert env.spec.action.n == 2
    assert first.legal.tolist() == [True, False] and step.legal.tolist() == [False, True]
    state, step = env.step(state, jnp.int32(1), key=jax.random.key(5))
    assert int(step.obs["state"]) == 2 and int(state.run.steps) == 1 and float(step.reward) == 1


class Counting(AbstractOption):
    """Goes right; its carry counts its steps, and it stops after `times` of them."""

    times: int

    def can_start(self, time_step):
        return jnp.ones((), bool)

    def initial(self):
        return jnp.int32(0)

    def act(self, carry, time_step, *, key):
        return carry + 1, Decision(jnp.int32(1), jnp.zeros(()))

    def stop_prob(self, carry, time_step):
        return (carry >= self.times).astype(jnp.float32)


def test_options_of_different_kinds_are_switched_between_and_equal_those_that_are_stacked():
    kinds = [Counting(2), walk(9, stop_at=[5]), Primitive(np.asarray(0))]
    both = OptionEnv(line(9), kinds, RULE)
    assert not both.options.alike
    for index, option in enumerate(kinds):
        alone = OptionEnv(line(9), [option, option], RULE)
        assert alone.options.alike
        one, other = ran(both, index)[2], ran(alone, 1)[2]
        for name in ("obs", "reward", "discount", "duration", "last"):
            assert jax.tree.all(jax.tree.map(jnp.array_equal, getattr(one, name), getattr(other, name))), name
    # The carry begins anew each time.
    env = OptionEnv(line(9), [Counting(2)], RULE)
    state, _ = env.reset(key=jax.random.key(0))
    for arrives in (2, 4, 6):
        state, step = env.step(state, jnp.int32(0), key=jax.random.key(1))
        assert int(step.obs["state"]) == arrives


def test_primitive_options_are_the_flat_environment_bit_for_bit():
    slippery = Tabular(
        np.random.default_rng(0).dirichlet(np.ones(4), size=(4, 2)), np.random.default_rng(1).normal(size=(4, 2, 4)),
        start=np.array([1.0, 0, 0, 0]), terminal=np.arange(4) == 3, name="slippery",
    )  # fmt: skip
    env = OptionEnv(slippery, primitives(slippery.spec), RULE)
    state, first = env.reset(key=jax.random.key(0))
    flat_state, flat = slippery.reset(key=jax.random.key(0))
    step = jitted(env)
    for t in range(200):
        if first.last:
            state, first = env.reset(key=jax.random.key(t))
            flat_state, flat = slippery.reset(key=jax.random.key(t))
        action, key = jnp.int32(t * 7 % 3 % 2), jax.random.key(t)
        state, first = step(state, action, key=key)
        env_key = jax.random.split(jax.random.fold_in(key, 0), 3)[1]  # as OptionEnv draws it
        flat_state, flat = slippery.step(flat_state, action, key=env_key)
        assert first.legal.all()
        first = dataclasses.replace(first, legal=None)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, first, flat))
        assert all(float(a) == float(b) for a, b in zip(RULE(first), RULE(flat), strict=True))


class Timed(Tabular):
    """The line in seconds: a step takes 0.5 s, 0.25 s from state 2 on, and its reward comes half-way."""

    @property
    def spec(self):
        return dataclasses.replace(Tabular.spec.fget(self), unit="second", duration=None)

    def step(self, state, action, *, key):
        begun = state.state
        state, step = Tabular.step(self, state, action, key=key)
        took = jnp.where(begun >= 2, 0.25, 0.5)
        return state, dataclasses.replace(step, duration=took, reward_delay=took / 2)


def test_continuous_time_discounts_each_reward_at_its_own_arrival():
    inner = line(9)
    timed = Timed(inner.transition, inner.reward, start=inner.start, terminal=inner.terminal, name="timed")
    rule = PerTime(0.3, "second")
    _, state, step = ran(OptionEnv(timed, [walk(9, stop_at=[4])], rule))
    # Rewards arrive after 0.25, 0.75, 1.125 and 1.375 s; four steps take 1.5 s.
    assert float(step.duration) == 1.5
    assert float(step.reward) == pytest.approx(sum(np.exp(-0.3 * t) for t in (0.25, 0.75, 1.125, 1.375)))
    reward, factor = rule(step)
    assert float(reward) == float(step.reward) and float(factor) == pytest.approx(np.exp(-0.45))
    with pytest.raises(ValueError, match="'decision'.*'second'"):
        OptionEnv(timed, [walk(9)], RULE)


def test_environments_of_options_stack():
    two = OptionEnv(line(9), [Counting(2)], RULE)
    over = OptionEnv(two, [Twice()], RULE)
    _, state, step = ran(over)
    assert int(step.obs["state"]) == 4 and float(step.duration) == 4.0 and int(state.run.steps) == 2
    # 1.9 + 0.81 * 1.9, as four steps of reward 1 are.
    assert float(step.reward) == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    reward, factor = RULE(step)
    assert float(factor) == pytest.approx(0.9**4)


class Twice(Counting):
    """Chooses option 0 of the level below, two times."""

    times: int = 2

    def act(self, carry, time_step, *, key):
        return carry + 1, Decision(jnp.int32(0), jnp.zeros(()))


def test_inner_rows_are_kept_where_they_are_asked_for():
    env = OptionEnv(line(6), [walk(6, stop_at=[3])], RULE, max_steps=4, record=True)
    _, state, _ = ran(env)
    rows, count = state.inner, int(state.run.steps)
    assert rows.time_step.obs["state"].tolist()[: count + 1] == [0, 1, 2, 3]
    assert rows.action.tolist() == [1, 1, 1, 0, 0] and rows.time_step.reward.tolist() == [0, 1, 1, 1, 0]
    assert rows.time_step.first.tolist()[0] and rows.log_prob.shape == (5,)
    state, _ = env.step(state, jnp.int32(0), key=jax.random.key(9))
    assert state.inner.time_step.obs["state"].tolist()[:3] == [3, 4, 5]  # the rows of the run before are gone


class Impatient(eqx.Module):
    """Interrupts option 0 from a state on."""

    state: int

    def __call__(self, index, time_step):
        return (index == 0) & (time_step.obs["state"] >= self.state)


def test_a_running_option_gives_way_where_it_is_told_to():
    env = OptionEnv(line(9), [walk(9), walk(9, stop_at=[5])], RULE, interrupt=Impatient(2))
    _, state, step = ran(env)
    assert (int(step.obs["state"]), int(state.run.reason)) == (2, EndReason.INTERRUPTED)
    assert int(ran(env, 1)[2].obs["state"]) == 5
    # Its own stop is told before an interruption at the same step.
    own = OptionEnv(line(9), [walk(9, stop_at=[2])], RULE, interrupt=Impatient(2))
    assert int(ran(own)[1].run.reason) == EndReason.STOPPED


def test_many_environments_run_at_once_each_its_own_option():
    env = OptionEnv(corridor(8), [walk(8, stop_at=[2]), walk(8, stop_at=[6])], RULE)
    keys = jax.random.split(jax.random.key(0), 2)
    state, _ = jax.vmap(lambda k: env.reset(key=k))(keys)
    _, step = jax.jit(jax.vmap(lambda s, a, k: env.step(s, a, key=k)))(state, jnp.array([0, 1]), keys)
    assert step.obs["state"].tolist() == [2, 6] and step.duration.tolist() == [2, 6]


def test_stop_probabilities_are_drawn_at_every_step():
    fair = TabularOption(np.ones(1, bool), np.ones((1, 1)), np.full(1, 0.25))
    env = OptionEnv(truncated_reward(10_000), [fair], RULE)
    state, _ = env.reset(key=jax.random.key(0))
    lengths = jax.jit(jax.vmap(lambda k: env.step(state, jnp.int32(0), key=k)[0].run.steps))(
        jax.random.split(jax.random.key(1), 4000)
    )
    # Geometric: mean 4, standard deviation sqrt(12); four standard errors.
    assert abs(float(lengths.mean()) - 4) < 4 * 12**0.5 / 4000**0.5


def test_an_empty_set_of_options_is_refused():
    with pytest.raises(ValueError, match="none to choose from"):
        OptionEnv(line(), [], RULE)
