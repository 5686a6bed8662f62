"""What both levels of a hierarchy did, recorded apart, and two checks on such data.

Do the levels' rewards agree? A low level may be paid for something of its own (a goal reached, novelty); where it earns
more of that, the task should not earn less. And is the data what the hierarchical policy that learns from it would do?
Log-probabilities that were recorded when either level decided are compared with what a policy says of the same
decisions now.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Array, Bool, Float, Int

from forethought.types import EndReason

SURE = 1e-3
"""One-sided p below which a low level is said to work against the task."""
FEW = 8
"""Of an option with fewer runs nothing is said."""


class Record(NamedTuple):
    """One row per primitive tick: what the low level did, and which option of the high level it did it for."""

    state: Int[Array | np.ndarray, " T"]
    action: Int[Array | np.ndarray, " T"]
    log_prob: Float[Array | np.ndarray, " T"]
    """Of the action, under the running option."""
    reward: Float[Array | np.ndarray, " T"]
    """Of the task, for the step from this row on, undiscounted; 0 in the tick of a reset."""
    ended: Bool[Array | np.ndarray, " T"]
    """The step ended the episode."""
    option: Int[Array | np.ndarray, " T"]
    started: Bool[Array | np.ndarray, " T"]
    """The option was chosen at this row."""
    option_log_prob: Float[Array | np.ndarray, " T"]
    """Of its choice, when it was chosen."""
    version: Int[Array | np.ndarray, " T"]
    """Updates behind the policy that chose it."""
    reason: Int[Array | np.ndarray, " T"]
    """`EndReason` of the option after this step; 0 while it runs."""
    rbar: Float[Array | np.ndarray, " T"]
    """Its discounted reward so far."""
    duration: Float[Array | np.ndarray, " T"]
    """Its duration so far, in the environment's unit."""
    acted: Bool[Array | np.ndarray, " T"]
    """False in the tick of a reset."""


class Runs(NamedTuple):
    """One row per option that was chosen and is over."""

    begin: Int[np.ndarray, " N"]
    """Its first row of the record."""
    steps: Int[np.ndarray, " N"]
    option: Int[np.ndarray, " N"]
    log_prob: Float[np.ndarray, " N"]
    version: Int[np.ndarray, " N"]
    reward: Float[np.ndarray, " N"]
    """rbar, the high level's."""
    duration: Float[np.ndarray, " N"]
    reason: Int[np.ndarray, " N"]
    task: Float[np.ndarray, " N"]
    """The task's rewards, summed."""
    own: Float[np.ndarray, " N"]
    """The low level's own rewards, summed; the task's where it has none."""


def runs(record: Record, own: Float[np.ndarray, " T"] | None = None) -> Runs:
    """Gathers a record of one stream by option runs; one that was cut off by the record's end is left out.

    Args:
        own: what the low level was paid for each row's step; None: what the task pays.
    """
    r: Any = Record(*map(np.asarray, record))
    end = np.flatnonzero(r.acted & (r.reason != EndReason.RUNNING))
    begin = np.flatnonzero(r.started)[: len(end)]
    sums = lambda x: np.array([x[b : e + 1].sum() for b, e in zip(begin, end, strict=True)])  # noqa: E731
    task = sums(r.reward)
    return Runs(
        begin, end - begin + 1, r.option[begin], r.option_log_prob[begin], r.version[begin], r.rbar[end],
        r.duration[end], r.reason[end], task, task if own is None else sums(np.asarray(own)),
    )  # fmt: skip


def agreement(found: Runs) -> dict[int, dict[str, Any]]:
    """Of each option, whether runs in which the low level earned more of its own were better for the task.

    Returns by option: runs, correlation (Spearman's, of own and task reward; None where one is constant or runs are
    fewer than 8), p (one-sided, for its being negative) and against (p below 1 in 1,000: it is paid for what hurts).
    """
    table = {}
    for option in np.unique(found.option):
        own, task = (x[found.option == option] for x in (found.own, found.task))
        told: dict[str, Any] = {"runs": len(own), "correlation": None, "p": None, "against": False}
        if len(own) >= FEW and np.ptp(own) > 0 and np.ptp(task) > 0:
            test: Any = scipy.stats.spearmanr(own, task, alternative="less")
            told |= {"correlation": float(test.statistic), "p": float(test.pvalue), "against": bool(test.pvalue < SURE)}
        table[int(option)] = told
    return table


def same_policy(recorded: Float[np.ndarray, " N"], now: Float[np.ndarray, " N"]) -> dict[str, float]:
    """How far data are from what a policy would do: log-probabilities of the same decisions, recorded and now.

    Both are of one level, or of both levels summed. Returns largest (absolute difference), share (of decisions that
    differ by more than 1e-4) and effective (the effective sample size of importance weights exp(now - recorded), as a
    share of N: 1 for the same policy; Kong 1992). Raises ValueError for recorded decisions of probability 0.
    """
    if not np.isfinite(recorded).all():
        raise ValueError("recorded log-probabilities are not finite: what was done had probability 0")
    gap = np.asarray(now, float) - recorded
    weight = np.exp(gap - gap.max()) if np.isfinite(gap.max()) else np.zeros(len(gap))
    total = weight.sum()
    return {
        "largest": float(np.abs(gap).max()),
        "share": float(np.mean(np.abs(gap) > 1e-4)),
        "effective": float(total**2 / np.sum(weight**2) / len(gap)) if total else 0.0,
    }


def ends(found: Runs) -> dict[str, int]:
    """How many runs ended for which reason."""
    return {reason.name.lower(): int(np.sum(found.reason == reason)) for reason in EndReason if reason}
