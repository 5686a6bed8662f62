"""From numbers to a verdict: what was found to be wrong, how far ahead the model holds, and what it may be used for."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from forethought.auditing.diagnosis import SURE


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """What is still good enough. Errors are shares of the variance of real rows, beyond what noise explains."""

    error: float = 0.1
    """Of every part of an observation, at every depth up to the horizon."""
    reward: float = 0.1
    """Of the reward, likewise."""
    termination: float = 0.1
    """Of the probability of having terminated, over its variance."""
    missed: float = 0.25
    """Share of terminations that the model does not predict."""
    time_limit: float = 0.2
    """Probability of a termination that the model gives to steps at which an episode was only cut."""
    region: float = 0.05
    """Error of the first step in the worst region, summed over quantities, where it is five times that elsewhere."""
    exploitation: float = 0.25
    """Mean of promised minus real return of plans sought in the model, in standard deviations of real returns."""
    false_plans: float = 0.25
    """Share of those plans that promise a gain and bring less than half of it."""
    spread: float = 0.02
    """Below this error the model's uncertainty is not judged."""
    regret: float = 0.1
    """Of choosing among policies by the model, over the range of their real returns."""
    value: float = 0.25
    """Largest difference of a policy's promised and real mean return, over that range."""
    support: float = 0.5
    """Share of imagined rows that are farther from the data than 99 in 100 real ones."""
    drift: float = 0.02
    """One-step error on newer data, where it is four times that on older."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"tolerance {field.name} is {value}; it must be finite and at least 0")

    @classmethod
    def read(cls, path: Path) -> Tolerances:
        """Reads a TOML file of names and numbers. Raises ValueError naming what is wrong."""
        try:
            found = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: not TOML: {error}") from error
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := found.keys() - set(names):
            raise ValueError(f"{path}: '{min(unknown)}' is no tolerance; there are {', '.join(names)}")
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{path}: tolerance {name} is {value!r}; it must be a number")
        try:
            return cls(**{name: float(value) for name, value in found.items()})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


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


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong, beyond its tolerance and beyond chance."""

    kind: str
    where: str
    text: str
    depth: int | None = None
    """The first imagined step at which it shows."""


def judge(sections: dict[str, Any], tolerances: Tolerances, horizon: int, uses: tuple[str, ...]) -> dict[str, Any]:
    """The findings and the verdict by use, as JSON; `sections` as `Audit` holds them.

    Of a tolerance on a curve it is said at each depth that it holds (the upper bound is within it), that it is broken
    (the lower bound is beyond) or that it is open. The safe horizon is the depth before the first at which it does not
    hold: tested in this order, and all parts having to hold, each claim at its own level keeps the level of the whole. A
    use passes where its curves hold up to the horizon, its numbers are within their tolerances, and no finding rules it
    out; where nothing it rests on was measured, it is said to be not measured.
    """
    findings = [*_curves(sections, tolerances), *_diagnoses(sections, tolerances), *_calibration(sections, tolerances),
                *_plans(sections, tolerances), *_values(sections, tolerances), *_data(sections, tolerances)]  # fmt: skip
    safe = {use: _safe(sections, tolerances, use) for use in (PLANNING, IMAGINATION)}
    verdict = {}
    for use in uses:
        against = [f for f in findings if use in KINDS[f.kind][1]]
        reasons = [f.text for f in against]
        measured = True
        if use in safe:
            measured = safe[use] is not None
            if measured and not reasons and (safe[use] or 0) < horizon:
                reasons.append(f"holds up to step {safe[use]} of {horizon}; beyond, the data do not show that it does")
            if use == PLANNING:
                measured = measured and "exploitation" in sections
        else:
            measured = (sections.get("ranking") or {}).get("regret") is not None
        status = "fail" if reasons else "pass" if measured else "not measured"
        verdict[use] = {"status": status, "reasons": reasons, "safe_horizon": safe.get(use)}
    status = {v["status"] for v in verdict.values()}
    body = "fail" if "fail" in status else "pass" if "pass" in status else "not measured"
    return {
        "findings": [dataclasses.asdict(f) for f in findings],
        "uses": verdict,
        "safe_horizon": safe[IMAGINATION],
        "horizon": horizon,
        "status": body,
    }


