"""The study of Dyna, small: its exact yardsticks, what it counts, its page."""

import json

import numpy as np
import pytest

from forethought import cli
from forethought.algos import dyna as algorithm
from forethought.envs import mazes
from forethought.studies import dyna, dyna_report


def test_the_yardsticks_are_the_published_ones():
    exact = dyna.yardsticks()
    assert exact["maze"]["shortest"] == pytest.approx(14)
    assert exact["maze"]["epsilon_greedy"] == pytest.approx(15.88, abs=0.005)
    assert exact["maze"]["random"] == pytest.approx(868.7, abs=0.05)
    assert exact["blocking"] == pytest.approx([10, 16]) and exact["shortcut"] == pytest.approx([16, 10])


def test_episodes_are_read_off_the_record():
    last = np.array([[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]], bool)
    elapsed = np.array([[1, 2, 1, 2, 3], [1, 1, 2, 1, 2]])
    record = algorithm.Record(np.zeros((2, 5)), last, elapsed, elapsed, elapsed)
    length = dyna.lengths(record, 2)
    assert length.tolist() == [[2, 3], [1, 2]]
    assert dyna.first_within(length, 2.4) == 1 and dyna.first_within(length, 1.5) == 1
    assert dyna.first_within(length[:, ::-1], 1.5) == 2 and dyna.first_within(length, 1.0) == 0
    with pytest.raises(ValueError, match="only 2 episodes of 3"):
        dyna.lengths(record, 3)


def breadth_first(rows, start, goal):
    frontier, seen, steps = {start}, {start}, 0
    while goal not in frontier:
        near = {(r + i, c + j) for r, c in frontier for i, j in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        inside = {(r, c) for r, c in near if 0 <= r < len(rows) and 0 <= c < len(rows[0]) and rows[r][c] != "#"}
        frontier, seen, steps = inside - seen, seen | inside, steps + 1
    return steps


def test_finer_mazes_are_the_same_maze():
    assert (dyna.finer(1).transition == mazes.dyna_maze().transition).all()
    env = dyna.finer(2)
    rows = ["".join(x * 2 for x in row) for row in mazes.DYNA.rows for _ in range(2)]
    assert len(env.start) == 4 * 47
    assert dyna.expected_steps(env, dyna.best_policy(env)) == pytest.approx(breadth_first(rows, (4, 0), (0, 17)))


def test_sweeping_needs_fewer_updates_until_the_path_is_optimal():
    swept, plain = (dyna.race(racer, 1, 6) for racer in ("prioritised sweeping", "Dyna-Q"))
    totals = [np.add(each["real_updates"], each["imagined_updates"]) for each in (swept, plain)]
    assert swept["shortest"] == 14 and sum(swept["solved"]) >= 4
    assert np.median(totals[0]) < np.median(totals[1]) / 3  # 30 seeds: a tenth
    assert not any(swept["real_updates"])


def test_the_study_writes_what_it_found(tmp_path, monkeypatch):
    for name, value in {
        "EPISODES": 2, "MAZE_STEPS": 6000, "SEEN_AFTER": 50, "PLANNING": (5,), "SCALES": {1: 200},
        "CHANGES": {"shortcut": dyna.CHANGES["shortcut"]}, "CHANGE_STEPS": {"shortcut": 3200},
    }.items():  # fmt: skip
        monkeypatch.setattr(dyna, name, value)
    said = []
    found = dyna.run(tmp_path, seeds=2, quick=True, progress=lambda *at: said.append(at), about={"git": "abc"})
    assert json.loads((tmp_path / "results.json").read_text()) == found and found["git"] == "abc"
    assert said[-1][:2] == (5, 5) and [each["planning"] for each in found["maze"]] == [5]
    assert np.shape(found["maze"][0]["length"]) == (2, 2) and found["maze"][0]["imagined_updates"] == 30_000
    assert np.shape(found["change"][0]["reward"]) == (2, 320) and found["configs"]["Dyna-Q+"]["kappa"] == 1e-3
    text = dyna_report.write(tmp_path, found).read_text()
    assert "15.88" in text and "868.7" in text and text.count("max-width:270px") == 2 + 3


def test_a_picture_shows_walls_shades_and_arrows():
    layout = mazes.Layout((".#", ".."))
    drawn = dyna_report.picture(layout, np.array([0.0, 0.5, 2.0]), greedy=[0, 3, 2])
    assert drawn.count("<rect") == 4 and drawn.count(">wall<") == 1
    assert drawn.count("fill-opacity:0.450") == 1 and drawn.count("fill-opacity:0.900") == 1  # 0.9 is the full shade
    assert "\N{RIGHTWARDS ARROW}" in drawn and "\N{LEFTWARDS ARROW}" in drawn and "\N{UPWARDS ARROW}" not in drawn


def test_bad_input_is_one_line(tmp_path, capsys):
    assert cli.main(["study", "dyna", "--out", str(tmp_path), "--episodes", "3", "--quiet"]) == 2
    assert capsys.readouterr().err == "forethought study: --episodes belongs to study alignment\n"
    assert not (tmp_path / "results.json").exists()
