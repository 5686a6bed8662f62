"""Gymnasium's spaces in the library's terms: what becomes of every observation key, and of the action.

Box of floats            Box float32, bounds kept; a scalar becomes shape (1,)
Box uint8                Box uint8, as it is (never divided by 255)
Box of other integers    Box int32; a value that does not fit is a fault
Box of bool, MultiBinary Box float32 of 0 and 1
Discrete                 Discrete, counted from 0
MultiDiscrete            MultiDiscrete, flattened, counted from 0
Dict, Tuple              one key per leaf: 'a/b', '0'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from forethought.envs.single import EnvironmentFault, float32
from forethought.types import Box, Discrete, MultiDiscrete, Space

MAX_FLAT_ACTIONS = 4096
"""A MultiDiscrete action becomes one Discrete of the product of its parts up to this size."""


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """One observation key: where it is in the native observation, and how it is read."""

    key: str
    path: tuple[Any, ...]
    native: spaces.Space
    space: Space

    def read(self, obs: Any) -> np.ndarray:
        """The value in this key's dtype, as a copy; faults on what the native space does not allow."""
        name = f"observation '{self.key}'"
        for part in self.path:
            if isinstance(obs, dict) and part not in obs or isinstance(obs, tuple) and part >= len(obs):
                raise EnvironmentFault("missing", f"{name} is missing")
            obs = obs[part]
        value, native = np.asarray(obs), self.native
        if value.shape != native.shape:
            raise EnvironmentFault("shape", f"{name} has shape {value.shape}, declared is {native.shape}")
        whole = not isinstance(native, spaces.Box) and np.issubdtype(value.dtype, np.integer)
        if not whole and not np.can_cast(value.dtype, native.dtype or value.dtype):
            raise EnvironmentFault("dtype", f"{name} is {value.dtype}, declared is {native.dtype}")
        if isinstance(native, spaces.Discrete | spaces.MultiDiscrete):
            return self._count(name, value, native)
        if self.space.dtype == "float32":
            return float32(name, value).reshape(self.space.shape)
        if self.space.dtype == "int32" and value.size and np.abs(value.astype(np.float64)).max() >= 2**31:
            raise EnvironmentFault("value", f"{name} holds an integer beyond int32's range")
        return np.array(value, self.space.dtype).reshape(self.space.shape)

    def _count(self, name: str, value: np.ndarray, native: spaces.Discrete | spaces.MultiDiscrete) -> np.ndarray:
        n = np.asarray(native.n if isinstance(native, spaces.Discrete) else native.nvec)
        counted = np.asarray(value.astype(np.int64) - native.start)
        if (counted < 0).any() or (counted >= n).any():
            raise EnvironmentFault("value", f"{name} is {value}, outside {native}")
        return counted.astype(np.int32).reshape(self.space.shape)


def leaves(space: spaces.Space) -> tuple[Leaf, ...]:
    """The keys of a native observation space; a space without parts has the key 'obs'.

    Raises ValueError, naming the key, for a space that has no counterpart.
    """
    found = tuple(_leaves(space, ()))
    keys = [leaf.key for leaf in found]
    if not keys:
        raise ValueError(f"observation space {space} holds nothing; declare at least one key")
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(
            f"observation '{twice[0]}': two parts have this key once nesting is written with '/'; rename one"
        )
    return found


def _leaves(space: spaces.Space, path: tuple[Any, ...]) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from _leaves(part, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for number, part in enumerate(space.spaces):
            yield from _leaves(part, (*path, number))
    else:
        key = "/".join(map(str, path)) or "obs"
        yield Leaf(key, path, space, _observed(key, space))


def _observed(key: str, space: spaces.Space) -> Space:
    if isinstance(space, spaces.MultiBinary):
        return Box(space.shape, "float32", 0.0, 1.0)
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiDiscrete(tuple(int(n) for n in space.nvec.ravel()))
    if not isinstance(space, spaces.Box):
        kind = type(space).__name__
        raise ValueError(
            f"observation '{key}': a {kind} space has no array form; encode it as Box, Discrete or MultiDiscrete"
        )
    if space.dtype == np.bool_:
        return Box(space.shape or (1,), "float32", 0.0, 1.0)
    if np.issubdtype(space.dtype, np.integer):
        return Box(space.shape or (1,), "uint8" if space.dtype == np.uint8 else "int32", *_at_least_1d(space))
    return Box(space.shape or (1,), "float32", *_bounds(space))


def _at_least_1d(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    return np.atleast_1d(space.low), np.atleast_1d(space.high)


def _bounds(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    # A bound at the largest number of the dtype is how some environments write "none": to scale an action with it
    # would give infinities.
    low, high = (np.asarray(bound, np.float64) for bound in _at_least_1d(space))
    huge = np.finfo(np.float32).max
    return np.where(low <= -huge, -np.inf, low).astype(np.float32), np.where(high >= huge, np.inf, high).astype(
        np.float32
    )


def action_space(space: spaces.Space) -> tuple[Box | Discrete, Callable[[np.ndarray], Any]]:
    """The library's action space, and the function from its actions to native ones.

    A Box is mapped from [-1, 1] per dimension to its own bounds (unbounded dimensions pass through); MultiDiscrete and
    MultiBinary become one Discrete, first part slowest. Raises ValueError for what has no counterpart.
    """
    if isinstance(space, spaces.Discrete):
        start, kind = space.start, space.dtype.type
        return Discrete(int(space.n)), lambda action: kind(start + int(action))
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        binary = isinstance(space, spaces.MultiBinary)
        parts = np.full(space.shape, 2) if binary else space.nvec
        start = 0 if binary else space.start
        size = int(np.prod(parts, dtype=np.float64))
        if size > MAX_FLAT_ACTIONS:
            limit = f"; at most {MAX_FLAT_ACTIONS} are flattened into one Discrete"
            raise ValueError(
                f"action: {space} has {size} combinations{limit}, so give the environment a smaller action space"
            )
        return Discrete(size), lambda action: _parts(int(action), parts, start, space.dtype)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        box = Box(space.shape or (1,), "float32", *_bounds(space))
        return box, lambda action: _native(box, space, action)
    raise ValueError(f"action: {space} has no counterpart; declare a Box of floats, Discrete or MultiDiscrete")


def _parts(action: int, parts: np.ndarray, start: Any, dtype: Any) -> np.ndarray:
    return (np.reshape(np.unravel_index(action, parts.ravel()), parts.shape) + start).astype(dtype)


def _native(box: Box, space: spaces.Box, action: np.ndarray) -> np.ndarray:
    # -1 and 1 can land one rounding error beyond the bounds, which are themselves allowed; nothing else is clipped,
    # for actions beyond [-1, 1] were refused before.
    native = np.asarray(box.native(action)).astype(space.dtype).reshape(space.shape)
    return np.clip(native, space.low, space.high)
