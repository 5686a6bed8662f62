"""The error of a world model by imagined depth, beside baselines that need no model, and what it says of the end.

With model samples m_k and real futures y_r of one start, less their overall mean and weighted by whether the step is
reached at all,

    excess  = (mean m - mean y)^2 - var m / K - var y / R     the squared error of the model's mean, without bias
    error   = excess + var y                                  what is left of y if the model's mean is believed
    noise   = var y                                           irreducible; measured where y is replayed afresh (R > 1)

all of them over the variance of real rows, or over that of the real rows at this depth where it is larger: 0 is exact,
1 is as good as knowing nothing but the mean.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import scipy.stats
from jaxtyping import PyTree

from forethought.auditing.trial import Quantity, Trial, going, parts

LEVEL = 0.05
"""One-sided, of every bound by depth."""
FEW = 6
"""Of a depth that fewer episodes reached, nothing is claimed."""
WORST = 1e6
"""The error, as a share of variance, that stands for a prediction that is not finite: wrong beyond any tolerance."""
CUT = 3
"""Of time limits that fewer episodes reached, nothing is claimed."""


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and unbiased variance over axis 1 of [N, K, ...]; the variance of one sample is taken to be 0."""
    return x.mean(1), x.var(1, ddof=1) if x.shape[1] > 1 else np.zeros(x[:, 0].shape)


def split(quantity: Quantity, which: np.ndarray) -> dict[str, np.ndarray]:
    """Excess, noise and spread (the model's variance), and the baselines' errors, [N, H] each, over the variance."""
    model, model_var = moments(quantity.model[..., which])
    real, real_var = moments(quantity.real[..., which])
    scale = np.sum(quantity.scale[which] ** 2)
    times = quantity.model.shape[1], quantity.real.shape[1]
    excess = (model - real) ** 2 - model_var / times[0] - real_var / times[1]
    still = np.mean((quantity.still - quantity.real)[..., which] ** 2, 1)
    mean = np.mean(quantity.real[..., which] ** 2, 1)
    found = {"excess": excess, "noise": real_var, "spread": model_var, "copy last": still, "mean": mean}
    return {name: worst(x.sum(-1) / scale) for name, x in found.items()}


def worst(error: np.ndarray) -> np.ndarray:
    """Errors, WORST where they are not finite or larger: one such start is not averaged away, and is no gap either."""
    return np.minimum(np.nan_to_num(error, nan=WORST, posinf=WORST), WORST)


def by_depth(x: np.ndarray, trial: Trial) -> dict[str, list[float | None]]:
    """The mean by depth of values [N, H], and one-sided bounds on it from the spread over episodes."""
    each = [trial.starts[:, 0] == e for e in np.unique(trial.starts[:, 0])]
    rows = np.stack([_mean(x[here], trial.valid[here]) for here in each])
    there = np.stack([trial.valid[here].any(0) for here in each])
    count, mean = there.sum(0), _mean(rows, there)
    with np.errstate(invalid="ignore"):  # where something predicted is not finite, nor is what is made of it
        sem = np.sqrt(_mean((rows - mean) ** 2, there) / np.maximum(count - 1, 1))
        reach = scipy.stats.t.ppf(1 - LEVEL, np.maximum(count - 1, 1)) * sem
        reach = np.where(count >= FEW, reach, np.inf)
        table = {"mean": mean, "low": mean - reach, "high": mean + reach, "sem": sem}
    return {name: [float(v) if np.isfinite(v) else None for v in row] for name, row in table.items()}


def error_by_depth(trial: Trial, found: list[Quantity]) -> dict[str, Any]:
    """Errors by depth of every part of every quantity: {"depth", "parts": {name: curves}}, curves as lists [H]."""
    table = {}
    for quantity in found:
        for name, which in parts(quantity):
            values = split(quantity, which)
            values["error"] = values["excess"] + values["noise"]
            at_depth = np.fmax(_mean(values["mean"], trial.valid), 1.0)  # 1 where there is none
            values = {key: x / at_depth for key, x in values.items()}
            table[name] = {key: by_depth(x, trial) for key, x in values.items()}
            table[name]["of"] = quantity.name
    horizon = trial.valid.shape[1]
    return {"depth": list(range(1, horizon + 1)), "fresh": trial.fresh, "parts": table}


