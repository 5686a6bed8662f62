"""What an audit says of promises: returns of plans and of policies in the model, beside what they bring."""

from __future__ import annotations

from typing import Any

import numpy as np

from forethought import page
from forethought.audit_curves import Part, array
from forethought.page import Html, brief, percent, tag

SOUGHT = "sought in the model"
"""How an audit names the policy that it seeks itself."""


def exploitation(part: Part, audit: Part) -> Html:
    promised, real, *before = (
        array(part[key], f"exploitation: {key}") for key in ("promised", "real", "recorded_promised", "recorded_real")
    )
    false = array(part["false"], "exploitation: false") > 0
    points = [
        page.trace("recorded actions", "baseline0", *before, points=True),
        page.trace("other plan", "imagined", promised[~false], real[~false], points=True),
        page.trace("false plan", "bad", promised[false], real[false], points=True),
        _diagonal(promised, real, *before),
    ]
    roles = {"false plan": "bad", "other plan": "imagined point", "recorded actions": "baseline0 point"}
    reading = (
        "A point below the dotted line brings less than promised. A false plan is promised to gain on the recorded "
        "actions, and is shown to bring less than half of that."
    )
    scatter = page.plot(points, x="promised return", y="real return")
    figures = [
        page.figure("promised and real return of plans", [scatter], reading, roles),
        _gaps(part, promised - real, before[0] - before[1]),
        _effort(part, audit["about"]["tolerances"]["exploitation"]),
        _distance(part, false),
        _worst_start(part["worst"]),
    ]
    return page.join([page.lead(_plans(part, audit)), tag("div", *figures, class_="grid")])


def _plans(part: Part, audit: Part) -> str:
    limits, gap = audit["about"]["tolerances"], part["gap_mean"]
    false = (
        f"{percent(part['false_share']['mean'])} of them are false: they promise a gain and bring less than half of it "
        f"(tolerance {percent(limits['false_plans'])})."
    )
    if gap is None:
        return f"By how much plans break their promise is not known, as some promises are not finite; {false}"
    return (
        f"Plans of {part['horizon']} steps that are sought in the model bring {brief(_scaled(part, abs(gap)))} "
        f"{'less' if gap > 0 else 'more'} than promised on average, {brief(abs(gap))} standard deviations of real "
        f"returns (the gap is {brief(part['gap_low'])} to {brief(part['gap_high'])}; tolerance "
        f"{brief(limits['exploitation'])}). {false}"
    )


def _gaps(part: Part, plans: np.ndarray, recorded: np.ndarray) -> Html:
    usual = recorded[np.isfinite(recorded)]
    middle, *interval = (_scaled(part, part[key]) for key in ("gap_mean", "gap_low", "gap_high"))
    dots = [
        {"name": "plans", "role": "imagined", "box": page.numbers(plans), "middle": middle},
        {"name": "recorded actions", "role": "baseline0", "box": page.numbers(recorded)},
    ]
    dots[0]["interval"] = None if None in interval else interval
    dots[1]["middle"] = float(usual.mean()) if len(usual) else None
    plot = page.plot(dots, x="", y="promised minus real", levels={"as promised": 0.0})
    caption = "A dot per start; the diamond is their mean, for plans with one-sided 95 % bounds."
    return page.figure("gaps between promise and return", [plot], caption)


def _effort(part: Part, limit: float) -> Html:
    gap = array(part["by_budget"], "exploitation: by_budget")
    trace = page.trace("mean gap", "imagined", np.arange(1.0, len(gap) + 1), gap)
    level = _scaled(part, limit)
    levels = {} if level is None else {"tolerance": level}
    plot = page.plot([trace], x="iterations of the search", y="mean gap", levels=levels)
    caption = "Where the gap grows with effort, searching harder finds the model's errors. No bounds were measured."
    return page.figure("gap and effort", [plot], caption)


def _scaled(part: Part, gap: float | None) -> float | None:
    """A gap in standard deviations of real returns, in units of return."""
    return None if gap is None or part["scale"] is None else gap * part["scale"]


