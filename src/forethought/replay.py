"""Replay: a ring of the latest rows of every environment stream, inside jit (`Ring`) and on the host (`Replay`).

    row   0 1 2 3 4 5 6 7 8 9      one stream after 10 rows, capacity 8: rows 2..9 are stored,
    slot  0 1 2 3 4 5 6 7 0 1      row 10 will overwrite row 2
                [-----]            a window of length 4: rows that followed each other

A row is called by its number in its stream, counted from the start of the run; its slot is that number modulo
the capacity. A stream is endless: a `last` row is followed by the `first` row of the next episode, so a window
may span episodes. It never spans the write head, where the newest row stands beside the oldest. The end of a
window ends nothing: its last row bootstraps unless it is terminal itself. The first row of a window need not be
`first`: recurrent learners start from their initial state there.

Windows are drawn uniformly, over streams and over starting rows; every stored row lies in at least one. The
newest rows are drawn as often as any other window's, not more.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from forethought.tree import named_arrays
from forethought.types import Array, Step


class Ring(eqx.Module):
    """The latest rows of B streams as arrays: pure, for use inside jit, scan and vmap.

    Under a vmap over seeds every array leads with an axis S, `count` too; all seeds are in lockstep.
    """

    data: Step
    """Leaves [B, C, ...]: streams, slots. Streams lead so that a window is contiguous in memory."""
    count: Int[Array, "*seeds"]
    """Rows ever added to each stream."""

    @classmethod
    def empty(cls, example_row: Step, capacity: int, streams: int) -> Ring:
        """A ring without rows; `example_row` (arrays or shapes, without leading axes) declares what a row is.

        Raises ValueError where the device cannot hold the ring. A vmap over seeds multiplies what is
        needed: `announce` it with the streams of all seeds first."""
        announce(example_row, capacity, streams, device=jax.devices()[0])
        data = jax.tree.map(lambda x: jnp.zeros((streams, capacity, *x.shape), x.dtype), example_row)
        return cls(data, jnp.zeros((), jnp.int32))

    @property
    def capacity(self) -> int:
        """C, the rows kept of each stream."""
        return jax.tree.leaves(self.data)[0].shape[self.count.ndim + 1]

    def add(self, rows: Step) -> Ring:
        """Adds rows [T, B], T at most the capacity, and forgets the oldest.

        Raises ValueError, when traced, for a field that was not declared so. Values cannot be refused in
        jit: `since` refuses what is not finite."""
        num = _check_declared(rows, self.data)
        # Indices instead of two slices: where the ring wraps is data, and a cond on it copies the ring under vmap.
        slot = (self.count + jnp.arange(num)) % self.capacity

        def write(old: jax.Array, new: Array) -> jax.Array:
            new = jnp.swapaxes(new, 0, 1)
            return old.at[:, slot].set(new, mode="promise_in_bounds", unique_indices=True)

        return Ring(jax.tree.map(write, self.data, rows), self.count + num)

    def sample(self, batch: int, length: int, *, key: PRNGKeyArray) -> Step:
        """Draws windows [batch, length].

        Under `length` rows, which cannot be an error in jit, a window goes round what there is: after the
        newest row, marked `last` (a truncation: its discount is as it was), comes row 0, which is `first`.
        All rows are real and no transition is invented. An empty ring gives zeros, all of them `last`."""
        if length > self.capacity:
            raise ValueError(f"replay: windows of {length} rows do not fit into a capacity of {self.capacity}")
        stream_key, start_key = jax.random.split(key)
        stream = jax.random.randint(stream_key, (batch,), 0, jax.tree.leaves(self.data)[0].shape[0])
        stored = jnp.minimum(self.count, self.capacity)
        starts = jnp.where(self.count < length, jnp.maximum(stored, 1), stored - length + 1)
        start = self.count - stored + jax.random.randint(start_key, (batch,), 0, starts)
        return self.windows(stream, start, length)

    def windows(self, stream: Int[Array, " batch"], start: Int[Array, " batch"], length: int) -> Step:
        """The windows [batch, length] of these streams from these rows on, which must be stored."""
        row = start[:, None] + jnp.arange(length)
        short = self.count < length
        row = jnp.where(short, row % jnp.maximum(self.count, 1), row)
        slot = row % self.capacity
        rows = jax.tree.map(lambda x: x.at[stream[:, None], slot].get(mode="promise_in_bounds"), self.data)
        last = rows.time_step.last | (short & (row >= self.count - 1))
        return eqx.tree_at(lambda r: r.time_step.last, rows, last)

    def since(self, row: int) -> Step:
        """The stored rows from number `row` on, as NumPy [T, B]; seeds [S] become S * B streams.

        Raises ValueError where a value is not finite or the seeds are not in lockstep."""
        counts = np.ravel(jax.device_get(self.count))
        if np.any(counts != counts[0]):
            raise ValueError(f"replay: the seeds hold different numbers of rows ({counts.min()} to {counts.max()})")
        count, lead = int(counts[0]), self.count.ndim
        start = max(row, count - self.capacity, 0)
        slot = np.arange(start, count) % self.capacity
        rows = jax.device_get(jax.tree.map(lambda x: jnp.take(x, slot, axis=lead + 1), self.data))
        streams = int(np.prod(jax.tree.leaves(self.data)[0].shape[: lead + 1]))
        rows = jax.tree.map(lambda x: np.swapaxes(x.reshape(streams, *x.shape[lead + 1 :]), 0, 1), rows)
        _check_finite(rows, start)
        return rows

    def holding(self, host: Replay) -> Ring:
        """This ring with the contents of a host ring: its S * B streams in the places of this one's [S, B]."""

        def move(old: jax.Array, new: np.ndarray) -> jax.Array:
            return jnp.array(new.reshape(old.shape))  # a copy: the host ring goes on living

        return Ring(jax.tree.map(move, self.data, host.data), jnp.full_like(self.count, host.count))


