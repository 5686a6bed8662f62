"""Checkpoints: what was saved comes back, whatever interrupts the saving or damages the files."""

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought import checkpoint
from forethought.checkpoint import CheckpointError, latest, load, load_replay, read, rewind, save
from forethought.replay import Replay, Ring
from forethought.types import Step, TimeStep

add = jax.jit(Ring.add)


@pytest.fixture(autouse=True)
def synced(monkeypatch):
    """Nothing waits for the disk (that matters when the power fails); what would be synced is listed by path."""
    paths = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
    return paths


def make_rows(start, stop, streams=2):
    """Rows [T, B] whose observation is 10 * row + stream."""
    at = np.arange(start, stop, dtype=np.float32)[:, None] * 10 + np.arange(streams, dtype=np.float32)
    row = np.broadcast_to(np.arange(start, stop)[:, None], at.shape)
    time_step = TimeStep({"x": at}, at / 8, 0 * at + 1, row % 4 == 0, row % 4 == 3, 0 * at + 1, 0 * at)
    return Step(time_step, at[..., None], None, np.zeros(at.shape, np.int32), row.astype(np.int32))


EXAMPLE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), make_rows(0, 1))


def state_at(step):
    return {"weights": np.full((50, 3), step, np.float32), "key": jax.random.fold_in(jax.random.key(0), step)}


def run(directory, stop, start=0, capacity=20, every=10, keep=2):
    """A run of one row per step that saves every few steps."""
    replay = Replay(EXAMPLE, capacity, 2)
    for step in range(start, stop):
        replay.add(make_rows(step, step + 1))
        if (step + 1) % every == 0:
            files = {"env": b"snapshot %d" % (step + 1)}
            save(directory, step + 1, state_at(step + 1), replay=replay, files=files, meta={"n": step + 1}, keep=keep)
    return replay


def holds(found, step, capacity=20):
    """Whether a checkpoint has the state, files and replay that `run` had at that step."""
    replay = load_replay(found, Replay(EXAMPLE, capacity, 2))
    return (
        eqx.tree_equal(load(found, state_at(0)), state_at(step))
        and found.file("env") == b"snapshot %d" % step
        and found.meta == {"n": step}
        and replay.count == step
        and eqx.tree_equal(replay.since(0), make_rows(max(0, step - capacity), step))
    )


def listing(directory):
    return sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())


@pytest.mark.parametrize(("steps", "capacity"), [(10, 20), (20, 20), (50, 20), (70, 33), (40, 5)])
def test_what_was_saved_comes_back(tmp_path, steps, capacity):
    replay = run(tmp_path, steps, capacity=capacity)
    found = latest(tmp_path)
    assert found is not None and found.step == steps and found.broken == () and holds(found, steps, capacity)
    restored = load_replay(found, Replay(EXAMPLE, capacity, 2))
    assert isinstance(restored, Replay) and eqx.tree_equal(restored.data, replay.data)


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize(("capacity", "chunk"), [(16, 1), (16, 3), (7, 7), (100, 2)])
def test_host_sampling_after_a_resume_equals_the_uninterrupted_run(tmp_path, capacity, chunk):
    def ten(replay, rng, first, last):
        drawn = []
        for turn in range(first, last):
            replay.add(make_rows(turn * chunk, (turn + 1) * chunk))
            drawn.append(replay.sample(6, 1 + (turn > 2), rng=rng))
        return drawn

    whole = ten(Replay(EXAMPLE, capacity, 2), np.random.default_rng(5), 0, 10)
    replay, rng = Replay(EXAMPLE, capacity, 2), np.random.default_rng(5)
    halves = ten(replay, rng, 0, 5)
    save(tmp_path, 5, {}, replay=replay, meta=rng.bit_generator.state)
    found = latest(tmp_path)
    rng = np.random.default_rng()
    rng.bit_generator.state = found.meta
    halves += ten(load_replay(found, Replay(EXAMPLE, capacity, 2)), rng, 5, 10)
    assert eqx.tree_equal(whole, halves)