def _distance(part: Part, false: np.ndarray) -> Html:
    title = "how far plans lead from the data"
    if part["distance"] is None:
        return page.figure(title, [page.missing("the model predicts no observations, or they are pictures")], "")
    distance = array(part["distance"], "exploitation: distance")
    groups = [("false plans", "bad", distance[false]), ("other plans", "imagined", distance[~false])]
    boxes = [{"name": name, "role": role, "box": page.numbers(x)} for name, role, x in groups if len(x)]
    plot = page.plot(boxes, x="", y="distance", levels={"edge of the data": 1.0})
    caption = "Of the farthest imagined row of each plan. Where false plans lie higher, they rest on unknown ground."
    return page.figure(title, [plot], caption)


def _worst_start(worst: Part | None) -> Html:
    if worst is None:
        return page.figure("the worst start", [page.missing("no real rows were left to search")], "")
    names = {"promised return": "promised", "real return": "real", "gap": "gap"}
    cells = [(name, brief(worst[key])) for name, key in names.items()]
    for name, values in worst["obs"].items():
        flat = np.ravel(np.array(values, float))
        shown = ", ".join(brief(x) for x in flat[:8].tolist())
        cells.append((f"{name} there", shown + (f" and {len(flat) - 8} more" if len(flat) > 8 else "")))
    caption = (
        f"The largest gap among {worst['tried']} other real rows, {worst['refined']} of them searched in full: "
        "sought out, not typical."
    )
    return page.figure("the worst start", [page.table(cells)], caption)


def ranking(part: Part, audit: Part) -> Html:
    roles = {name: f"phase{i % 8}" for i, name in enumerate(part["policies"])}
    told = [[x[key] for key in ("promised", "real", "error")] for x in part["policies"].values()]
    table = np.array(told, float).reshape(-1, 3)
    points = []
    for name, (promised, real, error) in zip(roles, table, strict=True):
        x, y = np.array([promised]), np.array([real])
        points.append(page.trace(name, roles[name], x, y, band=(y - 2 * error, y + 2 * error), points=True))
    scatter = page.plot([*points, _diagonal(table[:, 0], table[:, 1])], x="promised return", y="real return")
    caption = (
        "Bars: two standard errors of the difference. Where one crosses the dotted line, the promise is kept as far as "
        "can be told."
    )
    cells = [
        (name, brief(p), brief(r), brief(p - r), brief(2 * e)) for name, (p, r, e) in zip(roles, table, strict=True)
    ]
    numbers = page.table(cells, ("policy", "promised", "real", "difference", "\N{PLUS-MINUS SIGN} 2 errors"))
    what = (
        f"Mean returns of the first {part['steps']} steps of an episode; '{SOUGHT}' is the policy found by optimising "
        "in the model alone."
    )
    figures = [
        page.figure("promised and real return of policies", [scatter], caption, roles),
        page.figure("in numbers", [tag("div", numbers, class_="wide")], what),
    ]
    return page.join([page.lead(_choice(part, audit)), tag("div", *figures, class_="grid")])


def _choice(part: Part, audit: Part) -> str:
    if part["regret"] is None:
        return "There are too few policies, or they all earn the same, so nothing is said about their order."
    order = (
        f"Kendall's tau of the two orders is {brief(part['tau'])} (1 the same, 0 unrelated, \N{MINUS SIGN}1 reversed)."
    )
    if part["chosen"] == part["best"]:
        return f"The model prefers '{part['chosen']}', which earns most of {len(part['policies'])} policies. {order}"
    return (
        f"The model prefers '{part['chosen']}', but '{part['best']}' earns most: the choice costs "
        f"{percent(part['regret'])} of the range of real returns, with a standard error of "
        f"{percent(part['regret_error'])} (tolerance {percent(audit['about']['tolerances']['regret'])}). {order}"
    )


def _diagonal(*values: np.ndarray) -> dict[str, Any]:
    """Where what was promised is what came."""
    every = np.concatenate(values)
    every = every[np.isfinite(every)]
    ends = np.array([every.min(), every.max()]) if len(every) else np.zeros(0)
    return page.trace("as promised", "baseline0", ends, ends)
