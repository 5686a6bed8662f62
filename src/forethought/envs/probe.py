"""A wrapper that watches what `check` cannot see from outside: arrays that change after they were returned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np


class Probe(gymnasium.Wrapper):
    """Keeps each returned observation beside a copy of it, and compares the two after the next call."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self.mutated: set[str] = set()
        """Keys whose array was written to after it was returned."""
        self._returned: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def reset(self, **kwargs: Any) -> Any:
        return self._watched(self.env.reset(**kwargs))

    def step(self, action: Any) -> Any:
        return self._watched(self.env.step(action))

    def varies_unseeded(self) -> bool:
        """Whether resets without a seed begin differently."""
        starts = [{key: np.copy(array) for key, array in _arrays(self.env.reset()[0], ())} for _ in range(3)]
        return any(not np.array_equal(starts[0][key], other[key]) for other in starts[1:] for key in starts[0])

    def _watched(self, answer: Any) -> Any:
        for key, (returned, copy) in self._returned.items():
            # By bytes: a NaN equals itself here.
            if returned.tobytes() != copy.tobytes():
                self.mutated.add(key)
        self._returned = {key: (array, array.copy()) for key, array in _arrays(answer[0], ())}
        return answer


def _arrays(obs: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(obs, dict | tuple):
        for name, part in obs.items() if isinstance(obs, dict) else enumerate(obs):
            yield from _arrays(part, (*path, name))
    else:
        yield "/".join(map(str, path)) or "obs", obs if isinstance(obs, np.ndarray) else np.array(obs)
