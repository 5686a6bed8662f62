"""Options: ways to act for a while, a set of them to choose from, and one of them under way.

    choose o at obs0    obs0 --a0--> r1, obs1 --a1--> r2, obs2  stops, k = 2
    one transition of the level above:   obs0 --o--> rbar = r1 + f1 r2,  factor = f1 f2,  obs2

with the reward r and the factor f of each primitive step as the Discount rule makes them (Sutton, Precup & Singh 1999).
`option_env.py` runs them in an environment; here one step of the run is written once, for pure and host ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from forethought.protocols import AbstractOption
from forethought.types import Decision, Discount, Discrete, EndReason, Spec, TimeStep, check_unit


class Primitive(AbstractOption):
    """One action, once: an option of one step that may start wherever its action is legal."""

    action: Array | np.ndarray

    def can_start(self, time_step: TimeStep) -> Bool[Array, ""]:
        return jnp.ones((), bool) if time_step.legal is None else time_step.legal[self.action]

    def initial(self) -> None:
        return None

    def act(self, carry: None, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[None, Decision]:
        return None, Decision(jnp.asarray(self.action), jnp.zeros(()))

    def stop_prob(self, carry: None, time_step: TimeStep) -> Float[Array, ""]:
        return jnp.ones(())


def primitives(spec: Spec) -> tuple[Primitive, ...]:
    """Every action as an option. Raises ValueError for an environment whose actions cannot be listed."""
    if not isinstance(spec.action, Discrete):
        raise ValueError(f"{spec.name}: its actions are continuous and cannot be listed as options")
    return tuple(Primitive(np.asarray(a, np.int32)) for a in range(spec.action.n))


class TabularOption(AbstractOption):
    """An option over the states of a finite environment, as three tables."""

    initiation: Bool[Array | np.ndarray, " S"]
    policy: Float[Array | np.ndarray, "S A"]
    """Probabilities of actions."""
    stop: Float[Array | np.ndarray, " S"]
    key: str = eqx.field(static=True, default="state")
    """The observation key that is the state's index."""
    fails: Bool[Array | np.ndarray, " S"] | None = None
    """Where it has failed; None: nowhere."""

    def can_start(self, time_step: TimeStep) -> Bool[Array, ""]:
        return jnp.asarray(self.initiation)[time_step.obs[self.key]]

    def initial(self) -> None:
        return None

    def act(self, carry: None, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[None, Decision]:
        log_probs = jnp.log(jnp.asarray(self.policy, jnp.float32)[time_step.obs[self.key]])
        action = jax.random.categorical(key, log_probs).astype(jnp.int32)
        return None, Decision(action, log_probs[action])

    def stop_prob(self, carry: None, time_step: TimeStep) -> Float[Array, ""]:
        return jnp.asarray(self.stop, jnp.float32)[time_step.obs[self.key]]

    def failed(self, carry: None, time_step: TimeStep) -> Bool[Array, ""]:
        return jnp.zeros((), bool) if self.fails is None else jnp.asarray(self.fails)[time_step.obs[self.key]]


class OptionSet(eqx.Module):
    """Options to choose from by their index; of one class they are stacked, others are switched between."""

    options: tuple[AbstractOption, ...]
    alike: bool = eqx.field(static=True)

    def __init__(self, options: Sequence[AbstractOption]):
        """Raises ValueError for an empty set."""
        if not options:
            raise ValueError("options: there are none to choose from")
        self.options = tuple(options)
        kinds = {(jax.tree.structure(o), tuple(np.shape(x) for x in jax.tree.leaves(o))) for o in options}
        self.alike = len(kinds) == 1

    def __len__(self) -> int:
        return len(self.options)

    def can_start(self, time_step: TimeStep) -> Bool[Array, " O"]:
        if self.alike:
            return jax.vmap(lambda option: option.can_start(time_step))(self.stacked())
        return jnp.stack([option.can_start(time_step) for option in self.options])

    def initial(self) -> PyTree:
        """A carry with which any of them starts."""
        return self.options[0].initial() if self.alike else tuple(option.initial() for option in self.options)

    def act(
        self, index: Int[Array, ""], carry: PyTree, time_step: TimeStep, *, key: PRNGKeyArray
    ) -> tuple[PyTree, Decision]:
        """Lets option `index` act; the carries of others stay."""
        if self.alike:
            return self._one(index).act(carry, time_step, key=key)

        def acting(i: int) -> Any:
            def act(carries: PyTree) -> tuple[PyTree, Decision]:
                own, decision = self.options[i].act(carries[i], time_step, key=key)
                return (*carries[:i], own, *carries[i + 1 :]), decision

            return act

        return jax.lax.switch(index, [acting(i) for i in range(len(self))], carry)

    def stop_prob(self, index: Int[Array, ""], carry: PyTree, time_step: TimeStep) -> Float[Array, ""]:
        if self.alike:
            return self._one(index).stop_prob(carry, time_step)
        stops = [lambda carries, i=i: self.options[i].stop_prob(carries[i], time_step) for i in range(len(self))]
        return jax.lax.switch(index, stops, carry)

    def failed(self, index: Int[Array, ""], carry: PyTree, time_step: TimeStep) -> Bool[Array, ""]:
        if self.alike:
            return self._one(index).failed(carry, time_step)
        fails = [lambda carries, i=i: self.options[i].failed(carries[i], time_step) for i in range(len(self))]
        return jax.lax.switch(index, fails, carry)

    def stacked(self) -> Any:
        """The options, which are alike, as one whose arrays lead with O."""
        return jax.tree.map(lambda *xs: jnp.stack([jnp.asarray(x) for x in xs]), *self.options)

    def _one(self, index: Int[Array, ""]) -> AbstractOption:
        return jax.tree.map(lambda x: x[index], self.stacked())


def declared(spec: Spec, count: int) -> Spec:
    """What an environment declares whose actions are so many options in another. Which of them do something
    irreversible cannot be said of an option: a gate stands before the environment they act in."""
    action = Discrete(count)
    return dataclasses.replace(
        spec, name=f"{spec.name} by options", action=action, duration=None, time_limit=None, irreversible=()
    )


class Limits(eqx.Module):
    """How long an option may run: so many steps, and so much time in the environment's unit."""

    steps: int
    time: float = np.inf

    @classmethod
    def of(cls, spec: Spec, rule: Discount, max_steps: int, max_time: float) -> Limits:
        """Raises ValueError for limits that leave no step, and for a rule in another unit than the environment's."""
        check_unit(rule, spec)
        if max_steps < 1 or not max_time > 0:
            raise ValueError(f"{spec.name}: max_steps is {max_steps}, max_time {max_time}; both must be above 0")
        return cls(max_steps, max_time)


class Under(eqx.Module):
    """An option under way, and what its run has amounted to so far."""

    index: Int[Array, "*batch"]
    carry: PyTree
    steps: Int[Array, "*batch"]
    """Primitive steps taken."""
    reward: Float[Array, "*batch"]
    """rbar: every reward discounted to where the option was chosen."""
    factor: Float[Array, "*batch"]
    """Product of the rule's factors."""
    discount: Float[Array, "*batch"]
    """Product of the environment's discounts: 0 once it terminated."""
    duration: Float[Array, "*batch"]
    reason: Int[Array, "*batch"]
    """An `EndReason`; 0 while it runs."""

    @property
    def over(self) -> Bool[Array, "*batch"]:
        return self.reason != EndReason.RUNNING


def chosen(options: OptionSet, index: Int[Array, ""]) -> Under:
    """Option `index`, before its first step."""
    zero, one = jnp.zeros(()), jnp.ones(())
    none = jnp.zeros((), jnp.int32)
    return Under(jnp.asarray(index, jnp.int32), options.initial(), none, zero, one, one, zero, none)


def advanced(
    options: OptionSet, under: Under, arrived: TimeStep, rule: Discount, limits: Limits,
    interrupted: Bool[Array, ""] | bool = False, *, key: PRNGKeyArray,
) -> Under:  # fmt: skip
    """The run after one more primitive step, which led to `arrived`: its reward is added, and whether it ends is said.

    An episode's end ends every option. Else its own stop comes first, then a failure, an interruption, its limits."""
    reward, factor = rule(arrived)
    steps, duration = under.steps + 1, under.duration + arrived.duration
    stops = jax.random.uniform(key) < options.stop_prob(under.index, under.carry, arrived)
    limit = (steps >= limits.steps) | (duration >= limits.time)
    failed = options.failed(under.index, under.carry, arrived)
    whys = (arrived.last, stops, failed, jnp.asarray(interrupted), limit)
    names = (EndReason.EPISODE, EndReason.STOPPED, EndReason.FAILURE, EndReason.INTERRUPTED, EndReason.LIMIT)
    reason = jnp.select(whys, [jnp.int32(name) for name in names], jnp.int32(EndReason.RUNNING))
    return Under(
        under.index, under.carry, steps, under.reward + under.factor * reward, under.factor * factor,
        under.discount * arrived.discount, duration, reason,
    )  # fmt: skip


def summed(under: Under, arrived: TimeStep, legal: Bool[Array, " O"]) -> TimeStep:
    """The time step of the level above after a run that ended at `arrived`."""
    return dataclasses.replace(
        arrived, reward=under.reward, discount=under.discount, duration=under.duration,
        reward_delay=jnp.zeros_like(under.reward), legal=legal,
    )  # fmt: skip
