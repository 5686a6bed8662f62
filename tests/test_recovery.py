"""A bridge to cross, from which one falls into a pit: what follows a fall, by rule and learned, and its worth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.algos import smdp
from forethought.envs.tabular import Tabular
from forethought.option_env import OptionEnv
from forethought.options import TabularOption
from forethought.recovery import Measure, Recovery
from forethought.types import EndReason, PerStep

GAMMA, FALL, STEPS = 0.9, 0.2, 4
RULE, KEY = PerStep(GAMMA), jax.random.key(2)
GOAL, PIT = 4, 5
CROSSED = (1 - FALL) ** STEPS
"""Probability of crossing without a fall, 0.4096."""


def bridge():
    """0 .. 3 lie on the bridge and 4 beyond it; a step falls into the pit, 5, with probability 0.2. Out of it leads a
    ladder of three steps (action 1), or a jump that succeeds one time in five (action 0). A step costs 1."""
    chance = np.zeros((8, 2, 8))
    for s in range(STEPS):
        chance[s, 0, s + 1], chance[s, 0, PIT], chance[s, 1, s] = 1 - FALL, FALL, 1
    chance[GOAL, :, GOAL] = 1
    chance[PIT, 0, 0], chance[PIT, 0, PIT] = 0.2, 0.8
    for s, higher in ((5, 6), (6, 7), (7, 0)):
        chance[s, 1, higher] = 1
    chance[6, 0, 6] = chance[7, 0, 7] = 1
    return Tabular(chance, -np.ones((8, 2, 8)), start=np.eye(8)[0], terminal=np.arange(8) == GOAL, name="bridge",
                   time_limit=200)  # fmt: skip


def option(starts, action, stops, fails=()):
    at = lambda states: np.isin(np.arange(8), states)  # noqa: E731
    return TabularOption(at(starts), np.eye(2)[np.full(8, action)], at(stops).astype(float), fails=at(fails))


CROSS, CLIMB = option([0, 1, 2, 3, PIT], 0, [], [PIT]), option([5, 6, 7], 1, [0])


def over(*recovery, **kwargs):
    return OptionEnv(bridge(), [CROSS, CLIMB], RULE, recovery=recovery, **kwargs)


@jax.jit
def _crossings(env, keys):
    def one(key):
        state, _ = env.reset(key=key)
        return env.step(state, jnp.int32(0), key=key)

    return jax.vmap(one)(keys)


def crossings(env, count=4000):
    """Decisions to cross from the start: states and time steps [count]."""
    return jax.tree.map(np.asarray, _crossings(env, jax.random.split(KEY, count)))


def near(values, expected):
    """The mean of independent draws, within 4 standard errors."""
    assert abs(values.mean() - expected) < 4 * values.std() / len(values) ** 0.5 + 1e-9, (values.mean(), expected)


def test_a_failure_is_said_and_without_a_rule_the_level_above_chooses_where_it_stands():
    state, step = crossings(over())
    reason = state.run.reason
    assert set(reason.tolist()) == {EndReason.FAILURE, EndReason.EPISODE} and state.tally is None
    near(reason == EndReason.EPISODE, CROSSED)
    fell = reason == EndReason.FAILURE
    assert (step.obs["state"][fell] == PIT).all() and not step.last[fell].any() and (step.discount[fell] == 1).all()


def test_a_run_that_ends_the_episode_or_stops_has_not_failed():
    """Failing at the goal and where it stops says nothing: an episode's end comes first, then an option's own stop."""
    env = OptionEnv(bridge(), [option([0, 1, 2, 3], 0, [2], [2, GOAL]), CLIMB], RULE)
    reason = crossings(env)[0].run.reason
    assert EndReason.STOPPED in reason and EndReason.FAILURE not in reason


def test_reselecting_by_rule_is_what_happens_without_one_bit_for_bit_and_counts():
    plain, ruled = crossings(over()), crossings(over(Recovery(Measure.RESELECT)))
    tally = ruled[0].tally
    bare = dataclasses.replace(ruled[0], tally=None), ruled[1]
    for a, b in zip(*map(jax.tree.leaves, (plain, bare)), strict=True):
        np.testing.assert_array_equal(a, b)
    near(tally.failures, 1 - CROSSED)
    assert not tally.continues.any() and not tally.roll_backs.any() and not tally.spent.any()


def test_what_is_rolled_back_never_was_but_its_steps_are_counted():
    """With tries enough every decision crosses: 4 steps, -1 each, discounted: -(1 + .9 + .81 + .729). Falls before that
    are geometric, (1 - p) / p of them in the mean, after k of 4 steps with probability .2 * .8^(k - 1)."""
    state, step = crossings(over(Recovery(Measure.ROLL_BACK, tries=1000)))
    assert (state.run.reason == EndReason.EPISODE).all() and (step.obs["state"] == GOAL).all()
    np.testing.assert_allclose(step.reward, -(1 + 0.9 + 0.81 + 0.729), rtol=1e-6)
    assert (step.duration == STEPS).all() and (state.run.steps == STEPS).all()
    falls = (1 - CROSSED) / CROSSED
    near(state.tally.roll_backs, falls)
    assert (state.tally.failures == state.tally.roll_backs).all()
    steps = sum(k * FALL * (1 - FALL) ** (k - 1) for k in range(1, STEPS + 1)) / (1 - CROSSED)
    near(state.tally.spent, falls * steps)


def test_tries_run_out_and_steps_of_lost_branches_may_cost():
    free, dear = (crossings(over(Recovery(Measure.ROLL_BACK, tries=2, cost=c))) for c in (0.0, 0.25))
    state, step = dear
    assert state.tally.roll_backs.max() == 2 and set(state.run.reason.tolist()) == {
        EndReason.FAILURE, EndReason.EPISODE,
    }  # fmt: skip
    near(state.run.reason == EndReason.FAILURE, (1 - CROSSED) ** 3)
    np.testing.assert_allclose(step.reward, free[1].reward - 0.25 * state.tally.spent, rtol=1e-5)


def test_an_option_that_continues_is_one_decision_whose_time_goes_on():
    """From the pit it jumps, one time in five; every arrival there is a failure again. Its rewards and its duration are
    those of all the steps, and it ends where the flat policy that always takes action 0 would."""
    state, step = crossings(over(Recovery(Measure.CONTINUE, tries=1000)))
    assert (step.obs["state"] == GOAL).all() and (state.run.reason == EndReason.EPISODE).all()
    k = step.duration
    np.testing.assert_allclose(step.reward, -(1 - GAMMA**k) / (1 - GAMMA), rtol=1e-4)
    policy = np.tile([1.0, 0.0], (8, 1))
    near(step.reward, bridge().policy_values(policy, GAMMA)[0][0])
    assert (state.tally.continues == state.tally.failures).all() and not state.tally.spent.any()


def test_an_option_continues_only_where_it_may_start():
    env = OptionEnv(
        bridge(), [option([0, 1, 2, 3], 0, [], [PIT]), CLIMB], RULE, recovery=[Recovery(Measure.CONTINUE, tries=9)]
    )
    state, _ = crossings(env)
    fell = state.run.reason == EndReason.FAILURE
    assert fell.any() and not state.tally.continues.any() and (state.tally.failures == fell).all()


def test_a_limit_may_count_as_failure():
    rule = Recovery(Measure.ROLL_BACK, reasons=(EndReason.LIMIT,), tries=3)
    state, _ = crossings(over(rule, max_steps=3))
    assert (state.tally.failures[state.run.reason == EndReason.LIMIT] == 4).all()
    assert (state.tally.spent == 3 * state.tally.roll_backs).all()


def test_the_record_holds_what_survives():
    state, _ = crossings(over(Recovery(Measure.ROLL_BACK, tries=1000), max_steps=50, record=True), 50)
    assert state.tally.roll_backs.any()
    np.testing.assert_array_equal(state.inner.time_step.obs["state"][:, :5], np.tile(np.arange(5), (50, 1)))


MEASURES = [Recovery(Measure.RESELECT), Recovery(Measure.CONTINUE, tries=50)]


@pytest.mark.parametrize("cost, best", [(0.0, Measure.ROLL_BACK), (2.0, Measure.RESELECT)])
def test_the_level_above_learns_which_measure_pays(cost, best):
    """Crossing under each of three rules: free, rolling back is worth -3.439; at 2 a lost step, -3.439 - 2 * 3.207; the
    ladder after a fall is worth what the flat policy is that climbs, and jumping less."""
    rules = [*MEASURES, Recovery(Measure.ROLL_BACK, tries=1000, cost=cost)]
    env, cfg = over(*rules), smdp.Config(alpha=0.02, epsilon=0.5)
    assert env.spec.action.n == 6 and env.reset(key=KEY)[1].legal.tolist() == [True, False] * 3
    learn = lambda key: smdp.learn(cfg, env, RULE, 12_000, key=key)[0].q  # noqa: E731
    q = np.asarray(jax.jit(jax.vmap(learn))(jax.random.split(KEY, 8))).mean(0)
    climbs = np.eye(2)[np.array([0, 0, 0, 0, 0, 1, 1, 1])]
    flat = bridge().policy_values(climbs, GAMMA)[0]
    lost = sum(k * FALL * (1 - FALL) ** (k - 1) for k in range(1, STEPS + 1)) / CROSSED
    rolled = -(1 - GAMMA**STEPS) / (1 - GAMMA) - cost * lost
    assert q[0, 4] == pytest.approx(rolled, abs=0.3)
    if best == Measure.RESELECT:  # then the best after a fall is to climb, and crossing anew under the same rule
        assert q[0, 0] == pytest.approx(flat[0], abs=0.3)
    assert int(np.argmax(q[0, [0, 2, 4]])) == best


@pytest.mark.parametrize(
    "given, message",
    [
        ({"measure": Measure.CONTINUE, "reasons": (EndReason.LIMIT,)}, "reasons holds LIMIT"),
        ({"measure": Measure.RESELECT, "reasons": (EndReason.EPISODE,)}, "give FAILURE, LIMIT or both"),
        ({"measure": Measure.RESELECT, "tries": 0}, "tries is 0"),
        ({"measure": Measure.RESELECT, "cost": -1.0}, "cost is -1.0"),
    ],
)
def test_rules_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Recovery(**given)
