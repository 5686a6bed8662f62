"""The record of a gate: an append-only file of JSON lines, each of which carries the digest of the line before it.

    {"time": ..., "verdict": "allowed", ..., "previous": sha256 of the line before, "sha256": of this line without it}

Whoever changes, deletes or inserts a line breaks the chain, which `read` finds. There is no secret in it: who writes
the whole file anew makes a good chain, and a cut at the end leaves one. Keep `head` elsewhere to find these too.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START = "0" * 64
"""What stands for the digest of the line before the first."""


class RecordError(RuntimeError):
    """A record that is not what was written, or that somebody else is writing."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a record holds, every line of it verified."""

    lines: tuple[dict[str, Any], ...]
    """Decisions, and for each line that a killed process left torn a note with the key 'torn'."""
    head: str
    """Digest of the last line."""
    torn: bytes
    """What stands after the last line and is none: the act it was about to tell of was never sent."""


def read(path: str | os.PathLike[str], *, head: str | None = None) -> Reading:
    """Reads and verifies a record.

    Args:
        head: a digest that was the record's head at some time, kept elsewhere; its line must still be there.

    Raises:
        RecordError: a line was changed, inserted or deleted; it names the first that does not fit.
    """
    reading = _verified(Path(path).read_bytes(), str(path))
    if head not in (None, START, *(line["sha256"] for line in reading.lines)):
        raise RecordError(f"{path}: the line with digest {head} is missing; the end was cut, or all of it rewritten")
    return reading


def _verified(data: bytes, path: str) -> Reading:
    lines: list[dict[str, Any]] = []
    head, torn = START, b""
    for number, raw in enumerate(io.BytesIO(data), start=1):
        text = raw.removesuffix(b"\n")
        try:
            line = json.loads(text)
        except ValueError:  # a part of a line is never JSON
            torn += raw
            continue
        if not _states_its_digest(line, text):
            raise RecordError(f"{path}: line {number} was changed: it has not the digest that it states")
        if line.get("previous") != head:
            raise RecordError(f"{path}: line {number} does not follow the line before; one was changed or is missing")
        if line.get("torn") != (_digest(torn) if torn else None):
            raise RecordError(f"{path}: what stands before line {number} is no line, and not what it says was torn")
        lines.append(line)
        head, torn = line["sha256"], b""
    return Reading(tuple(lines), head, torn)


def _states_its_digest(line: Any, text: bytes) -> bool:
    try:
        return isinstance(line, dict) and _line(line) == text
    except ValueError:  # a number that we never write
        return False


def _line(entry: dict[str, Any]) -> bytes:
    """The line of an entry, with its digest; any digest in the entry is not looked at."""
    body = {name: value for name, value in entry.items() if name != "sha256"}
    digest = _digest(json.dumps(body, allow_nan=False).encode())
    return json.dumps({**body, "sha256": digest}, allow_nan=False).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Record:
    """Appends decisions to a file; a line is on disk when `append` returns.

    One process at a time writes a record. A torn last line, which a killed process or a full disk leaves, stays where
    it is and is noted in the line after it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Opens or begins a record.

        Raises:
            RecordError: it does not verify, or is being written by another.
            OSError: it cannot be written; the error names it.
        """
        self.path, self._lock = Path(path), threading.Lock()
        with self._errors_name():
            self._file = open(self.path, "ab+", buffering=0)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _sync_directory(self.path.parent)
                self._mend()
            except BlockingIOError as error:
                self._file.close()
                raise RecordError(f"{self.path}: is being written by another gate; give each its own record") from error
            except BaseException:
                self._file.close()
                raise

    def append(self, entry: dict[str, Any]) -> None:
        """Writes one line. Raises OSError or RecordError where it is not on disk, ValueError for what JSON has not."""
        with self._lock, self._errors_name():
            if self._broken:
                self._mend()
            about = os.fstat(self._file.fileno())
            if about.st_size != self._size or about.st_nlink == 0:
                raise RecordError(f"{self.path}: was changed or removed by another while it was being written")
            self._write(b"", {**entry, "previous": self.head})

    def close(self) -> None:
        self._file.close()

    def _write(self, end: bytes, entry: dict[str, Any]) -> None:
        """Ends the line before, where it was torn, and writes one."""
        line = _line(entry)
        left = end + line + b"\n"
        self._broken = True  # until all of it is there
        while left:
            written = self._file.write(left)
            self._size += written
            left = left[written:]
        os.fsync(self._file.fileno())
        self.head, self._broken = json.loads(line)["sha256"], False

    def _mend(self) -> None:
        """Verifies what the file holds; a torn line is ended and noted."""
        data = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        reading = _verified(data, str(self.path))
        self.head, self._size, self._broken = reading.head, len(data), False
        end = b"" if not data or data.endswith(b"\n") else b"\n"
        if reading.torn:
            note = {"time": time.time(), "torn": _digest(reading.torn + end), "previous": self.head}
            self._write(end, note)
        elif end:  # a whole line that lacks its end only
            self._size += self._file.write(end)

    @contextmanager
    def _errors_name(self) -> Iterator[None]:
        """Adds the path to what the operating system refuses: a failed write does not say which file it was."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or str(self.path)) from error


def _sync_directory(directory: Path) -> None:
    """Makes a new file's name outlive a power cut too."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
