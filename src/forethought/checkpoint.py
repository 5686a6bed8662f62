"""Checkpoints: written beside the old ones and renamed, so that a kill at any byte leaves the last good one.

    DIR/checkpoints/000000000200/manifest.json       what belongs to the checkpoint, with size and sha256
                                 state.safetensors   the arrays of the state, by name
                                 ...                 what else the run hands over as bytes
    DIR/replay/segment-000000000100-000000000200.safetensors      rows 100..199 of every stream
    DIR/metrics.jsonl                                cut on resume to the length it had at the checkpoint

Replay is not rewritten: each checkpoint adds one segment with the rows since the one before, and a segment goes
when no checkpoint left needs it. Nothing is pickled. Whatever in a state is not an array comes from the config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from forethought import packing
from forethought.replay import Replay, Ring

SCHEMA = 1
STATE, MANIFEST, METRICS = "state.safetensors", "manifest.json", "metrics.jsonl"
Tree = TypeVar("Tree")


class CheckpointError(Exception):
    """A checkpoint could not be written, read or fitted to its template; one line with path and reason."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte was verified."""

    path: Path
    manifest: dict[str, Any]
    broken: tuple[str, ...] = ()
    """One line for each newer checkpoint that was passed over: which, and why."""

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def meta(self) -> dict[str, Any]:
        """What the run noted in JSON."""
        return self.manifest["meta"]

    def file(self, name: str) -> bytes:
        """The content of a file that was handed to `save`."""
        if name not in self.manifest["files"]:
            raise CheckpointError(f"{self.path}: holds no file '{name}', only {sorted(self.manifest['files'])}")
        with _errors_name(self.path / name):
            return (self.path / name).read_bytes()