def termination(trial: Trial, missed: float = 0.25) -> dict[str, Any] | None:
    """How the model's ends compare with the real ones, by depth; None where it predicts none.

    Returns curves as lists [H]: excess (of the probability of having terminated, over its variance at all depths
    together), missed (probability by which the model falls short of, or exceeds, the real one), many_missed (that, less
    a share `missed` of the real one), real and model (that probability); and of steps that are reached: by how much the
    model's probability of a termination exceeds the real one at time limits, a lower bound on it over episodes, and its
    probability elsewhere where nothing terminated.
    """
    predicted, real = trial.predicted, trial.real
    if predicted.discount is None:
        return None
    survival = going(predicted) * np.clip(predicted.discount, 0, 1)
    model, model_var = moments(survival)
    true, true_var = moments(real.survived)
    excess = worst((model - true) ** 2 - model_var / survival.shape[1] - true_var / real.survived.shape[1])
    share = np.clip(1 - true.mean(), 0.05, 0.95)
    stops = _hazard(going(predicted), survival)
    alive = trial.valid & ~trial.limit & (real.survived == 1).all(1)
    # What really ended there in replays is no fault of the model's.
    beyond = stops - _hazard(real.going, real.survived)
    cut = [trial.limit & (trial.starts[:, :1] == e) for e in np.unique(trial.starts[trial.limit.any(1), 0])]
    at_limit, elsewhere = np.array([beyond[here].mean() for here in cut]), stops[alive]
    return {
        "excess": by_depth(excess / (share * (1 - share)), trial),
        "missed": by_depth(model - true, trial),
        "many_missed": by_depth((model - true) - missed * (1 - true), trial),
        "real": by_depth(1 - true, trial),
        "model": by_depth(1 - model, trial),
        "at_limit": float(at_limit.mean()) if len(at_limit) else None,
        "at_limit_low": _low(at_limit),
        "elsewhere": float(elsewhere.mean()) if len(elsewhere) else None,
        "confusion": _confusion(1 - model, 1 - true, trial.valid),
    }


def _hazard(going: np.ndarray, survived: np.ndarray) -> np.ndarray:
    """Of what reaches a step [N, K, H], the share [N, H] that terminates there; 0 where nothing does."""
    return (going - survived).sum(1) / np.maximum(going.sum(1), 1e-12)


def _low(x: np.ndarray) -> float | None:
    """A one-sided lower bound at 1 in 100 on a mean of independent values; None for fewer than CUT."""
    if len(x) < CUT:
        return None
    return float(x.mean() - scipy.stats.t.ppf(0.99, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5)


def _confusion(model: np.ndarray, real: np.ndarray, valid: np.ndarray) -> dict[str, float]:
    """Shares of starts by (real, model) end within the horizon, at each start's last recorded step."""
    last = valid.sum(1) - 1
    here = last >= 0
    m, y = (x[np.arange(len(x)), np.maximum(last, 0)][here] for x in (model, real))
    table = {"both": y * m, "missed": y * (1 - m), "false": (1 - y) * m, "neither": (1 - y) * (1 - m)}
    return {name: float(x.mean()) if len(x) else 0.0 for name, x in table.items()}


def _mean(x: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The mean over axis 0 of what is valid; NaN where nothing is."""
    count = valid.sum(0)
    return np.where(count > 0, np.where(valid, x, 0.0).sum(0) / np.maximum(count, 1), np.nan)


def as_lists(tree: PyTree) -> Any:
    """A tree of arrays as JSON lists; JSON has no NaN and no infinity, so they are None."""

    def plain(x: Any) -> Any:
        x = np.asarray(x)
        if not np.isfinite(x).all():
            finite, x = np.isfinite(x), x.astype(object)
            x[~finite] = None
        return x.tolist()

    return jax.tree.map(plain, tree)
