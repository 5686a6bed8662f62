import dataclasses

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stub_learner
from forethought import checkpoint, packing, tree
from forethought.envs import EnvironmentFault, make
from forethought.envs.control import Pendulum
from forethought.loop import CHUNK, HostLoop, PureLoop, Tally, prefill_ticks
from forethought.protocols import AbstractEnv
from forethought.types import PerStep, TimeStep
from stub_learner import Config
from tiny_runs import compiling_once

RULE = PerStep(0.9)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with compiling_once():
        yield


def build(env, *, seed=0, num_devices=1, **fields):
    cfg = Config(**fields)
    env = make(env, num=cfg.envs, seed=seed)
    kind = PureLoop if isinstance(env, AbstractEnv) else HostLoop
    return kind(stub_learner, cfg, env, RULE, seed=seed, num_devices=num_devices)


def everything(loop):
    """All that a loop is, as bytes."""
    state, replay, files = loop.save()
    return packing.pack(state), packing.pack(replay.since(0)), int(replay.count), files


def time_step(reward, first, last):
    zero = np.zeros((len(reward), len(reward[0])), np.float32)
    return TimeStep({}, np.array(reward, np.float32), zero + 1, np.array(first), np.array(last), zero, zero)


def test_tally_adds_up_episodes_across_calls():
    tally = Tally.empty(2)
    # Stream 0: first, then rewards 1 and 2, then first again. Stream 1: first, reward 5 and last, first, reward 7.
    ended = tally.add(
        time_step(
            [[0, 0], [1, 5], [2, 0]],
            [[True, True], [False, False], [False, True]],
            [[False, False], [False, True], [False, False]],
        )
    )
    assert ended == [(5.0, 1)]
    # Stream 0 ends with reward 4: return 1 + 2 + 4, three decisions. Stream 1 ends with 7, and then begins anew.
    ended = tally.add(time_step([[4, 7], [0, 0]], [[False, False], [True, True]], [[True, True], [False, False]]))
    assert ended == [(7.0, 3), (7.0, 1)]
    # Decisions are the rows that are not first: 3 of the first call's 6, and 2 of the second's 4.
    assert int(tally.decisions) == 3 + 2


def test_prefill_is_at_least_a_window():
    assert prefill_ticks(Config(prefill=33, envs=2)) == 17  # 33 rows over 2 environments, rounded up
    assert prefill_ticks(Config(prefill=2, envs=2, length=8)) == 8


@pytest.mark.parametrize(
    "env, num_devices",
    [
        ("jax/pendulum", 1), ("dmc/cartpole-swingup", 1), ("CartPole-v1", 1), ("jax/corridor", 1),
        ("jax/pendulum", 2), ("CartPole-v1", 2),
    ],
)  # fmt: skip
def test_resumed_loop_equals_one_that_never_stopped(env, num_devices, tmp_path):
    def half(loop):
        # Chunks as uneven as they may be.
        chunks = [loop.advance(n) for n in (1, 16, 20, 3)]
        return [chunk.metrics for chunk in chunks], sum((chunk.episodes for chunk in chunks), [])

    whole = build(env, num_devices=num_devices)
    first = half(whole)
    state, replay, files = whole.save()
    if env != "jax/corridor":
        step = state["loop"].streams.time_step if "loop" in state else state["stream"].time_step
        assert not np.any(step.last) and not np.any(step.first)  # in the middle of episodes
    checkpoint.save(tmp_path, 40, state, replay=replay, files=files)
    second = half(whole)
    assert int(whole.agent.updates) == 80

    resumed = build(env, num_devices=num_devices)
    found = checkpoint.latest(tmp_path)
    state, replay = resumed.like()
    resumed.restore(
        checkpoint.load(found, state), checkpoint.load_replay(found, replay), {n: found.file(n) for n in files}
    )
    assert half(resumed) == second
    assert everything(resumed) == everything(whole)
    if env in ("CartPole-v1", "jax/corridor"):
        assert len(first[1]) > 3 and len(second[1]) > 3  # episodes ended on both sides of the stop
    if isinstance(whole, HostLoop):
        resumed.env.close(), whole.env.close()


@pytest.mark.parametrize("env", ["jax/pendulum", "CartPole-v1"])
def test_foreign_random_calls_change_nothing_and_the_seed_does(env):
    import random

    def run(seed, meddle):
        loop = build(env, seed=seed)
        for n in range(4):
            if meddle:
                np.random.seed(n), random.seed(n), np.random.rand(3), random.random()
            loop.advance(3)
        return everything(loop)

    plain = run(0, False)
    assert run(0, True) == plain
    other = run(1, False)
    assert other[0] != plain[0] and other[1] != plain[1]


@pytest.mark.parametrize("env", ["jax/pendulum", "Pendulum-v1"])
def test_environments_of_a_run_are_different_streams(env):
    loop = build(env)
    loop.advance(1)
    obs, action = (np.asarray(x) for x in (loop.save()[1].data.time_step.obs["obs"], loop.save()[1].data.action))
    assert not np.array_equal(obs[0, 0], obs[1, 0])  # resets
    assert not np.array_equal(action[0, :16], action[1, :16])  # and the random policy's draws
    assert not np.array_equal(action[0, 16:20], action[1, 16:20])


def versions(loop):
    replay = loop.save()[1]
    return np.asarray(replay.data.policy_version)[0, : int(replay.count)].tolist()


