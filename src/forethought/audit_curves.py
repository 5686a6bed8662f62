"""What an audit measured by imagined depth, in words and curves: errors, ends of episodes, calibration, support."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from forethought import page
from forethought.page import Html, brief, percent, tag
from forethought.record import rows

Part = dict[str, Any]
"""A part of an audit, or of a part, as its JSON has it."""
DRAWN = 6
"""The most quantities of which curves are drawn: the reward, then the worst."""
ROUNDING = 1e-9
"""Shares of variance below this are those of rounding: a logarithmic axis shows none of them."""
BOUNDS = ("mean", "low", "high")
DEPTH = "imagined depth (steps)"
ROLES = {"error": "ink", "excess": "imagined", "noise": "baseline0", "copy last": "baseline1", "mean": "baseline2"}


def array(values: Any, where: str) -> np.ndarray:
    """A list of numbers; null becomes NaN. Raises ValueError naming `where`."""
    return rows(values, where, "audit.json")[:, 0]


def curve(name: str, role: str, x: np.ndarray, table: Part, where: str, *, band: bool = True) -> Part:
    """A trace of a mean by depth within its bounds; where a bound is null, none is drawn."""
    y, low, high = (array(table[key], f"{where}: {name}: {key}") for key in BOUNDS)
    if {len(y), len(low), len(high)} != {len(x)}:
        raise ValueError(f"audit.json: {where}: {name}: {len(y)} values for {len(x)} depths")
    y = np.where(np.abs(y) < ROUNDING, 0.0, y)
    style = {"band": (np.where(np.isnan(low), y, low), np.where(np.isnan(high), y, high))} if band else {}
    return page.trace(name, role, x, y, **style)


def listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def error_by_depth(part: Part, audit: Part) -> Html:
    limits, depth = audit["about"]["tolerances"], array(part["depth"], "error_by_depth: depth")
    found: dict[str, dict[str, Part]] = {}
    for policy, table in part["policies"].items():
        for name, curves in table["parts"].items():
            found.setdefault(name, {})[policy] = curves
    ends = {policy: table["termination"] for policy, table in part["policies"].items() if table["termination"]}
    limit = {name: limits["reward" if name == "reward" else "error"] for name in found}
    told = {(name, who): _track(x, limit[name]) for name, by in found.items() for who, x in by.items()}
    told |= {("termination", who): _track(x, limits["termination"]) for who, x in ends.items()}
    worst = {name: max(told[name, who]["worst"] for who in by) for name, by in found.items()}
    order = sorted(found, key=lambda name: (name != "reward", -worst[name]))
    figures = [_errors(name, found[name], depth, limit[name], part["fresh"], told) for name in order[:DRAWN]]
    left = f" The {len(order) - DRAWN} quantities that are not drawn are in the table." if len(order) > DRAWN else ""
    switch = tag("button", "Logarithmic error axis", type="button", class_="switch", aria_pressed="false")
    head = ("quantity", "policy", "1 step", f"{len(depth)} steps", "within tolerance to", "better than baselines to")
    cells = [
        (*key, *("" if np.isnan(x[at]) else brief(x[at]) for at in ("first", "last", "holds", "better")))
        for key, x in told.items()
    ]
    return page.join(
        [
            page.lead(_worst(told, part, audit["verdict"]["horizon"])),
            tag("p", _reading(part["fresh"]) + left, class_="facts"),
            tag("div", switch, tag("div", *figures, class_="grid" if len(part["policies"]) == 1 else "stack")),
            page.fold(f"Excess error in numbers ({len(cells)} rows)", page.table(cells, head)),
            _ends(ends, depth) if ends else page.missing("the model predicts no ends of episodes"),
        ]
    )


def _reading(fresh: bool) -> str:
    what = (
        "Excess is what the model adds to the environment's own noise; the tolerance is about it, and its band has "
        "one-sided 95 % bounds. Error is excess and noise together."
        if fresh
        else "The band has one-sided 95 % bounds. The environment's own noise was not measured; the error contains it."
    )
    return f"{what} A model tells something where its error is below both baselines, the last value and the mean."


def _track(curves: Part, limit: float) -> dict[str, float]:
    """The excess of the first and of the last step that was seen, the most of it in tolerances, and the depths up to
    which it is within tolerance and the error below both baselines."""
    mean, low, high = (array(curves["excess"][key], f"error_by_depth: excess: {key}") for key in BOUNDS)
    seen = mean[np.isfinite(mean)]
    first, last = (mean[0], seen[-1]) if len(seen) else (np.nan, np.nan)
    body = {"first": first, "last": last, "worst": max(seen, default=0.0) / max(limit, 1e-9), "better": np.nan}
    open_ = np.isnan(mean) | (np.isnan(low) & np.isnan(high))  # too few episodes were seen to say anything
    body["holds"] = _leading(open_ | (high <= limit))
    if "error" in curves:
        error, *others = (
            array(curves[key]["mean"], f"error_by_depth: {key}") for key in ("error", "copy last", "mean")
        )
        body["better"] = _leading(np.isnan(error) | np.all([error < other for other in others], axis=0))
    return body


def _leading(holds: np.ndarray) -> float:
    """How many hold before the first that does not."""
    return float(np.argmin([*holds, False]))


def _worst(told: dict[tuple[str, str], dict[str, float]], part: Part, horizon: int) -> str:
    """`horizon`: the most steps that any episode let be seen."""
    if not told:
        return "The model predicts nothing that could be compared."

    def most(at: str) -> str:
        key = max(told, key=lambda key: np.nan_to_num(told[key][at], nan=-np.inf))
        return f"{key[0]} ({percent(max(told[key][at], 0.0))} of its variance, policy '{key[1]}')"

    held = min(horizon, *(x["holds"] for x in told.values()))
    shown = (
        f"Every quantity of every policy is shown to be within tolerance up to step {held:.0f}."
        if held
        else "Already at the first step, some quantity of some policy is not shown to be within tolerance."
    )
    noise = "Beyond what" if part["fresh"] else "Together with what"
    return (
        f"{noise} noise explains, the largest error one step ahead is that of {most('first')}; "
        f"{len(part['depth'])} steps ahead that of {most('last')}. {shown}"
    )


def _errors(
    name: str, by: dict[str, Part], depth: np.ndarray, limit: float, fresh: bool, told: dict[Any, dict[str, float]]
) -> Html:
    drawn = {key: role for key, role in ROLES.items() if fresh or key not in ("excess", "noise")}
    judged = "excess" if fresh else "error"
    panels = {
        who: [curve(key, role, depth, x[key], f"{name}: {who}", band=key == judged) for key, role in drawn.items()]
        for who, x in by.items()
    }
    heights = [
        (trace["name"], y) for traces in panels.values() for trace in traces for y in trace["y"] if y is not None
    ]
    highest = max([limit, *(y for _, y in heights)])
    own = max([0.0, *(y for key, y in heights if key in ("error", "excess"))])
    top = 1.05 * min(highest, max(1.1, 1.2 * min(own, 5.0), 1.2 * limit))
    low = max(min([1.2 * y for _, y in heights] + [-0.03 * top]), -top)
    axes = [
        page.plot(traces, x=DEPTH, y="share of variance", title=who, levels={"tolerance": limit}, range=[low, top])
        for who, traces in panels.items()
    ]
    holds, better = (", ".join(f"{told[name, who][at]:.0f} ({who})" for who in by) for at in ("holds", "better"))
    caption = f"Shown within tolerance to step {holds}; better than both baselines to step {better}."
    caption += " Some curves go on above the top." if highest > top else ""
    return page.figure(name, axes, caption, drawn)


def _ends(ends: dict[str, Part], depth: np.ndarray) -> Html:
    roles, layout = {"real": "real", "model": "imagined"}, {"x": DEPTH, "y": "probability", "range": [-0.02, 1.02]}
    axes = []
    for who, table in ends.items():
        traces = [curve(key, role, depth, table[key], f"termination: {who}") for key, role in roles.items()]
        if any(y is not None and y > 0.005 for trace in traces for y in trace["y"]):
            axes.append(page.plot(traces, title=who, **layout))
    shares = {key: "confusion" for key in ("both", "missed", "false", "neither")}
    cells = [
        (who, *(percent(x["confusion"][key]) for key in shares), percent(x["at_limit"]), percent(x["elsewhere"]))
        for who, x in ends.items()
    ]
    head = ("policy", "both end", "only real", "only model", "neither", "at time limits", "elsewhere")
    caption = (
        "Shares of starts by whether the episode terminates within the steps that were seen, really and in the model; "
        "then by how much the model's probability of a termination exceeds the real one where an episode was cut by "
        "its time limit, and what it is where the episode went on."
    )
    if len(axes) < len(ends):
        caption += " No curves are drawn where both probabilities stay below 0.5 %."
    probability = "The probability that the episode has terminated, with one-sided 95 % bounds."
    figures = [page.figure("termination", axes, probability, roles)] if axes else []
    table = tag("div", page.table(cells, head), class_="wide")
    return page.join([*figures, page.figure("confusion of ends", [table], caption)])


def calibration(part: Part, audit: Part) -> Html:
    dispersion, coverage = part["dispersion"] or {}, part["coverage"]
    off = {name: (coverage["error"].get(name) or 0.0) if coverage else 0.0 for name in dispersion}
    order = sorted(dispersion, key=lambda name: (name != "reward", -off[name]))
    figures = [_calibrated(name, dispersion[name], coverage, part["fresh"]) for name in order[:DRAWN]]
    reading = "Where spread (the model's own variance) is far below its squared error, it is more certain than right."
    if coverage:
        reading += (
            f" Intervals between its {coverage['samples']} samples are too narrow where their curve is below the "
            "dotted line; no bounds on it were measured."
        )
    body = [page.lead(_certainty(part, audit)), tag("p", reading, class_="facts"), tag("div", *figures, class_="grid")]
    if coverage is None:
        body.append(page.missing("intervals need at least four samples of the model, which draws fewer"))
    members = part["members"]
    body.append(_members(members) if members else page.missing("the model has no members that could disagree"))
    return page.join(body)


def _certainty(part: Part, audit: Part) -> str:
    found: dict[str, list[str]] = {}
    for finding in audit["verdict"]["findings"]:
        found.setdefault(finding["kind"], []).append(finding["where"])
    kinds = {
        "no_spread": "It draws no noise where the environment does",
        "overconfident": "It is more certain than right",
        "underconfident": "It is less certain than it could be",
    }
    told = [f"{text}: {listed(found[kind])}." for kind, text in kinds.items() if kind in found]
    if not part["random"]:
        return " ".join(["The model draws no random numbers, so it does not say how certain it is.", *told])
    told = told or [
        "None of it is shown to be worse than is allowed: a standard deviation wrong by a factor of two, or less than "
        "half of the environment's variance."
    ]
    coverage = part["coverage"]
    held = [array(levels[0], "coverage") for levels in coverage["covered"].values()] if coverage else []
    held = [x[np.isfinite(x)] for x in held if np.isfinite(x).any()]
    if held:
        near, far = (" to ".join({percent(find(x[at] for x in held)): 0 for find in (min, max)}) for at in (0, -1))
        should = f"Intervals that should hold {percent(coverage['nominal'][0])} of what comes hold"
        told.insert(0, f"{should} {near} one step ahead and {far} at the last step, depending on the quantity.")
    return " ".join(told)


def _calibrated(name: str, curves: Part, coverage: Part | None, fresh: bool) -> Html:
    roles = {"spread": "imagined", "error": "ink", **({"noise": "baseline0"} if fresh else {})}
    depth, where = np.arange(1.0, len(curves["error"]["mean"]) + 1), f"dispersion: {name}"
    traces = [curve(key, role, depth, curves[key], where, band=key != "noise") for key, role in roles.items()]
    axes, caption = [page.plot(traces, x=DEPTH, y="share of variance")], "Bands: one-sided 95 % bounds."
    if coverage and name in coverage["covered"]:
        nominal = array(coverage["nominal"], "coverage: nominal")
        held = np.array([array(x, f"coverage: {name}") for x in coverage["covered"][name]])
        last = max(np.flatnonzero(np.isfinite(held).any(0)).tolist(), default=0)
        pairs = {"1 step": ("baseline1", held[:, 0]), f"{last + 1} steps": ("baseline2", held[:, last])}
        lines = [page.trace(key, role, nominal, y) for key, (role, y) in pairs.items()]
        lines.append(page.trace("as it should be", "baseline0", np.array([0.0, 1.0]), np.array([0.0, 1.0])))
        roles |= {key: role for key, (role, _) in pairs.items()} | {"as it should be": "baseline0"}
        axes.append(page.plot(lines, x="share that intervals should hold", y="share held", range=[0, 1]))
        caption += (
            f" Intervals for {percent(nominal[0])} hold {percent(held[0, 0])} at 1 step, {percent(held[0, last])} at "
            f"{last + 1}."
        )
    return page.figure(name, axes, caption, roles)


def _members(members: Part) -> Html:
    what = {"rank_correlation": ("rank correlation", 0.0, [-1.05, 1.05]), "auroc": ("AUROC", 0.5, [-0.02, 1.02])}
    axes = []
    for key, (name, chance, bounds) in what.items():
        y = array(members[key], f"members: {key}")
        trace = page.trace(name, "imagined", np.arange(1.0, len(y) + 1), y)
        axes.append(page.plot([trace], x=DEPTH, y=name, levels={"chance": chance}, range=bounds))
    caption = (
        f"Over starts, does the disagreement of the {members['members']} members rank as their error does (1: always), "
        "and does it tell the fifth with the largest error from the rest (0.5: no better than chance)?"
    )
    copies = f" {members['copies']} members are copies of others." if members["copies"] else ""
    return page.figure("disagreement of members", axes, caption + copies)


def support(part: Part, audit: Part) -> Html:
    outside, median = (array(part[key], f"support: {key}") for key in ("outside", "median"))
    depth, limit = np.arange(1.0, len(outside) + 1), audit["about"]["tolerances"]["support"]
    if not np.isfinite(outside).any():
        return page.missing("too few imagined episodes went on for a share of rows")
    at = int(np.nanargmax(outside))
    sentence = (
        f"At most {percent(outside[at])} of the rows that the model imagines under '{part['policy']}' lie farther from "
        f"the data than 99 in 100 real rows do (step {at + 1} of {len(outside)}), "
        f"{'more than' if outside[at] > limit else 'within'} the tolerance of {percent(limit)}."
    )
    curves = [page.trace(name, "imagined", depth, y) for name, y in (("outside", outside), ("median", median))]
    tolerance: dict[str, Any] = {"levels": {"tolerance": limit}, "range": [-0.02, 1.05]}
    share = page.plot(curves[:1], x=DEPTH, y="share of rows", title="outside the data", **tolerance)
    distance = page.plot(curves[1:], x=DEPTH, y="distance", title="median distance", levels={"edge of the data": 1.0})
    caption = (
        "Distance to the nearest real row; 1 is what 99 in 100 held-out real rows stay within. No bounds were "
        f"measured: each of {audit['about']['episodes']} imagined episodes counts once at each depth, while it goes on."
    )
    return page.join([page.lead(sentence), page.figure("distance from the data", [share, distance], caption)])
