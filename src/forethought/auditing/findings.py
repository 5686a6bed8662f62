"""What an audit finds wrong: beyond its tolerance, beyond chance, and named."""

from __future__ import annotations

import dataclasses
from typing import Any

from forethought.auditing.diagnosis import SURE
from forethought.auditing.tolerances import Tolerances, held, of
from forethought.auditing.values import SOUGHT

PLANNING, IMAGINATION, RANKING, EVALUATION = "planning", "imagination", "ranking policies", "offline evaluation"
USES = (PLANNING, IMAGINATION, RANKING, EVALUATION)
ALL = frozenset(USES)
ROLLOUTS = frozenset({IMAGINATION, RANKING, EVALUATION})
"""Uses in which a policy may read what the model predicts it will see."""

KINDS: dict[str, tuple[str, frozenset[str]]] = {
    "non_finite": ("predictions are not finite", ALL),
    "error": ("observations are predicted wrongly", frozenset({IMAGINATION})),
    "reward": ("rewards are predicted wrongly", frozenset({PLANNING, IMAGINATION})),
    "missed_termination": ("the model goes on where the episode terminates", frozenset({PLANNING, IMAGINATION})),
    "false_termination": ("the model terminates where the episode goes on", frozenset({PLANNING, IMAGINATION})),
    "time_limit": ("the model takes time limits for terminations", frozenset({PLANNING, IMAGINATION})),
    "delayed_action": ("the model does what it was told a step before", ALL),
    "action_sign": ("the model takes an action for its opposite", ALL),
    "swapped_keys": ("observation keys stand for each other", ROLLOUTS),
    "region": ("the model errs in one region", frozenset({IMAGINATION})),
    "overconfident": ("the model is more certain than right", frozenset({IMAGINATION, EVALUATION})),
    "underconfident": ("the model is less certain than it could be", frozenset({IMAGINATION})),
    "no_spread": ("the model draws no noise where the environment does", frozenset({IMAGINATION, EVALUATION})),
    "identical_members": ("members of the ensemble are copies", frozenset({PLANNING, IMAGINATION})),
    "exploitation": ("plans earn less than the model promises", frozenset({PLANNING})),
    "policy_exploitation": ("a policy sought in the model earns less than it promises", frozenset({IMAGINATION})),
    "support": ("imagination leaves the data", frozenset({IMAGINATION})),
    "ranking": ("the model prefers the wrong policy", frozenset({RANKING})),
    "value": ("the model promises another return than comes", frozenset({EVALUATION})),
    "drift": ("the model no longer fits the newest data", ALL),
}
"""Everything that an audit can find wrong: what it says, and the uses that it rules out."""


RARE = 0.01
"""Terminations that are missed with less than this probability are not held against a model by their share."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong, beyond its tolerance and beyond chance."""

    kind: str
    where: str
    text: str
    depth: int | None = None
    """The first imagined step at which it shows."""


