"""Every public module class is a tree: it passes through flatten, jit and vmap as what it was."""

import importlib
import inspect
import pkgutil
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import forethought
from forethought import collect, loop, nets, options
from forethought.agent import Agent
from forethought.algos import aligned, director, dreamer, dyna, option_critic, smdp
from forethought.auditing import values
from forethought.envs import control, distractor, mazes, tabular, trial
from forethought.envs.distract import distract
from forethought.envs.pure import Repeated
from forethought.envs.waiting import Cost, waiting
from forethought.gate import Gate, Gated, Record
from forethought.models.members import ensemble
from forethought.models.oracle import Oracle
from forethought.models.planted import planted
from forethought.models.tabular import Counts
from forethought.ops import dists, stats
from forethought.option_env import OptionEnv
from forethought.option_host import runner
from forethought.recovery import Measure, Recovery, Rules, Tally
from forethought.types import Box, Discrete, Outcome, PerStep, PerTime

KEY = jax.random.key(0)


def examples():
    """One of every class, as far as a small run of dreamer does not hold it already."""
    env = tabular.corridor(3, time_limit=4)
    sizes = dict(deter=4, hidden=4, stoch=2, classes=2, units=4, blocks=2, layers=1, bins=5)
    cfg = dreamer.Config(**sizes, envs=1, prefill=4, capacity=8, batch=1, length=2, starts=1)
    pure, ring, _ = jax.jit(lambda: loop.begin(dreamer, cfg, env, key=KEY))()
    policy = dreamer.policy(cfg, pure.agent)
    model, one = policy.model, jnp.ones(())
    pendulum, noise = control.Pendulum(), distractor.Distractor()
    record = Record(Path(tempfile.mkdtemp()) / "gate.jsonl")
    record.close()
    gated = Gated(env, Gate([], record), irreversible=(1,))
    table = dyna.init(dyna.Config(), 3, 2)
    maze = mazes.Changing((mazes.DYNA,), (0,), start=(2, 0), goal=(0, 8), name="maze")
    walk = options.TabularOption(np.ones(3, bool), np.full((3, 2), 0.5), np.ones(3))
    over = OptionEnv(env, [walk, *options.primitives(env.spec)], PerStep(0.9), record=True)
    level = over.reset(key=KEY)[0]
    critic = option_critic.init(option_critic.Config(units=2), env.spec, key=KEY)
    acts = option_critic.policy(option_critic.Config(), critic)
    choice = acts(acts.initial(), jax.tree.map(lambda x: x[0], pure.streams.time_step), key=KEY)[1].extras
    two = director.Config(**sizes, goal_variables=2, goal_classes=2)
    leader = director.init(two, env.spec, key=KEY)
    leads = director.policy(two, leader)
    latent, acted, _ = leads.initial()
    told = leads(leads.initial(), jax.tree.map(lambda x: x[0], pure.streams.time_step), key=KEY)[1].extras
    pair, distracted = aligned.init(aligned.Config(), noise, key=KEY), distract(pendulum)
    waits = waiting(pendulum, Cost(0.1, "decision"))
    stream = pure.streams
    decision = collect.RandomPolicy(Discrete(2))(None, jax.tree.map(lambda x: x[0], stream.time_step), key=KEY)[1]
    return [
        pure, ring, pure.agent, pure.agent.params, policy, policy.actor, pure.agent.params.critic, model,
        model.recurrence, *model.codes, model.initial(), pure.agent.return_scale, stats.RunningStats.empty(2),
        stream, collect.HostStream(stream.time_step, None, stream.tick[0], KEY), stream.time_step, stream.env_state,
        ring.data, decision, Outcome(None, one, one, one, one), PerStep(0.9), PerTime(0.1),
        collect.RandomPolicy(Box((2,))), collect.ZeroPolicy(Discrete(2)), Agent(policy, model, env.spec, 0),
        env, pendulum, control.CartPoleSwingUp(), Repeated(pendulum, 2), noise,
        pendulum.reset(key=KEY)[0], noise.reset(key=KEY)[0],
        dists.Categorical(jnp.zeros((3, 2))), dists.Normal(jnp.zeros(2), jnp.ones(2)), nets.Trunk(2, 3, 1, key=KEY),
        nets.MLP(2, 3, 1, 2, key=KEY), nets.Layer(2, 3, key=KEY), nets.Dense(2, 3, key=KEY),
        nets.BlockDense(2, 3, 4, key=KEY), nets.RMSNorm(3),
        pair.params.model(aligned.Config()), pair.partner, pair.params.actor, pair.slow, aligned.Factors(),
        distracted, distracted.reset(key=KEY)[0], pure.agent.params.sight, Oracle(pendulum),
        trial.Hover(), trial.Balance(), trial.Grid(), trial.Grid().reset(key=KEY)[0],
        ensemble(trial.Hover()), ensemble(trial.Hover()).members[0], planted(trial.Hover(), "region_bias", 0.5),
        planted(trial.Hover(), "region_bias", 0.5).initial(), trial.Controller("jax/hover"),
        values.LinearPolicy(jnp.zeros((2, 5)), jnp.zeros(4), jnp.ones(4), trial.Hover().spec),
        gated, gated.reset(key=KEY)[0],
        table, table.model, Counts.empty(3, 2), dyna.policy(dyna.Config(), table), maze,
        walk, options.primitives(env.spec)[0], over, over.options, over.limits, level, level.run, level.inner,
        runner(env.spec, [walk], PerStep(0.9), 3, np.inf, None, None), smdp.init(smdp.Config(), 3, 2),
        critic, critic.net, acts, choice,
        leader, leader.params, leads, leads.pursuing, leads.levels, leads.levels.goals, latent, latent.pursuit,
        acted, told, Tally.empty(), Rules.of([Recovery(Measure.ROLL_BACK)]),
        waits, waits.reset(key=KEY)[0],
        smdp.learn_within(smdp.Config(), env, 3.0, "decision", 2, dual_rate=0.1, key=KEY)[0],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trees():
    return {type(example).__name__: example for example in examples()}


def test_every_public_class_has_an_example(trees):
    classes = set()
    for module in pkgutil.walk_packages(forethought.__path__, "forethought."):
        found = vars(importlib.import_module(module.name)).values()
        classes |= {
            c for c in found if isinstance(c, type) and issubclass(c, eqx.Module) and c.__module__ == module.name
        }
    public = {c.__name__ for c in classes if not inspect.isabstract(c) and not c.__name__.startswith(("_", "Abstract"))}
    assert public - set(trees) == set()


def test_every_module_is_a_tree(trees):
    through, batches = jax.jit(lambda trees: (trees, jax.vmap(lambda _: trees)(jnp.arange(2))))(trees)
    for name, module in trees.items():
        leaves, form = jax.tree.flatten(module)
        for result in (jax.tree.unflatten(form, leaves), through[name], batches[name]):
            assert type(result) is type(module) and jax.tree.structure(result) == form, name
        for leaf, one, two in zip(leaves, jax.tree.leaves(through[name]), jax.tree.leaves(batches[name]), strict=True):
            assert one.shape == np.shape(leaf) and two.shape == (2, *np.shape(leaf)), name
            if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(one, np.asarray(leaf, one.dtype), err_msg=name)
                np.testing.assert_array_equal(two[1], one, err_msg=name)