@pytest.mark.parametrize("capacity", [4, 11])
def test_device_sampling_after_a_resume_equals_the_uninterrupted_run(tmp_path, capacity):
    def turns(carry, rows):
        def turn(carry, rows):
            ring, key = carry
            key, draw_key = jax.random.split(key)
            ring = ring.add(rows)
            return (ring, key), ring.sample(5, 3, key=draw_key)

        return jax.lax.scan(turn, carry, rows)

    seeds = jax.jit(jax.vmap(turns, (0, None)))
    rows = [
        jax.tree.map(lambda *x: np.stack(x), *(make_rows(2 * t, 2 * t + 2) for t in half))
        for half in (range(5), range(5, 10))
    ]
    empty = jax.vmap(lambda _: Ring.empty(EXAMPLE, capacity, 2))(jnp.arange(3))
    start = (empty, jax.random.split(jax.random.key(1), 3))
    middle, first = seeds(start, rows[0])
    end, second = seeds(middle, rows[1])

    save(tmp_path, 5, middle[1], replay=middle[0])
    found = latest(tmp_path)
    resumed = (load_replay(found, empty), load(found, start[1]))
    assert eqx.tree_equal(resumed, middle)
    again, drawn = seeds(resumed, rows[1])
    assert eqx.tree_equal(drawn, second) and eqx.tree_equal(again, end)
    assert not eqx.tree_equal(first, second)


def test_segments_are_written_once_and_removed_when_no_checkpoint_needs_them(tmp_path):
    seen = {}
    replay = Replay(EXAMPLE, 20, 2)
    for step in range(10, 80, 10):
        replay.add(make_rows(step - 10, step))
        save(tmp_path, step, state_at(step), replay=replay, keep=2)
        # Kept are this checkpoint and the one before, whose ring goes back 20 rows from there.
        oldest = max(0, step - 30)
        expected = [f"segment-{start:012d}-{start + 10:012d}.safetensors" for start in range(oldest, step, 10)]
        segments = sorted((tmp_path / "replay").iterdir())
        assert [path.name for path in segments] == expected
        stats = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in segments}
        assert all(seen.get(name, stat) == stat for name, stat in stats.items())
        seen |= stats
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert steps == [f"{step:012d}" for step in (60, 70)]


def test_a_checkpoint_without_new_rows_writes_no_segment(tmp_path):
    replay = run(tmp_path, 10)
    before = listing(tmp_path / "replay")
    save(tmp_path, 11, {}, replay=replay)
    assert listing(tmp_path / "replay") == before
    assert load_replay(read(tmp_path / "checkpoints" / f"{11:012d}"), replay).count == 10


def test_more_new_rows_than_the_capacity_make_one_segment(tmp_path):
    replay = run(tmp_path, 10)
    for step in range(10, 45):
        replay.add(make_rows(step, step + 1))
    save(tmp_path, 45, {}, replay=replay, keep=1)
    assert listing(tmp_path / "replay") == [f"segment-{25:012d}-{45:012d}.safetensors"]
    restored = load_replay(latest(tmp_path), Replay(EXAMPLE, 20, 2))
    assert eqx.tree_equal(restored.data, replay.data)


def test_all_is_on_the_disk_before_its_name_and_the_name_before_anything_is_removed(tmp_path, monkeypatch, synced):
    replay = run(tmp_path, 20)
    (tmp_path / "metrics.jsonl").write_text("{}")
    replay.add(make_rows(20, 30))
    synced.clear()
    for name in ("rename", "replace", "unlink"):
        call = getattr(Path, name)

        def noted(path, *args, name=name, call=call, **kwargs):
            synced.append((name, path.name))
            return call(path, *args, **kwargs)

        monkeypatch.setattr(Path, name, noted)
    save(tmp_path, 30, {}, replay=replay, files={"env": b"e"}, keep=1)
    temporary, segment = tmp_path / "checkpoints" / f".tmp-{30:012d}", f".tmp-segment-{20:012d}-{30:012d}.safetensors"
    assert synced[:11] == [
        tmp_path / "metrics.jsonl",
        tmp_path,
        tmp_path / "replay" / segment,
        ("replace", segment),
        tmp_path / "replay",
        temporary / "state.safetensors",
        temporary / "env",
        temporary / "manifest.json",
        temporary,
        ("rename", temporary.name),
        tmp_path / "checkpoints",
    ]
    removed = synced[11:]
    assert ("rename", f"{10:012d}") in removed and removed[-1] == ("unlink", f"segment-{0:012d}-{10:012d}.safetensors")


