"""The gate before a pure environment: asked outside of jit, refused wherever JAX traces or maps."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stub_learner
from forethought import collect, loop
from forethought.envs.control import Pendulum
from forethought.envs.distract import distract
from forethought.envs.hosted import Hosted
from forethought.envs.pure import Repeated
from forethought.gate import Ask, Gate, Gated, Refused, Rule
from forethought.protocols import AbstractEnv
from forethought.types import PerStep
from silo import CORRIDOR, KEY, lines, silo, verdicts, yes
from silo import record as record


class Declaring(AbstractEnv):
    """A corridor of which going right is irreversible, as its own spec says."""

    @property
    def spec(self):
        return dataclasses.replace(CORRIDOR.spec, irreversible=(1,))

    def reset(self, *, key):
        return CORRIDOR.reset(key=key)

    def step(self, state, action, *, key):
        return CORRIDOR.step(state, action, key=key)


def test_outside_of_jit_the_gate_is_asked(record):
    sources = (Rule("not at 2", lambda obs, action: obs["state"] != 2), Ask(lambda act: act.step < 9))
    env = Gated(Declaring(), Gate(sources, record))
    state, time_step = env.reset(key=KEY)
    for action, arrives in ((1, 1), (0, 0), (1, 1), (1, 2)):
        state, time_step = env.step(state, jnp.int32(action), key=KEY)
        assert time_step.obs["state"] == arrives
    with pytest.raises(Refused, match="corridor.*step 4: .*action 1 is refused: rule 'not at 2'"):
        env.step(state, 1, key=KEY)
    state, time_step = env.step(state, np.int8(0), key=KEY)
    assert time_step.obs["state"] == 1 and verdicts(record) == ["allowed"] * 3 + ["refused"]
    assert [(line["step"], line["row"], line["episode"]) for line in lines(record)] == [
        (n, None, None) for n in (0, 2, 3, 4)
    ]


def test_a_state_that_was_left_with_leave_is_left_again_only_with_new_leave(record):
    """A pure state can be stepped twice, which is how an approval would be replayed."""
    answers = iter([True, False])
    env = Gated(Declaring(), Gate([Ask(lambda act: next(answers))], record))
    state, _ = env.reset(key=KEY)
    env.step(state, jnp.int32(1), key=KEY)
    with pytest.raises(Refused):
        env.step(state, jnp.int32(1), key=KEY)


def ways():
    """Every way to step without being asked: name, and what does it with a step and a state."""
    two = lambda state: jax.tree.map(lambda x: jnp.stack([x, x]), state)  # noqa: E731
    return {
        "jit": lambda step, state: jax.jit(step)(state, jnp.int32(1)),
        "jit of a harmless action": lambda step, state: jax.jit(step)(state, jnp.int32(0)),
        "jit of constants": lambda step, state: jax.jit(lambda: step(state, np.int32(1)))(),
        "vmap": lambda step, state: jax.vmap(step)(two(state), jnp.ones(2, jnp.int32)),
        "vmap of actions": lambda step, state: jax.vmap(step, (None, 0))(state, jnp.array([0, 1])),
        "vmap of constants": lambda step, state: jax.vmap(lambda _: step(state, np.int32(1)))(jnp.arange(3)),
        "scan": lambda step, state: jax.lax.scan(lambda s, a: (step(s, a)[0], None), state, jnp.ones(3, jnp.int32)),
        "cond": lambda step, state: jax.lax.cond(False, lambda: step(state, np.int32(1))[0], lambda: state),
        "while": lambda step, state: jax.lax.while_loop(lambda s: False, lambda s: step(s, np.int32(1))[0], state),
        "eval_shape": lambda step, state: jax.eval_shape(step, state, jnp.int32(1)),
        "make_jaxpr": lambda step, state: jax.make_jaxpr(step)(state, jnp.int32(1)),
        "checkpoint": lambda step, state: jax.checkpoint(step)(state, jnp.int32(1)),
        "grad": lambda step, state: jax.grad(lambda x: x * step(state, np.int32(1))[1].reward)(1.0),
        "a batch": lambda step, state: step(two(state), jnp.ones(2, jnp.int32)),
    }


@pytest.mark.parametrize("way", ways())
def test_wherever_jax_traces_or_maps_it_refuses(record, way):
    env = Gated(Declaring(), Gate([Ask(yes)], record))
    state, _ = jax.jit(lambda: env.reset(key=KEY))()
    with pytest.raises(ValueError if way == "a batch" else Refused):
        ways()[way](lambda s, a: env.step(s, a, key=KEY), state)
    assert lines(record) == ()


@pytest.mark.parametrize("way", ["jit", "scan", "cond"])
def test_without_compilation_everyone_is_asked_every_time(record, way):
    env = Gated(Declaring(), Gate([Ask(yes)], record))
    state, _ = env.reset(key=KEY)
    with jax.disable_jit():
        ways()[way](lambda s, a: env.step(s, a, key=KEY), state)
        with pytest.raises(Refused):
            ways()["vmap"](lambda s, a: env.step(s, a, key=KEY), state)
    assert verdicts(record) == ["allowed"] * {"jit": 1, "scan": 3, "cond": 0}[way]


def test_training_and_collecting_refuse_when_they_are_built(record):
    env = Gated(Declaring(), Gate([Ask(yes)], record))
    with pytest.raises(Refused, match="inside jit"):
        loop.PureLoop(stub_learner, stub_learner.Config(), env, PerStep(0.9), seed=0)
    policy = collect.ZeroPolicy(env.spec.action)  # never goes right
    stream = collect.begin(env, policy, 0, key=KEY)
    with pytest.raises(Refused):
        collect.collect(env, policy, stream, 3, policy_version=jnp.int32(0))
    host = Hosted(env, 2, key=KEY)
    host.reset()
    with pytest.raises(Refused):
        host.send(np.array([1, 0]))
    assert lines(record) == ()


def test_where_nothing_is_irreversible_it_compiles_and_changes_nothing(record):
    env, policy = Gated(Pendulum(), Gate([], record), irreversible=()), collect.RandomPolicy(Pendulum().spec.action)

    def rows(env):
        stream = collect.begin(env, policy, 0, key=KEY)
        return collect.collect(env, policy, stream, 5, policy_version=jnp.int32(0))[1]

    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda: rows(env))(), jax.jit(lambda: rows(Pendulum()))())


@pytest.mark.parametrize("action", [2.0, 1.0, True, np.nan, -1, 2, np.array([1]), 2**32 + 1, "1", None])
def test_nothing_is_made_an_action_of_a_pure_environment(record, action):
    env = Gated(Declaring(), Gate([Ask(yes)], record))
    with pytest.raises(ValueError):
        env.step(env.reset(key=KEY)[0], action, key=KEY)
    assert lines(record) == ()


class Shifty:
    """An action that is harmless when it is looked at for the first time."""

    def __init__(self):
        self.looks = itertools.chain([0], itertools.repeat(1))

    def __array__(self, dtype=None, copy=None):
        return np.asarray(next(self.looks))


def test_what_was_judged_is_what_is_sent(record):
    env = Gated(Declaring(), Gate([], record))
    assert env.step(env.reset(key=KEY)[0], Shifty(), key=KEY)[1].obs["state"] == 0


class Macro(AbstractEnv):
    """An environment whose every step takes several actions of another, as an OptionEnv does."""

    env: AbstractEnv
    actions: tuple[int, ...]
    compiled: bool

    @property
    def spec(self):
        return dataclasses.replace(self.env.spec, irreversible=())

    def reset(self, *, key):
        return self.env.reset(key=key)

    def step(self, state, action, *, key):
        if self.compiled:
            go = lambda now, a: (self.env.step(now[0], a, key=key), None)  # noqa: E731
            first = self.env.reset(key=key)[1]
            return jax.lax.scan(go, (state, first), jnp.array(self.actions, jnp.int32))[0]
        for one in self.actions:
            state, time_step = self.env.step(state, jnp.int32(one), key=key)
        return state, time_step


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("wrap", ["macro", "option", "distract", "gate"])
def test_however_deep_it_is_nested_in_a_pure_environment(record, wrap, depth):
    env = Gated(CORRIDOR, Gate([], record), irreversible=(1,))
    for _ in range(depth):
        if wrap == "gate":
            env = Gated(env, Gate([Ask(yes)], record))
        else:
            env = distract(env, dims=2) if wrap == "distract" else Macro(env, (0, 1), wrap == "option")
    state, _ = env.reset(key=KEY)
    with pytest.raises(Refused):
        env.step(state, jnp.int32(1), key=KEY)


def test_a_repeated_action_does_not_pass_on_one_evidence(record):
    gate, declared = Gate([Ask(yes)], record), dataclasses.replace(CORRIDOR.spec, irreversible=(1,))
    gated = Gated(CORRIDOR, gate, irreversible=(1,))
    with pytest.raises(Refused, match="nobody can be asked"):
        repeated = Repeated(gated, 3)
        repeated.step(repeated.reset(key=KEY)[0], jnp.int32(1), key=KEY)
    for env in (
        Repeated(CORRIDOR, 3),
        distract(Repeated(CORRIDOR, 3), dims=1),
        Hosted(Repeated(CORRIDOR, 3), 1, key=KEY),
        silo(1, action_repeat=3)[0],
    ):
        with pytest.raises(ValueError, match="3 times"):
            Gated(env, gate, irreversible=declared.irreversible)
        assert Gated(env, gate, irreversible=()).spec.irreversible == ()