def _held(curve: dict[str, Any], tolerance: float) -> list[str | None]:
    """By depth: 'holds', 'broken' or 'open'; None where too few steps of this depth were seen to say."""
    found = []
    for mean, low, high in zip(curve["mean"], curve["low"], curve["high"], strict=True):
        if mean is None or (low is None and high is None):
            found.append(None)
        elif high is not None and high <= tolerance:
            found.append("holds")
        else:
            found.append("broken" if low is not None and low > tolerance else "open")
    return found


def _tolerance(name: str, tolerances: Tolerances) -> float:
    return tolerances.reward if name == "reward" else tolerances.error


def _watched(sections: dict[str, Any], tolerances: Tolerances, use: str) -> list[list[str | None]]:
    held = []
    for table in sections["error_by_depth"]["policies"].values():
        for curves in table["parts"].values():
            if use == IMAGINATION or curves["of"] == "reward":
                held.append(_held(curves["excess"], _tolerance(curves["of"], tolerances)))
        if table["termination"] is not None:
            held.append(_held(table["termination"]["excess"], tolerances.termination))
    return held


def _safe(sections: dict[str, Any], tolerances: Tolerances, use: str) -> int | None:
    """The depth up to which every curve that the use rests on holds; None where there is none."""
    held = _watched(sections, tolerances, use)
    if not held:
        return None
    safe = 0
    for column in zip(*held, strict=True):
        if any(x not in ("holds", None) for x in column):
            break
        safe += 1
    return safe


