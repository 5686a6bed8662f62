"""From numbers to a verdict: what was found to be wrong, how far ahead the model holds, and what it may be used for."""

from __future__ import annotations

import dataclasses
from typing import Any

from forethought.auditing.findings import IMAGINATION, KINDS, PLANNING, findings
from forethought.auditing.tolerances import Tolerances, held, of


def judge(sections: dict[str, Any], tolerances: Tolerances, horizon: int, uses: tuple[str, ...]) -> dict[str, Any]:
    """The findings and the verdict by use, as JSON; `sections` as `Audit` holds them.

    Of a tolerance on a curve it is said at each depth that it holds (the upper bound is within it), that it is broken
    (the lower bound is beyond) or that it is open. The safe horizon is the depth before the first at which it does not
    hold: tested in this order, and all parts having to hold, each claim at its own level keeps the level of the whole.
    A use passes where its curves hold up to the horizon, its numbers are within their tolerances, and no finding rules
    it out; where nothing it rests on was measured, it is said to be not measured.
    """
    found = findings(sections, tolerances)
    safe = {use: _safe(sections, tolerances, use) for use in (PLANNING, IMAGINATION)}
    verdict = {}
    for use in uses:
        against = [f for f in found if use in KINDS[f.kind][1]]
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
        "findings": [dataclasses.asdict(f) for f in found],
        "uses": verdict,
        "safe_horizon": safe[IMAGINATION],
        "horizon": horizon,
        "status": body,
    }


def _safe(sections: dict[str, Any], tolerances: Tolerances, use: str) -> int | None:
    """The depth up to which every curve that the use rests on holds; None where there is none."""
    watched = []
    for table in sections["error_by_depth"]["policies"].values():
        for curves in table["parts"].values():
            if use == IMAGINATION or curves["of"] == "reward":
                watched.append(held(curves["excess"], of(curves["of"], tolerances)))
        if table["termination"] is not None:
            watched.append(held(table["termination"]["excess"], tolerances.termination))
    if not watched:
        return None
    fine = [all(x in ("holds", None) for x in column) for column in zip(*watched, strict=True)]
    return fine.index(False) if False in fine else len(fine)
