"""Whether the model knows how uncertain it is: intervals of its samples, and the disagreement of its members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import scipy.stats

from forethought.auditing.asked import Asked
from forethought.auditing.depth import by_depth, split
from forethought.auditing.reality import Played
from forethought.auditing.subject import ModelSubject, Prediction
from forethought.auditing.trial import LEAST, Quantity, Trial, elements, parts, reached
from forethought.ops import stats
from forethought.protocols import EnsembleModel
from forethought.types import Box, Spec


def dispersion(trial: Trial, found: list[Quantity]) -> dict[str, Any]:
    """The model's variance beside what it should be, the noise and its own squared error, by part and depth.

    Over the variance of real rows, `short` is error - 4 spread and `over` spread - 4 error: where the first is above 0,
    the model's standard deviation is less than half of what its errors ask for, where the second is, more than twice.
    `less` is noise - 2 spread: above 0, the model's variance is less than half of the environment's."""
    table = {}
    for quantity in found:
        for name, which in parts(quantity):
            values = split(quantity, which)
            error = values["excess"] + values["noise"]
            curves = {"spread": values["spread"], "error": error, "noise": values["noise"]}
            curves |= {"short": error - 4 * values["spread"], "over": values["spread"] - 4 * error}
            curves["less"] = values["noise"] - 2 * values["spread"]
            table[name] = {key: by_depth(x, trial) for key, x in curves.items()}
    return table


def coverage(trial: Trial, found: list[Quantity]) -> dict[str, Any] | None:
    """How often intervals between the model's sorted samples hold what came, beside how often they should.

    Of K samples and one real value that are drawn alike, the value lies between the i-th and the j-th smallest with
    probability (j - i) / (K + 1), what is equal being taken in every order. Whether a sample has ended is drawn with
    the probability that the model gives to it; what has ended is 0 on either side. Values of discrete keys have no
    order and are left out.

    Returns nominal [I], covered {name: [I][H]} and error, the mean |covered - nominal|, by name; None for fewer than
    four samples and where nothing can be compared.
    """
    samples = found[0].model.shape[1] if found else 0
    if samples < 4 or not trial.valid.any():
        return None
    weight = reached(trial)[..., None]
    alive = np.random.default_rng(0).random((len(weight), samples, 1, 1)) < weight
    cuts = np.unique(np.round(np.array([0.05, 0.15, 0.25]) * (samples + 1)).astype(int).clip(1))
    nominal = [(samples + 1 - 2 * int(c)) / (samples + 1) for c in cuts]
    covered = {}
    for quantity in found:
        if quantity.space is not None and not isinstance(quantity.space, Box):
            continue
        for name, which in parts(quantity):
            below, equal = _ranks(quantity.model[..., which], quantity.real[..., which], weight, alive)
            # Among `equal` samples the value has `below` .. `below + equal` below itself; c .. K - c are inside.
            inside = [np.minimum(below + equal, samples - c) - np.maximum(below, c) + 1 for c in cuts]
            covered[name] = [_share((x.clip(0) / (equal + 1)).mean(-1), trial.valid) for x in inside]
    if not covered:
        return None
    error = {
        name: float(np.nanmean(np.abs(np.array(held, float) - np.array(nominal)[:, None])))
        for name, held in covered.items()
    }
    return {"nominal": nominal, "covered": covered, "error": error, "samples": samples}


def _ranks(model: np.ndarray, real: np.ndarray, weight: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many of the samples [N, K, H, D] are below each real value [N, R, H, D], and how many equal to it."""
    below, equal = np.zeros(real.shape, int), np.zeros(real.shape, int)
    for r in range(real.shape[1]):
        value = real[:, r, None]
        there = value * weight  # as the samples are weighted, so that what is equal stays so
        below[:, r] = np.where(alive, model < there, 0 < value).sum(1)
        equal[:, r] = np.where(alive, model == there, 0 == value).sum(1)
    return below, equal


def _share(inside: np.ndarray, valid: np.ndarray) -> list[float | None]:
    """The mean by depth of what is valid [N, H] of values [N, R, H]."""
    count = valid.sum(0)
    share = np.where(valid, inside.mean(1), 0.0).sum(0) / np.maximum(count, 1)
    return [float(x) if n else None for x, n in zip(share, count, strict=True)]


def disagreement(spec: Spec, trial: Trial, members: list[Prediction]) -> dict[str, Any]:
    """Whether the members of an ensemble disagree where the ensemble is wrong.

    Members are asked with the same random numbers, [N, H, ...] each. Disagreement is the variance over members, error
    the squared error of their mean against the real futures' mean, both summed over elements that are scaled by their
    standard deviation among real futures; correlated over starts at each depth.

    Returns members, copies (how many are equal to an earlier one), rank_correlation [H] and auroc [H] (of error in the
    upper fifth), None where undefined.
    """
    flat = np.stack([_flat(spec, member.obs, member.reward) for member in members])
    same = lambda a, b: np.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)  # noqa: E731
    copies = sum(any(same(flat[i], flat[j]) for j in range(i)) for i in range(len(flat)))
    told = {name: trial.real.obs[name] for name in members[0].obs or {}}
    real = _flat(spec, told, None if members[0].reward is None else trial.real.reward).mean(1)
    scale = np.maximum(real.std((0, 1)), LEAST)
    varied = (flat.var(0, ddof=1) / scale**2).sum(-1)
    wrong = (((flat.mean(0) - real) / scale) ** 2).sum(-1)
    ranks, areas = [], []
    for h in range(varied.shape[1]):
        here = trial.valid[:, h] & (trial.real.going[:, :, h] == 1).all(1)
        x, y = varied[here, h], wrong[here, h]
        fine = len(x) > 4 and min(np.ptp(x), np.ptp(y)) > 1e-12  # more than rounding
        ranks.append(stats.rank_correlation(x, y) if fine else None)
        areas.append(_auroc(x, y > np.quantile(y, 0.8)) if fine else None)
    return {"members": len(members), "copies": copies, "rank_correlation": ranks, "auroc": areas}


def _auroc(score: np.ndarray, positive: np.ndarray) -> float | None:
    """The probability that a positive has the higher score, ties counted half (Mann & Whitney 1947)."""
    if positive.all() or not positive.any():
        return None
    u = scipy.stats.mannwhitneyu(score[positive], score[~positive]).statistic
    return float(u / (positive.sum() * (~positive).sum()))


def _flat(spec: Spec, obs: Mapping[str, np.ndarray] | None, reward: np.ndarray | None) -> np.ndarray:
    """All observations and the reward side by side, [..., D]; discrete keys as one-hot vectors."""
    pieces = [elements(spec.obs[name], x) for name, x in (obs or {}).items()]
    if reward is not None:
        pieces.append(elements(Box(()), reward))
    return np.concatenate(pieces, -1)


def members(asked: Asked, played: Played, trial: Trial) -> dict[str, Any] | None:
    """How the members of an ensemble disagree; None where there is one."""
    model = asked.subject.model if isinstance(asked.subject, ModelSubject) else None
    if not isinstance(model, EnsembleModel) or len(model.members) < 2:
        return None
    told = []
    for member in model.members:
        one = ModelSubject(member)
        latents = one.filter(played.rows, seed=asked.seed + 1)
        at = jax.tree.map(lambda x: x[trial.starts[:, 0], trial.starts[:, 1]], latents)
        told.append(one.unroll(at, trial.action, seed=asked.seed + 2))
    return disagreement(asked.spec, trial, told)
