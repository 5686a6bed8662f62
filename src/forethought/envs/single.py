"""One environment on the host, in the library's terms, and the fault that it can have."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import numpy as np

from forethought.types import Spec


class EnvironmentFault(RuntimeError):
    """An environment broke its word: the message names the environment, the key and the step.

    `kind` is one of 'non-finite', 'shape', 'dtype', 'value', 'missing', 'raised', 'not reproducible', 'process died'.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(kind, message)  # both are args, so that the fault survives a pipe between processes
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return self.message


class Frame(NamedTuple):
    """What a single environment says after a reset or one simulator step."""

    obs: dict[str, np.ndarray]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False


class AbstractSingle(abc.ABC):
    """One stateful environment: observations by key in the dtypes of `spec`, actions as the library has them.

    Durations and `spec.time_limit` count simulator steps; action repeat and batching happen above.
    """

    spec: Spec
    native: dict[str, str]
    """What the environment itself declares, per observation key, and for 'action'."""
    copyable: bool = False
    """Whether `state` and `restore` exist; otherwise an episode is restored by replaying its actions."""

    @abc.abstractmethod
    def reset(self, seed: int) -> Frame:
        """Begins the episode that the seed (31 bits) stands for."""

    @abc.abstractmethod
    def step(self, action: np.ndarray) -> Frame: ...

    def state(self) -> dict[str, np.ndarray]:
        """All that decides how the episode goes on, where `copyable`."""
        raise NotImplementedError(f"{self.spec.name} has no state to copy")

    def restore(self, state: dict[str, np.ndarray]) -> None:
        raise NotImplementedError(f"{self.spec.name} has no state to copy")

    def sketch(self) -> np.ndarray | None:
        """The present state as line segments [n, 5] (x0, y0, x1, y1, radius), or None."""
        return None

    def close(self) -> None:
        return None


def float32(key: str, value: np.ndarray) -> np.ndarray:
    """Casts to float32, and faults where a value is not finite or does not fit."""
    with np.errstate(over="ignore"):
        cast = np.array(value, np.float32)  # a copy: the environment may write on in its own array
    if not np.isfinite(cast).all():
        bad = np.asarray(value).ravel()[~np.isfinite(cast).ravel()][0]
        why = "beyond float32's range" if np.isfinite(bad) else "not finite"
        raise EnvironmentFault("non-finite", f"{key} holds {bad}, which is {why}")
    return cast


def scalar_reward(reward: Any) -> float:
    """The reward as a float; faults on arrays, None and the like."""
    if isinstance(reward, np.ndarray) and reward.shape != ():
        raise EnvironmentFault("shape", f"reward has shape {reward.shape}; a reward is one number")
    if not isinstance(reward, int | float | np.number | np.bool_ | np.ndarray):
        raise EnvironmentFault("dtype", f"reward is a {type(reward).__name__}; a reward is one number")
    return float(reward)