class Replay:
    """The latest rows of B streams on the host, in NumPy: the same windows as `Ring` for the same rows."""

    data: Step
    """Leaves [B, C, ...]: streams, slots."""
    count: int
    """Rows ever added to each stream."""

    def __init__(self, example_row: Step, capacity: int, streams: int, *, count: int = 0) -> None:
        """A ring without rows; `example_row` (arrays or shapes, without leading axes) declares what a row is.

        A ring that is refilled from a checkpoint begins at row `count`. Raises ValueError where memory
        cannot hold the ring."""
        announce(example_row, capacity, streams)
        self.data = jax.tree.map(lambda x: np.zeros((streams, capacity, *x.shape), x.dtype), example_row)
        self.count = count

    @property
    def capacity(self) -> int:
        """C, the rows kept of each stream."""
        return jax.tree.leaves(self.data)[0].shape[1]

    def add(self, rows: Step) -> None:
        """Adds rows [T, B], T at most the capacity, and forgets the oldest.

        Raises ValueError, before anything is written, naming the field that was not declared so or holds
        a value that is not finite."""
        rows = jax.device_get(rows)
        num = _check_declared(rows, self.data)
        _check_finite(rows, self.count)
        slot = np.arange(self.count, self.count + num) % self.capacity
        for old, new in zip(jax.tree.leaves(self.data), jax.tree.leaves(rows), strict=True):
            old[:, slot] = np.swapaxes(new, 0, 1)
        self.count += num

    def sample(self, batch: int, length: int, *, rng: np.random.Generator) -> Step:
        """Draws windows [batch, length]. Raises ValueError while fewer than `length` rows are stored."""
        stored = min(self.count, self.capacity)
        if length > stored:
            raise ValueError(f"replay: windows of {length} rows, but only {stored} rows are stored in each stream")
        stream = rng.integers(jax.tree.leaves(self.data)[0].shape[0], size=batch)
        start = self.count - stored + rng.integers(stored - length + 1, size=batch)
        return self.windows(stream, start, length)

    def windows(self, stream: Int[Array, " batch"], start: Int[Array, " batch"], length: int) -> Step:
        """The windows [batch, length] of these streams from these rows on. Raises ValueError for rows not stored."""
        oldest = max(self.count - self.capacity, 0)
        if np.any(start < oldest) or np.any(start + length > self.count):
            raise ValueError(f"replay: a window of {length} rows leaves the stored rows {oldest}..{self.count - 1}")
        slot = (start[:, None] + np.arange(length)) % self.capacity
        return jax.tree.map(lambda x: x[stream[:, None], slot], self.data)

    def since(self, row: int) -> Step:
        """The stored rows from number `row` on, [T, B]."""
        slot = np.arange(max(row, self.count - self.capacity, 0), self.count) % self.capacity
        return jax.tree.map(lambda x: np.swapaxes(x[:, slot], 0, 1), self.data)


