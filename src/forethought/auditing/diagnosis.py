"""What kind of fault it is: the model is asked again under a hypothesis, and one that explains the error is named.

delayed      the model does what it was told one step before
sign         it takes one dimension of the action for its opposite (discrete: two actions for each other)
keys         two observation keys of one shape stand for each other, in what it sees, in what it says, or in both
region       it errs in one part of the observations more than elsewhere
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import scipy.stats

from forethought.auditing.depth import split
from forethought.auditing.reality import Played
from forethought.auditing.subject import Prediction, Subject
from forethought.auditing.trial import Quantity, Trial, quantities, samples, unrolled
from forethought.types import Discrete, Spec, TimeStep

SURE = 1e-3
"""One-sided level at which a hypothesis has to explain more than half of the error, over episodes."""
AHEAD = 5
"""Steps over which a hypothesis is judged."""
SEVERAL = 8
"""The most action dimensions, or discrete actions, of which each (each pair) is tried."""

Change = Callable[[np.ndarray], np.ndarray]


def hypotheses(
    subject: Subject, spec: Spec, trials: Mapping[str, tuple[Played, Trial]], rows: TimeStep, *, seed: int
) -> list[dict[str, Any]]:
    """Every hypothesis with the error without and with it: {kind, where, error, explained, p}; those that are SURE come
    first, and the one that explains most before others.

    Errors are mean excess (depth.py) over AHEAD steps and all quantities, from rows that are not the first of an
    episode (where nothing was done before); `explained` is the share of it that goes when the model is asked under the
    hypothesis; p is one-sided, over the episodes of all policies, for its being more than half.
    """
    each = [_Asked(subject, spec, *trial, rows, seed) for trial in trials.values()]
    asked = lambda *change: np.concatenate([one(*change) for one in each])  # noqa: E731
    same: Change = lambda x: x  # noqa: E731
    plain = asked(same, {}, {})
    tried = [("delayed", "action", asked(_shifted, {}, {}))]
    for where, change in _flips(spec):
        tried.append(("sign", where, asked(change, {}, {})))
    for a, b in itertools.combinations(spec.obs, 2):
        if _alike(spec.obs[a], spec.obs[b]):
            swap = {a: b, b: a}
            for seen, said in (({}, swap), (swap, {}), (swap, swap)):
                tried.append(("keys", f"{a} and {b}", asked(same, seen, said)))
    if not len(plain):
        return []
    found, error = [], float(plain.mean())
    for kind, where, errors in tried:
        explained, p = 1 - float(errors.mean()) / error if error > 0 else 0.0, _p(plain - 2 * errors)
        found.append({"kind": kind, "where": where, "error": error, "explained": explained, "p": p})
    return sorted(found, key=lambda h: (h["p"] >= SURE, -h["explained"]))


class _Asked:
    """The excess per episode [E] of the model asked under a change of actions, of the keys it sees and of those it
    says."""

    def __init__(self, subject: Subject, spec: Spec, played: Played, trial: Trial, rows: TimeStep, seed: int):
        self.subject, self.spec, self.played, self.trial = subject, spec, played, trial
        self.rows, self.seed = rows, seed
        self.samples = samples(trial)

    def __call__(self, change: Change, seen: dict[str, str], said: dict[str, str]) -> np.ndarray:
        rows, places = self.played.rows, self.trial.starts
        action = change(rows.action)
        obs = {seen.get(name, name): x for name, x in rows.time_step.obs.items()}
        asked = dataclasses.replace(
            rows, action=action, time_step=dataclasses.replace(rows.time_step, obs={k: obs[k] for k in self.spec.obs})
        )
        latents = self.subject.filter(asked, seed=self.seed)
        ahead = places[:, 1:] + np.arange(min(AHEAD, self.trial.valid.shape[1]))
        plan = action[places[:, :1], np.minimum(ahead, action.shape[1] - 1)]
        found = unrolled(self.subject, latents, places, plan, self.samples, self.seed)
        if found.obs is not None:
            found = found._replace(obs={said.get(name, name): x for name, x in found.obs.items()})
        cut = first_steps(self.trial, AHEAD)._replace(predicted=found)
        each = [split(q, np.arange(len(q.scale)))["excess"] for q in quantities(self.spec, cut, self.rows)]
        excess = sum(each, np.zeros(cut.valid.shape))
        mean = np.where(cut.valid, excess, 0.0).sum(1) / np.maximum(cut.valid.sum(1), 1)
        later = places[:, 1] > 0
        return np.array([mean[later & (places[:, 0] == e)].mean() for e in np.unique(places[later, 0])])


def first_steps(trial: Trial, horizon: int) -> Trial:
    """The same starts, looked at for the first steps only."""
    cut = lambda tree: jax.tree.map(lambda x: x[:, :, :horizon], tree)  # noqa: E731
    short = {name: getattr(trial, name)[:, :horizon] for name in ("valid", "limit", "action")}
    return trial._replace(**short, predicted=cut(trial.predicted), real=cut(trial.real))


def _shifted(action: np.ndarray) -> np.ndarray:
    return np.concatenate([action[:, 1:], action[:, -1:]], 1)


def _flips(spec: Spec) -> list[tuple[str, Change]]:
    space = spec.action
    if isinstance(space, Discrete):
        pairs = list(itertools.combinations(range(space.n), 2)) if space.n <= SEVERAL else []
        return [
            (f"actions {a} and {b}", lambda x, a=a, b=b: np.where(x == a, b, np.where(x == b, a, x))) for a, b in pairs
        ]
    size = int(np.prod(space.shape))
    flips = []
    for i in range(size if size <= SEVERAL else 0):
        sign = np.where(np.arange(size) == i, -1, 1).reshape(space.shape).astype(space.dtype)
        flips.append((f"action[{i}]", lambda x, sign=sign: x * sign))
    return flips


def _alike(a: Any, b: Any) -> bool:
    what = lambda s: (type(s), s.shape, s.dtype, getattr(s, "n", None))  # noqa: E731
    return what(a) == what(b)


def _p(x: np.ndarray) -> float:
    """One-sided, for values over episodes lying above 0: by signed ranks (Wilcoxon 1945), which one wild episode does
    not sway."""
    if not np.any(x != 0):
        return 1.0
    found: Any = scipy.stats.wilcoxon(x, alternative="greater")
    return float(found.pvalue)


def region(trials: Sequence[Trial], found: Sequence[list[Quantity]], spec: Spec) -> dict[str, Any] | None:
    """The half-space of one observation element in which the model's first steps err most against elsewhere.

    Of every element and nine quantiles of it, the split with the largest Welch t of the excess of the first step,
    summed over quantities, over the starts of all trials. Returns where, inside, outside (mean excess), share (of
    starts) and p (one-sided, times the number of splits tried); None where nothing can be split.
    """
    seen = [(trial.obs, trial.valid[:, 0]) for trial in trials]
    excess = np.concatenate([_first_excess(*both) for both in zip(trials, found, strict=True)])
    best, tried = None, 0
    for key in spec.obs:
        x = np.concatenate([np.asarray(obs[key], float).reshape(len(valid), -1)[valid] for obs, valid in seen])
        for i in range(x.shape[1]):
            name = f"{key}[{i}]" if x.shape[1] > 1 else key
            for where, inside in _halves(name, x[:, i]):
                tried += 1
                a, b = excess[inside], excess[~inside]
                t = (a.mean() - b.mean()) / np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b) + 1e-24)
                if best is None or t > best[0]:
                    best = (t, where, a, b)
    if best is None:
        return None
    _, where, a, b = best
    p = 1.0
    if np.ptp(a) > 0 or np.ptp(b) > 0:
        welch: Any = scipy.stats.ttest_ind(a, b, equal_var=False, alternative="greater")
        p = min(1.0, float(welch.pvalue) * tried)
    return {
        "where": where,
        "inside": float(a.mean()),
        "outside": float(b.mean()),
        "share": len(a) / len(excess),
        "p": p,
    }


def _first_excess(trial: Trial, found: list[Quantity]) -> np.ndarray:
    """The excess of the first step at starts [N], where there is one, summed over quantities."""
    cut = lambda x: x[:, :, :1]  # noqa: E731
    first = [q._replace(model=cut(q.model), real=cut(q.real), still=cut(q.still)) for q in found]
    excess = sum((split(q, np.arange(len(q.scale)))["excess"][:, 0] for q in first), np.zeros(len(trial.starts)))
    return excess[trial.valid[:, 0]]


def _halves(name: str, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Both sides of nine quantiles of values [N], as far as at least 8 lie on either."""
    for q in np.unique(np.quantile(x, np.linspace(0.1, 0.9, 9))):
        above = x > q
        if min(above.sum(), (~above).sum()) >= 8:
            yield f"{name} > {q:.3g}", above
            yield f"{name} <= {q:.3g}", ~above


def broken(*predictions: Prediction) -> dict[str, int]:
    """How many predicted values were not finite, by what they are of."""
    counts: dict[str, int] = {}
    for found in predictions:
        named = {**(found.obs or {}), "reward": found.reward, "discount": found.discount}
        for name, x in named.items():
            if x is not None and x.dtype.kind == "f":
                counts[name] = counts.get(name, 0) + int(np.sum(~np.isfinite(x)))
    return {name: count for name, count in counts.items() if count}
