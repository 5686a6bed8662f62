"""What a run says while it goes: metrics.jsonl, TensorBoard events, and a progress display."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

SHOWN = {
    "return": "real/episode_return",
    "obs": "real/loss/obs",
    "reward": "real/loss/reward",
    "dynamics": "real/loss/dynamics",
    "actor": "imagined/loss/actor",
    "critic": "imagined/loss/critic",
    "steps/s": "time/steps_per_second",
}
"""Metrics on the progress display, by their short names."""
FLUSH_SECONDS = 10.0
"""How long TensorBoard may wait for events."""


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Adds the path to what the operating system refuses: a failed write does not say which file it was."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error


class MetricsLog:
    """Appends a line per step to metrics.jsonl and the same numbers to TensorBoard events.

    Events are written here and now, not by a thread (as tensorboardX's SummaryWriter does): a thread that meets a
    full disk dies, and whoever hands it the next event waits for ever.
    """

    def __init__(self, directory: Path, step: int):
        """Goes on after `step`: later TensorBoard events are hidden (metrics.jsonl is cut by `checkpoint.rewind`)."""
        self._path, self._events = directory / "metrics.jsonl", directory / "tensorboard"
        self._flushed = 0.0
        with errors_name(self._path):
            self._file = open(self._path, "a", encoding="utf-8")
        with errors_name(self._events):
            self._events.mkdir(exist_ok=True)
            # The name says the step too, since two writers may begin in the same second.
            self._board = EventsWriter(str(self._events / "events"), f".{step}")
            # A restart: events of this step and later, of a part of the run that is done again, are not shown.
            self._add(step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Raises OSError, naming the file, where the line cannot be written."""
        with errors_name(self._path):
            self._file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")
            self._file.flush()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with errors_name(self._events):
            self._add(step, summary=Summary(value=values))
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._board.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        # Lines are flushed as they are written, so what fails here has been reported already; events are a copy.
        for file in (self._file, self._board):
            with suppress(OSError):
                file.close()

    def _add(self, step: int, **content: Any) -> None:
        self._board.write_event(Event(wall_time=time.time(), step=step, **content))


class Display:
    """Step, return, losses, speed and time left, redrawn on a terminal; elsewhere a line every `every` seconds."""

    def __init__(self, console: Console, title: str, total: int, *, every: float = 10.0):
        self._console, self._title, self._every, self._spoke = console, title, every, 0.0
        self._latest: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=total)
        self._live = Live(self._drawn(), console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, step: int, metrics: dict[str, float]) -> None:
        self._latest |= {short: metrics[name] for short, name in SHOWN.items() if name in metrics}
        self._progress.update(self._task, completed=step)
        if self._console.is_terminal:
            self._live.update(self._drawn())
        elif time.monotonic() - self._spoke >= self._every:
            self._spoke = time.monotonic()
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in self._latest.items())
            self._console.print(f"{self._title}: step {step:,}  {numbers}", soft_wrap=True, highlight=False)

    def _drawn(self) -> Table:
        grid, numbers = Table.grid(), Table.grid(padding=(0, 2))
        numbers.add_row(*[Text.assemble((name, "dim"), f" {value:.4g}") for name, value in self._latest.items()])
        grid.add_row(self._progress)
        grid.add_row(numbers)
        return grid
