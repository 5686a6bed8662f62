"""What an audit says of causes: where the model's errors matter, which mistake explains them, since when they are."""

from __future__ import annotations

import numpy as np

from forethought import page
from forethought.audit_curves import DEPTH, Part, array
from forethought.page import Html, brief, percent, tag

GUESSES = {
    "delayed": "it does what it was told a step before",
    "sign": "it takes an action for its opposite",
    "keys": "observation keys stand for each other",
}
NAMED = ("delayed_action", "action_sign", "swapped_keys", "region", "non_finite")
"""Findings that say which mistake it is."""
SHOWN = 12
"""The most elements, hypotheses or angles that are shown."""


def mismatch(part: Part, audit: Part) -> Html:
    relevance, checkpoints, codes = part["relevance"], part["checkpoints"], part["codes"]
    told, body = [], []
    if relevance:
        relevant, others = (array(relevance[key], f"mismatch: {key}") for key in ("relevant", "others"))
        told.append(_matters(relevant, others, relevance["by"]))
        body.append(_weights(relevance, relevant, others))
    else:
        body.append(page.missing("what matters needs a model of ours that predicts two continuous elements or more"))
    if checkpoints:
        ranks = {name: x for name, x in checkpoints["rank_correlation"].items() if x is not None}
        if ranks:
            best = max(ranks, key=lambda name: abs(ranks[name]))
            told.append(
                f"Over {len(checkpoints['names'])} checkpoints, the real return went most closely with the {best} "
                f"(rank correlation {brief(ranks[best])})."
            )
        body.append(_checkpoints(checkpoints))
    else:
        body.append(page.missing("returns by checkpoint need three checkpoints or more and an environment"))
    if codes:
        body.append(_codes(codes))
    else:
        body.append(page.missing("agreement of codes needs an algorithm whose policy has an encoder of its own"))
    return page.join([page.lead(" ".join(told) or "Nothing of this was measured."), *body])


def _matters(relevant: np.ndarray, others: np.ndarray, by: str) -> str:
    seen = np.flatnonzero(np.isfinite(relevant) & np.isfinite(others))
    if not len(seen):
        return "No error was measured where it matters."
    near, far = ([max(float(x[at]), 0.0) for x in (relevant, others)] for at in (seen[0], seen[-1]))
    better = near[0] <= near[1], far[0] <= far[1]
    says = {
        (True, True): "the model is no worse where it matters",
        (False, False): "the model is worse where it matters",
        (True, False): "ahead, the model becomes worse where it matters",
        (False, True): "the model is worse where it matters, but only at first",
    }
    return (
        f"On the half of the observation on which the {by} depends most, {percent(near[0])} of the variance is "
        f"unexplained {seen[0] + 1} step ahead, on the other {percent(near[1])}; {seen[-1] + 1} steps ahead, "
        f"{percent(far[0])} and {percent(far[1])}: {says[better]}."
    )


def _weights(relevance: Part, relevant: np.ndarray, others: np.ndarray) -> Html:
    weights = list(relevance["weight"].items())
    half = (len(weights) + 1) // 2
    bars = [
        {"name": name, "role": "imagined" if i < half else "baseline0", "bar": weight}
        for i, (name, weight) in enumerate(weights[:SHOWN])
    ]
    roles, depth = {"what matters": "imagined", "the rest": "baseline0"}, np.arange(1.0, len(relevant) + 1)
    curves = [
        page.trace(name, role, depth, y) for (name, role), y in zip(roles.items(), (relevant, others), strict=True)
    ]
    left = f" {len(weights) - SHOWN} lighter elements are not drawn." if len(weights) > SHOWN else ""
    caption = f"Share of each element in how strongly the {relevance['by']} depends on the observation.{left}"
    figures = [
        page.figure("what matters", [page.plot(bars, x="", y="weight")], caption, roles),
        page.figure(
            "error where it matters",
            [page.plot(curves, x=DEPTH, y="share of variance")],
            "Mean excess error over elements. No bounds were measured.",
            roles,
        ),
    ]
    return tag("div", *figures, class_="grid")


