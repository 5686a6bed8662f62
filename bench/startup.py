"""How long `forethought train` takes from its start to its first update, with its programs compiled before.

pytest bench/startup.py --benchmark-json FILE
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("env", ["jax/pendulum", "dmc/cartpole-swingup"])
def test_startup(benchmark: Any, env: str, tmp_path: Path) -> None:
    """The bar: under 10 s. The random prefill, 1,024 rows, is part of it."""
    runs = iter(range(100))

    def first_update() -> None:
        out = tmp_path / str(next(runs))
        # As many steps as the prefill and one iteration take.
        command = [
            sys.executable,
            "-m",
            "forethought.cli",
            "train",
            "dreamer",
            "--env",
            env,
            "--steps",
            "2080",
            "--quiet",
        ]
        process = subprocess.Popen([*command, "--out", str(out)])
        metrics = out / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        process.wait()

    benchmark.pedantic(first_update, rounds=3, warmup_rounds=1)
    print(f"\n{env}: {benchmark.stats.stats.median:.1f} s")
    assert benchmark.stats.stats.median < 10
