"""What follows when an option fails: the level above chooses anew, it goes on, or the environment is rolled back.

    obs0 --o--> obs1 --> obs2 fails        reselect    the run is over at obs2; the level above chooses there
                                           continue    o starts again at obs2, within the same decision
                                           roll back   the environment is put back to obs0 and o starts again there,
                                                       with other random numbers; obs1 and obs2 never were

A branch that was rolled back is no part of what the level above sees: reward, duration and discount are those of what
survives. Its steps were taken all the same, so they are counted beside it (`Tally.spent`) and may cost.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from forethought.types import EndReason


class Measure(enum.IntEnum):
    """What follows a failure."""

    RESELECT = 0
    CONTINUE = 1
    ROLL_BACK = 2


@dataclasses.dataclass(frozen=True)
class Recovery:
    """A rule: which measure follows which failures, how often in a decision; then the level above chooses anew."""

    measure: Measure
    reasons: tuple[EndReason, ...] = (EndReason.FAILURE,)
    """What counts as a failure: FAILURE, and LIMIT for an option that has run as long as it may."""
    tries: int = 1
    """Measures per decision."""
    cost: float = 0.0
    """Reward that a step of a branch which is rolled back costs."""

    def __post_init__(self) -> None:
        if not self.reasons or set(self.reasons) - {EndReason.FAILURE, EndReason.LIMIT}:
            raise ValueError(f"reasons is {self.reasons}; give FAILURE, LIMIT or both")
        if self.measure == Measure.CONTINUE and EndReason.LIMIT in self.reasons:
            raise ValueError("reasons holds LIMIT, after which nothing goes on; give a larger limit, or roll back")
        if self.tries < 1:
            raise ValueError(f"tries is {self.tries}; it must be at least 1")
        if not 0 <= self.cost < float("inf"):
            raise ValueError(f"cost is {self.cost}; it must be finite and not negative")


class Tally(eqx.Module):
    """What recovery came to in one decision."""

    failures: Int[Array, "*batch"]
    continues: Int[Array, "*batch"]
    roll_backs: Int[Array, "*batch"]
    spent: Int[Array, "*batch"]
    """Real steps in branches that were rolled back."""

    @classmethod
    def empty(cls) -> Tally:
        none = jnp.zeros((), jnp.int32)
        return cls(none, none, none, none)

    def add(
        self, failed: Bool[Array, ""], continued: Bool[Array, ""], rolled: Bool[Array, ""], steps: Int[Array, ""]
    ) -> Tally:
        """One run's end: whether it failed, which measure followed, and the steps it had taken."""
        return Tally(
            self.failures + failed, self.continues + continued, self.roll_backs + rolled,
            self.spent + jnp.where(rolled, steps, 0),
        )  # fmt: skip


class Rules(eqx.Module):
    """Rules to choose from by their index, as arrays."""

    measure: Int[Array, " R"]
    fails: Bool[Array, "R E"]
    """By `EndReason`."""
    tries: Int[Array, " R"]
    cost: Array

    @classmethod
    def of(cls, rules: Sequence[Recovery]) -> Rules:
        fails = [[reason in rule.reasons for reason in EndReason] for rule in rules]
        numbers = (jnp.array([getattr(rule, name) for rule in rules]) for name in ("measure", "tries"))
        measure, tries = numbers
        return cls(measure, jnp.array(fails), tries, jnp.array([float(rule.cost) for rule in rules]))

    def follows(
        self, rule: Int[Array, ""], reason: Int[Array, ""], tally: Tally, again: Bool[Array, ""]
    ) -> tuple[Bool[Array, ""], Bool[Array, ""], Bool[Array, ""]]:
        """Whether an end is a failure, and whether the option then starts again here, or is rolled back.

        Args:
            reason: why the run is over, an `EndReason`.
            again: the option may start where it stands.
        """
        failed = self.fails[rule, reason]
        left = failed & (tally.continues + tally.roll_backs < self.tries[rule])
        continues = left & (self.measure[rule] == Measure.CONTINUE) & again
        return failed, continues, left & (self.measure[rule] == Measure.ROLL_BACK)