def _checkpoints(found: Part) -> Html:
    rows, ranks = {"real return": found["return"], **found["metrics"]}, found["rank_correlation"]
    cells = [(name, *map(brief, values), brief(ranks[name]) if name in ranks else "") for name, values in rows.items()]
    table = tag("div", page.table(cells, ("", *found["names"], "rank correlation")), class_="wide")
    caption = (
        "Errors of each checkpoint's model on the same episodes and the real return of its policy. A rank correlation "
        "of \N{MINUS SIGN}1 says that smaller errors always went with higher returns."
    )
    return page.figure("do better models go with better policies?", [table], caption)


def _codes(codes: Part) -> Html:
    angles = ", ".join(map(brief, codes["angles"][:SHOWN]))
    cells = [("mean cosine", brief(codes["cosine"])), ("linear CKA", brief(codes["cka"])), ("principal angles", angles)]
    caption = "How alike what the encoders of model and policy make of real rows is. Cosine and CKA are 1 where alike."
    return page.figure("codes of model and policy", [page.table(cells)], caption)


def diagnosis(part: Part, audit: Part) -> Html:
    named = [finding["text"] for finding in audit["verdict"]["findings"] if finding["kind"] in NAMED]
    sentence = " ".join(named) or (
        "No single mistake that was tried (an action delayed or flipped, observation keys swapped, one region of the "
        "observations) explains the error."
    )
    cells = [
        (GUESSES[x["kind"]], x["where"], percent(max(x["explained"] or 0.0, 0.0)), brief(x["p"]))
        for x in part["hypotheses"][:SHOWN]
    ]
    tried = (
        page.table(cells, ("mistake", "of", "error explained", "p")) if cells else page.missing("none could be tried")
    )
    caption = (
        "The model is asked again as if it made this mistake, on episodes of all policies. A mistake is named where "
        "more than half of the error goes, at p below 0.001."
    )
    figures = [page.figure("asked under a hypothesis", [tag("div", tried, class_="wide")], caption)]
    if region := part["region"]:
        facts = {"where": region["where"], "error there": brief(region["inside"])}
        facts |= {"error elsewhere": brief(region["outside"]), "starts there": percent(region["share"])}
        table = page.table([*facts.items(), ("p", brief(region["p"]))])
        text = "Of all halves of one observation element, the one in which the first step errs most against elsewhere."
        figures.append(page.figure("the worst region", [table], text))
    if part["non_finite"]:
        counts = page.table([(name, f"{count:,}") for name, count in part["non_finite"].items()])
        text = "How many predicted values, by what they are of."
        figures.append(page.figure("predictions that are not finite", [counts], text))
    return page.join([page.lead(sentence), tag("div", *figures, class_="grid")])


def drift(part: Part, audit: Part) -> Html:
    episode, error = (array(part[key], f"drift: {key}") for key in ("episode", "error"))
    named = [finding["text"] for finding in audit["verdict"]["findings"] if finding["kind"] == "drift"]
    sentence = " ".join(named) or (
        f"The newest episodes are not predicted worse beyond tolerance: the largest change is at episode "
        f"{part['change']}, from a one-step error of {brief(part['before'])} to {brief(part['after'])}, and "
        f"{percent(part['p'])} of shuffled orders have one as large."
    )
    trace = page.trace("one-step error", "imagined", episode, error)
    layout = {
        "levels": {key: part[key] for key in ("before", "after") if part[key] is not None},
        "shade": [part["change"] - 0.5, episode[-1] + 0.5],
    }
    plot = page.plot([trace], x="recorded episode, in order", y="share of variance", **layout)
    caption = "Shaded: after the cut that divides the episodes most. Dashed: the means before and after it."
    return page.join(
        [page.lead(sentence), page.figure("error by episode", [plot], caption, {"after the change": "context"})]
    )
