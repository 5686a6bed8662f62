"""Small runs for tests: the stub learner in this process or in one of its own, and what they wrote, read back."""

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load

from forethought import checkpoint

CACHE = tempfile.mkdtemp(prefix="forethought-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

DREAMER = dict(
    deter=8, hidden=8, stoch=2, classes=4, units=8, blocks=2, layers=1, bins=15, batch=2, length=8, starts=2, horizon=3,
    prefill=32, envs=2, ticks=4, updates=1, action_repeat=1, capacity=4096,
)  # fmt: skip
"""The smallest dreamer."""

COMMAND = """
import resource, sys
sys.path.insert(0, {tests!r})
from forethought import settings
settings.ALGORITHMS["stub"] = "stub_learner"
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from forethought.cli import main
sys.exit(main())
"""


@contextlib.contextmanager
def compiling_once():
    """Keeps compiled programs, so that what a test builds again, or in another process, need not be compiled again."""
    ours = {"jax_compilation_cache_dir": CACHE, "jax_persistent_cache_min_compile_time_secs": 0.0}
    old = {name: getattr(jax.config, name) for name in ours}
    for settings in (ours, old):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if settings is ours:
            yield


def options(fields: dict) -> list[str]:
    """The fields as command-line options."""
    return [part for name, value in fields.items() for part in ("--" + name.replace("_", "-"), str(value))]


def start(*arguments: object, limit: int = 0) -> subprocess.Popen:
    """Starts `forethought ARGUMENTS` in a process of its own; with `limit`, no file may grow beyond so many bytes."""
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": CACHE,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "MUJOCO_GL": "disable",
        "COLUMNS": "200",
    }
    code = COMMAND.format(tests=str(Path(__file__).parent), limit=limit)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def command(*arguments: object, limit: int = 0, seconds: float = 240) -> subprocess.CompletedProcess:
    """Runs `forethought ARGUMENTS` to its end, which has to come within so many seconds."""
    with start(*arguments, limit=limit) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def metrics(directory: Path) -> list[dict]:
    """The lines of metrics.jsonl, whose steps have to increase, without the times."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert all(a < b for a, b in zip(steps, steps[1:], strict=False)), steps
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def state(directory: Path) -> dict[str, bytes]:
    """Every file of the newest checkpoint but its manifest, which holds times."""
    found = checkpoint.latest(directory)
    assert found is not None and not found.broken
    return {name: found.file(name) for name in found.manifest["files"]}


def rows(directory: Path) -> dict[str, np.ndarray]:
    """All rows in the segments of the newest checkpoint, which have to follow each other without a gap or overlap."""
    found = checkpoint.latest(directory)
    assert found is not None
    segments = found.manifest["segments"]
    assert [s["start"] for s in segments] == [0] + [s["stop"] for s in segments[:-1]]
    assert segments[-1]["stop"] == found.manifest["replay"]["count"]
    parts = [load((directory / "replay" / s["file"]).read_bytes()) for s in segments]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def same_run(a: Path, b: Path) -> None:
    """Asserts that two runs ended alike, bit for bit: state, environments, replay and metrics."""
    states, replays = (state(a), state(b)), (rows(a), rows(b))
    assert states[0].keys() == states[1].keys() and replays[0].keys() == replays[1].keys()
    arrays = [load(x["state.safetensors"]) for x in states]
    for name in arrays[0]:
        assert arrays[0][name].tobytes() == arrays[1][name].tobytes(), name
    assert states[0] == states[1]
    for name in replays[0]:
        assert replays[0][name].tobytes() == replays[1][name].tobytes(), name
    assert metrics(a) == metrics(b)