def save(
    directory: str | os.PathLike[str],
    step: int,
    state: PyTree,
    *,
    replay: Ring | Replay | None = None,
    files: dict[str, bytes] | None = None,
    meta: dict[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint of the run in `directory`; then, and only then, removes all but the newest `keep`.

    Args:
        state: its JAX and NumPy arrays are saved by name; typed keys as their data.
        replay: its rows since the checkpoint before are appended as a segment.
        files: further contents by file name, such as a snapshot of the environments.
        meta: anything that JSON can hold.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: it could not be written (disk full, no permission); the earlier ones are untouched.
        ValueError: the step is not after the newest checkpoint's (`rewind` goes back), or an argument is unfit.
    """
    root, files = Path(directory), files or {}
    final = root / "checkpoints" / f"{step:012d}"
    steps = _checkpoints(root)
    if steps and step <= int(steps[-1].name):
        raise ValueError(f"{final}: step {step} is not after the newest checkpoint, {steps[-1].name}")
    if bad := [name for name in files if name in (STATE, MANIFEST) or Path(name).name != name]:
        raise ValueError(f"{final}: '{bad[0]}' cannot be the name of a further file")
    if keep < 1:
        raise ValueError(f"{final}: keep is {keep}; at least the checkpoint just written is kept")
    body = {"schema": SCHEMA, "step": step, "meta": meta or {}, "metrics_bytes": _metrics_bytes(root)}
    with _errors_name(final), _undone_on_error() as made:
        for parent in (final.parent, root / "replay"):
            parent.mkdir(parents=True, exist_ok=True)
            _remove(*parent.glob(".tmp-*"))
        _sync(root)
        body |= _append_segment(root, replay, steps, made) if replay is not None else {"replay": None, "segments": []}
        temporary = final.parent / f".tmp-{final.name}"
        made.append(temporary)
        temporary.mkdir()
        contents = {STATE: packing.pack(state), **files}
        body["files"] = {name: _write(temporary / name, content) for name, content in contents.items()}
        _write(temporary / MANIFEST, _sealed(body))
        _sync(temporary)
        temporary.rename(final)
        made.clear()
        _sync(final.parent)
    with _errors_name(root):
        _prune(root, drop=_checkpoints(root)[:-keep])
    return final


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens one checkpoint and verifies every byte of it and of its replay; raises CheckpointError."""
    path = Path(path)
    body = _manifest(path)
    if body["step"] != int(path.name):
        raise CheckpointError(f"{path}: is named {path.name} but holds step {body['step']}")
    for name, entry in body["files"].items():
        _verify(path / name, entry)
    for entry in body["segments"]:
        _verify(path.parent.parent / "replay" / entry["file"], entry)
    return Checkpoint(path, body)


def latest(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """Opens the newest checkpoint that verifies; None where the run has none.

    `Checkpoint.broken` says which newer ones were passed over and why. Raises CheckpointError where there
    are checkpoints and all are broken."""
    broken: list[str] = []
    for path in reversed(_checkpoints(Path(directory))):
        try:
            return dataclasses.replace(read(path), broken=tuple(broken))
        except CheckpointError as error:
            broken.append(str(error))
    if broken:
        raise CheckpointError(f"{directory}: no checkpoint is whole: {'; '.join(broken)}")
    return None


def load(checkpoint: Checkpoint, like: Tree, part: str = "") -> Tree:
    """Returns the state saved, or its branch `part`, with all that is not an array taken from the template `like`.

    Raises CheckpointError, naming the array, where names, shapes or dtypes differ from the template's."""
    return _unpack(checkpoint.path / STATE, like, part)


def load_replay(checkpoint: Checkpoint, like: Ring | Replay) -> Ring | Replay:
    """Returns a replay of `like`'s kind and size with the rows, and the write head, of the checkpoint.

    Raises CheckpointError where the rows are declared otherwise than in `like`."""
    path, stored = checkpoint.path, checkpoint.manifest["replay"]
    if stored is None:
        raise CheckpointError(f"{path}: was saved without a replay")
    if stored["capacity"] != like.capacity:
        raise CheckpointError(f"{path}: replay has a capacity of {stored['capacity']} rows, not {like.capacity}")
    lead = np.ndim(like.count) + 1
    shape = jax.tree.leaves(like.data)[0].shape[:lead]
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead + 1 :], x.dtype), like.data)
    segments = checkpoint.manifest["segments"]
    host = Replay(example, like.capacity, int(np.prod(shape)), count=segments[0]["start"] if segments else 0)
    for entry in segments:
        axes = (entry["stop"] - entry["start"], int(np.prod(shape)))
        rows = jax.tree.map(lambda x, axes=axes: np.broadcast_to(np.zeros((), x.dtype), axes + x.shape), example)
        host.add(_unpack(path.parent.parent / "replay" / entry["file"], rows))
    return like.holding(host) if isinstance(like, Ring) else host


def rewind(directory: str | os.PathLike[str], checkpoint: Checkpoint | None) -> None:
    """Takes a run back to one of its checkpoints, or to before its first (None): what came later is removed.

    Later checkpoints and replay segments go, metrics are cut at the length they had. May be repeated when
    interrupted. Raises CheckpointError where metrics are shorter than they were."""
    root = Path(directory)
    step, length = (checkpoint.step, checkpoint.manifest["metrics_bytes"]) if checkpoint else (-1, 0)
    if (size := _metrics_bytes(root)) < length:
        raise CheckpointError(f"{root / METRICS}: has {size} bytes, but had {length} at step {step}; put it back")
    with _errors_name(root):
        _prune(root, drop=[path for path in _checkpoints(root) if int(path.name) > step])
        if size > length:
            os.truncate(root / METRICS, length)


def _checkpoints(root: Path) -> list[Path]:
    """All checkpoints of a run, whole or not, oldest first."""
    return sorted(path for path in (root / "checkpoints").glob("*") if path.name.isdigit())


