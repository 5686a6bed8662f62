"""Objective mismatch: whether the model is right where it matters, and whether better models went with better
policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from forethought.auditing.asked import Asked, rows
from forethought.auditing.depth import split
from forethought.auditing.reality import LoggedReality, Played
from forethought.auditing.subject import ModelSubject
from forethought.auditing.trial import Quantity, Trial, elements, quantities
from forethought.auditing.values import real_returns
from forethought.ops import align, stats
from forethought.protocols import AbstractPolicy, AbstractWorldModel, ValuedModel
from forethought.types import Box, Spec, TimeStep

Codes = Callable[[TimeStep], tuple[np.ndarray, np.ndarray]]
"""Of real rows [M], the codes [M, D] of the model's and the policy's encoders."""
AHEAD = 5
"""Steps of predicted reward whose gradient says what matters, where the model knows no value."""


def relevance(model: AbstractWorldModel, spec: Spec, trial: Trial, found: list[Quantity]) -> dict[str, Any] | None:
    """The error on observation elements that the value depends on, beside that on the others.

    The weight of an element is the mean absolute gradient, times the element's standard deviation, of the model's value
    of a real observation (ValuedModel), or of its predicted rewards of AHEAD steps under the recorded actions; the half
    of the elements with the largest weights are the relevant ones. None where no key is continuous, fewer than two
    elements are, or the model predicts no observations.

    Returns weight {element: share}, relevant and others: mean error over them by depth.
    """
    continuous = [q for q in found if isinstance(q.space, Box) and np.issubdtype(q.space.dtype, np.floating)]
    if sum(len(q.scale) for q in continuous) < 2:
        return None
    obs = {q.name: jnp.asarray(trial.obs[q.name]) for q in continuous}
    rest = {name: jnp.asarray(x) for name, x in trial.obs.items() if name not in obs}
    ahead = jnp.asarray(trial.action[:, :AHEAD])
    slope = jax.tree.map(np.asarray, _gradient(model, obs, rest, ahead, jax.random.key(0)))
    weights, errors, names = [], [], []
    for q in continuous:
        g = np.abs(elements(spec.obs[q.name], slope[q.name]))
        weights.append(np.nan_to_num(g).mean(0) * q.scale)
        errors += [split(q, np.array([i]))["excess"] for i in range(len(q.scale))]
        names += [f"{q.name}[{i}]" for i in range(len(q.scale))]
    weight = np.concatenate(weights)
    if not weight.sum() > 0:
        return None
    order = np.argsort(-weight, kind="stable")
    half = (len(order) + 1) // 2
    mean = lambda which: [  # noqa: E731
        float(np.mean([errors[i][trial.valid[:, h], h] for i in which])) if trial.valid[:, h].any() else None
        for h in range(trial.valid.shape[1])
    ]
    shares = weight / weight.sum()
    return {
        "weight": {names[i]: float(shares[i]) for i in order},
        "relevant": mean(order[:half]), "others": mean(order[half:]),
        "by": "value" if isinstance(model, ValuedModel) else f"reward of {AHEAD} steps",
    }  # fmt: skip


@eqx.filter_jit
def _gradient(model: AbstractWorldModel, obs: Any, rest: Any, action: Any, key: Any) -> Any:
    def worth(obs: Any, rest: Any, action: Any, key: Any) -> Any:
        void = jnp.zeros_like(action[0])
        latent = model.observe(model.initial(), void, {**rest, **obs}, jnp.ones((), bool), key=key)
        if isinstance(model, ValuedModel):
            return model.value(latent)
        total = 0.0
        for t in range(action.shape[0]):
            latent, outcome = model.imagine(latent, action[t], key=jax.random.fold_in(key, t))
            total = total + outcome.reward
        return total

    keys = jax.random.split(key, action.shape[0])
    return jax.vmap(jax.grad(worth))(obs, rest, action, keys)


def metrics(found: list[Quantity], trial: Trial) -> dict[str, float]:
    """Errors of the first and the last step, of observations and reward apart."""
    told = {}
    for kind, some in (
        ("obs", [q for q in found if q.name != "reward"]),
        ("reward", [q for q in found if q.name == "reward"]),
    ):
        if not some:
            continue
        error = np.mean([split(q, np.arange(len(q.scale)))["excess"] for q in some], 0)
        for h, name in ((0, "one step"), (error.shape[1] - 1, f"{error.shape[1]} steps")):
            here = trial.valid[:, h]
            told[f"error of {kind}, {name}"] = float(error[here, h].mean()) if here.any() else float("nan")
    return told


def correlations(told: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Spearman's rank correlation over checkpoints of every model metric with the real return of the policy."""
    names = [name for name in next(iter(told.values())) if name != "return"]
    real = [row["return"] for row in told.values()]
    table = {name: [row[name] for row in told.values()] for name in names}
    constant = lambda x: len(set(x)) < 2  # noqa: E731
    return {
        "names": list(told), "return": real, "metrics": table,
        "rank_correlation": {
            name: None if constant(x) or constant(real) else stats.rank_correlation(np.array(x), np.array(real))
            for name, x in table.items()
        },
    }  # fmt: skip


def agreement(model: np.ndarray, policy: np.ndarray) -> dict[str, float | list[float]]:
    """How much alike the codes [M, D] of the model's and of the policy's encoder are (ops/align.py)."""
    return {
        "cosine": float(np.mean(np.asarray(jax.vmap(align.cosine)(jnp.asarray(model), jnp.asarray(policy))))),
        "cka": float(align.linear_cka(model, policy)),
        "angles": np.asarray(align.principal_angles(model, policy)).tolist(),
    }


def measure(
    asked: Asked, played: Played, trial: Trial, found: list[Quantity], *,
    checkpoints: Mapping[str, tuple[AbstractPolicy, AbstractWorldModel]], codes: Codes | None, episodes: int,
) -> dict[str, Any]:  # fmt: skip
    """All of it; None for a part that was not measured (no gradient, fewer than 3 checkpoints, one encoder)."""
    body: dict[str, Any] = {"relevance": None, "checkpoints": None, "codes": None}
    here = rows([played])
    if isinstance(asked.subject, ModelSubject):
        body["relevance"] = relevance(asked.subject.model, asked.spec, trial, found)
    if len(checkpoints) >= 3 and not isinstance(asked.reality, LoggedReality):
        told = {}
        for name, (policy, model) in checkpoints.items():
            one, own = ModelSubject(model), asked.reality.play(policy, episodes, seed=asked.seed)
            again = asked.attempt(played, one.filter(played.rows, seed=asked.seed + 1), one)
            whole = float(real_returns(own, own.rows.action.shape[1]).mean())
            told[name] = metrics(quantities(asked.spec, again, here), again) | {"return": whole}
        body["checkpoints"] = correlations(told)
    if codes is not None:
        body["codes"] = agreement(*codes(here))
    return body