def findings(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    """Everything that is wrong in an audit's sections."""
    parts = (_curves, _diagnoses, _calibration, _plans, _values, _data)
    return [found for part in parts for found in part(sections, tolerances)]


def _curves(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    """Errors and terminations beyond their tolerance, each named once, for the policy where it shows first."""
    first: dict[tuple[str, str], tuple[int, float, str]] = {}

    def note(kind: str, where: str, curve: dict[str, Any], tolerance: float, policy: str) -> None:
        at = held(curve, tolerance)
        if "broken" in at:
            depth = at.index("broken") + 1
            if (kind, where) not in first or depth < first[kind, where][0]:
                first[kind, where] = (depth, curve["mean"][depth - 1], policy)

    limits = []
    for policy, table in sections["error_by_depth"]["policies"].items():
        for name, curves in table["parts"].items():
            kind = "reward" if curves["of"] == "reward" else "error"
            note(kind, name, curves["excess"], of(curves["of"], tolerances), policy)
        ends = table["termination"]
        if ends is None:
            continue
        limits += _time_limit(policy, ends, tolerances)
        at = held(ends["excess"], tolerances.termination)
        missed = "broken" in at and (ends["missed"]["mean"][at.index("broken")] or 0) > 0
        if missed or not limits:
            kind = "missed_termination" if missed else "false_termination"
            note(kind, "termination", ends["excess"], tolerances.termination, policy)
        note("missed_termination", "termination", _many_missed(ends), 0.0, policy)
    return [_curve(*key, *value) for key, value in first.items()] + limits[:1]


def _many_missed(ends: dict[str, Any]) -> dict[str, Any]:
    """By how much more than tolerated is missed, but for depths at which hardly anything ends: of a few ends in
    thousands of rollouts chance alone misses many."""
    rare = [low is None or low < RARE for low in ends["missed"]["low"]]
    keep = lambda curve: [None if r else x for x, r in zip(curve, rare, strict=True)]  # noqa: E731
    return {name: keep(ends["many_missed"][name]) for name in ("mean", "low", "high")}


def _curve(kind: str, where: str, depth: int, value: float, policy: str) -> Finding:
    if kind in ("error", "reward"):
        text = f"{where} is predicted wrongly from imagined step {depth} on: {value:.2f} of its variance is unexplained"
    else:
        text = f"From imagined step {depth} on {KINDS[kind][0]} (by {value:.2f})"
    return Finding(kind, where, f"{text}, in episodes of '{policy}'.", depth)


def _time_limit(policy: str, ends: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    at, low, elsewhere = ends["at_limit"], ends["at_limit_low"], ends["elsewhere"] or 0.0
    if low is None or low <= tolerances.time_limit or at <= 3 * elsewhere:
        return []
    what = f"Where episodes of '{policy}' were only cut by their time limit, the model gives a termination"
    return [Finding("time_limit", policy, f"{what} a probability of {at:.2f}, elsewhere {elsewhere:.3f}.")]


def _diagnoses(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    found, diagnosis = [], sections["diagnosis"]
    if bad := diagnosis["non_finite"]:
        text = ", ".join(f"{count} of {name}" for name, count in bad.items())
        found.append(Finding("non_finite", ", ".join(bad), f"Predictions are not finite: {text}."))
    kinds = {"delayed": "delayed_action", "sign": "action_sign", "keys": "swapped_keys"}
    for best in diagnosis["hypotheses"][:1]:
        if best["p"] < SURE and best["explained"] > 0.5 and best["error"] > 1e-4:
            kind = kinds[best["kind"]]
            text = f"{best['where']}: {KINDS[kind][0]}; asked so, {best['explained']:.0%} of its error goes."
            found.append(Finding(kind, best["where"], text))
    r = diagnosis["region"]
    if r and r["p"] < SURE and r["inside"] > tolerances.region and r["inside"] > 5 * max(r["outside"], 0.0):
        text = f"Where {r['where']} the first imagined step errs by {r['inside']:.2g} of the variance"
        found.append(Finding("region", r["where"], f"{text}, elsewhere by {max(r['outside'], 0):.2g}.", 1))
    return found


def _calibration(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    found, section = [], sections["calibration"]
    for name, curves in section["dispersion"].items():
        for depth in range(1, len(curves["error"]["mean"]) + 1):
            said = _dispersed(name, depth, curves, section, tolerances.spread)
            if said is not None:
                found.append(said)
                break
    members = section["members"]
    if members and members["copies"]:
        text = f"{members['copies']} of {members['members']} members of the ensemble are copies of others"
        found.append(Finding("identical_members", "members", f"{text}: their disagreement says nothing."))
    return found


def _dispersed(name: str, depth: int, curves: dict[str, Any], section: dict[str, Any], least: float) -> Finding | None:
    """What is wrong with the model's variance of one quantity at one depth, if anything."""

    def at(curve: str, bound: str) -> float:
        """NaN where too little was seen, which no comparison holds for."""
        value = curves[curve][bound][depth - 1]
        return float("nan") if value is None else value

    error, spread = at("error", "mean"), at("spread", "mean")
    if not section["random"]:
        if section["fresh"] and at("noise", "low") > least:
            text = f"the environment's noise is {at('noise', 'mean'):.2f} of the variance, the model draws none"
            return Finding("no_spread", name, f"{name}: at step {depth} {text}.", depth)
        return None
    text = (
        f"{name}: at step {depth} the model's variance is {spread:.2g} of the real one, its squared error {error:.2g}"
    )
    if error > least and (at("short", "low") > 0 or at("less", "low") > 0):
        return Finding("overconfident", name, f"{text}: it is more certain than right.", depth)
    if spread > least and at("over", "low") > 0:
        return Finding("underconfident", name, f"{text}: it is less certain than it could be.", depth)
    return None


def _plans(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    plans, found = sections.get("exploitation"), []
    if not plans:
        return []
    low, share = plans["gap_low"], plans["false_share"]
    if (low is not None and low > tolerances.exploitation) or share["low"] > tolerances.false_plans:
        gap = (
            "not finite"
            if plans["gap_mean"] is None
            else f"{plans['gap_mean']:.2g} standard deviations of real returns"
        )
        text = f"Promised minus real return of plans sought in the model is {gap}"
        text = f"{text}; {share['mean']:.0%} of them gain less than half of what they promise."
        found.append(Finding("exploitation", "plans", text))
    if plans["broken"]:
        text = f"{plans['broken']} plans met predictions that are not finite."
        found.append(Finding("non_finite", "plans", text))
    return found


def _values(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    ranking, found = sections.get("ranking"), []
    if not ranking or ranking["regret"] is None:
        return []
    if ranking["regret"] - 2 * ranking["regret_error"] > tolerances.regret:
        text = f"The model prefers '{ranking['chosen']}' to '{ranking['best']}', at a cost of {ranking['regret']:.0%}"
        found.append(Finding("ranking", ranking["chosen"], f"{text} of the range of real returns."))
    for name, value in ranking["policies"].items():
        gap = value["promised"] - value["real"]
        if abs(gap) - 2.5 * value["error"] > tolerances.value * ranking["range"]:
            kind = "policy_exploitation" if name == SOUGHT and gap > 0 else "value"
            text = f"The model promises '{name}' a return of {value['promised']:.3g}, and {value['real']:.3g} comes."
            found.append(Finding(kind, name, text))
    return found


def _data(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    found, support, drift = [], sections.get("support"), sections.get("drift")
    outside = [x for x in support["outside"] if x is not None] if support else []
    if support and outside and (worst := max(outside)) > tolerances.support:
        depth = support["outside"].index(worst) + 1
        text = f"At step {depth} {worst:.0%} of imagined rows lie out of the data's support."
        found.append(Finding("support", "imagined rows", text, depth))
    if drift and drift["p"] < SURE and drift["after"] > max(tolerances.drift, 4 * max(drift["before"], 0)):
        text = f"From episode {drift['change']} on the one-step error is {drift['after']:.2g} of the variance"
        text = f"{text}, before it was {drift['before']:.2g}: the environment is not what the model learned."
        found.append(Finding("drift", f"episode {drift['change']}", text))
    return found