def _curves(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    """Errors and terminations beyond their tolerance, each named once, for the policy where it shows first."""
    first: dict[tuple[str, str], tuple[int, float, str]] = {}

    def note(kind: str, where: str, curve: dict[str, Any], tolerance: float, policy: str) -> None:
        held = _held(curve, tolerance)
        if "broken" in held:
            depth = held.index("broken") + 1
            if (kind, where) not in first or depth < first[kind, where][0]:
                first[kind, where] = (depth, curve["mean"][depth - 1], policy)

    limits = []
    for policy, table in sections["error_by_depth"]["policies"].items():
        for name, curves in table["parts"].items():
            kind = "reward" if curves["of"] == "reward" else "error"
            note(kind, name, curves["excess"], _tolerance(curves["of"], tolerances), policy)
        ends = table["termination"]
        if ends is None:
            continue
        held = _held(ends["excess"], tolerances.termination)
        at, low, elsewhere = ends["at_limit"], ends["at_limit_low"], ends["elsewhere"] or 0.0
        if low is not None and low > tolerances.time_limit and at > 3 * elsewhere:
            limits.append(Finding("time_limit", policy, f"The model gives a probability of {at:.2f} to a termination where an "
                                  f"episode of '{policy}' was only cut by its time limit, and {elsewhere:.3f} elsewhere."))  # fmt: skip
        if "broken" in held:
            depth = held.index("broken") + 1
            kind = "missed_termination" if (ends["missed"]["mean"][depth - 1] or 0) > 0 else "false_termination"
            if kind == "missed_termination" or not limits:
                note(kind, "termination", ends["excess"], tolerances.termination, policy)
        note("missed_termination", "termination", ends["many_missed"], 0.0, policy)
    found = []
    for (kind, where), (depth, value, policy) in first.items():
        what = f"{where}: " if kind in ("error", "reward") else ""
        share = f"{value:.2f} of its variance is unexplained" if kind in ("error", "reward") else f"excess {value:.2f}"
        found.append(Finding(kind, where, f"{what}{KINDS[kind][1 - 1]}, from imagined step {depth} on ({share}, episodes of '{policy}').", depth))
    return found + limits[:1]


def _diagnoses(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    found, diagnosis = [], sections.get("diagnosis") or {}
    if bad := diagnosis.get("non_finite"):
        text = ", ".join(f"{count} of {name}" for name, count in bad.items())
        found.append(Finding("non_finite", ", ".join(bad), f"Predictions are not finite: {text}."))
    kinds = {"delayed": "delayed_action", "sign": "action_sign", "keys": "swapped_keys"}
    for h in diagnosis.get("hypotheses", [])[:1]:
        if h["p"] < SURE and h["explained"] > 0.5 and h["error"] > 1e-4:
            kind = kinds[h["kind"]]
            found.append(Finding(kind, h["where"], f"{h['where']}: {KINDS[kind][0]}; asked so, {h['explained']:.0%} of its error goes."))
    r = diagnosis.get("region")
    if r and r["p"] < SURE and r["inside"] > tolerances.region and r["inside"] > 5 * max(r["outside"], 0.0):
        found.append(Finding("region", r["where"], f"The first imagined step is wrong where {r['where']}: {r['inside']:.2g} of the "
                             f"variance, {max(r['outside'], 0):.2g} elsewhere.", 1))  # fmt: skip
    return found


def _calibration(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    found, section = [], sections.get("calibration") or {}
    for name, curves in (section.get("dispersion") or {}).items():
        for depth, (short, over, error, spread, noise, less) in enumerate(
            zip(*(curves[k][b] for k, b in (("short", "low"), ("over", "low"), ("error", "mean"), ("spread", "mean"), ("noise", "low"), ("less", "low"))), strict=True), 1
        ):
            if short is None or error is None:
                continue
            if not section["random"] and section["fresh"] and noise is not None and noise > tolerances.spread:
                found.append(Finding("no_spread", name, f"{name}: the environment's noise is {noise:.2f} of the variance at step {depth}, "
                                     "and the model draws none.", depth))  # fmt: skip
            elif section["random"] and error > tolerances.spread and (short > 0 or (less is not None and less > 0)):
                found.append(Finding("overconfident", name, f"{name}: at step {depth} the model's variance is {spread:.2g} of the real "
                                     f"one, its squared error {error:.2g}: it is more certain than right.", depth))  # fmt: skip
            elif section["random"] and over is not None and over > 0 and spread > tolerances.spread:
                found.append(Finding("underconfident", name, f"{name}: at step {depth} the model's variance is {spread:.2g} of the real "
                                     f"one, its squared error only {error:.2g}.", depth))  # fmt: skip
            else:
                continue
            break
    members = section.get("members")
    if members and members["copies"]:
        found.append(Finding("identical_members", "members", f"{members['copies']} of {members['members']} members of the ensemble "
                             "are copies of others: their disagreement says nothing."))  # fmt: skip
    return found


def _plans(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    plans = sections.get("exploitation")
    if not plans:
        return []
    found = []
    low, share = plans["gap_low"], plans["false_share"]
    if low is not None and low > tolerances.exploitation or share["low"] > tolerances.false_plans:
        found.append(Finding("exploitation", "plans", f"Plans sought in the model are promised {plans['gap_mean']:.2g} standard deviations of "
                             f"real returns more than they bring; {share['mean']:.0%} of them gain less than half of what they promise."))  # fmt: skip
    if plans["broken"]:
        found.append(Finding("non_finite", "plans", f"{plans['broken']} plans met predictions that are not finite."))
    return found


def _values(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    found, ranking = [], sections.get("ranking") or {}
    if ranking.get("regret") is None:
        return []
    if ranking["regret"] - 2 * ranking["regret_error"] > tolerances.regret:
        found.append(Finding("ranking", ranking["chosen"], f"The model prefers '{ranking['chosen']}' to '{ranking['best']}', which costs "
                             f"{ranking['regret']:.0%} of the range of real returns."))  # fmt: skip
    for name, value in ranking["policies"].items():
        gap = value["promised"] - value["real"]
        if abs(gap) - 2.5 * value["error"] > tolerances.value * ranking["range"]:
            kind = "policy_exploitation" if name == "sought in the model" and gap > 0 else "value"
            found.append(Finding(kind, name, f"The model promises '{name}' {value['promised']:.3g}, and {value['real']:.3g} comes."))
    return found


def _data(sections: dict[str, Any], tolerances: Tolerances) -> list[Finding]:
    found, support, drift = [], sections.get("support"), sections.get("drift")
    outside = [x for x in support["outside"] if x is not None] if support else []
    if support and outside and (worst := max(outside)) > tolerances.support:
        found.append(Finding("support", "imagined rows", f"{worst:.0%} of imagined rows lie out of the data's support.",
                             support["outside"].index(worst) + 1))  # fmt: skip
    if drift and drift["p"] < SURE and drift["after"] > max(tolerances.drift, 4 * max(drift["before"], 0)):
        found.append(Finding("drift", f"episode {drift['change']}", f"From episode {drift['change']} on the one-step error is {drift['after']:.2g} of "
                             f"the variance, before it was {drift['before']:.2g}: the environment is not what the model learned."))  # fmt: skip
    return found