def test_a_pure_loop_acts_with_its_newest_parameters():
    loop = build("jax/pendulum")
    loop.advance(3)
    # 16 prefill rows by the random policy, then 4 rows per iteration, each after one more update.
    assert versions(loop) == [0] * 16 + [0] * 4 + [1] * 4 + [2] * 4


def test_a_host_loop_acts_one_iteration_late_and_says_so():
    loop = build("CartPole-v1", updates=3)
    loop.advance(2), loop.advance(2)
    # Iteration i collects while what iteration i - 1 collected is learned from: version 3 (i - 1).
    assert versions(loop) == [0] * 16 + [0] * 4 + [0] * 4 + [3] * 4 + [6] * 4


def test_a_host_loop_acts_with_the_parameters_whose_version_it_says():
    """The log-probabilities in replay are those of the parameters of that very version."""
    fast, slow = build("CartPole-v1", rate=0.5), build("CartPole-v1", rate=0.5)
    fast.advance(4)
    kept = {}
    for _ in range(4):
        kept[int(slow.agent.updates)] = tree.copy(slow.agent)  # its arrays are overwritten by the next call
        slow.advance(1)
    replay = fast.save()[1]
    data = jax.tree.map(lambda x: x[0, 16:32], replay.data)  # stream 0, the learner's rows
    carry, checked = None, 0
    for t in range(16):
        step, version = jax.tree.map(lambda x, t=t: x[t], (data.time_step, data.policy_version))
        if step.first:
            carry = jnp.zeros(4)  # what was carried before is known only from an episode's first row on
        if carry is not None and not step.last:
            policy = stub_learner.policy(None, kept[int(version)])
            carry, _ = policy(carry, step, key=jax.random.key(0))
            want = jax.nn.log_softmax(policy.weight @ carry)[int(data.action[t])]
            np.testing.assert_allclose(data.log_prob[t], want, rtol=1e-5)
            checked += int(version) > 0
    assert checked >= 4


@pytest.mark.parametrize("splits", [(8,), (3, 5), (1, 1, 6)])
def test_how_a_pure_loop_is_cut_into_calls_changes_nothing(splits, cut_loops):
    loop = build("jax/pendulum")
    for n in splits:
        loop.advance(n)
    cut_loops.append(everything(loop))
    assert all(x == cut_loops[0] for x in cut_loops)


@pytest.fixture(scope="module")
def cut_loops():
    return []


def test_a_pure_loop_runs_at_most_a_chunk():
    loop = build("jax/pendulum")
    loop.advance(10 * CHUNK)
    assert int(loop.agent.updates) == CHUNK


class Poisoned(Pendulum):
    """Observation and reward are NaN at decisions of an episode that come late, or early."""

    @property
    def spec(self):
        return dataclasses.replace(Pendulum().spec, name="poisoned")

    def step(self, state, action, *, key):
        state, step = super().step(state, action, key=key)
        obs = {"obs": step.obs["obs"] + jnp.where(state.elapsed == 30, jnp.nan, 0.0)}
        return state, dataclasses.replace(
            step, obs=obs, reward=step.reward + jnp.where(state.elapsed == 25, jnp.nan, 0)
        )


def test_nan_of_a_pure_environment_stops_with_its_name_key_and_step():
    loop = build(Poisoned())
    loop.advance(2)  # 16 + 8 rows: not there yet
    # Rows 24 .. 39 follow; the 25th decision's row is number 25, so row 1 of them. 2 x 23 decisions were made before.
    said = "poisoned: 'reward' is not finite at row 1 after decision 46, environment 0"
    with pytest.raises(EnvironmentFault, match=f"^{said}|'obs/obs' is not finite at row 6 after decision 46"):
        loop.advance(4)
    with pytest.raises(ValueError, match="not finite"):  # and what would be saved is refused
        loop.ring.since(0)


def test_nan_in_the_prefill_stops_before_anything_is_learned():
    with pytest.raises(
        EnvironmentFault, match="poisoned: '.*' is not finite at row (25|30) after decision 0, environment 0"
    ):
        build(Poisoned(), prefill=200)


class PoisonedGym(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.array([0, np.nan if self.t == 30 else 1], np.float32), 0.0, False, self.t >= 40, {}


def test_nan_of_a_host_environment_stops_and_replay_stays_finite():
    loop = build(PoisonedGym)
    loop.advance(3)
    with pytest.raises(
        EnvironmentFault, match="PoisonedGym: environment 0, episode 0, step 30: observation 'obs' holds nan"
    ):
        loop.advance(4)
    assert loop.replay.count == 28 and np.isfinite(loop.replay.since(0).time_step.obs["obs"]).all()


@pytest.mark.parametrize("env", ["jax/pendulum", "Pendulum-v1"])
def test_diverged_training_is_not_called_a_fault_of_the_environment(env):
    # The actor's weights overflow with the second update; from then on every action is NaN.
    with pytest.raises(FloatingPointError, match=r"^training diverged: (the policy's|.*imagined/drift).* not finite"):
        build(env, rate=3e38).advance(8)


def test_an_environment_that_cannot_be_saved_is_refused_by_name():
    loop = build("CartPole-v1")
    loop.advance(1)
    loop.env.snapshot = lambda: None
    with pytest.raises(ValueError, match="CartPole-v1: this environment cannot be saved"):
        loop.save()
