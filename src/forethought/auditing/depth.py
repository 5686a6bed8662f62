"""The error of a world model by imagined depth, beside baselines that need no model."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from forethought.imagine import open_loop
from forethought.protocols import AbstractWorldModel
from forethought.types import Box, Outcome, Spec, Step

CONTEXT = 5
"""Real rows that the model sees before it imagines."""

_open_loop = eqx.filter_jit(
    eqx.filter_vmap(lambda model, obs, action, first, key: open_loop(model, obs, action, first, key=key),
                    in_axes=(None, 0, 0, 0, 0))
)  # fmt: skip


def error_by_depth(
    model: AbstractWorldModel,
    spec: Spec,
    episodes: list[Step],
    horizon: int,
    *,
    windows: int = 8,
    key: PRNGKeyArray,
) -> dict[str, Any]:
    """Measures predictions 1 .. H steps ahead, from windows evenly spaced over real episodes.

    A window is CONTEXT real rows and what followed; depths beyond its episode's end do not count. The error of a
    quantity is the mean squared error over its elements (for discrete keys the share of wrong elements). Two
    baselines stand beside the model: "copy last" repeats the last real row, "mean" predicts the mean of these same
    episodes (of the rows that an action led to; for discrete keys the most frequent value of each element). The
    model's prediction is one sample of its rollout.

    Args:
        episodes: held out from training; those that end within the context are left out.
        windows: per episode, at most.

    Returns:
        depth [H], episodes (how many counted), keys {key: errors}, reward, discount; errors is a dict of "model",
        "model_sem" (standard error over episodes), "copy last" and "mean", lists [H] with None where nothing reached
        and where a prediction was not finite.

    Raises:
        ValueError: no episode is longer than the context.
    """
    episodes = [episode for episode in episodes if len(episode.depth) > CONTEXT]
    if not episodes:
        raise ValueError(f"error_by_depth: no episode is longer than the context of {CONTEXT} rows")
    cut, owner, valid = _windows(episodes, horizon, windows)
    reached = np.stack([valid[owner == e].any(0) for e in range(len(episodes))])
    outcome = predictions(model, cut, key=key)
    truth = jax.tree.map(lambda x: x[:, CONTEXT:], cut.time_step)
    seen = jax.tree.map(lambda x: x[:, CONTEXT - 1 : CONTEXT], cut.time_step)
    led = jax.tree.map(lambda *xs: np.concatenate([x[1:] for x in xs]), *[episode.time_step for episode in episodes])

    def errors(predicted: Any, true: Any, last: Any, seen: Any, discrete: bool) -> dict[str, list[float | None]]:
        def by_depth(guess: Any) -> np.ndarray:
            wrong = (guess != true) if discrete else (np.asarray(guess, np.float64) - true) ** 2
            wrong = np.broadcast_to(wrong, true.shape)
            wrong = wrong.reshape(*valid.shape, -1).mean(-1)
            return np.stack([_mean(wrong[owner == e], valid[owner == e]) for e in range(len(episodes))])

        average = _most_frequent(seen) if discrete else seen.mean(0)
        model_errors = by_depth(predicted)
        table = {
            "model": _mean(model_errors, reached),
            "model_sem": _standard_error(model_errors, reached),
            "copy last": _mean(by_depth(last), reached),
            "mean": _mean(by_depth(average), reached),
        }
        return {name: [float(x) if np.isfinite(x) else None for x in row] for name, row in table.items()}

    discrete = {key: not isinstance(space, Box) for key, space in spec.obs.items()}
    return {
        "depth": list(range(1, horizon + 1)),
        "episodes": len(episodes),
        "windows": len(owner),
        "context": CONTEXT,
        "unit": "mean squared error",
        "keys": {
            name: errors(guess, truth.obs[name], seen.obs[name], led.obs[name], discrete[name])
            for name, guess in (outcome.obs or {}).items()
        },
        "reward": errors(outcome.reward, truth.reward, seen.reward, led.reward, False),
        "discount": errors(outcome.discount, truth.discount, seen.discount, led.discount, False),
    }


def predictions(model: AbstractWorldModel, cut: Step, *, key: PRNGKeyArray) -> Outcome:
    """What the model imagines [N, H] after the CONTEXT first rows of windows [N, CONTEXT + H]."""
    keys = jax.random.split(key, cut.depth.shape[0])
    obs = jax.tree.map(lambda x: x[:, :CONTEXT], cut.time_step.obs)
    first = cut.time_step.first[:, :CONTEXT].copy()
    first[:, 0] = True  # as in training: a window begins like an episode, in the middle of one too
    args = (obs, cut.action[:, :-1], first, keys)
    return jax.tree.map(np.asarray, _open_loop(model, *args)[1])


def _windows(episodes: list[Step], horizon: int, windows: int) -> tuple[Step, np.ndarray, np.ndarray]:
    """Windows [N, CONTEXT + H], the episode of each, and which imagined rows [N, H] really happened."""
    cut, owner, valid = [], [], []
    for e, episode in enumerate(episodes):
        rows = len(episode.depth)
        latest = rows - CONTEXT - 1
        spread = max(1, min(windows, latest // max(horizon // 2, 1) + 1))
        for start in np.unique(np.linspace(0, max(latest - horizon + 1, 0), spread).astype(int)):
            places = start + np.arange(CONTEXT + horizon)
            cut.append(jax.tree.map(lambda x, p=places, n=rows: x[np.minimum(p, n - 1)], episode))
            owner.append(e)
            valid.append(places[CONTEXT:] < rows)
    return jax.tree.map(lambda *xs: np.stack(xs), *cut), np.array(owner), np.array(valid)


def _mean(x: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The mean over axis 0 of what is valid; NaN where nothing is."""
    count = valid.sum(0)
    return np.where(count > 0, np.where(valid, x, 0.0).sum(0) / np.maximum(count, 1), np.nan)


def _standard_error(x: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The standard error of that mean; NaN for fewer than two values."""
    count = valid.sum(0)
    with np.errstate(invalid="ignore"):  # the difference of two infinities
        squares = np.where(valid, (x - _mean(x, valid)) ** 2, 0.0).sum(0)
    return np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1) / np.maximum(count, 1)), np.nan)


def _most_frequent(x: np.ndarray) -> np.ndarray:
    """The most frequent value over axis 0 of every element; of equals, the smallest."""

    def one(column: np.ndarray) -> Any:
        values, counts = np.unique(column, return_counts=True)
        return values[counts.argmax()]

    return np.apply_along_axis(one, 0, x)


def as_lists(tree: PyTree) -> Any:
    """A tree of arrays as JSON lists; JSON has no NaN and no infinity, so they are None."""

    def plain(x: Any) -> Any:
        x = np.asarray(x)
        if not np.isfinite(x).all():
            finite, x = np.isfinite(x), x.astype(object)
            x[~finite] = None
        return x.tolist()

    return jax.tree.map(plain, tree)
