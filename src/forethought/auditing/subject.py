"""A model as the audit asks it: in batches of NumPy arrays, through three functions, whoever wrote it.

    filter    latents at every row of real episodes
    imagine   one step on from a latent
    unroll    many steps on, under given actions

`ModelSubject` asks an `AbstractWorldModel`, `HostModel` anything else: three functions of one's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from forethought.protocols import AbstractWorldModel
from forethought.types import Step


class Prediction(NamedTuple):
    """What a model expects to see, [N, ...] or [N, H, ...]; None for what it does not predict."""

    obs: dict[str, np.ndarray] | None
    reward: np.ndarray | None
    discount: np.ndarray | None
    """The probability of going on, given that the step is reached."""


@runtime_checkable
class Subject(Protocol):
    """What is audited. Rows and latents are batches; equal seeds draw equal numbers."""

    def filter(self, rows: Step, *, seed: int) -> PyTree:
        """Latents [N, T, ...] at every row of episodes [N, T], each seen from its first row on."""
        ...

    def imagine(self, latent: PyTree, action: np.ndarray, *, seed: int) -> tuple[PyTree, Prediction]:
        """One step from latents [N, ...] under actions [N, ...]."""
        ...

    def unroll(self, latent: PyTree, action: np.ndarray, *, seed: int) -> Prediction:
        """What follows latents [N, ...] under actions [N, H, ...]."""
        ...


def subject(model: AbstractWorldModel | Subject) -> Subject:
    """The model as the audit asks it; what answers the three questions itself is taken as it is."""
    if isinstance(model, AbstractWorldModel):
        return ModelSubject(model)
    if isinstance(model, Subject):
        return model
    raise ValueError(f"audit: a {type(model).__name__} is no world model; give an AbstractWorldModel or a HostModel")


def before(action: np.ndarray) -> np.ndarray:
    """The action that led to each row [N, T]: what was done one row earlier, void at the first."""
    return np.concatenate([np.zeros_like(action[:, :1]), action[:, :-1]], 1)


@eqx.filter_jit
def _filter(model: AbstractWorldModel, action: Any, obs: Any, first: Any, key: Any) -> Any:
    def one(action: Any, obs: Any, first: Any, key: Any) -> Any:
        def observe(latent: Any, row: Any) -> Any:
            action, obs, first, key = row
            latent = model.observe(latent, action, obs, first, key=key)
            return latent, latent

        rows = (action, obs, first, jax.random.split(key, first.shape[0]))
        return jax.lax.scan(observe, model.initial(), rows)[1]

    return jax.vmap(one)(action, obs, first, jax.random.split(key, first.shape[0]))


@eqx.filter_jit
def _unroll(model: AbstractWorldModel, latent: Any, action: Any, key: Any) -> Any:
    def one(latent: Any, action: Any, key: Any) -> Any:
        def step(latent: Any, row: Any) -> Any:
            latent, outcome = model.imagine(latent, row[0], key=row[1])
            return latent, (outcome.obs, outcome.reward, outcome.discount)

        return jax.lax.scan(step, latent, (action, jax.random.split(key, action.shape[0])))

    return jax.vmap(one)(latent, action, jax.random.split(key, action.shape[0]))


BLOCK = 512
"""Rollouts per call of the compiled program, so that it is compiled for one number of them."""


class ModelSubject:
    """Asks an `AbstractWorldModel`, in blocks."""

    def __init__(self, model: AbstractWorldModel):
        self.model = model

    def filter(self, rows: Step, *, seed: int) -> PyTree:
        step = rows.time_step
        return jax.tree.map(
            np.asarray, _filter(self.model, before(rows.action), step.obs, step.first, jax.random.key(seed))
        )

    def imagine(self, latent: PyTree, action: np.ndarray, *, seed: int) -> tuple[PyTree, Prediction]:
        latent, found = self._unroll(latent, action[:, None], seed)
        return latent, Prediction(*jax.tree.map(lambda x: x[:, 0], found))

    def unroll(self, latent: PyTree, action: np.ndarray, *, seed: int) -> Prediction:
        return Prediction(*self._unroll(latent, action, seed)[1])

    def _unroll(self, latent: PyTree, action: np.ndarray, seed: int) -> Any:
        key = jax.random.key(seed)
        call = lambda i, latent, action: _unroll(self.model, latent, action, jax.random.fold_in(key, i))  # noqa: E731
        return in_blocks(call, latent, action)


def in_blocks(call: Callable[..., Any], *batch: PyTree) -> PyTree:
    """Calls `call(number, *block)` for blocks of BLOCK rows of NumPy arrays [N, ...], the last one filled up with its
    last row, and joins what it returns."""
    num = len(jax.tree.leaves(batch)[0])
    found = []
    for start in range(0, num, BLOCK):
        rows = np.minimum(np.arange(start, start + BLOCK), num - 1)
        found.append(jax.tree.map(np.asarray, call(start // BLOCK, *jax.tree.map(lambda x, rows=rows: x[rows], batch))))
    return jax.tree.map(lambda *xs: np.concatenate(xs)[:num], *found)


@dataclasses.dataclass(frozen=True)
class HostModel:
    """Anybody's model, from three functions on batches of NumPy arrays (docs/audit.md shows two).

    Latents are trees of NumPy arrays that lead with the batch axis N; obs is a dict of [N, ...], as in the
    environment's spec; an action is [N, ...], continuous ones in [-1, 1].
    """

    initial: Callable[[int], PyTree]
    """N -> latents before anything was seen."""
    observe: Callable[[PyTree, np.ndarray, dict[str, np.ndarray], np.ndarray], PyTree]
    """Latents and actions at t - 1, observations at t, first [N] -> latents at t. Where `first`, latent and action are
    void and must be forgotten."""
    next: Callable[[PyTree, np.ndarray, np.random.Generator], tuple[PyTree, dict[str, Any]]]
    """Latents and actions at t -> latents at t + 1, and of what is predicted there: obs (dict), reward [N], discount
    [N] (the probability of going on). What is left out is reported as not measured."""

    def filter(self, rows: Step, *, seed: int) -> PyTree:
        step, action = rows.time_step, before(rows.action)
        latent, seen = self.initial(len(action)), []
        for t in range(action.shape[1]):
            obs = {name: np.array(x[:, t]) for name, x in step.obs.items()}  # copies, which may be written to
            latent = self.observe(latent, np.array(action[:, t]), obs, np.array(step.first[:, t]))
            seen.append(jax.tree.map(np.array, latent))
        return jax.tree.map(lambda *xs: np.stack(xs, 1), *seen)

    def imagine(self, latent: PyTree, action: np.ndarray, *, seed: int) -> tuple[PyTree, Prediction]:
        return self._next(latent, action, np.random.default_rng(seed))

    def unroll(self, latent: PyTree, action: np.ndarray, *, seed: int) -> Prediction:
        rng, found = np.random.default_rng(seed), []
        for t in range(action.shape[1]):
            latent, prediction = self._next(latent, action[:, t], rng)
            found.append(prediction)
        return jax.tree.map(lambda *xs: np.stack(xs, 1), *found)

    def _next(self, latent: PyTree, action: np.ndarray, rng: np.random.Generator) -> tuple[PyTree, Prediction]:
        latent, found = self.next(jax.tree.map(np.array, latent), np.array(action), rng)
        if unknown := found.keys() - set(Prediction._fields):
            raise ValueError(f"HostModel: next: '{min(unknown)}' is none of {', '.join(Prediction._fields)}")
        for name in ("reward", "discount"):
            value = found.get(name)
            if value is not None and np.shape(value) != (len(action),):
                raise ValueError(f"HostModel: next: {name} has shape {np.shape(value)}; it must be ({len(action)},)")
        arrays = jax.tree.map(np.asarray, {name: found.get(name) for name in Prediction._fields})
        return latent, Prediction(**arrays)
