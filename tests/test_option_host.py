import dataclasses

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought import envs
from forethought.envs.hosted import Hosted
from forethought.envs.tabular import Tabular, TabularState
from forethought.gate import Check, Refused
from forethought.option_env import OptionEnv
from forethought.option_host import GymOptions, HostOptions
from forethought.options import Primitive, TabularOption, primitives
from forethought.protocols import AbstractOption
from forethought.types import Decision, EndReason, PerStep
from silo import LAUNCH, guarded, verdicts
from silo import record as record
from taxi import NAME, taxi

RULE = PerStep(0.9)
KEY = jax.random.key(3)


def line(length=7):
    arrives = np.array([[s, min(s + 1, length - 1)] for s in range(length)])
    pays = np.zeros((length, 2, length))
    pays[:, 1] = np.arange(length)[None]
    return Tabular(np.eye(length)[arrives], pays, start=np.eye(length)[0], terminal=np.arange(length) == length - 1,
                   time_limit=12, name="line")  # fmt: skip


def walk(stop, length=7, key="state", where=None):
    begin = np.ones(length, bool) if where is None else np.isin(np.arange(length), where)
    return TabularOption(begin, np.eye(2)[np.ones(length, int)], np.asarray(stop, float), key)


OPTIONS = [walk([0, 0.3, 0.3, 0.3, 0.3, 0, 0]), walk([0, 0, 1, 0, 1, 0, 0]), TabularOption(
    np.ones(7, bool), np.full((7, 2), 0.5), np.full(7, 0.2))]  # fmt: skip


def equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True))


def test_host_options_are_the_pure_environment_of_options_bit_for_bit():
    pure = Hosted(OptionEnv(line(), OPTIONS, RULE, max_steps=4), 3, key=KEY)
    host = HostOptions(Hosted(line(), 3, key=KEY), OPTIONS, RULE, key=KEY, max_steps=4)
    a, b = pure.reset(seed=5), host.reset(seed=5)
    for t in range(30):
        assert equal(a, b), t
        action, ended = (np.arange(3, dtype=np.int32) + t) % 3, a.last
        for env in (pure, host):
            if not ended.all():
                env.send(action, where=~ended)
            if ended.any():
                env.reset(where=ended)
        a, b = pure.recv(), host.recv()
    assert host.spec == pure.spec


def test_a_batch_waits_for_its_longest_option_and_each_keeps_its_own_sums():
    host = HostOptions(Hosted(line(), 2, key=KEY), [walk(np.eye(7)[1]), walk(np.eye(7)[4])], RULE, key=KEY)
    host.reset(seed=0)
    host.send(np.array([0, 1]))
    step = host.recv()
    assert step.obs["state"].tolist() == [1, 4] and step.duration.tolist() == [1, 4]
    # Rewards 1, 2, 3, 4 on arrival: 1 + 0.9 * 2 + 0.81 * 3 + 0.729 * 4.
    np.testing.assert_allclose(step.reward, [1, 1 + 1.8 + 2.43 + 2.916], rtol=1e-6)
    assert [EndReason(int(r)) for r in host.runs.reason] == [EndReason.STOPPED] * 2
    host.send(np.array([1, 1]), where=np.array([True, False]))
    step = host.recv()
    assert step.obs["state"].tolist() == [4, 4] and step.duration.tolist() == [3, 4]


def test_an_option_that_may_not_start_is_refused_and_so_is_a_state_where_none_may():
    host = HostOptions(Hosted(line(), 1, key=KEY), [walk(np.eye(7)[2], where=[0, 1]), walk(np.eye(7)[3], where=[5])],
                       RULE, key=KEY)  # fmt: skip
    host.reset(seed=0)
    with pytest.raises(ValueError, match=r"option 1 may not start in environment 0; \[0\] may"):
        host.send(np.array([1]))
    with pytest.raises(ValueError, match="option -1 may not start"):
        host.send(np.array([-1]))
    host.send(np.array([0]))
    with pytest.raises(ValueError, match="no option may start in environment 0; give a fallback"):
        host.recv()
    saved = HostOptions(Hosted(line(), 1, key=KEY), [walk(np.eye(7)[2], where=[0, 1])], RULE, key=KEY,
                        fallback=Primitive(np.asarray(1)))  # fmt: skip
    saved.reset(seed=0)
    saved.send(np.array([0]))
    assert saved.recv().legal.tolist() == [[False, True]]


def test_a_snapshot_between_decisions_goes_on_bit_for_bit():
    make = lambda: HostOptions(envs.make("FrozenLake-v1", num=2), [  # noqa: E731
        TabularOption(np.ones(16, bool), np.full((16, 4), 0.25), np.full(16, 0.3), "obs")], RULE, key=KEY)  # fmt: skip
    env = make()
    step = env.reset(seed=1)
    for _ in range(3):
        env.send(np.zeros(2, np.int32), where=~step.last)
        if step.last.any():
            env.reset(where=step.last)
        step = env.recv()
    bytes_ = env.snapshot()
    other = make()
    assert equal(other.restore(bytes_), step)
    for one in (env, other):
        if step.last.any():
            one.reset(where=step.last)
        one.send(np.zeros(2, np.int32))
    assert equal(env.recv(), other.recv())
    env.close(), other.close()


