"""Time as a cost and as a deadline, alone and inside options, pure and on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from forethought import envs
from forethought.envs.hosted import Hosted
from forethought.envs.tabular import Tabular, corridor
from forethought.envs.waiting import KEY as LEFT
from forethought.envs.waiting import Cost, Deadline, waiting
from forethought.gate import Gate, Gated, Record
from forethought.ops.dynamic import action_values, sweep
from forethought.option_env import OptionEnv
from forethought.option_host import HostOptions
from forethought.options import TabularOption
from forethought.types import EndReason, PerStep
from sojourns import AT_END, AT_START, Lasting, known, row

KEY = jax.random.key(0)
UNDISCOUNTED = PerStep(1.0, "second")


def timed(durations, pays=AT_START, reward=1.0):
    """States in a row; from state s to the next it takes durations[s] seconds."""
    return Lasting(row(len(durations) + 1, reward=reward), known(jnp.asarray(durations, jnp.float32)), pays)


def walk(length, stop=()):
    return TabularOption(np.ones(length, bool), np.eye(2)[np.ones(length, int)], np.isin(np.arange(length), stop) * 1.0)


def rows(env, count):
    """The time steps of going right `count` times, the first one before them."""
    state, first = env.reset(key=KEY)
    seen = [first]
    for _ in range(count):
        state, arrived = env.step(state, jnp.int32(1), key=KEY)
        seen.append(arrived)
    return jax.tree.map(lambda *xs: np.stack(xs), *seen)


def test_a_cost_is_the_rate_times_the_duration():
    env = waiting(timed([0.5, 2.0, 0.25]), Cost(0.5, "second"))
    assert env.spec.unit == "second" and list(env.spec.obs) == ["state"]
    seen = rows(env, 3)
    np.testing.assert_array_equal(seen.reward, [0, 1 - 0.25, 1 - 1, 1 - 0.125])
    np.testing.assert_array_equal(seen.duration, [0, 0.5, 2, 0.25])
    assert seen.last.tolist() == [False, False, False, True]


def test_a_deadline_ends_the_episode_and_what_is_earned_later_does_not_count():
    seen = rows(waiting(timed([0.5, 2.0, 0.25, 1.0]), Deadline(2.6, "second")), 3)
    # Arrivals after 0.5 and 2.5; the third would be at 2.75, so it is cut at 2.6.
    np.testing.assert_array_equal(seen.reward, [0, 1, 1, 0])
    np.testing.assert_allclose(seen.obs[LEFT], [2.6, 2.1, 0.1, 0], atol=1e-6)
    np.testing.assert_allclose(seen.duration, [0, 0.5, 2.0, 0.1], atol=1e-6)
    assert seen.discount.tolist() == [1, 1, 1, 0] and seen.last.tolist() == [False, False, False, True]


def test_a_reward_counts_when_it_arrives():
    early = Partial(lambda reward, s, took: (reward, 0.25 + 0 * took))
    for pays, counts in ((early, 1), (AT_END, 0), (AT_START, 0)):
        # The step of 2 s begins after 0.5 of 1 s; its reward comes 0.25 after it began, or when it is over.
        seen = rows(waiting(timed([0.5, 2.0, 1.0], pays), Deadline(1.0, "second")), 2)
        assert seen.reward.tolist() == [0, 1, counts] and seen.discount[2] == 0, pays
    # Just in time counts, ten times 0.1 s in float32 too, and ends the episode: nothing more could count.
    seen = rows(waiting(timed([0.1] * 12), Deadline(1.0, "second")), 10)
    assert seen.reward.sum() == 10 and seen.last.tolist() == [False] * 10 + [True] and seen.obs[LEFT][-1] == 0


def test_a_termination_or_truncation_before_the_deadline_is_left_as_it_is():
    seen = rows(waiting(timed([0.5, 0.5]), Deadline(9.0, "second")), 2)
    assert seen.last[-1] and seen.discount[-1] == 0 and seen.reward[-1] == 1 and seen.obs[LEFT][-1] == 8
    seen = rows(waiting(corridor(6, time_limit=2), Deadline(3.0, "decision")), 2)
    assert seen.last[-1] and seen.discount[-1] == 1 and seen.obs[LEFT][-1] == 1


def test_durations_inside_an_option_count():
    durations = [0.5, 2.0, 0.25, 1.0]
    step = lambda env: jax.jit(lambda k: OptionEnv(env, [walk(5, [3])], UNDISCOUNTED).step(  # noqa: E731
        OptionEnv(env, [walk(5, [3])], UNDISCOUNTED).reset(key=k)[0], jnp.int32(0), key=k))(KEY)  # fmt: skip
    _, arrived = step(waiting(timed(durations), Cost(0.5, "second")))
    assert float(arrived.reward) == 3 - 0.5 * 2.75 and float(arrived.duration) == 2.75
    late = waiting(timed(durations), Deadline(2.6, "second"))
    state, arrived = step(late)
    assert int(state.run.reason) == EndReason.EPISODE and int(state.run.steps) == 3
    assert (float(arrived.reward), float(arrived.discount)) == (2, 0)
    assert float(arrived.duration) == pytest.approx(2.6) and UNDISCOUNTED(arrived)[1] == 0
    # With both, the cost is billed up to the deadline.
    _, arrived = step(waiting(late, Cost(0.5, "second")))
    assert float(arrived.reward) == pytest.approx(2 - 0.5 * 2.6)


def test_with_the_time_left_the_problem_is_markov_and_has_the_values_of_backward_induction():
    """State 0 stays for 1, or goes to 1 for -0.5; state 1 pays 3 and is left for 0 half of the time. Sweeps give

        decisions left    1    2              3                 4
        state 0           1    -0.5 + 3       -0.5 + 5          -0.5 + 6.75 = 6.25
        state 1           3    3 + (1+3)/2    3 + (2.5+5)/2

    Who cannot see that little time is left invests to the end: -0.5, 2.5, 3.75, 5.875 in state 0."""
    table = Tabular(
        np.array([[[1.0, 0], [0, 1]], [[0.5, 0.5]] * 2]), np.array([[[1.0, 1], [-0.5, -0.5]], [[3, 3]] * 2]),
        start=np.array([1.0, 0]), terminal=np.zeros(2, bool), name="hasty",
    )  # fmt: skip
    model, value, best = table.tables(1.0), [np.zeros(2)], [np.zeros(2, int)]
    for _ in range(4):
        best.append(action_values(model, value[-1]).argmax(1))
        value.append(sweep(model, value[-1]))
    assert [v[0] for v in value] == [0, 1, 2.5, 4.5, 6.25]
    policy, env = jnp.asarray(np.stack(best)), waiting(table, Deadline(4.0, "decision"))

    def episode(key, blind):
        def tick(held, key):
            state, now, total = held
            left = jnp.where(blind, 4, jnp.round(now.obs[LEFT]).astype(int))
            later, arrived = env.step(state, policy[left, now.obs["state"]], key=key)
            total = total + jnp.where(now.last, 0.0, arrived.reward)
            held = jax.tree.map(lambda a, b: jnp.where(now.last, a, b), (state, now), (later, arrived))
            return (*held, total), None

        begin, *keys = jax.random.split(key, 6)
        (_, end, total), _ = jax.lax.scan(tick, (*env.reset(key=begin), 0.0), jnp.stack(keys))
        return total, end

    run = jax.jit(jax.vmap(episode, (0, None)))
    for blind, worth in ((False, 6.25), (True, 5.875)):
        total, end = run(jax.random.split(KEY, 40_000), blind)
        assert end.last.all() and (end.discount == 0).all()
        assert abs(float(total.mean()) - worth) < 4 * float(total.std()) / 200  # 4 standard errors, 0.05


@pytest.mark.parametrize("time", [Deadline(3.5, "second"), Cost(0.5, "second")])
def test_on_the_host_it_is_the_pure_environment(time):
    # Quarters of seconds, so that not even a fused multiplication rounds.
    inner = Lasting(row(9), Partial(lambda s, a, key: jax.random.randint(key, (), 1, 6) / 4), AT_END)
    pure, host = Hosted(waiting(inner, time), 3, key=KEY), waiting(Hosted(inner, 3, key=KEY), time)
    assert pure.spec == host.spec
    one, other, ended = pure.reset(seed=4), host.reset(seed=4), 0
    for t in range(24):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b, str(t))
        last, action = one.last, np.array([1, t % 2, 1], np.int32)
        if t == 11:  # between decisions: goes on exactly from there
            host, kept = waiting(Hosted(inner, 3, key=jax.random.key(9)), time), host.snapshot()
            for a, b in zip(jax.tree.leaves(host.restore(kept)), jax.tree.leaves(other), strict=True):
                np.testing.assert_array_equal(a, b)
        for env in (pure, host):
            env.send(action, where=~last)
            if last.any():
                env.reset(where=last)
        one, other, ended = pure.recv(), host.recv(), ended + last.sum()
    assert ended >= 3


def test_options_on_the_host_end_at_the_deadline_and_an_ended_episode_is_not_stepped():
    inner = timed([0.5, 2.0, 0.25, 1.0])
    host = HostOptions(waiting(Hosted(inner, 2, key=KEY), Deadline(2.6, "second")), [walk(5, [3]), walk(5, [1])],
                       UNDISCOUNTED, key=KEY)  # fmt: skip
    host.reset(seed=0)
    host.send(np.array([0, 1]))
    arrived = host.recv()
    np.testing.assert_allclose(arrived.reward, [2, 1])
    np.testing.assert_allclose(arrived.duration, [2.6, 0.5])
    assert arrived.last.tolist() == [True, False] and arrived.discount.tolist() == [0, 1]
    with pytest.raises(ValueError, match="environment 0 cannot be stepped: it ended"):
        host.send(np.array([1, 1]))


def test_a_batch_of_gymnasium_environments_has_deadlines_too():
    env = waiting(
        envs.make("CartPole-v1", num=2, unit="simulator step", action_repeat=2), Deadline(5.0, "simulator step")
    )
    step = env.reset(seed=0)
    assert step.obs[LEFT].tolist() == [5, 5] and step.obs[LEFT].dtype == np.float32
    for left in (3, 1, 0):
        env.send(np.array([0, 1]))
        step = env.recv()
        assert step.obs[LEFT].tolist() == [left, left]
    # Every simulator step pays 1; the last decision would be over after 6, so neither of its steps counts.
    assert step.last.all() and (step.discount == 0).all() and step.reward.tolist() == [0, 0]
    assert step.duration.tolist() == [1, 1]
    env.close()


def test_a_fault_is_not_hidden_by_the_deadline():
    seen = rows(waiting(timed([3.0, 1.0], Partial(lambda r, s, took: (r * jnp.nan, took))), Deadline(1.0, "second")), 1)
    assert np.isnan(seen.reward[1])


def test_what_does_not_fit_is_refused(tmp_path):
    inner = timed([1.0])
    for env in (inner, Hosted(inner, 1, key=KEY)):
        for time in (Cost(0.1, "decision"), Deadline(9.0, "decision")):
            with pytest.raises(ValueError, match="row: .*counts in 'decision' but .*'second'; give unit='second'"):
                waiting(env, time)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be finite and above 0"):
            Cost(wrong, "second")
        with pytest.raises(ValueError, match="must be finite and above 0"):
            Deadline(wrong, "second")
    late = waiting(inner, Deadline(9.0, "second"))
    with pytest.raises(ValueError, match="has an observation 'time_left' already"):
        waiting(late, Deadline(5.0, "second"))
    with pytest.raises(ValueError, match="a str is neither"):
        waiting("CartPole-v1", Cost(1.0, "decision"))
    host = waiting(Hosted(inner, 1, key=KEY), Deadline(9.0, "second"))
    host.reset(seed=0)
    with pytest.raises(ValueError, match="the snapshot is of row within 9 second"):
        waiting(Hosted(inner, 1, key=KEY), Deadline(8.0, "second")).restore(host.snapshot())
    # What a gate must know of the environment shows through.
    twice = waiting(envs.make("CartPole-v1", action_repeat=2), Cost(0.1, "decision"))
    record = Record(tmp_path / "gate.jsonl")
    with pytest.raises(ValueError, match="does an irreversible action 2 times"):
        Gated(twice, Gate([], record), irreversible=(1,))
    record.close(), twice.close()
