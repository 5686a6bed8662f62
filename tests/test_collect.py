"""The scan and its host twin give equal rows, over every kind of episode end; nothing crosses a reset."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought import collect
from forethought.algos import dreamer
from forethought.collect import RandomPolicy, ZeroPolicy
from forethought.envs import tabular
from forethought.envs.control import Pendulum
from forethought.envs.hosted import Hosted
from forethought.envs.pure import first_step, next_step
from forethought.protocols import AbstractEnv, AbstractPolicy
from forethought.tree import named_arrays
from forethought.types import Box, Decision, Discrete, Spec

# A third of the time to compile, and at these sizes little more to run.
KEY = jax.random.key(3)
CORRIDOR = tabular.corridor(3, time_limit=4)
PENDULUM = Pendulum()
VERSION = jnp.array(9, jnp.int32)
START = first_step({"x": jnp.zeros(())})


class Reckless(AbstractEnv):
    """Counts up from 0 and ends by termination at 2; a step after that is NaN."""

    @property
    def spec(self):
        return Spec("reckless", {"x": Box(())}, Box((1,), low=-1.0, high=1.0))

    def reset(self, *, key):
        return jnp.zeros(()), first_step({"x": jnp.zeros(())})

    def step(self, state, action, *, key):
        state = jnp.where(state >= 2, jnp.nan, state + 1)
        count = jnp.zeros((), jnp.int32)
        return state, next_step({"x": state}, state, elapsed=count, time_limit=None, terminated=state >= 2)


class Chatty(AbstractPolicy):
    """Leaves something everywhere: what it decides is never 0. Its carry counts the rows it has seen."""

    def initial(self):
        return jnp.zeros(())

    def __call__(self, carry, time_step, *, key):
        return carry + 1, Decision(jnp.full((1,), 0.5), jnp.full((), -0.7), {"rows": carry + 1})


def dreamer_policy(env, gradient):
    sizes = dict(deter=8, hidden=8, stoch=2, classes=3, units=8, blocks=2, layers=1, bins=11)
    cfg = dreamer.Config(**sizes, actor_gradient=gradient)
    rng = np.random.default_rng(0)  # weights drawn by NumPy, which compiles nothing
    policy = jax.eval_shape(lambda: dreamer.policy(cfg, dreamer.init(cfg, env.spec, key=KEY)))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.3), x.dtype), policy)


CASES = {
    "tabular, random": lambda: (CORRIDOR, RandomPolicy(CORRIDOR.spec.action), 60),
    "tabular, dreamer": lambda: (CORRIDOR, dreamer_policy(CORRIDOR, "reinforce"), 30),
    "pendulum, random": lambda: (PENDULUM, RandomPolicy(PENDULUM.spec.action), 205),
    "pendulum, dreamer": lambda: (PENDULUM, dreamer_policy(PENDULUM, "dynamics"), 205),
    "reckless": lambda: (Reckless(), Chatty(), 10),
}


def scanned(env, policy, ticks, num=3, chunks=1):
    """Rows [T, B] and the streams [B]."""
    begin = jax.vmap(lambda i: collect.begin(env, policy, i, key=KEY))
    one = lambda stream: collect.collect(env, policy, stream, ticks // chunks, policy_version=VERSION)  # noqa: E731
    go = jax.jit(jax.vmap(one, out_axes=(0, 1)))
    streams, parts = jax.jit(begin)(jnp.arange(num)), []
    for _ in range(chunks):
        streams, rows = go(streams)
        parts.append(rows)
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts), streams


def hosted(env, policy, ticks, num=3):
    host = Hosted(env, num, key=jax.random.split(KEY)[0])
    stream = collect.begin_host(host, policy, seed=None, key=KEY)
    decide = jax.jit(lambda stream: collect.decide(policy, stream, VERSION))
    stream, rows = collect.collect_host(host, decide, stream, ticks)
    return rows, stream


@functools.cache
def both(case):
    return *scanned(*CASES[case]()), *hosted(*CASES[case]())


cases = pytest.mark.parametrize("case", CASES)


@cases
def test_the_twins_are_equal(case):
    rows, streams, host_rows, host_stream = both(case)
    found = named_arrays({"rows": rows, "tick": streams.tick[0], "next": streams.time_step.first})
    other = named_arrays({"rows": host_rows, "tick": host_stream.tick, "next": host_stream.time_step.first})
    assert found.keys() == other.keys()
    assert jax.tree.structure(streams.carry) == jax.tree.structure(host_stream.carry)
    for name, leaf in found.items():
        assert leaf.dtype == other[name].dtype and leaf.shape == other[name].shape, name
        # Two programs round a pendulum's swing differently, and an upright one doubles what differs every few ticks;
        # a wrong key or row makes a difference of 1.
        for part, tolerance in ((slice(15), 1e-5), (slice(None), 0.02)):
            tolerance = tolerance if np.issubdtype(leaf.dtype, np.floating) else 0
            one, another = (x[part] if np.ndim(x) else x for x in (leaf, other[name]))
            np.testing.assert_allclose(one, another, rtol=10 * tolerance, atol=tolerance, err_msg=name)


@cases
def test_no_transition_crosses_a_reset(case):
    step = both(case)[0].time_step
    assert step.last.sum() >= 3 and not step.last.all(0).any()
    np.testing.assert_array_equal(step.first[1:], step.last[:-1])  # an end is followed by a reset, one tick later
    assert step.first[0].all()
    first = {name: getattr(step, name)[step.first] for name in ("reward", "discount", "duration", "reward_delay")}
    for name, void in (("reward", 0), ("discount", 1), ("duration", 0), ("reward_delay", 0)):
        np.testing.assert_array_equal(first[name], void)
    np.testing.assert_array_equal(step.duration[~step.first], 1)


@cases
def test_rows_are_real_and_void_where_an_episode_ended(case):
    rows = both(case)[0]
    last = rows.time_step.last
    np.testing.assert_array_equal(rows.depth, 0)
    np.testing.assert_array_equal(rows.policy_version, 9)
    assert rows.depth.dtype == rows.policy_version.dtype == np.int32
    for leaf in jax.tree.leaves((rows.action, rows.log_prob, rows.extras)):
        np.testing.assert_array_equal(leaf[last], 0)
    assert (rows.log_prob[~last] != 0).any()


def test_episodes_are_those_of_the_environment():
    """The corridor of 3: what follows a row is what its action does there; both kinds of end occur."""
    rows = both("tabular, random")[0]
    step, state = rows.time_step, rows.time_step.obs["state"]
    goes_on = ~step.last[:-1]
    arrives = np.where(rows.action == 1, state + 1, np.maximum(state - 1, 0))[:-1]
    np.testing.assert_array_equal(state[1:][goes_on], arrives[goes_on])
    np.testing.assert_array_equal(step.reward[1:][goes_on], (arrives == 2)[goes_on])
    np.testing.assert_array_equal(step.discount == 0, state == 2)
    assert (step.discount[step.last] == 0).any() and (step.discount[step.last] == 1).any()
    assert len({tuple(rows.action[:, stream]) for stream in range(3)}) == 3  # three streams, three stories


def test_an_ended_environment_is_never_stepped():
    """0, 1, 2 (ended), 0, 1, 2, ... and no NaN from a step after the end; the carry sees every row."""
    rows = both("reckless")[0]
    np.testing.assert_array_equal(rows.time_step.obs["x"][:, 0], [0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    np.testing.assert_array_equal(rows.extras["rows"][:, 0], [1, 2, 0, 4, 5, 0, 7, 8, 0, 10])
    np.testing.assert_array_equal(rows.time_step.discount[:, 0], [1, 1, 0, 1, 1, 0, 1, 1, 0, 1])


def test_collecting_goes_on_where_it_stood():
    env, policy, _ = CASES["tabular, random"]()
    whole, parts = scanned(env, policy, 60), scanned(env, policy, 60, chunks=5)
    for one, other in zip(jax.tree.leaves(whole[0]), jax.tree.leaves(parts[0]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_same_seed_whatever_others_draw():
    """F23, F22: foreign draws between change nothing; another stream's rows differ."""
    env, policy, _ = CASES["tabular, random"]()
    runs = []
    for foreign in range(2):
        np.random.seed(foreign)
        np.random.random(foreign + 1)
        runs.append(hosted(env, policy, 12)[0])
    for one, other in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(runs[1]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_random_policy_is_uniform():
    keys = jax.random.split(KEY, 4000)
    decide = lambda policy: jax.jit(jax.vmap(lambda k: policy(None, START, key=k)[1]))(keys)  # noqa: E731
    drawn = decide(RandomPolicy(Discrete(4)))
    # Five standard deviations of a frequency: 5 * sqrt(3 / 16 / 4000) = 0.034.
    np.testing.assert_allclose(np.bincount(drawn.action) / 4000, np.full(4, 0.25), atol=0.034)
    np.testing.assert_allclose(drawn.log_prob, -np.log(4), rtol=1e-6)
    drawn = decide(RandomPolicy(Box((2, 3), low=-5.0, high=0.0)))
    assert drawn.action.shape == (4000, 2, 3) and np.abs(drawn.action).max() <= 1
    # The mean of 4000 uniforms has a standard error of 1 / sqrt(3 * 4000) = 0.0091; the variance is 1/3.
    np.testing.assert_allclose(drawn.action.mean(0), 0, atol=0.046)
    np.testing.assert_allclose(drawn.action.var(0), 1 / 3, atol=0.03)
    np.testing.assert_allclose(drawn.log_prob, -6 * np.log(2), rtol=1e-6)


@pytest.mark.parametrize("space", [Discrete(4), Box((2, 3), low=0.0, high=5.0)])
def test_the_zero_policy_does_nothing(space):
    decision = ZeroPolicy(space)(None, START, key=KEY)[1]
    assert decision.action.shape == space.shape and decision.action.dtype == space.dtype
    done = decision.action if isinstance(space, Discrete) else space.native(np.asarray(decision.action))
    assert not done.any() and decision.log_prob == 0


@pytest.mark.parametrize("policy", [RandomPolicy, ZeroPolicy])
def test_a_mask_of_legal_actions_is_refused_not_ignored(policy):
    masked = dataclasses.replace(START, legal=jnp.array([True, False, True, False]))
    with pytest.raises(ValueError, match="legal: this policy would ignore"):
        policy(Discrete(4))(None, masked, key=KEY)
