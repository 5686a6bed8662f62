"""The page of the hierarchy study: what two levels and flat agents earn, seed by seed, and whether the levels agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from forethought import page
from forethought.ops import stats
from forethought.page import Html, tag
from forethought.studies import hierarchy


def write(out: Path, found: dict[str, Any]) -> Path:
    """Writes `out`/report.html from what `hierarchy.run` found."""
    parts = found["results"]
    tasks = [task for task in hierarchy.TASKS if any(x["task"] == task for x in parts)]
    sections = {task: _task([x for x in parts if x["task"] == task]) for task in tasks}
    sections["Both levels"] = _levels([x for x in parts if x["checks"]])
    header = tag(
        "header",
        tag("p", "Forethought study", class_="kicker"),
        tag("h1", "Two levels on a learned world model, and flat agents beside them"),
        tag(
            "p", "One model, one budget of real rows, updates and imagined steps for all arms of a task", class_="facts"
        ),
    )
    return page.write(out / "report.html", page.render("Hierarchy", header, sections))


def _task(parts: list[dict[str, Any]]) -> Html:
    """Reward over real rows of every arm, and what it came to."""
    roles = {x["arm"]: f"phase{i}" for i, x in enumerate(parts)}
    rewards, cells = [], []
    for x in parts:
        at = x["prefill"] + x["every"] * np.arange(1, len(x["reward"][0]) + 1)
        per = np.array(x["reward"]) / np.maximum(np.array(x["episodes"]), 1)
        for i, seed in enumerate(per):
            first = {} if i == 0 else {"showlegend": False}
            rewards.append(page.trace(x["arm"], roles[x["arm"]], at, page.smooth(seed, 3), **first))
        cells.append(page.trace(x["arm"], roles[x["arm"]], at, np.mean(x["cells"], 0)))
    figures = (
        page.figure(
            "Reward per episode", [page.plot(rewards, x="real rows", y="reward per episode")],
            "A line per seed.", roles,
        ),
        page.figure(
            "States ever visited", [page.plot(cells, x="real rows", y="states")],
            "Means over seeds.", roles,
        ),
    )  # fmt: skip
    head = ("arm", "reward in training, IQM and 95 %", "greedy episodes that earn it, by seed")
    x = parts[0]
    text = f"{x['seeds']} seeds an arm; each {x['real_rows']:,} real rows, {x['updates']:,} updates and"
    lead = page.lead(f"{text} {x['imagined_steps']:,} imagined steps.")
    return tag("div", lead, tag("div", *figures, class_="grid"), page.table(map(_row, parts), head))


def _row(x: dict[str, Any]) -> tuple[str, ...]:
    total, greedy = np.sum(x["reward"], 1), np.mean(x["returns"], 1)
    interval = stats.iqm_interval(total, rng=np.random.default_rng(0))
    shown = "too few seeds" if interval is None else f"{interval[0]:.0f} to {interval[1]:.0f}"
    each = ", ".join(page.percent(float(g)) for g in greedy)
    return (x["arm"], f"{stats.iqm(total):.0f} ({shown})", each)


def _levels(parts: list[dict[str, Any]]) -> Html:
    """What goals' runs were like, and the two checks, a row per seed."""
    rows = []
    for x in parts:
        for seed, told in enumerate(x["checks"]):
            agrees, ends = told["agreement"], ", ".join(f"{k} {n:,}" for k, n in told["ends"].items() if n)
            verdict = "paid for what hurts" if agrees["against"] else "no sign of it"
            same = [[told.get(f"{data}/{level}") for level in ("high", "low")] for data in ("fresh", "replayed")]
            shown = [
                " and ".join("no rows" if s is None else page.percent(s["effective"]) for s in pair) for pair in same
            ]
            name = f"{x['task']}, {x['arm']}, seed {seed}"
            rows.append((name, f"{told['steps']:.2f}", ends, page.brief(agrees["correlation"], 2), verdict, *shown))
    head = ("agent", "steps of a goal", "goals over by", "own and task reward", "low level",
            "same policy, fresh: high and low", "same policy, replayed")  # fmt: skip
    text = "Of 2,000 fresh rows of each agent's sampled play: how its goals ended; the rank correlation, over goals, of"
    more = "what the low level was paid with what the task paid; and the effective sample size of importance weights"
    last = "between log-probabilities recorded and now, for fresh rows (latents are drawn anew) and for replayed ones."
    return tag("div", page.lead(f"{text} {more} {last}"), page.table(rows, head))