class Cut:
    """A file that takes so many bytes, over all files written, and then raises."""

    def __init__(self, file, left, error):
        self.file, self.left, self.error = file, left, error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, content):
        self.file.write(content[: self.left[0]])
        self.left[0] -= len(content)
        if self.left[0] < 0:
            raise self.error

    def flush(self):
        self.file.flush()

    def fileno(self):
        return self.file.fileno()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_at_any_byte_leaves_the_last_good_checkpoint(tmp_path, monkeypatch, error):
    replay = run(tmp_path, 20)
    replay.add(make_rows(20, 30))
    before = listing(tmp_path)
    arguments = {"replay": replay, "files": {"env": b"snapshot 30"}, "meta": {"n": 30}}
    total = sum(path.stat().st_size for path in (tmp_path / "replay").iterdir()) // 2
    total += sum(path.stat().st_size for path in (tmp_path / "checkpoints" / f"{20:012d}").iterdir())
    for cut in [0, 1, *range(7, total - 50, total // 25)]:
        left = [cut]

        def opened(path, mode, left=left):
            file = open(path, mode)
            return Cut(file, left, error) if "x" in mode else file

        monkeypatch.setattr(checkpoint, "open", opened, raising=False)
        with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
            save(tmp_path, 30, state_at(30), **arguments)
        if isinstance(error, OSError):
            assert str(caught.value) == f"{tmp_path}/checkpoints/{30:012d}: No space left on device"
        assert listing(tmp_path) == before
    monkeypatch.undo()
    assert holds(latest(tmp_path), 20)
    save(tmp_path, 30, state_at(30), **arguments)
    assert holds(latest(tmp_path), 30)


CRASHES = textwrap.dedent(
    """
    import os, random, resource, signal, sys, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    import test_checkpoint as t
    from forethought import checkpoint
    t.state_at = lambda step: {"weights": np.full((50, 3), step, np.float32)}  # no JAX array: this process forks
    os.fsync = lambda descriptor: None  # a process that dies loses nothing that it wrote
    mode, root = sys.argv[2], Path(sys.argv[3])

    def resumed():
        found = checkpoint.latest(root)
        checkpoint.rewind(root, found)
        step = found.step if found else 0
        assert found is None or (found.broken == () and t.holds(found, step)), (found, t.listing(root))
        assert not [name for name in t.listing(root) if ".tmp" in name], t.listing(root)
        replay = t.Replay(t.EXAMPLE, 20, 2)
        return step, replay if found is None else checkpoint.load_replay(found, replay)

    def one_more(step, replay):
        replay.add(t.make_rows(step, step + 10))
        step += 10
        files = {"env": b"snapshot %d" % step}
        checkpoint.save(root, step, t.state_at(step), replay=replay, files=files, meta={"n": step})
        return step

    def child(work):
        pid = os.fork()
        if pid == 0:
            work()
            os._exit(0)
        return pid

    if mode == "limit":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for _ in range(3):
            one_more(*resumed())
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        step, before = resumed()[0], t.listing(root)
        for limit in range(0, 1000, 37):
            _, replay = resumed()
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                one_more(step, replay)
            except checkpoint.CheckpointError as error:
                assert str(error) == f"{root}/checkpoints/{step + 10:012d}: File too large", error
            else:
                raise AssertionError(limit)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            assert resumed()[0] == step and t.listing(root) == before
        assert one_more(*resumed()) == step + 10 == resumed()[0]

    if mode == "calls":  # die before the k-th call that changes the disk, for every k there is
        def dying(k):
            calls = [0]
            def counted(function):
                def wrapper(*args, **kwargs):
                    calls[0] += 1
                    if calls[0] > k:
                        os._exit(9)
                    return function(*args, **kwargs)
                return wrapper
            os.fsync, os.unlink, os.rmdir, os.truncate = map(counted, (os.fsync, os.unlink, os.rmdir, os.truncate))
            for name in ("mkdir", "rename", "replace", "unlink"):
                setattr(Path, name, counted(getattr(Path, name)))
            checkpoint.open = counted(open)
            one_more(*resumed())
        k, died, steps = 0, 9, []
        for fresh in (True, False):
            if not fresh:
                for _ in range(4):
                    one_more(*resumed())
            k, died = 0, 9
            while died:
                died = os.waitstatus_to_exitcode(os.waitpid(child(lambda: dying(k)), 0)[1])
                steps.append(resumed()[0])
                k += 1
            assert died == 0 and k > 10, (died, k)
        assert sorted(steps) == steps

    if mode == "kill":
        def endless():
            step, replay = resumed()
            while True:
                step = one_more(step, replay)
        last = 0
        for moment in np.random.default_rng(0).uniform(0.02, 0.4, 10):
            pid = child(endless)
            time.sleep(moment)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            step = resumed()[0]
            assert step >= last, (step, last)
            last = step
        assert last > 20, last

    print("survived")
    """
)


@pytest.mark.parametrize("mode", ["limit", "calls", "kill"])
def test_no_limit_no_crash_and_no_kill_harms_the_last_good_checkpoint(tmp_path, mode):
    command = [sys.executable, "-c", CRASHES, str(Path(__file__).parent), mode, str(tmp_path / "run")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0 and done.stdout == "survived\n", done.stderr[-3000:]


def damaged(path, damage):
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    elif damage == "longer":
        path.write_bytes(content + b"0")
    else:
        content[damage % len(content)] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["manifest.json", "state.safetensors", "env", "segment"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", 0, 7, 100, 333, -2, -9])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, name, damage):
    run(tmp_path, 30, keep=3)
    newest = tmp_path / "checkpoints" / f"{30:012d}"
    path = newest / name if name != "segment" else tmp_path / "replay" / f"segment-{20:012d}-{30:012d}.safetensors"
    damaged(path, damage)
    with pytest.raises(CheckpointError, match=path.name) as error:
        read(newest)
    assert str(path) in str(error.value)
    found = latest(tmp_path)
    assert found.step == 20 and found.broken == (str(error.value),) and holds(found, 20)
    rewind(tmp_path, found)
    assert latest(tmp_path).broken == ()
    assert not any(f"{30:012d}" in file for file in listing(tmp_path))


def test_where_all_are_damaged_there_is_an_error_and_not_a_fresh_start(tmp_path):
    run(tmp_path, 20)
    for path in (tmp_path / "checkpoints").glob("*/state.safetensors"):
        damaged(path, "truncated")
    with pytest.raises(CheckpointError, match=f"no checkpoint is whole: .*{20:012d}.*; .*{10:012d}"):
        latest(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "segment"])
def test_a_save_does_not_build_on_a_damaged_checkpoint(tmp_path, name):
    replay = run(tmp_path, 20)
    last = f"segment-{10:012d}-{20:012d}.safetensors"
    damaged(
        tmp_path / "replay" / last if name == "segment" else tmp_path / "checkpoints" / f"{20:012d}" / name, "truncated"
    )
    replay.add(make_rows(20, 30))
    save(tmp_path, 30, {}, replay=replay, keep=1)
    assert listing(tmp_path / "replay") == [f"segment-{10:012d}-{30:012d}.safetensors"]
    assert eqx.tree_equal(load_replay(latest(tmp_path), Replay(EXAMPLE, 20, 2)).data, replay.data)


@pytest.mark.parametrize("target", [10, 20, 30])
def test_a_run_goes_back_to_a_checkpoint_and_on_as_if_nothing_had_come_after(tmp_path, target):
    def written(root, steps):
        replay = Replay(EXAMPLE, 20, 2)
        for step in range(10, steps + 10, 10):
            replay.add(make_rows(step - 10, step))
            with open(root / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step}) + "\n")
            save(root, step, state_at(step), replay=replay, keep=9)

    straight, winding = tmp_path / "straight", tmp_path / "winding"
    straight.mkdir(), winding.mkdir()
    written(straight, target), written(winding, 40)
    with open(winding / "metrics.jsonl", "a") as file:
        file.write('{"step": 45, "unfini')
    for _ in range(2):
        rewind(winding, read(winding / "checkpoints" / f"{target:012d}"))
    assert listing(straight) == listing(winding)
    for name in listing(straight):
        assert (straight / name).read_bytes() == (winding / name).read_bytes()


def test_a_run_killed_before_its_first_checkpoint_starts_clean(tmp_path):
    (tmp_path / "checkpoints" / ".tmp-000000000010").mkdir(parents=True)
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / f"segment-{0:012d}-{10:012d}.safetensors").write_bytes(b"half")
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    rewind(tmp_path, latest(tmp_path))
    assert listing(tmp_path) == ["metrics.jsonl"] and (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_metrics_that_are_shorter_than_they_were_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    run(tmp_path, 10)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl: has 3 bytes, but had 12 at step 10"):
        rewind(tmp_path, latest(tmp_path))


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (Replay(EXAMPLE, 21, 2), "capacity of 20 rows, not 21"),
        (Replay(EXAMPLE, 20, 3), r"'time_step/obs/x' is float32\[10, 2\], the template has float32\[10, 3\]"),
        (Replay(eqx.tree_at(lambda r: r.depth, EXAMPLE, jax.ShapeDtypeStruct((), "int8")), 20, 2), r"'depth' is int32"),
    ],
)
def test_a_replay_that_differs_is_refused_by_name(tmp_path, like, message):
    run(tmp_path, 10)
    with pytest.raises(CheckpointError, match=message):
        load_replay(latest(tmp_path), like)


