"""What every benchmark shares: processes that work when they are asked to, and where a number comes from.

Benchmarks are run by pytest-benchmark, which names, repeats and stores them:

    pytest bench --benchmark-json FILE [--peer DIR --peer-python EXE]

A process that is timed does one piece of work for every line on its standard input and answers with its seconds, so
that two of them can take turns on one noisy machine while only one is busy at a time.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from forethought import settings


class Worker:
    """A process that answers every request with the seconds that its work took."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self.read()

    @classmethod
    def ours(cls, file: str, *arguments: str) -> Worker:
        """A file of bench/ under this python."""
        return cls([sys.executable, file, *arguments])

    def work(self) -> float:
        """Asks for one piece of work and returns its seconds."""
        return together([self])[0]

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def close(self) -> dict[str, Any]:
        """Ends the process; returns its last words, `peak_bytes` among them."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        facts = self.read()
        self.process.wait()
        return facts

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with status {self.process.wait()}")
        return json.loads(line)


def together(workers: list[Worker]) -> list[float]:
    """Asks several for a piece of work each, at the same time; returns their seconds."""
    for worker in workers:
        worker.ask()
    return [worker.read() for worker in workers]


def serve(work: Callable[[], Any], **facts: Any) -> None:
    """The other side of a Worker: says what it is, works when asked, and says at the end what it took."""
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        work()
        print(time.perf_counter() - begun, flush=True)
    print(json.dumps({"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


def provenance() -> dict[str, Any]:
    """The commit, versions, date and cores of a measurement."""
    return {
        "git": settings.git_commit(),
        "versions": settings.versions(),
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
    }
