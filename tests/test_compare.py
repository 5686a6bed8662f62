"""What a comparison says of runs made by hand, what it refuses, and its page in a real browser."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forethought import compare_page
from forethought.cli import main
from forethought.compare import compare
from test_report import HOSTILE, PROBE, browse, change, found, words, write

FIELDS = {"gamma": 0.9, "ticks": 5, "envs": 2, "action_repeat": 1}


def build(
    directory: Path,
    score: float,
    *,
    seed: int = 0,
    env: str = "A",
    random: float = 10,
    fields: dict | None = None,
    **own,
) -> Path:
    """A run with two evaluation episodes whose mean return is `score`."""
    directory.mkdir(parents=True)
    config = {"algorithm": "dreamer", "preset": "cpu", "steps": 995, "env": env, "env_args": {}, "seed": seed}
    config |= {"fields": FIELDS | (fields or {}), "git": f"{seed:07}" + "d" * 33 + "+", "versions": {}}
    write(directory / "config.json", config | own)
    returns = {"agent": [score - 3, score + 3], "zero action": [0.0], "random": [random - 1, random + 1]}
    write(directory / "evaluation.json", {"step": 990, "rule": "greedy", "env": env, "returns": returns})
    return directory


def suite(root: Path, scores: dict[float, dict[str, list[float]]], **own: Any) -> list[Path]:
    """Runs by gamma, environment and seed."""
    return [
        build(root / f"{gamma}-{i}-{seed}", score, seed=seed, env=env, fields={"gamma": gamma}, **own)
        for gamma, tasks in scores.items()
        for i, (env, line) in enumerate(tasks.items())
        for seed, score in enumerate(line)
    ]


def compared(directories: list[Path], *ranges: tuple[str, tuple[float, float]]) -> dict[str, Any]:
    return compare(directories, ranges, rng=np.random.default_rng(0))


LOW, HIGH = [20.0, 30, 28, 22, 25], [40.0, 60, 44, 51, 55]
"""Means 25 and 50; each score of HIGH is above each of LOW."""


def test_numbers_by_hand(tmp_path: Path) -> None:
    # On A random actions get 10 and the best mean is 50: score (r - 10) / 40. On B it is the other method that is best.
    result = compared(suite(tmp_path, {0.9: {"A": LOW, "B": HIGH}, 0.99: {"A": HIGH, "B": [18.0, 34, 14, 26, 43]}}))
    best = {"A": "dreamer, cpu, gamma 0.99", "B": "dreamer, cpu, gamma 0.9"}
    for task, scale in result["scales"].items():
        assert scale == {"low": 10, "high": 50, "from": f"random actions, and the mean of {best[task]}"}
    first, second = result["methods"]
    assert (first["name"], second["name"]) == (best["B"], best["A"])
    assert [run["scaled"] for run in first["tasks"]["A"]["runs"]] == [0.25, 0.5, 0.45, 0.3, 0.375]
    # LOW and HIGH together, sorted: 20 22 | 25 28 30 40 44 51 | 55 60; of ten runs, two are cut at either end.
    assert first["iqm"]["value"] == pytest.approx(((25 + 28 + 30 + 40 + 44 + 51) / 6 - 10) / 40)
    assert first["mean"]["value"] == pytest.approx(((25 + 50) / 2 - 10) / 40)
    # HIGH falls short of 50 by 10, 0, 6, 0 and 0; LOW by 25 on average
    assert first["optimality_gap"]["value"] == pytest.approx((16 / 5 + 25) / 2 / 40)
    assert first["tasks"]["A"]["iqm"]["value"] == pytest.approx((22 + 25 + 28) / 3)
    assert first["tasks"]["B"]["iqm"]["value"] == pytest.approx((44 + 51 + 55) / 3)
    # Above score 0.5 (return 30): HIGH, none of LOW (30 is not above 30); above 0: all
    tau, share = np.array(result["tau"]), np.array(first["profile"]["value"])
    assert share[np.argmin(abs(tau - 0.5001))] == 5 / 10 and share[0] == 1 and share[-1] == 0
    # On A no run of the first is above one of the second; on B all 25 pairs are but 40 and 43.
    pair, back = result["pairs"]
    assert pair["improvement"]["value"] == pytest.approx((0 + 24 / 25) / 2)
    assert back["improvement"]["value"] == pytest.approx((1 + 1 / 25) / 2)
    assert pair["difference"]["value"] == first["iqm"]["value"] - second["iqm"]["value"]
    for part in (pair["improvement"], pair["difference"], first["iqm"], first["mean"], first["tasks"]["A"]["iqm"]):
        assert part["low"] <= part["value"] <= part["high"] and part["low"] < part["high"]
    json.dumps(result, allow_nan=False)


def test_a_given_range_replaces_random_and_best(tmp_path: Path) -> None:
    result = compared(suite(tmp_path, {0.9: {"A": LOW, "B": LOW}, 0.99: {"A": HIGH, "B": HIGH}}), ("B", (-60.0, 140.0)))
    assert result["scales"]["B"] == {"low": -60, "high": 140, "from": "given"}
    assert result["methods"][0]["tasks"]["B"]["runs"][0]["scaled"] == pytest.approx((20 + 60) / 200)
    assert result["scales"]["A"]["high"] == 50


@pytest.mark.parametrize(
    ("other", "verdict", "says"),
    [
        (HIGH, "good", "gamma 0.99 does better than dreamer, cpu, gamma 0.9: "),
        # IQMs 25 and (22 + 26 + 28) / 3 = 25.33
        ([21.0, 31, 28, 22, 26], "unsure", "gamma 0.99 and dreamer, cpu, gamma 0.9 are not told apart: "),
        (HIGH[:4], "unsure", "Too few seeds to say which method is better: dreamer, cpu, gamma 0.99 has 4 on A, "),
    ],
)
def test_the_sentence(tmp_path: Path, other: list[float], verdict: str, says: str) -> None:
    result = compared(suite(tmp_path / "runs", {0.9: {"A": LOW}, 0.99: {"A": other}}))
    assert result["verdict"] == verdict and says in result["summary"]
    page = words(compare_page.write(tmp_path / "page.html", result))
    assert result["summary"] in page
    if len(other) < 5:
        (one, few), (pair, _) = result["methods"], result["pairs"]
        assert one["iqm"]["low"] is not None and few["iqm"]["low"] is None and pair["improvement"]["low"] is None
        assert "no interval" in page and all(f" {score:.0f} " in page for score in other)


def test_on_one_task_the_difference_is_said_in_its_unit(tmp_path: Path) -> None:
    # IQMs (44 + 51 + 55) / 3 = 50 and 25: scores 1 and 15 / 40 = 0.375
    summary = compared(suite(tmp_path, {0.9: {"A": LOW}, 0.99: {"A": HIGH}}))["summary"]
    assert "scores are 1.00 and 0.38, a difference of 0.62" in summary
    assert "In return on A the difference is 25 (" in summary


def test_the_best_of_three_is_told_from_the_next(tmp_path: Path) -> None:
    far = [score + 100 for score in HIGH]
    result = compared(suite(tmp_path, {0.9: {"A": HIGH}, 0.5: {"A": LOW}, 0.99: {"A": far}}))
    assert "gamma 0.99 does best of 3 methods, before dreamer, cpu, gamma 0.9: " in result["summary"]
    assert len(result["pairs"]) == 6


def test_methods_are_named_by_what_sets_them_apart(tmp_path: Path) -> None:
    runs = [
        build(tmp_path / "0", 20),
        build(tmp_path / "1", 30, fields={"gamma": 0.99}),
        build(tmp_path / "2", 30, preset="wide", fields={"gamma": 0.5, "layers": 3}),
        build(tmp_path / "3", 30, algorithm="other", steps=2995, fields={"depth": 4}),
    ]
    change(runs[3], step=2995)
    assert [method["name"] for method in compared(runs)["methods"]] == [
        "dreamer, cpu, steps 995, gamma 0.9",
        "dreamer, cpu, steps 995, gamma 0.99",
        "dreamer, wide, steps 995",
        "other, cpu, steps 2995",
    ]


def test_a_task_is_what_was_measured_where(tmp_path: Path) -> None:
    runs = [build(tmp_path / str(gamma), 20, fields={"gamma": gamma}, env_args={"b": 1}) for gamma in (0.9, 0.99)]
    for run in runs:
        change(run, env="C", rule="sampled")
    assert list(compared(runs)["scales"]) == ['A {"b": 1}, played in C, sampled']


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, alone = (
        build(tmp_path / name, 20, fields={"gamma": gamma}, env=env)
        for name, gamma, env in (("one", 0.9, "A"), ("two", 0.99, "A"), ("alone", 0.99, "B"))
    )
    again, unfinished, below, not_finite, torn, dull, silent = (
        build(tmp_path / name, score, fields={"gamma": 0.99}, random=random)
        for name, score, random in (
            *(("again", 21, 10), ("unfinished", 20, 10), ("below", 7, 30), ("not_finite", 20, 10)),
            *(("torn", 20, 10), ("dull", 20, 10), ("silent", 20, 10)),
        )
    )
    change(unfinished, step=985)  # an iteration is 5 * 2 * 1 steps
    change(not_finite, returns={"agent": [1, None]})
    change(dull, returns={"agent": [25]})
    (silent / "evaluation.json").unlink()
    write(torn / "config.json", {"algorithm": "dreamer"})
    for directories, said in (
        ((one, tmp_path / "nowhere"), "nowhere: no config.json there"),
        ((one, silent), f"{silent}: was not evaluated; forethought eval {silent} does it"),
        ((one, two, again), f"{again}: dreamer, cpu, gamma 0.99 on A with seed 0 is in {two} too; give each seed"),
        ((one,), "all of one method, dreamer, cpu; give runs of two or more"),
        ((one, two, alone), "dreamer, cpu, gamma 0.9: has no run on B; every method needs the same tasks: A, B"),
        ((one, unfinished), f"{unfinished}: was evaluated at step 985 of 995; train it to its end"),
        ((one, not_finite), f"{not_finite}: evaluation.json: returns: agent: not finite"),
        ((one, torn), f"{torn}: is not a run's record (KeyError: 'fields')"),
        (
            (one, dull),
            "A: random actions were not evaluated in every run; evaluate those again or give --range 'A=LOW,",
        ),
        ((one, below), "A: no method is above random actions (20), so there is no scale; give --range 'A=LOW,HIGH'"),
        ((one, two, "--range", "B=0,1"), "--range: no run is on 'B'; the tasks are: A"),
        ((one, two, "--range", "A=0,1", "--range", "A=0,2"), "--range: a task was given twice"),
        ((one, two, "--range", "A=1,1"), "'A=1,1' is not TASK=LOW,HIGH"),
        ((one, two, "--range", "A=0,inf"), "'A=0,inf' is not TASK=LOW,HIGH"),
        ((one, two, "--range", "0,1"), "'0,1' is not TASK=LOW,HIGH"),
        ((one, two, "--out", tmp_path / "no" / "page.html"), f"{tmp_path}/no/page.html"),
    ):
        try:
            status = main(["compare", "--out", str(tmp_path / "page.html"), *map(str, directories)])
        except SystemExit as ended:
            status = ended.code
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (2, "", 1) and said in err, err
    assert not list(tmp_path.rglob("page.html*"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    runs = suite(tmp_path, {0.9: {"A=B": LOW}, 0.99: {"A=B": HIGH}})
    assert main(["compare", *map(str, runs), "--json", "result.json", "--range", "A=B=0,80"]) == 0
    out = capsys.readouterr().out
    result = json.loads(Path("result.json").read_text())
    assert result["summary"] in out and "compare.html" in out and result["page"] == "compare.html"
    assert result["scales"] == {"A=B": {"low": 0, "high": 80, "from": "given"}}
    assert result["methods"] == compared(runs, ("A=B", (0.0, 80.0)))["methods"]  # the same numbers every time
    assert "the scale of A=B was given" in words(Path("compare.html")) and "0000003+" in words(Path("compare.html"))
    assert main(["compare", *map(str, runs), "--quiet"]) == 0 and capsys.readouterr().out == ""


def test_browser(tmp_path: Path) -> None:
    runs = suite(tmp_path / "runs", {0.9: {HOSTILE: LOW, "B": LOW}, 0.99: {HOSTILE: HIGH, "B": HIGH}}, preset=HOSTILE)
    path = compare_page.write(tmp_path / "page.html", compared(runs))
    assert "<img src=x" not in path.read_text()
    document, complaints = browse(path, tmp_path / "profile", probe=PROBE)
    seen = found(document)
    assert complaints == [] and not seen["failed"]
    assert seen["drawn"] == 2 + 2  # scores and profiles; a plot for each task
    assert seen["requests"] == [] and seen["strangers"] == 0


def test_phone(tmp_path: Path) -> None:
    tasks = {"dmc/cartpole-swingup": LOW, "my_own.environments:LongNamesWithoutSpacesAreBroken": HIGH}
    path = compare_page.write(tmp_path / "page.html", compared(suite(tmp_path / "runs", {0.9: tasks, 0.985: tasks})))
    seen = found(browse(path, tmp_path, width=375, probe='root.style.width = "375px";' + PROBE)[0])
    assert seen["width"] == 375 and seen["beyond"] == 0 and seen["clipped"] == 0