def test_a_state_that_differs_is_refused_with_path_and_name(tmp_path):
    run(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"state.safetensors: 'weights' is float32\[50, 3\], .* float32\[50, 4\]"):
        load(latest(tmp_path), {**state_at(0), "weights": np.zeros((50, 4), np.float32)})
    with pytest.raises(CheckpointError, match="holds no file 'model'"):
        latest(tmp_path).file("model")
    save(tmp_path, 11, {})
    with pytest.raises(CheckpointError, match="saved without a replay"):
        load_replay(latest(tmp_path), Replay(EXAMPLE, 20, 2))


@pytest.mark.parametrize(
    ("step", "arguments", "message"),
    [
        (20, {}, "step 20 is not after the newest checkpoint, 000000000020"),
        (19, {}, "step 19 is not after"),
        (30, {"files": {"a/b": b""}}, "'a/b' cannot be the name"),
        (30, {"files": {"manifest.json": b""}}, "'manifest.json' cannot be the name"),
        (30, {"keep": 0}, "keep is 0"),
        (30, {"meta": {"loss": float("nan")}}, "JSON"),
    ],
)
def test_unfit_arguments_are_refused_and_leave_nothing(tmp_path, step, arguments, message):
    run(tmp_path, 20)
    before = listing(tmp_path)
    with pytest.raises(ValueError, match=message):
        save(tmp_path, step, {}, **arguments)
    assert listing(tmp_path) == before


def test_a_ring_with_a_value_that_is_not_finite_is_not_saved(tmp_path):
    rows = make_rows(0, 4)
    rows.time_step.reward[2, 1] = np.nan
    ring = add(Ring.empty(EXAMPLE, 8, 2), rows)
    with pytest.raises(ValueError, match="'time_step/reward' is not finite at row 2 of stream 1"):
        save(tmp_path, 4, {}, replay=ring)
    assert listing(tmp_path) == []


def test_a_checkpoint_of_another_schema_is_refused(tmp_path, monkeypatch):
    run(tmp_path, 10)
    monkeypatch.setattr(checkpoint, "SCHEMA", 2)
    with pytest.raises(CheckpointError, match="has schema 1, this version reads 2"):
        latest(tmp_path)
