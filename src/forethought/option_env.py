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
from forethought.recovery import Recovery, Rules, Tally
from forethought.tree import select
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
    tally: Tally | None
    """What recovery came to in the last decision; None without rules."""


class OptionEnv(AbstractEnv):
    """A pure environment whose discrete action i starts `options[i]` and lasts until that option is over.

    Observation, unit and end of the episode are the environment's; reward is rbar, duration the sum, discount the
    product, `reward_delay` 0, and `legal` says which options may start. `state.run` tells how the last run went.
    Where none may start, exactly the fallback may, which has the last index; without one the reward is NaN there, so
    that whoever collects stops. So is that of an option which is chosen where it may not start. An ended option is
    never resumed.

    With `recovery` rules every action is an option under one of them: action i + O r starts option i of O, and rule r
    says what follows if it fails. With one rule that is a choice by rule; with several the level above learns which.
    """

    env: AbstractEnv
    options: OptionSet
    rule: Discount
    limits: Limits
    interrupt: Interrupt | None
    fallback: bool = eqx.field(static=True)
    record: int | None = eqx.field(static=True)
    recovery: tuple[Recovery, ...] = eqx.field(static=True)

    def __init__(
        self, env: AbstractEnv, options: Sequence[AbstractOption], rule: Discount, *, max_steps: int = MAX_STEPS,
        max_time: float = np.inf, fallback: AbstractOption | None = None, interrupt: Interrupt | None = None,
        record: bool = False, recovery: Sequence[Recovery] = (),
    ):  # fmt: skip
        """Options that act in `env`, discounted by `rule`, which the learner must use too.

        Args:
            max_steps, max_time: an option that runs so many steps, or so long in the environment's unit, is over.
            fallback: an option for where no other may start.
            interrupt: asked after every step whether the running option is to give way.
            record: keep the inner rows of the last run in the state, padded to max_steps + 1; what was rolled back is
                not among them.
            recovery: rules for options that fail; none: the level above chooses anew.

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
        self.recovery = tuple(recovery)

    @property
    def spec(self) -> Spec:
        return declared(self.env.spec, len(self.options) * max(len(self.recovery), 1))

    def reset(self, *, key: PRNGKeyArray) -> tuple[OptionState, TimeStep]:
        state, time_step = self.env.reset(key=key)
        inner = None if self.record is None else self._empty(state, time_step)
        legal = self._legal(time_step)
        shown = dataclasses.replace(time_step, legal=legal, reward=jnp.where(legal.any(), time_step.reward, jnp.nan))
        tally = Tally.empty() if self.recovery else None
        return OptionState(state, time_step, chosen(self.options, jnp.int32(0)), inner, tally), shown

    def step(self, state: OptionState, action: Int[Array, ""], *, key: PRNGKeyArray) -> tuple[OptionState, TimeStep]:
        may = self._legal(state.time_step)
        legal = (action >= 0) & (action < len(may)) & may[jnp.clip(action, 0, len(may) - 1)]
        rule, option = jnp.divmod(jnp.where(legal, action, 0), len(self.options))
        begun = dataclasses.replace(state, run=chosen(self.options, option))
        if self.record is not None:
            begun = dataclasses.replace(begun, inner=self._empty(state.env_state, state.time_step))
        if self.recovery:
            begun = dataclasses.replace(begun, tally=Tally.empty())

        def advance(now: OptionState) -> OptionState:
            later = self._advance(now, key)
            return self._recovered(begun, later, rule) if self.recovery else later

        done = jax.lax.while_loop(lambda s: ~s.run.over, advance, begun)
        may = self._legal(done.time_step)
        fine = legal & (may.any() | done.time_step.last)
        shown = summed(done.run, done.time_step, may)
        if done.tally is not None:
            paid = Rules.of(self.recovery).cost[rule] * done.tally.spent
            shown = dataclasses.replace(shown, reward=shown.reward - paid)
        return done, dataclasses.replace(shown, reward=jnp.where(fine, shown.reward, jnp.nan))

    def _advance(self, state: OptionState, key: PRNGKeyArray) -> OptionState:
        """One primitive step of the option under way."""
        run, now = state.run, state.time_step
        ever = run.steps if state.tally is None else run.steps + state.tally.spent  # a new try draws anew
        act_key, env_key, stop_key = jax.random.split(jax.random.fold_in(key, ever), 3)
        carry, decision = self.options.act(run.index, run.carry, now, key=act_key)
        env_state, arrived = self.env.step(state.env_state, decision.action, key=env_key)
        run = dataclasses.replace(run, carry=carry)
        gives_way = False if self.interrupt is None else self.interrupt(run.index, arrived)
        later = advanced(self.options, run, arrived, self.rule, self.limits, gives_way, key=stop_key)
        inner = state.inner
        if inner is not None:
            inner = _written(inner, run.steps, decision, arrived)
        return OptionState(env_state, arrived, later, inner, state.tally)

    def _recovered(self, begun: OptionState, now: OptionState, rule: Int[Array, ""]) -> OptionState:
        """What follows where the run is over: it stays so, starts again here, or where it was chosen."""
        run, tally = now.run, now.tally
        assert tally is not None
        again = self.options.can_start(now.time_step)[run.index]
        failed, continues, rolls = Rules.of(self.recovery).follows(rule, run.reason, tally, again)
        later = tally.add(failed, continues, rolls, run.steps)
        running = jnp.zeros_like(run.reason)
        anew = dataclasses.replace(run, carry=self.options.initial(), reason=running)
        here = dataclasses.replace(now, run=select(continues, anew, run), tally=later)
        return select(rolls, dataclasses.replace(begun, tally=later), here)

    def _legal(self, time_step: TimeStep) -> Bool[Array, " O"]:
        """Which actions may be chosen: options, once for each rule."""
        return jnp.tile(legality(self.options, time_step, self.fallback), max(len(self.recovery), 1))

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
