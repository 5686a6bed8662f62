"""A pure environment behind the host interface, so that the host loop can run it and be compared with the scan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, PRNGKeyArray, PyTree
from safetensors.numpy import load, save

from forethought.envs.pure import SketchedEnv
from forethought.envs.single import EnvironmentFault
from forethought.protocols import AbstractEnv
from forethought.tree import named_arrays, select
from forethought.types import Discrete, Spec, TimeStep


class Hosted:
    """A `HostEnv` of `num` copies of a pure environment; arrays go in and come out as NumPy.

    Environment i draws from a stream of its own: at its tick n, which counts its resets and steps from 0, the key
    is `fold_in(fold_in(key, i), n)`. `reset(seed=s)` begins again with `key = jax.random.key(s)` at tick 0.
    """

    spec: Spec
    num: int

    def __init__(self, env: AbstractEnv, num: int, *, key: PRNGKeyArray):
        if num < 1:
            raise ValueError(f"{env.spec.name}: num is {num}, at least 1 is needed")
        self.env, self.num, self.spec = env, num, env.spec
        self._key = key
        self._reset, self._step = _compiled(env)
        first = jax.eval_shape(jax.vmap(lambda k: env.reset(key=k)), jax.random.split(key, num))
        # Zeros until the first reset; `_ready` says which environments may be stepped.
        self._state, self._time_step = jax.tree.map(lambda x: _blank(x, key), first)
        self._ticks = jnp.zeros(num, jnp.int32)
        self._started = np.zeros(num, bool)
        self._ready = np.zeros(num, bool)

    def reset(self, where: np.ndarray | None = None, *, seed: int | None = None) -> TimeStep:
        """Resets the environments in `where` (bool [B]; None: all), waits for all and returns the batch.

        With a seed, which must come with `where=None`, every stream begins anew.
        """
        mask = self._mask(where)
        if seed is not None:
            if where is not None:
                raise ValueError(f"{self.spec.name}: a seed begins every stream anew, so it needs where=None")
            self._key, self._ticks = jax.random.key(seed), jnp.zeros(self.num, jnp.int32)
        self._advance(self._reset, mask)
        self._started = self._started | mask
        return self.recv()

    def send(self, action: np.ndarray, where: np.ndarray | None = None) -> None:
        """Starts the steps of the environments in `where`; the other rows of `action` are void.

        Raises ValueError where an environment may not be stepped (never reset, ended, or not received since it was
        last stepped) and for an action outside the action space.
        """
        mask = self._mask(where)
        if not self._ready[mask].all():
            index = int(np.flatnonzero(mask & ~self._ready)[0])
            why = "was never reset" if not self._started[index] else "ended, or its last step was not received"
            raise ValueError(f"{self.spec.name}: environment {index} cannot be stepped: it {why}")
        action = np.asarray(action)
        self._check(action, mask)
        self._advance(self._step, mask, action)
        self._ready = self._ready & ~mask

    def recv(self) -> TimeStep:
        """Waits for all that was sent; raises EnvironmentFault for an observation or reward that is not finite."""
        time_step = jax.tree.map(np.asarray, self._time_step)
        for name, value in named_arrays({"obs": time_step.obs, "reward": time_step.reward}).items():
            if not np.isfinite(value).all():
                index = int(np.argwhere(~np.isfinite(value))[0, 0])
                where = f"environment {index}, tick {int(self._ticks[index]) - 1}"
                raise EnvironmentFault(
                    "non-finite", f"{self.spec.name}: {where}: {name} holds values that are not finite"
                )
        self._ready = self._started & ~time_step.last
        return time_step

    def snapshot(self) -> bytes:
        """Holds states, time steps, ticks and the key, as safetensors; `restore` goes on bit for bit."""
        arrays = _plain(self._everything()) | {"name": np.frombuffer(self.spec.name.encode(), np.uint8)}
        return save({name: np.ascontiguousarray(leaf) for name, leaf in arrays.items()})

    def restore(self, snapshot: bytes) -> TimeStep:
        """Goes on where `snapshot` was taken; raises ValueError for one of another environment or number."""
        found, template = load(snapshot), self._everything()
        found_name = found.pop("name").tobytes().decode() if "name" in found else "none that says its name"
        if found_name != self.spec.name:
            raise ValueError(f"{self.spec.name}: the snapshot's environment is {found_name}")
        theirs, ours = _shapes(found), _shapes(_plain(template))
        if theirs != ours:
            name = min(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
            raise ValueError(
                f"{self.spec.name}: '{name}' is {theirs.get(name, 'absent')} in the snapshot "
                f"and {ours.get(name, 'absent')} in this environment"
            )
        leaves = [_like(leaf, found[name]) for name, leaf in named_arrays(template).items()]
        restored = jax.tree.unflatten(jax.tree.structure(template), leaves)
        self._state, self._time_step = restored["state"], restored["time_step"]
        self._key, self._ticks = restored["key"], restored["ticks"]
        self._started = np.array(restored["started"])
        return self.recv()

    def sketch(self, index: int = 0) -> np.ndarray | None:
        """Line segments [n, 5] (x0, y0, x1, y1, radius) that draw an environment; None where it has no picture."""
        if not isinstance(self.env, SketchedEnv):
            return None
        return self.env.sketch(jax.tree.map(lambda leaf: np.asarray(leaf[index]), self._time_step.obs))

    def close(self) -> None:
        """There is nothing to close."""

    def _advance(self, what: Any, mask: np.ndarray, *action: np.ndarray) -> None:
        at = (self._state, self._time_step, self._ticks)
        # Copies, because the caller may write on in its arrays before the device has read them.
        copies = [jnp.array(x) for x in action]
        self._state, self._time_step, self._ticks = what(at, jnp.array(mask), self._key, *copies)

    def _everything(self) -> dict[str, PyTree]:
        own = {"state": self._state, "time_step": self._time_step, "ticks": self._ticks, "key": self._key}
        return own | {"started": jnp.array(self._started)}

    def _mask(self, where: np.ndarray | None) -> np.ndarray:
        mask = np.ones(self.num, bool) if where is None else np.asarray(where)
        if mask.shape != (self.num,) or mask.dtype != bool:
            raise ValueError(f"{self.spec.name}: where is {mask.dtype}{list(mask.shape)}, not bool[{self.num}]")
        return mask

    def _check(self, action: np.ndarray, mask: np.ndarray) -> None:
        space = self.spec.action
        kind = np.integer if isinstance(space, Discrete) else np.floating
        if action.shape != (self.num, *space.shape) or not np.issubdtype(action.dtype, kind):
            raise ValueError(
                f"{self.spec.name}: action is {action.dtype}{list(action.shape)}, "
                f"not {space.dtype}{[self.num, *space.shape]}"
            )
        if isinstance(space, Discrete):
            fits, allowed = (action >= 0) & (action < space.n), f"in 0 .. {space.n - 1}"
        else:
            bounded = np.broadcast_to(np.isfinite(space.low) & np.isfinite(space.high), space.shape)
            fits = np.isfinite(action) & (~bounded | (np.abs(action) <= 1))
            allowed = "finite, and in [-1, 1] where bounded"
        wrong = mask & ~fits.reshape(self.num, -1).all(1)
        if wrong.any():
            index = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"{self.spec.name}: environment {index} got action {action[index]}, which is not {allowed}"
            )


def _compiled(env: AbstractEnv):
    """The batch's reset and step: (state, time step, ticks) -> the same, one tick later where the mask holds."""

    def reset(at: PyTree, mask: Bool[Array, " B"], key: PRNGKeyArray) -> PyTree:
        keys = _keys(key, at[2])
        state, time_step = jax.vmap(lambda k: env.reset(key=k))(keys)
        return select(mask, (state, time_step, at[2] + 1), at)

    def step(at: PyTree, mask: Bool[Array, " B"], key: PRNGKeyArray, action: Array) -> PyTree:
        keys = _keys(key, at[2])
        state, time_step = jax.vmap(lambda s, a, k: env.step(s, a, key=k))(at[0], action, keys)
        return select(mask, (state, time_step, at[2] + 1), at)

    return jax.jit(reset), jax.jit(step)


def _keys(key: PRNGKeyArray, ticks: Int[Array, " B"]) -> Key[Array, " B"]:
    """Each environment's key at its present tick."""
    return jax.vmap(lambda i, n: jax.random.fold_in(jax.random.fold_in(key, i), n))(jnp.arange(len(ticks)), ticks)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(tree: PyTree) -> dict[str, np.ndarray]:
    """A tree's arrays by name, typed keys as the integers they hold."""
    named = named_arrays(tree).items()
    return {name: np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for name, leaf in named}


def _shapes(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}


def _blank(described: jax.ShapeDtypeStruct, key: PRNGKeyArray) -> Array:
    """Zeros, or copies of a key, of the shape and dtype described."""
    return jnp.broadcast_to(key, described.shape) if _is_key(described) else jnp.zeros(described.shape, described.dtype)


def _like(template: Array, found: np.ndarray) -> Array:
    if _is_key(template):
        return jax.random.wrap_key_data(jnp.asarray(found), impl=jax.random.key_impl(template))
    return jnp.asarray(found)
