"""What all questions of an audit have in common: the model, its environment, and how much is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from forethought.auditing.reality import LoggedReality, Played, Reality
from forethought.auditing.subject import Subject
from forethought.auditing.trial import Trial, attempt
from forethought.protocols import AbstractPolicy
from forethought.types import TimeStep

Episodes = Mapping[str, tuple[Played, PyTree]]
"""By policy: what it played, and the model's latents at those rows."""


class Asked:
    """The model and its environment, with what is common to all questions."""

    def __init__(self, subject: Subject, reality: Reality, horizon: int, starts: int, samples: int, seed: int):
        self.subject, self.reality, self.spec = subject, reality, reality.spec
        self.horizon, self.starts, self.samples, self.seed = horizon, starts, samples, seed

    def play(self, policy: AbstractPolicy | None, episodes: int) -> tuple[Played, PyTree]:
        """Episodes of a policy, and the model's latents at their rows."""
        assert policy is not None or isinstance(self.reality, LoggedReality)
        played = self.reality.play(policy, episodes, seed=self.seed)  # pyright: ignore[reportArgumentType]
        return played, self.subject.filter(played.rows, seed=self.seed + 1)

    def attempt(self, played: Played, latents: PyTree, who: Subject | None = None) -> Trial:
        return attempt(who or self.subject, latents, self.reality, played, self.horizon, count=self.starts,
                       samples=self.samples, seed=self.seed + 2)  # fmt: skip


def rows(played: Sequence[Played]) -> TimeStep:
    """The rows that happened, of all policies, [M], but for episodes' first ones, which no action led to."""
    kept = []
    for some in played:
        place = np.arange(some.rows.action.shape[1])
        happened = (place > 0) & (place < some.length[:, None])
        kept.append(jax.tree.map(lambda x, there=happened: x[there], some.rows.time_step))
    return jax.tree.map(lambda *xs: np.concatenate(xs), *kept)
