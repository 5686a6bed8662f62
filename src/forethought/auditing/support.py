"""How far what a model imagines lies from the data: distances to the nearest real rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.spatial
from jaxtyping import Float

from forethought.auditing.asked import Asked, Episodes
from forethought.auditing.trial import elements
from forethought.types import Box, Spec, Step, TimeStep

ROWS = 5000
"""The most real rows that are kept to compare with."""
FEW = 5
NEAR = 0.99
"""A point is out of support where it is farther from the data than this share of held-out real rows."""


class Support:
    """Real rows, scaled by their standard deviation, and how far apart real rows of different episodes are."""

    def __init__(self, spec: Spec, episodes: list[TimeStep], rng: np.random.Generator):
        """Half of the episodes, two or more, are what is compared with; the other half says how far a real row may be.

        Raises ValueError for fewer."""
        if len(episodes) < 2:
            raise ValueError(f"{spec.name}: how far apart real rows are takes two episodes; there is {len(episodes)}")
        half = len(episodes) // 2
        known, held = (np.concatenate([flat(spec, e.obs) for e in some]) for some in (episodes[:half], episodes[half:]))
        self.spec, self.mean = spec, known.mean(0)
        self.scale = np.maximum(known.std(0), 1e-3 * np.maximum(1.0, np.abs(self.mean)))
        self.tree = scipy.spatial.KDTree(self._scaled(known[rng.permutation(len(known))[:ROWS]]))
        self.radius = float(np.quantile(self._nearest(held[rng.permutation(len(held))[:ROWS]]), NEAR))

    def distance(self, obs: dict[str, np.ndarray]) -> Float[np.ndarray, "*batch"]:
        """Distances to the nearest real row, in units of `radius`: above 1 is out of support; infinite if not
        finite."""
        x = flat(self.spec, obs)
        return (self._nearest(x.reshape(-1, x.shape[-1])) / max(self.radius, 1e-9)).reshape(x.shape[:-1])

    def _nearest(self, x: np.ndarray) -> np.ndarray:
        fine = np.isfinite(x).all(-1)
        found = np.full(len(x), np.inf)
        found[fine] = self.tree.query(self._scaled(x[fine]))[0]
        return found

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        return (x - self.mean) / self.scale / np.sqrt(x.shape[-1])


def flat(spec: Spec, obs: dict[str, Any]) -> Any:
    """All observation keys side by side, [..., D], discrete ones as one-hot vectors; NumPy's or JAX's, as they come."""
    pieces = [elements(space, obs[name]) for name, space in spec.obs.items()]
    return (jnp if isinstance(pieces[0], jax.Array) else np).concatenate(pieces, -1)


def by_depth(support: Support, obs: dict[str, np.ndarray], going: np.ndarray) -> dict[str, Any]:
    """Of imagined observations [N, H, ...] that are reached with probability `going` [N, H]: the share out of support
    and the median distance, by depth; None where fewer than FEW are more likely reached than not."""
    distance = support.distance(obs)
    there = going > 0.5
    enough = there.sum(0) >= FEW
    outside = [float(np.mean(d[t] > 1)) if n else None for d, t, n in zip(distance.T, there.T, enough, strict=True)]
    middle = [float(np.median(d[t])) if n else None for d, t, n in zip(distance.T, there.T, enough, strict=True)]
    return {"outside": outside, "median": middle, "radius": support.radius}


def known(asked: Asked, played: Episodes, data: Sequence[Step] | None) -> Support | None:
    """The data that imagined rows are compared with: what the model learned from, or the episodes played; None for
    fewer than two and for observations between which distances mean nothing (bytes)."""
    if any(isinstance(space, Box) and space.dtype == "uint8" for space in asked.spec.obs.values()):
        return None
    rng = np.random.default_rng(asked.seed)
    if data is not None and len(data) >= 2:
        episodes = [data[i].time_step for i in rng.permutation(len(data))]
    else:
        cut = lambda p, e: jax.tree.map(lambda x: x[e, : p.length[e]], p.rows.time_step)  # noqa: E731
        turns = range(min(len(p.length) for p, _ in played.values()))
        episodes = [cut(p, e) for e in turns for p, _ in played.values()]
    return Support(asked.spec, episodes, rng) if len(episodes) > 1 else None
