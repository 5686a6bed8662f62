"""What is left of a run that was killed, or met a full disk, at whatever moment."""

import json
import os
import random
import resource
import signal
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import load

from forethought import checkpoint
from tiny_runs import DREAMER, command, metrics, options, rows, same_run, start

STEPS = 2000
# One row of each environment is an iteration, so that a chunk has 32 x 2 rows and every chunk ends in a checkpoint.
PENDULUM = (
    "train",
    "stub",
    "--env",
    "Pendulum-v1",
    "--eval-episodes",
    1,
    "--audit-episodes",
    0,
    "--ticks",
    1,
    "--checkpoint-every",
    24,
)
PENDULUM = (*PENDULUM, "--capacity", 1024, "--steps", STEPS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to, and all rows it ever collected."""
    root = tmp_path_factory.mktemp("whole") / "run"
    done = command(*PENDULUM, "--out", root)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return root


def checkpoint_steps(root):
    return sorted(int(path.name) for path in (root / "checkpoints").glob("*") if path.name.isdigit())


def begun(root):
    return bool(checkpoint_steps(root))


def kill_at(moment, root, train=PENDULUM):
    """Starts the run, waits for its first checkpoint, kills it after so many more seconds; false where it had ended."""
    process = start(*train, "--out", root)
    until = time.monotonic() + 120
    while not begun(root) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(moment)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def stored(root):
    """The rows ever added to a stream, whose latest are in segments without a gap or an overlap."""
    found = checkpoint.latest(root)
    segments = found.manifest["segments"]
    assert [s["start"] for s in segments[1:]] == [s["stop"] for s in segments[:-1]]
    assert segments[-1]["stop"] == found.manifest["replay"]["count"]
    return segments[-1]["stop"]


def check_killed(root, moments):
    """Kills the run at these moments and looks at what is left each time; returns how often it still ran."""
    killed = 0
    for moment in moments:
        if not begun(root) or checkpoint.latest(root).step < STEPS - 2:
            killed += kill_at(moment, root)
        found = checkpoint.latest(root)  # verifies every byte
        lines = (root / "metrics.jsonl").read_bytes()[: found.manifest["metrics_bytes"]].decode().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == sorted(set(steps)) and steps[-1] == found.step
        # A row is a step or a reset, of which there is one in 201 rows: replay holds what was stepped and no more.
        count = stored(root)
        assert 2 * count - found.step == 2 * -(-count // 201)
    return killed


def test_a_run_killed_at_random_moments_goes_on_to_the_end_it_would_have_had(tmp_path, whole):
    draw = random.Random(5)
    assert check_killed(tmp_path / "run", [draw.uniform(0, 0.4) for _ in range(3)]) >= 2
    done = command("eval", tmp_path / "run", "--episodes", 1)
    assert (done.returncode, done.stderr) == (0, "")
    done = command(*PENDULUM, "--out", tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "going on from step" in done.stdout
    end_alike(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills(tmp_path, whole):
    draw = random.Random(int.from_bytes(os.urandom(4)))
    for n in range(20):
        root = tmp_path / f"run{n // 4}"
        moment = draw.uniform(0, 0.8)
        print(f"kill {n} after {moment:.3f} s")
        check_killed(root, [moment])
        assert command("eval", root, "--episodes", 1).returncode == 0
        if n % 4 == 3:
            done = command(*PENDULUM, "--out", root)
            assert (done.returncode, done.stderr) == (0, "")
            end_alike(root, whole)


def end_alike(root, whole):
    """The same state, the same rows in replay whatever segments they lie in, the same metrics."""
    ends = [checkpoint.latest(x) for x in (root, whole)]
    assert [end.file("state.safetensors") for end in ends][0] == ends[1].file("state.safetensors")
    assert ends[0].file("environment") == ends[1].file("environment")
    newest = []
    for run, end in zip((root, whole), ends, strict=True):
        parts = [load((run / "replay" / s["file"]).read_bytes()) for s in end.manifest["segments"]]
        newest.append({name: np.concatenate([part[name] for part in parts])[-256:] for name in parts[0]})
    assert newest[0].keys() == newest[1].keys()
    for name, values in newest[0].items():
        assert len(values) == 256 and values.tobytes() == newest[1][name].tobytes(), name
    assert metrics(root) == metrics(whole)


def test_rows_after_a_kill_are_the_first_of_an_uninterrupted_run(tmp_path):
    # Few enough to be all in replay, which 512 rows per stream are.
    short = (*PENDULUM[:-1], 800)
    assert command(*short, "--out", tmp_path / "whole").returncode == 0
    kill_at(0.02, tmp_path / "run", short)
    found, all_rows = rows(tmp_path / "run"), rows(tmp_path / "whole")
    for name, values in found.items():
        assert 16 < len(values) < len(all_rows[name])
        assert values.tobytes() == all_rows[name][: len(values)].tobytes(), name


def test_signals_end_with_a_checkpoint_one_line_and_their_status(tmp_path, whole):
    root, before = tmp_path / "run", 0
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = start(*PENDULUM, "--out", root)
        while not (begun(root) and checkpoint_steps(root)[-1] > before) and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (status, "")
        assert out.count("\n") <= 4 and out.splitlines()[-1].endswith("the same command goes on")
        before = checkpoint.latest(root).step
        assert before == metrics(root)[-1]["step"] < STEPS - 2
    assert command(*PENDULUM, "--out", root, "--quiet").stdout == ""
    end_alike(root, whole)


def check_full(done, path):
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("forethought "), done.stderr
    assert str(path) in done.stderr and ("File too large" in done.stderr or "No space left" in done.stderr)


def test_files_that_cannot_grow_give_one_line_and_leave_the_last_checkpoint(tmp_path, whole):
    root = tmp_path / "run"
    check_full(command(*PENDULUM, "--out", root, limit=2_000), root / "config.json")  # the first file of all
    check_full(command(*PENDULUM, "--out", root, limit=7_000), root)  # metrics or events, half-way
    last = checkpoint.latest(root).step
    assert 32 < last < STEPS - 2
    assert command("eval", root, "--episodes", 1).returncode == 0
    check_full(command("eval", root, "--episodes", 1, limit=7_000), root / "evaluation.json")
    assert checkpoint.latest(root).step == last
    done = command(*PENDULUM, "--out", root)
    assert (done.returncode, done.stderr) == (0, "")
    end_alike(root, whole)


def test_a_full_file_system_gives_one_line_and_leaves_the_last_checkpoint(tmp_path, whole):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        # Not every machine lets its tests mount; RLIMIT_FSIZE above always runs.
        pytest.skip("no tmpfs can be mounted here")
    try:
        root = disk / "run"
        full = command(*PENDULUM, "--out", root)
        check_full(full, root)
        last = checkpoint.latest(root).step
        assert command("eval", root, "--episodes", 1).returncode in (0, 2)  # its own file may not fit
        assert checkpoint.latest(root).step == last
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        done = command(*PENDULUM, "--out", root)
        assert (done.returncode, done.stderr) == (0, "")
        end_alike(root, whole)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


DREAMS = {
    "jax/pendulum": ("--actor-gradient", "dynamics"),
    "dmc/cartpole-swingup": ("--actor-gradient", "dynamics"),
    "CartPole-v1": ("--actor-gradient", "reinforce"),
}


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "env", ["dmc/cartpole-swingup", pytest.param("jax/pendulum", marks=slow), pytest.param("CartPole-v1", marks=slow)]
)
def test_dreamer_stopped_half_way_equals_dreamer_that_never_stopped(env, tmp_path):
    """200 updates at once and 100 + 100 in two processes; for DMControl the stop is in the middle of an episode."""
    # An iteration is one update and 8 rows; resets take rows, so the steps are a little fewer.
    steps = 32 + 200 * 8 + 8
    train = (
        "train",
        "dreamer",
        "--env",
        env,
        "--steps",
        steps,
        "--eval-episodes",
        1,
        "--audit-episodes",
        0,
        *options(DREAMER),
        *DREAMS[env],
    )
    train = (*train, "--checkpoint-every", 768)
    done = command(*train, "--out", tmp_path / "whole")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert metrics(tmp_path / "whole")[-1]["update/count"] >= 200
    process = start(*train, "--out", tmp_path / "stopped")
    while not begun(tmp_path / "stopped") and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    found = checkpoint.latest(tmp_path / "stopped")
    assert process.returncode == -signal.SIGKILL and 700 < found.step < steps - 100
    if env == "dmc/cartpole-swingup":
        assert found.step // 2 % 1000 not in (0, 999)
    done = command(*train, "--out", tmp_path / "stopped")
    assert (done.returncode, done.stderr) == (0, "")
    same_run(tmp_path / "whole", tmp_path / "stopped")
    results = [json.loads((tmp_path / x / "evaluation.json").read_text()) for x in ("whole", "stopped")]
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_says_its_time_and_writes_its_report(tmp_path):
    done = command("demo", "--out", tmp_path / "demo", "--json", tmp_path / "x.json", seconds=850)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["steps"] <= 10_000 and np.mean(result["returns"]["agent"]) > -200
    assert (
        tmp_path / "demo" / "report.html"
    ).stat().st_size > 1e6 and f"{result['seconds']:.0f} s in all" in done.stdout


def test_the_limit_of_these_tests_is_a_limit():
    """RLIMIT_FSIZE is there, and Python turns its signal into an error."""
    assert hasattr(resource, "RLIMIT_FSIZE") and signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