def _append_segment(root: Path, replay: Ring | Replay, steps: list[Path], made: list[Path]) -> dict[str, Any]:
    """Writes the rows that no segment holds yet and lists the segments that the replay consists of."""
    count = int(np.ravel(jax.device_get(replay.count))[0])
    oldest = max(count - replay.capacity, 0)
    segments = [entry for entry in _intact_segments(root, steps) if entry["stop"] > oldest]
    start = segments[-1]["stop"] if segments else oldest
    if start < count:
        path = root / "replay" / f"segment-{start:012d}-{count:012d}.safetensors"
        temporary = path.with_name(f".tmp-{path.name}")
        made += [temporary] if path.exists() else [temporary, path]  # a name taken is an older checkpoint's
        entry = _write(temporary, packing.pack(replay.since(start)))
        temporary.replace(path)
        segments.append({"file": path.name, "start": start, "stop": count, **entry})
    _sync(root / "replay")
    return {"replay": {"count": count, "capacity": replay.capacity}, "segments": segments}


def _intact_segments(root: Path, steps: list[Path]) -> list[dict[str, Any]]:
    """The segments of the checkpoint before; none, so that all rows are written anew, where it was damaged."""
    try:
        segments = _manifest(steps[-1])["segments"] if steps else []
    except CheckpointError:
        return []
    sizes = {path.name: path.stat().st_size for path in (root / "replay").glob("segment-*")}
    return segments if all(sizes.get(entry["file"]) == entry["bytes"] for entry in segments) else []


def _prune(root: Path, drop: list[Path]) -> None:
    """Removes checkpoints, then the segments that no checkpoint left needs, and what was left half-written."""
    for path in drop:
        aside = path.with_name(f".tmp-{path.name}")
        _remove(aside)
        path.rename(aside)  # at once, so that none is found half-removed
    _remove(*(root / "checkpoints").glob(".tmp-*"), *(root / "replay").glob(".tmp-*"))
    needed: set[str] = set()
    for path in _checkpoints(root):
        with contextlib.suppress(CheckpointError):  # a broken checkpoint needs nothing
            needed |= {entry["file"] for entry in _manifest(path)["segments"]}
    _remove(*(path for path in (root / "replay").glob("segment-*") if path.name not in needed))


def _remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> dict[str, Any]:
    """Writes a new file through to the disk and returns its manifest entry."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _sync(path: Path) -> None:
    """Makes the names in a directory, or the content of a file, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _metrics_bytes(root: Path) -> int:
    path = root / METRICS
    if not path.exists():
        return 0
    with _errors_name(path):
        _sync(path)
        return path.stat().st_size


@contextlib.contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Turns what the operating system refuses into one line with path and reason."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _undone_on_error() -> Iterator[list[Path]]:
    """Removes the paths put on the list if anything at all goes wrong, an interrupt too."""
    made: list[Path] = []
    try:
        yield made
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report; the next save cleans up
            _remove(*made)
        raise


def _sealed(body: dict[str, Any]) -> bytes:
    """The manifest with the hash of itself."""
    body = json.loads(json.dumps(body, allow_nan=False))  # as it will be read: keys are strings, tuples are lists
    return json.dumps({"sha256": _seal(body), **body}, indent=1).encode()


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _manifest(path: Path) -> dict[str, Any]:
    with _errors_name(path / MANIFEST):
        content = (path / MANIFEST).read_bytes()
    try:
        body = json.loads(content)
        seal = body.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: is damaged ({error})") from error
    if seal != _seal(body):
        raise CheckpointError(f"{path / MANIFEST}: is damaged (its sha256 does not fit)")
    if body["schema"] != SCHEMA:
        raise CheckpointError(f"{path}: has schema {body['schema']}, this version reads {SCHEMA}")
    return body


def _unpack(path: Path, like: Tree, part: str = "") -> Tree:
    with _errors_name(path):
        content = path.read_bytes()
    try:
        return packing.unpack(content, like, part)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _verify(path: Path, entry: dict[str, Any]) -> None:
    with _errors_name(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{path}: has {size} bytes instead of {entry['bytes']}")
        if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{path}: is damaged (its sha256 does not fit)")
