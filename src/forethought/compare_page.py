"""The page of a comparison: what can be said in a sentence, scores with their intervals, pairs, and every seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from forethought import page
from forethought.compare import two
from forethought.ops import stats
from forethought.page import Html, show, tag

Roles = dict[str, str]
"""The colour of each method."""


def write(path: Path, result: dict[str, Any]) -> Path:
    """Writes what `compare.compare` found as one page; an older one stays until the new one is whole."""
    methods, scales = result["methods"], result["scales"]
    roles = {method["name"]: f"phase{i % 8}" for i, method in enumerate(methods)}
    title = f"{len(methods)} methods on {len(scales)} task{'s' if len(scales) > 1 else ''}"
    sections = {
        "Scores": page.join([_scores(result, roles), _numbers(methods), _scale(scales)]),
        "Pairs": _pairs(result["pairs"]),
        "Every seed": page.join(_task(task, scale, methods, roles) for task, scale in scales.items()),
        "Methods": page.join([_runs(methods), _settings(methods)]),
    }
    return page.write(path, page.render(title, _header(title, result), sections))


def _header(title: str, result: dict[str, Any]) -> Html:
    methods, scales = result["methods"], result["scales"]
    runs = sum(len(x["runs"]) for method in methods for x in method["tasks"].values())
    given = [task for task, scale in scales.items() if scale["from"] == "given"]
    facts = [f"{runs} runs on {' and '.join(scales)}"]
    if len(given) < len(scales):
        facts.append("score 0 is the return of random actions, 1 that of the task's best method")
    if given:
        facts.append(f"the scale of {' and '.join(given)} was given")
    boxes = [
        tag("div", tag("dt", m["name"]), tag("dd", two(m["iqm"]["value"])), tag("dd", _bounds(m["iqm"])), class_="tile")
        for m in methods
    ]
    return tag(
        "header",
        tag("p", "Forethought comparison", class_="kicker"),
        tag("h1", title),
        tag("p", " \N{MIDDLE DOT} ".join(facts), class_="facts"),
        tag("p", result["summary"], class_=f"verdict {result['verdict']}"),
        tag("dl", *boxes, class_="tiles"),
    )


def _scores(result: dict[str, Any], roles: Roles) -> Html:
    dots, curves, tau = [], [], np.array(result["tau"])
    for method in result["methods"]:
        name, profile = method["name"], method["profile"]
        runs = [run["scaled"] for x in method["tasks"].values() for run in x["runs"]]
        dots.append(_dots(name, roles, runs, method["iqm"]))
        band = {} if profile["low"] is None else {"band": (np.array(profile["low"]), np.array(profile["high"]))}
        curves.append(page.trace(name, roles[name], tau, np.array(profile["value"]), **band))
    middle = (
        "A dot per run, all tasks together; the diamond is the mean of their middle half. Its interval holds 95 % of "
        f"{result['resamples']:,} draws of the seeds within each task; with fewer than {stats.FEW} seeds there is none."
    )
    above = (
        "The share of a method's runs that score more than x: the higher curve is better. Band: the interval at each x."
    )
    means = page.plot(dots, x="", y="score", legend=True)
    profiles = page.plot(curves, x="score", y="share of runs above", range=[-0.02, 1.02])
    figures = [
        page.figure("interquartile mean", [means], middle, roles),
        page.figure("performance profile", [profiles], above, roles),
    ]
    return tag("div", *figures, class_="grid")


def _dots(name: str, roles: Roles, runs: list[float], iqm: dict[str, Any]) -> dict[str, Any]:
    middle, *interval = page.numbers(np.array([iqm[key] for key in ("value", "low", "high") if iqm[key] is not None]))
    own = {"box": page.numbers(np.array(runs)), "middle": middle, "interval": interval or None}
    return {"name": name, "role": roles[name], **own}


def _numbers(methods: list[dict[str, Any]]) -> Html:
    rows = [(m["name"], *(_estimate(m[key]) for key in ("iqm", "mean", "optimality_gap"))) for m in methods]
    caption = (
        "Of all runs of a method. IQM is the interquartile mean; the gap (optimality gap) is by how much runs fall "
        "short of score 1 on average, so lower is better."
    )
    return page.figure("numbers", [page.table(rows, ("method", "IQM", "mean", "gap"))], caption)


def _scale(scales: dict[str, dict[str, Any]]) -> Html:
    rows = [(task, show(x["low"]), show(x["high"]), x["from"]) for task, x in scales.items()]
    caption = (
        "A run of mean return r over its evaluation episodes has the score (r - low) / (high - low), where low and "
        "high are the returns that count as 0 and 1. Taken from the compared runs, they change with these runs, and "
        "the intervals leave out their own uncertainty."
    )
    return page.figure("scale", [page.table(rows, ("task", "score 0", "score 1", "which are"))], caption)


def _pairs(pairs: list[dict[str, Any]]) -> Html:
    rows = [(f"{p['a']} over {p['b']}", _estimate(p["improvement"]), _estimate(p["difference"])) for p in pairs]
    caption = (
        "The probability that a run of the first method scores above one of the second on the same task, a tie "
        "counting half, averaged over tasks: 0.5 is no difference. Beside it, the difference of their IQMs."
    )
    if len(pairs) > 2:
        caption += (
            f" Of {len(pairs) // 2} pairs: where methods are equal, one interval in twenty says otherwise by chance."
        )
    return page.figure("probability of improvement", [page.table(rows, ("pair", "probability", "IQM"))], caption)


def _task(task: str, scale: dict[str, Any], methods: list[dict[str, Any]], roles: Roles) -> Html:
    found = {method["name"]: method["tasks"][task] for method in methods}
    scores = {name: {run["seed"]: run["score"] for run in x["runs"]} for name, x in found.items()}
    dots = [_dots(name, roles, list(scores[name].values()), x["iqm"]) for name, x in found.items()]
    seeds = sorted(set().union(*scores.values()))
    rows = [(str(seed), *(show(x[seed]) if seed in x else "" for x in scores.values())) for seed in seeds]
    rows.append(("IQM", *(_estimate(x["iqm"], show) for x in found.values())))
    levels = {"score 0": scale["low"], "score 1": scale["high"]}
    plot = page.plot(dots, x="", y="return", levels=levels, legend=True)
    caption = "Mean return of each run over its evaluation episodes."
    return page.figure(task, [plot, page.table(rows, ("seed", *found))], caption, roles)


def _runs(methods: list[dict[str, Any]]) -> Html:
    rows = []
    for method in methods:
        runs = [run for x in method["tasks"].values() for run in x["runs"]]
        seeds = _span(len(x["runs"]) for x in method["tasks"].values())
        spans = (_span(run[key] for run in runs) for key in ("step", "episodes"))
        rows.append((method["name"], seeds, *spans, ", ".join(sorted({_short(run["version"]) for run in runs}))))
    caption = (
        "Seeds of each task, steps that an agent had trained when it was evaluated, episodes of that evaluation, and "
        "the commit that trained it (+: with changes that were not committed)."
    )
    return page.figure("runs", [page.table(rows, ("method", "seeds", "steps", "episodes", "version"))], caption)


def _settings(methods: list[dict[str, Any]]) -> Html:
    names = dict.fromkeys(name for method in methods for name in method["settings"])
    texts = {name: [str(method["settings"].get(name, "")) for method in methods] for name in names}
    rows = [(name, *values) for name, values in texts.items() if len(set(values)) > 1]
    table = page.table(rows, ("setting", *(method["name"] for method in methods)))
    return page.figure("settings that differ", [table], "Nothing where a method has no such setting.")


def _span(values: Iterable[int]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:,}" if ordered[0] == ordered[-1] else f"{ordered[0]:,} to {ordered[-1]:,}"


def _short(version: str) -> str:
    """A commit in seven letters, with the + of one that was changed."""
    return version[:7] + version[40:]


def _estimate(estimate: dict[str, Any], write: Callable[[float], str] = two) -> str:
    return f"{write(estimate['value'])} ({_bounds(estimate, write)})"


def _bounds(estimate: dict[str, Any], write: Callable[[float], str] = two) -> str:
    low, high = estimate["low"], estimate["high"]
    return "no interval" if low is None else f"{write(low)} to {write(high)}"
