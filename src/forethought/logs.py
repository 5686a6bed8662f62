"""What a run says while it goes: metrics.jsonl, TensorBoard events, and a progress display."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tensorboardX import SummaryWriter

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


class MetricsLog:
    """Appends a line per step to metrics.jsonl and the same numbers to TensorBoard events."""

    def __init__(self, directory: Path, step: int):
        """Goes on after `step`: later TensorBoard events are hidden (metrics.jsonl is cut by `checkpoint.rewind`)."""
        self._path = directory / "metrics.jsonl"
        self._file = open(self._path, "a", encoding="utf-8")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Raises OSError, naming the file, where the line cannot be written."""
        try:
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:
            raise OSError(error.errno, f"{self._path}: {os.strerror(error.errno or 0)}") from error

    def close(self) -> None:
        self._file.close()
        self._board.close()


class Display:
    """Step, return, losses, speed and time left, redrawn on a terminal; elsewhere a line every `every` seconds."""

    def __init__(self, console: Console, title: str, total: int, *, every: float = 10.0):
        self._console, self._title, self._every, self._spoke = console, title, every, 0.0
        self._latest: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
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
        numbers.add_row(*[f"[dim]{name}[/dim] {value:.4g}" for name, value in self._latest.items()])
        grid.add_row(self._progress)
        grid.add_row(numbers)
        return grid