def test_options_on_gymnasium_and_on_its_jax_twin_give_equal_transitions():
    always = lambda a, stop: TabularOption(np.ones(500, bool), np.eye(6)[np.full(500, a)], np.full(500, stop), "obs")  # noqa: E731
    drive, handle = [always(a, 0.4) for a in range(4)], [always(a, 1.0) for a in (4, 5)]
    other = [dataclasses.replace(o, key="state") for o in [*drive, *handle]]
    env = GymOptions(gymnasium.make(NAME), [*drive, *handle], RULE, max_steps=5)
    twin = OptionEnv(taxi(), other, RULE, max_steps=5)
    step = jax.jit(lambda s, a, k: twin.step(s, a, key=k))
    obs, info = env.reset(seed=11)
    state, _ = twin.reset(key=KEY)
    begun = dataclasses.replace(state.time_step, obs={"state": jnp.int32(obs)})
    state = dataclasses.replace(state, env_state=TabularState(jnp.int32(obs), jnp.int32(0)), time_step=begun)
    durations = set()
    for t in range(200):
        action = t * 5 % 6
        obs, reward, terminated, truncated, info = env.step(action)
        state, found = step(state, jnp.int32(action), jax.random.fold_in(jax.random.key(11), t))
        assert int(found.obs["state"]) == obs and float(found.reward) == reward
        assert bool(found.last) == (terminated or truncated) and float(found.duration) == info["duration"]
        assert float(RULE(found)[1]) == pytest.approx(info["factor"], rel=1e-6)
        assert EndReason(int(state.run.reason)).name == info["reason"]
        durations.add(info["steps"])
        if terminated or truncated:
            break
    assert truncated and durations >= {1, 2, 3} and info["reason"] == "EPISODE" and info["factor"] > 0


def test_the_wrapper_is_a_gymnasium_environment_with_native_observations():
    env = GymOptions(gymnasium.make("CartPole-v1"), primitives(envs.make("CartPole-v1").spec), RULE)
    obs, info = env.reset(seed=0)
    assert env.observation_space.contains(obs) and info["legal"].all()
    flat = gymnasium.make("CartPole-v1")
    same, _ = flat.reset(seed=0)
    assert np.array_equal(obs, same)
    for action in (0, 1, 1, 0):
        assert all(np.array_equal(a, b) for a, b in zip(env.step(action)[:4], flat.step(action)[:4], strict=True))
    with pytest.raises(ValueError, match="option 7 may not start here"):
        env.step(7)


class Macro(AbstractOption):
    """Does what its script says; the carry counts."""

    script: np.ndarray

    def can_start(self, time_step):
        return jnp.ones((), bool)

    def initial(self):
        return jnp.zeros((), jnp.int32)

    def act(self, carry, time_step, *, key):
        return carry + 1, Decision(jnp.asarray(self.script)[carry], jnp.zeros(()))

    def stop_prob(self, carry, time_step):
        return (carry >= len(self.script)).astype(jnp.float32)


MACROS = [Macro(np.array(x, np.int32)) for x in ([0, 1, LAUNCH], [1, 1, 3], [LAUNCH, 0, 0])]


def behind_a_gate(record, *sources, num):
    gated, world = guarded(record, *sources, num=num)
    host = HostOptions(gated, MACROS, RULE, key=KEY)
    host.reset(seed=0)
    return host, world


def test_an_irreversible_action_inside_an_option_is_refused_where_it_comes_and_the_run_is_over_there(record):
    host, world = behind_a_gate(record, num=1)
    host.send(np.array([0]))
    with pytest.raises(Refused, match="step 2"):
        host.recv()
    assert world == [0, 1] and verdicts(record) == ["refused"]
    step = host.recv()
    assert step.duration.tolist() == [2] and EndReason(int(host.runs.reason[0])) is EndReason.FAILURE
    host.send(np.array([1]))  # the level above chooses anew
    assert host.recv().duration.tolist() == [3] and world == [0, 1, 1, 1, 3]


def test_an_option_that_begins_with_it_is_not_begun(record):
    host, world = behind_a_gate(record, num=1)
    with pytest.raises(Refused):
        host.send(np.array([2]))
    assert world == [] and verdicts(record) == ["refused"]
    host.send(np.array([1]))
    assert host.recv().duration.tolist() == [3] and world == [1, 1, 3]


def test_one_option_that_tries_it_stops_the_batch_and_no_row_has_done_it(record):
    host, world = behind_a_gate(record, num=3)
    host.send(np.array([1, 0, 1]))
    with pytest.raises(Refused, match="environment 1|row 1"):
        host.recv()
    assert LAUNCH not in world and world == [1, 0, 1, 1, 1, 1]
    step = host.recv()
    assert step.duration.tolist() == [2, 2, 2] and set(host.runs.reason.tolist()) == {int(EndReason.FAILURE)}
    host.send(np.array([1, 1, 1]), where=np.array([True, False, True]))
    assert host.recv().duration.tolist() == [3, 2, 3] and LAUNCH not in world


def test_each_of_an_options_irreversible_acts_needs_its_own_evidence_and_none_is_done_again(record):
    """Allowed once, the macro does it once; a batch that has done it has no snapshot to try it from again."""
    host, world = behind_a_gate(record, Check("once", lambda act: verdicts(record) == []), num=1)
    host.send(np.array([0]))
    assert host.recv().duration.tolist() == [3] and world == [0, 1, LAUNCH]
    assert host.snapshot() is None
    with pytest.raises(Refused):
        host.send(np.array([2]))
    assert verdicts(record) == ["allowed", "refused"] and world.count(LAUNCH) == 1
