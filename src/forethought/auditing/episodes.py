"""Real episodes of a policy, held out from training, for every measurement that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from forethought import collect
from forethought.protocols import AbstractPolicy, HostEnv
from forethought.types import Step

PATIENCE = 20_000
"""Decisions after which an episode is taken to be endless."""

_decide = eqx.filter_jit(lambda policy, stream: collect.decide(policy, stream, jnp.zeros((), jnp.int32)))


def play(
    env: HostEnv,
    policy: AbstractPolicy,
    episodes: int,
    *,
    seed: int,
    key: PRNGKeyArray,
    watch: Callable[[], Any] | None = None,
) -> list[Step]:
    """Plays whole episodes; every environment plays the same number, so short episodes are not preferred.

    Args:
        episodes: at least this many; rounded up to a multiple of `env.num`, the rest is dropped at the end.
        seed: of the environments.
        watch: called once per row, before the environments are stepped (to draw them, say).

    Returns:
        `episodes` episodes of NumPy rows [T + 1], the first of every environment first.

    Raises:
        ValueError: some episode does not end within PATIENCE decisions.
    """
    each = -(-episodes // env.num)
    stream = collect.begin_host(env, policy, seed=seed, key=key)
    rows, ended = [], np.zeros(env.num, int)
    while ended.min() < each:
        if len(rows) > each * PATIENCE:
            raise ValueError(f"{env.spec.name}: an episode goes on for {PATIENCE:,} decisions; give it a time limit")
        if watch is not None:
            watch()
        stream, row = collect.collect_host(env, lambda s: _decide(policy, s), stream, 1)
        rows.append(row)
        ended += row.time_step.last[0]
    table = jax.tree.map(lambda *xs: np.concatenate(xs), *rows)
    played = [split(jax.tree.map(lambda x, b=b: x[:, b], table))[:each] for b in range(env.num)]
    return [episode for turn in zip(*played, strict=True) for episode in turn][:episodes]


def split(rows: Step) -> list[Step]:
    """Cuts one stream's rows [T] into its whole episodes; an unfinished one at either end is left out."""
    first, last = np.flatnonzero(rows.time_step.first), np.flatnonzero(rows.time_step.last)
    whole = [(start, last[last >= start][0] + 1) for start in first if (last >= start).any()]
    return [jax.tree.map(lambda x, a=a, b=b: x[a:b], rows) for a, b in whole]


def returns(episodes: list[Step]) -> np.ndarray:
    """The undiscounted return of each episode."""
    return np.array([float(episode.time_step.reward.sum(dtype=np.float64)) for episode in episodes])
