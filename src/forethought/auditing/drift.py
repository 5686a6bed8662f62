"""Drift: whether the model fits the newest real data as well as the older, and since when not."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from forethought.auditing.depth import split
from forethought.auditing.reality import LoggedReality, padded
from forethought.auditing.subject import Subject
from forethought.auditing.trial import attempt, quantities
from forethought.types import Spec, Step

SHUFFLES = 2000
EPISODES = 40
"""The most episodes looked at, evenly spaced over time."""


def drift(subject: Subject, spec: Spec, data: list[Step], *, seed: int) -> dict[str, Any] | None:
    """Compares the one-step error of recorded episodes in the order they were made; None with fewer than 8 of
    two steps or more. Of fewer than about 14, no order is so unlikely among their shuffles that it would be a finding.

    The change point is the cut that makes the difference of means largest in its standard errors, at least an eighth of
    the episodes on either side; its p is that of the same search over shuffled episodes.

    Returns error by episode, episode (their numbers in `data`), change (number of the first episode after it), before,
    after (mean errors) and p.
    """
    long = np.flatnonzero([len(episode.depth) > 2 for episode in data])
    if len(long) < 8:
        return None
    chosen = long[np.linspace(0, len(long) - 1, min(EPISODES, len(long))).astype(int)]
    played = padded([data[i] for i in chosen])
    latents = subject.filter(played.rows, seed=seed)
    reality = LoggedReality(spec, data)
    trial = attempt(subject, latents, reality, played, 1, count=8 * len(chosen), samples=4, seed=seed)
    rows = jax.tree.map(lambda *xs: np.concatenate([x[1:] for x in xs]), *[data[i].time_step for i in chosen])
    found = quantities(spec, trial, rows)
    error = np.sum([split(q, np.arange(len(q.scale)))["excess"][:, 0] for q in found], 0)
    error = np.where(trial.valid[:, 0], error, np.nan)
    each = np.array([np.nanmean(error[trial.starts[:, 0] == e]) for e in range(len(chosen))])
    cut, statistic = _change(each)
    rng = np.random.default_rng(seed)
    beyond = sum(_change(rng.permutation(each))[1] >= statistic for _ in range(SHUFFLES))
    return {
        "episode": chosen.tolist(), "error": each.tolist(), "change": int(chosen[cut]),
        "before": float(each[:cut].mean()), "after": float(each[cut:].mean()), "p": (beyond + 1) / (SHUFFLES + 1),
    }  # fmt: skip


def _change(x: np.ndarray) -> tuple[int, float]:
    """The cut with the largest standardised difference of means, and that difference."""
    n, edge = len(x), max(len(x) // 8, 2)
    cuts = np.arange(edge, n - edge + 1)
    sums, total = np.cumsum(x)[cuts - 1], x.sum()
    difference = np.abs((total - sums) / (n - cuts) - sums / cuts)
    statistic = difference * np.sqrt(cuts * (n - cuts) / n)
    i = int(statistic.argmax())
    return int(cuts[i]), float(statistic[i])
