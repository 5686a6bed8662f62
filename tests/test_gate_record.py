"""The record of a gate: on disk before an action is sent, and whoever changes it leaves a trace."""

import errno
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forethought import gate_record
from forethought.gate import Ask, Record, RecordError, Refused, read
from forethought.gate_record import START
from silo import LAUNCH, done, guarded, yes


@pytest.fixture
def path(tmp_path):
    """A record of four decisions."""
    path = tmp_path / "gate.jsonl"
    write(path, 4)
    return path


def write(path, count, begin=0):
    record = Record(path)
    for n in range(begin, begin + count):
        record.append({"n": n, "text": 'a "quoted"\nline \u00e4'})
    record.close()


def numbers(path):
    return [line.get("n", "torn") for line in read(path).lines]


def test_each_line_carries_its_digest_and_that_of_the_line_before(path):
    """By hand: sha256 of the line without its last entry."""
    before = START
    for raw in path.read_text().splitlines():
        line = json.loads(raw)
        own = line.pop("sha256")
        assert own == hashlib.sha256(json.dumps(line).encode()).hexdigest() and line["previous"] == before
        assert raw.endswith(f'"sha256": "{own}"}}')
        before = own
    assert read(path).head == before and numbers(path) == [0, 1, 2, 3] and read(path).torn == b""


def test_it_is_gone_on_with_after_it_was_closed(path):
    before = path.read_bytes()
    write(path, 2, begin=4)
    assert numbers(path) == [0, 1, 2, 3, 4, 5] and path.read_bytes().startswith(before)


@pytest.mark.parametrize("row", range(4))
def test_a_changed_line_shows(path, row):
    raw = path.read_bytes().splitlines(keepends=True)
    for change in (lambda x: x.replace(b'"n": ', b'"n": 1'), lambda x: x.replace(b'"n"', b'"m"'), lambda x: b" " + x):
        path.write_bytes(b"".join([*raw[:row], change(raw[row]), *raw[row + 1 :]]))
        with pytest.raises(RecordError, match=f"line {row + 1} was changed"):
            read(path)
        with pytest.raises(RecordError):  # nor is it gone on with
            Record(path)


@pytest.mark.parametrize(
    "order, line", [([1, 2, 3], 1), ([0, 2, 3], 2), ([0, 1, 3], 3), ([0, 2, 1, 3], 2), ([0, 1, 1, 2, 3], 3)]
)
def test_a_missing_moved_or_doubled_line_shows(path, order, line):
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(raw[i] for i in order))
    with pytest.raises(RecordError, match=f"line {line} does not follow"):
        read(path)


@pytest.mark.parametrize("put", [b"x\n", b"\n", b"NaN\n", b"3\n", b"{}\n", b'{"n": 9}\n'])
def test_what_is_put_in_between_shows(path, put):
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([raw[0], put, *raw[1:]]))
    with pytest.raises(RecordError, match="line [23]"):
        read(path)


def test_a_line_that_was_garbled_shows(path):
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([raw[0], raw[1][:20] + b"\n", *raw[2:]]))
    with pytest.raises(RecordError, match="line 3 does not follow"):
        read(path)


def test_a_cut_at_the_end_shows_to_who_keeps_the_head(path):
    head, raw = read(path).head, path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(raw[:3]))
    assert numbers(path) == [0, 1, 2]  # this is a good chain
    with pytest.raises(RecordError, match="is missing"):
        read(path, head=head)
    write(path, 1, begin=3)  # written anew, it has other digests only where it says something else
    assert read(path, head=head).head == head
    assert read(path, head=START).head == head


def test_a_line_torn_anywhere_is_reported_kept_and_gone_on_after(path):
    whole = path.read_bytes()
    last = len(b"".join(whole.splitlines(keepends=True)[:3]))
    for cut in [last, *range(last + 1, len(whole) - 2, 7), len(whole) - 2, len(whole) - 1]:
        path.write_bytes(whole[:cut])
        complete = cut == len(whole) - 1  # only the end of the line is missing
        assert read(path).torn == (b"" if complete else whole[last:cut])
        assert numbers(path) == [0, 1, 2] + [3] * complete
        write(path, 1, begin=7)
        noted = ["torn"] if last < cut and not complete else []
        assert numbers(path) == [0, 1, 2] + [3] * complete + noted + [7]
        assert path.read_bytes().startswith(whole[:cut]) and read(path).torn == b""


def test_the_note_of_a_torn_line_may_be_torn_too(path):
    whole = path.read_bytes()
    for first in (1, 40):
        path.write_bytes(whole[: -first - 1])
        Record(path).close()
        noted = path.read_bytes()
        for second in (1, 30, len(noted) - len(whole) + first):
            path.write_bytes(noted[:-second])
            write(path, 1, begin=8)
            assert numbers(path)[-2:] == ["torn", 8] and numbers(path)[:3] == [0, 1, 2]