def staleness(rows: Step, version: Int[Array, ""] | int) -> Float[Array, ""]:
    """The mean age, in updates, of the policy that chose the actions trained on; void actions do not count.

    `version` is the number of updates behind the policy that is trained now."""
    acted = ~rows.time_step.last
    age = jnp.where(acted, version - rows.policy_version, 0).astype(jnp.float32)
    return jnp.sum(age) / jnp.maximum(jnp.sum(acted), 1)


def nbytes(example_row: Step, capacity: int, streams: int) -> int:
    """The bytes that a ring of these rows takes."""
    return capacity * streams * _row_bytes(example_row)


def announce(example_row: Step, capacity: int, streams: int, *, device: Any = None) -> str:
    """Says in one line what a replay will hold and take; raises ValueError where it cannot fit.

    `device` is the JAX device that will hold it; None: the memory of this machine."""
    if capacity < 1 or streams < 1:
        raise ValueError(f"replay: capacity and streams are at least 1, not {capacity} and {streams}")
    need, free = nbytes(example_row, capacity, streams), _free_bytes(device)
    what = f"replay of {capacity:,} rows x {streams:,} streams, {_row_bytes(example_row):,} bytes a row"
    if need > free:
        raise ValueError(
            f"{what}: needs {need / 2**30:,.2f} GiB, this machine has {free / 2**30:,.2f} GiB available; "
            f"a capacity of {free // nbytes(example_row, 1, streams):,} would fit"
        )
    return f"{what}: {need / 2**30:,.2f} GiB of {free / 2**30:,.2f} GiB available"


def _row_bytes(example_row: Step) -> int:
    return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(example_row))


def _free_bytes(device: Any) -> int:
    """What can still be allocated: of the device's memory, or of the machine's and its container's, the less."""
    stats = device.memory_stats() if device is not None else None
    if stats is not None:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = 1024 * int(meminfo.read_text().split("MemAvailable:")[1].split()[0])
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return free
    # What the page cache holds can be had back, so it is not counted as used.
    cached = int((group / "memory.stat").read_text().split("inactive_file")[1].split()[0])
    used = int((group / "memory.current").read_text()) - cached
    return max(0, min(free, int(limit.read_text()) - used))


def _check_declared(rows: Step, data: Step) -> int:
    """Returns T where rows [T, B] have the fields, shapes and dtypes of a ring's data [B, C]; else ValueError."""
    if jax.tree.structure(rows) != jax.tree.structure(data):
        got, declared = set(named_arrays(rows)), set(named_arrays(data))
        faults = [f"'{name}' is missing" for name in sorted(declared - got)]
        faults += [f"'{name}' was not declared" for name in sorted(got - declared)]
        raise ValueError(f"replay: {faults[0] if faults else 'rows of another type'}; a run has one row structure")
    num = jax.tree.leaves(rows)[0].shape[0]
    capacity = jax.tree.leaves(data)[0].shape[1]
    if num > capacity:
        raise ValueError(f"replay: {num} rows at once do not fit into a capacity of {capacity}")
    for new, old in zip(jax.tree.leaves(rows), jax.tree.leaves(data), strict=True):
        want = (num, old.shape[0], *old.shape[2:])
        if new.shape != want or new.dtype != old.dtype:
            name = next(name for name, leaf in named_arrays(rows).items() if leaf is new)
            raise ValueError(f"replay: '{name}' is {new.dtype}{list(new.shape)}, declared {old.dtype}{list(want)}")
    return num


def _check_finite(rows: Step, start: int) -> None:
    """Raises ValueError naming field, row and stream of a value that is not finite; rows [T, B] from number `start`."""
    for name, leaf in named_arrays(rows).items():
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not (finite := np.isfinite(leaf)).all():
            row, stream = np.argwhere(~finite)[0][:2]
            raise ValueError(f"replay: '{name}' is not finite at row {start + row} of stream {stream}")
