"""Hierarchy as a transformation of environments: an environment whose actions are options.

A flat learner on it is an SMDP learner: with the same Discount rule as the environment, its backup
reward + factor * value is rbar + gamma^k (1 - d) value. It stacks: options may act in an OptionEnv.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from forethought.options import Limits, OptionSet, Under, advanced, chosen, declared, summed
from forethought.protocols import AbstractEnv, AbstractOption
from forethought.types import Decision, Discount, Spec, TimeStep

MAX_STEPS = 1000
"""An option runs no longer than this unless it is said."""
Interrupt = Callable[[Int[Array, ""], TimeStep], Bool[Array, ""]]
"""Whether the running option, of this index, is to be interrupted at a time step it has led to."""


class Inner(eqx.Module):
    """What happened inside an option's run: rows 0 .. steps as in `Step`, those after them void.

    Row 0 is where the option was chosen, row `steps` where it ended: its action is void. A row's reward is the
    primitive one, not yet discounted. Depth and policy version are those of the row that the option was chosen in.
    """

    time_step: TimeStep
    action: Array
    log_prob: Array | None


class OptionState(eqx.Module):
    """Where the environment stands, and how the last option's run went."""

    env_state: PyTree
    time_step: TimeStep
    """The environment's own, with the primitive reward."""
    run: Under
    inner: Inner | None


class OptionEnv(AbstractEnv):
    """A pure environment whose discrete action i starts `options[i]` and lasts until that option is over.

    Observation, unit and end of the episode are the environment's; reward is rbar, duration the sum, discount the
    product, `reward_delay` 0, and `legal` says which options may start. `state.run` tells how the last run went.
    Where none may start, exactly the fallback may, which has the last index; without one the reward is NaN there, so
    that whoever collects stops. So is that of an option which is chosen where it may not start. An ended option is
    never resumed.
    """

    env: AbstractEnv
    options: OptionSet
    rule: Discount
    limits: Limits
    interrupt: Interrupt | None
    fallback: bool = eqx.field(static=True)
    record: int | None = eqx.field(static=True)

    def __init__(
        self, env: AbstractEnv, options: Sequence[AbstractOption], rule: Discount, *, max_steps: int = MAX_STEPS,
        max_time: float = np.inf, fallback: AbstractOption | None = None, interrupt: Interrupt | None = None,
        record: bool = False,
    ):  # fmt: skip
        """Options that act in `env`, discounted by `rule`, which the learner must use too.

        Args:
            max_steps, max_time: an option that runs so many steps, or so long in the environment's unit, is over.
            fallback: an option for where no other may start.
            interrupt: asked after every step whether the running option is to give way.
            record: keep the inner rows of the last run in the state, padded to max_steps + 1.

        Raises:
            ValueError: a rule in another unit than the environment's, no options, limits that leave no step, or an
                environment that declares irreversible actions: a run is compiled, where nobody can be asked.
        """
        limits = Limits.of(env.spec, rule, max_steps, max_time)
        if env.spec.irreversible:
            raise ValueError(
                f"{env.spec.name}: it declares irreversible actions, and a compiled run of options asks nobody; "
                "act in it with HostOptions over Gated"
            )
        self.env, self.rule, self.interrupt = env, rule, interrupt
        self.options = OptionSet([*options, *([] if fallback is None else [fallback])])
        self.limits, self.fallback = limits, fallback is not None
        self.record = max_steps if record else None

    @property
    def spec(self) -> Spec:
        return declared(self.env.spec, len(self.options))

    def reset(self, *, key: PRNGKeyArray) -> tuple[OptionState, TimeStep]:
        state, time_step = self.env.reset(key=key)
        inner = None if self.record is None else self._empty(state, time_step)
        legal = legality(self.options, time_step, self.fallback)
        shown = dataclasses.replace(time_step, legal=legal, reward=jnp.where(legal.any(), time_step.reward, jnp.nan))
        return OptionState(state, time_step, chosen(self.options, jnp.int32(0)), inner), shown

    def step(self, state: OptionState, action: Int[Array, ""], *, key: PRNGKeyArray) -> tuple[OptionState, TimeStep]:
        may = legality(self.options, state.time_step, self.fallback)
        legal = (action >= 0) & (action < len(self.options)) & may[jnp.clip(action, 0, len(self.options) - 1)]
        begun = dataclasses.replace(state, run=chosen(self.options, jnp.where(legal, action, 0)))
        if self.record is not None:
            begun = dataclasses.replace(begun, inner=self._empty(state.env_state, state.time_step))
        done = jax.lax.while_loop(lambda s: ~s.run.over, lambda s: self._advance(s, key), begun)
        may = legality(self.options, done.time_step, self.fallback)
        fine = legal & (may.any() | done.time_step.last)
        shown = summed(done.run, done.time_step, may)
        return done, dataclasses.replace(shown, reward=jnp.where(fine, shown.reward, jnp.nan))

    def _advance(self, state: OptionState, key: PRNGKeyArray) -> OptionState:
        """One primitive step of the option under way."""
        run, now = state.run, state.time_step
        act_key, env_key, stop_key = jax.random.split(jax.random.fold_in(key, run.steps), 3)
        carry, decision = self.options.act(run.index, run.carry, now, key=act_key)
        env_state, arrived = self.env.step(state.env_state, decision.action, key=env_key)
        run = dataclasses.replace(run, carry=carry)
        gives_way = False if self.interrupt is None else self.interrupt(run.index, arrived)
        later = advanced(self.options, run, arrived, self.rule, self.limits, gives_way, key=stop_key)
        inner = state.inner
        if inner is not None:
            inner = _written(inner, run.steps, decision, arrived)
        return OptionState(env_state, arrived, later, inner)

    def _empty(self, env_state: PyTree, time_step: TimeStep) -> Inner:
        """Rows for a run that begins at `time_step`."""
        assert self.record is not None
        count = self.record + 1
        carry, key = self.options.initial(), jax.random.key(0)
        decision = jax.eval_shape(lambda: self.options.act(jnp.int32(0), carry, time_step, key=key)[1])
        rows = lambda x: jnp.zeros((count, *x.shape), x.dtype)  # noqa: E731
        first = jax.tree.map(lambda x: rows(x).at[0].set(x), jax.tree.map(jnp.asarray, time_step))
        return Inner(first, rows(decision.action), None if decision.log_prob is None else rows(decision.log_prob))


def _written(inner: Inner, row: Int[Array, ""], decision: Decision, arrived: TimeStep) -> Inner:
    """The decision in its row and what it led to in the next."""
    put = lambda rows, x, at: rows.at[at].set(x)  # noqa: E731
    later = jax.tree.map(lambda rows, x: put(rows, x, row + 1), inner.time_step, arrived)
    log_prob = None if inner.log_prob is None else put(inner.log_prob, decision.log_prob, row)
    return Inner(later, put(inner.action, decision.action, row), log_prob)


def legality(options: OptionSet, time_step: TimeStep, fallback: bool) -> Bool[Array, " O"]:
    """Which options may start; the fallback, which is the last, only where no other may."""
    may = options.can_start(time_step)
    return may.at[-1].set(~may[:-1].any()) if fallback else may
