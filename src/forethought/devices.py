"""Several devices that share the batch of an update, each of which computes the mean over its part.

The program is the same on all of them (`replicated`): state and random keys are equal everywhere, and what differs is
asked of an `Axis`. On a CPU two devices with one thread each beat one device with two: XLA splits a product of matrices
over threads, but not the loops between products, nor the many products that are too small to be split.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Axis:
    """The devices that share a batch, as seen from one of them."""

    name: str | None = None
    """None: there is only one."""

    @property
    def size(self) -> int:
        return 1 if self.name is None else jax.lax.axis_size(self.name)

    def share(self, tree: PyTree) -> PyTree:
        """This device's part of leaves [N, ...]: [N / size, ...]."""
        if self.name is None:
            return tree

        def part(x: Array) -> Array:
            each = x.shape[0] // self.size
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.name) * each, each)

        return jax.tree.map(part, tree)

    def mean(self, tree: PyTree) -> PyTree:
        """The mean over devices, of all leaves in one exchange."""
        if self.name is None:
            return tree
        flat, unravel = ravel_pytree(tree)
        return unravel(jax.lax.pmean(flat, self.name))

    def gather(self, tree: PyTree, axis: int) -> PyTree:
        """All devices' parts, joined at an axis."""
        if self.name is None:
            return tree
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self.name, axis=axis, tiled=True), tree)


ALONE = Axis()
SHARED = Axis("batch")


def axis(num: int) -> Axis:
    """The axis of `num` devices inside a `replicated` function."""
    return ALONE if num == 1 else SHARED


def replicated(function: Callable[..., Any], num: int) -> Callable[..., Any]:
    """Runs a function of replicated arrays on `num` devices; inside it, their axis is `axis(num)`."""
    if num == 1:
        return function
    everywhere = PartitionSpec()
    return jax.shard_map(function, mesh=_mesh(num), in_specs=everywhere, out_specs=everywhere, check_vma=False)


def apart(function: Callable[..., Any], num: int) -> Callable[..., Any]:
    """Runs a function of leaves [S, ...], one of S seeds on each place, S / num of them on each of `num` devices."""
    seeds = jax.vmap(function)
    if num == 1:
        return seeds
    each = PartitionSpec(SHARED.name)
    return jax.shard_map(seeds, mesh=_mesh(num), in_specs=each, out_specs=each, check_vma=False)


def spread(tree: PyTree, num: int) -> PyTree:
    """Copies arrays to `num` devices."""
    return tree if num == 1 else jax.device_put(tree, NamedSharding(_mesh(num), PartitionSpec()))


def first(tree: PyTree) -> PyTree:
    """The first device's copies of replicated arrays, for programs that run on one device."""
    return jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, tree)


def _mesh(num: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num]), (SHARED.name,))


def sharing(batch: int, asked: int = 0) -> int:
    """How many devices share a batch: those asked for, or (0) as many as there are and divide it.

    Raises ValueError where that many cannot."""
    there = len(jax.devices())
    if asked > there:
        raise ValueError(f"devices is {asked}, but JAX sees {there}; see forethought.cpu_devices")
    if asked and batch % asked:
        raise ValueError(f"devices is {asked}, which does not divide a batch of {batch}")
    return asked or max(num for num in range(1, there + 1) if batch % num == 0)


def cpu_devices(num: int | None = None) -> None:
    """Makes JAX see `num` CPU devices of one thread each; by default one per core that this process may use.

    Raises RuntimeError where JAX has already started."""
    if num is None:
        num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", num)
    if num > 1:
        os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false {os.environ.get('XLA_FLAGS', '')}"


def whole_loops() -> None:
    """Lets XLA compile a loop of any size as one piece on the CPU, where it would run it operation by operation.

    A planning step is so small that starting its operations takes most of its time: without this Dyna is about seven
    times slower. Must come before JAX starts; has no effect afterwards, and none on results."""
    flag = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
    os.environ["XLA_FLAGS"] = f"{flag} {os.environ.get('XLA_FLAGS', '')}"