def test_a_torn_line_that_is_changed_after_it_was_noted_shows(path):
    path.write_bytes(path.read_bytes()[:-30])
    write(path, 1, begin=4)
    path.write_bytes(path.read_bytes().replace(b'{"n": 3', b'{"n": 5'))
    with pytest.raises(RecordError, match="not what it says was torn"):
        read(path)


KILLED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("gate_record", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["gate_record"] = module
spec.loader.exec_module(module)
record, n = module.Record(sys.argv[2]), 0
while True:
    record.append({"n": n, "text": "x" * 5000})
    print(n, flush=True)  # the action is sent
    n += 1
"""


def test_what_was_sent_before_kill_9_is_on_record(tmp_path):
    path = tmp_path / "gate.jsonl"
    command = [sys.executable, "-c", KILLED, gate_record.__file__, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        sent = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        sent += [int(line) for line in process.stdout.read().splitlines()]
    write(path, 1, begin=-1)
    kept = [n for n in numbers(path) if n != "torn"]
    assert kept[:-1] == list(range(len(kept) - 1)) and kept[-1] == -1 and set(sent) <= set(kept)


def test_one_writer_at_a_time(path):
    record = Record(path)
    with pytest.raises(RecordError, match="another gate"):
        Record(path)
    record.close()
    Record(path).close()


def test_nothing_passes_where_the_decision_cannot_be_written(tmp_path):
    record = Record(tmp_path / "gate.jsonl")
    asked = []
    gated, world = guarded(record, Ask(lambda act: asked.append(act.row) or True), num=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 100):  # the disk is full at once, and in the middle of a line
        resource.setrlimit(resource.RLIMIT_FSIZE, (record.path.stat().st_size + room, limits[1]))
        try:
            with pytest.raises(OSError, match="gate.jsonl"):
                gated.send(np.array([LAUNCH, 0]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert done(gated, world) == []
    gated.send(np.array([0, LAUNCH]))  # there is room again, and new leave is asked for
    assert done(gated, world) == [0, LAUNCH] and asked == [0, 0, 1]
    kinds = [line.get("verdict", "torn") for line in read(record.path).lines]
    assert kinds == ["torn", "allowed"]
    record.close()


def test_nothing_passes_where_the_disk_does_not_confirm(tmp_path, monkeypatch):
    """The line may be there, or not: what it says was not done, and the record goes on from what is there."""
    record = Record(tmp_path / "gate.jsonl")
    gated, world = guarded(record, Ask(yes), num=1)

    def fails(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="gate.jsonl"):
            gated.send(np.array([LAUNCH]))
    assert done(gated, world) == []
    gated.send(np.array([LAUNCH]))
    assert done(gated, world) == [LAUNCH] and len(read(record.path).lines) == 2
    record.close()


@pytest.mark.parametrize("harm", ["removed", "appended", "cut", "closed"])
def test_nothing_passes_where_the_record_is_tampered_with(tmp_path, harm):
    record = Record(tmp_path / "gate.jsonl")
    gated, world = guarded(record, Ask(yes), num=1)
    gated.send(np.array([LAUNCH]))
    gated.recv()
    if harm == "removed":
        record.path.unlink()
    elif harm == "appended":
        record.path.write_bytes(record.path.read_bytes() + b"\n")
    elif harm == "cut":
        os.truncate(record.path, 10)
    else:
        record.close()
    with pytest.raises(ValueError if harm == "closed" else RecordError):
        gated.send(np.array([LAUNCH]))
    assert done(gated, world) == [LAUNCH]
    record.close()


def test_the_decision_is_on_disk_before_the_action_is_sent(tmp_path):
    """Seen from inside of the environment: when it steps, the line is there."""
    record = Record(tmp_path / "gate.jsonl")
    gated, world = guarded(record, Ask(yes), num=1)
    seen = []

    class World(list):
        def append(self, action):
            seen.append((action, [line["action"] for line in read(record.path).lines]))

    inner = gated._env._seats._seats[0].single._env
    inner.world = World()
    gated.send(np.array([LAUNCH]))
    gated.recv()
    assert seen == [(LAUNCH, [LAUNCH])] and world == []
    record.close()


def test_a_record_that_cannot_be_opened_says_which(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        Record(tmp_path / "nowhere" / "gate.jsonl")
    record = Record(str(tmp_path / "gate.jsonl"))
    with pytest.raises(ValueError):
        record.append({"x": float("nan")})
    record.append({"x": 1.5})
    assert [line["x"] for line in read(Path(record.path)).lines] == [1.5]
    with pytest.raises(Refused):
        guarded(record)[0].send(np.array([LAUNCH, 0, 0]))
    record.close()
