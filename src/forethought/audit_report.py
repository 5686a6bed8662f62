"""The page of an audit: may the model be trusted, for what, how far ahead and why not, then each part of the audit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forethought import page
from forethought.audit_causes import diagnosis, drift, mismatch
from forethought.audit_curves import Part, calibration, error_by_depth, listed, support
from forethought.audit_promises import exploitation, ranking
from forethought.page import Html, brief, show, tag
from forethought.record import check_audit

USES = {
    "planning": ("search for actions in the model", ("error_by_depth", "exploitation")),
    "imagination": ("train a policy on imagined steps", ("error_by_depth",)),
    "ranking policies": ("choose the policy to which the model promises most", ("ranking",)),
    "offline evaluation": ("take the promised return of a policy for its real one", ("ranking",)),
}
"""What each use is, and the parts without which nothing is said of it."""
WORDS = {
    "pass": ("good", "\N{CHECK MARK} pass"),
    "fail": ("bad", "\N{BALLOT X} fail"),
    "not measured": ("unsure", "not measured"),
}
"""A colour and a word for each verdict."""
REASONS = 3
"""The most reasons given beside a use; the rest stand among the findings."""


def write(audit: dict[str, Any], path: Path) -> Path:
    """Writes the page of an audit (`Audit.as_dict()`) and returns its path; an older page stays until it is whole.

    Raises ValueError, naming part and field, for what is not an audit."""
    check_audit(audit)
    title, body = f"Audit of a world model of {audit['about']['env']}", sections(audit)
    return page.write(path, page.render(title, header(audit), body))


def header(audit: dict[str, Any]) -> Html:
    """What was audited, the verdict in a sentence, and a tile for each use."""
    about, verdict = audit["about"], audit["verdict"]
    tiles = [tile(f"For {use}", said, verdict["horizon"]) for use, said in verdict["uses"].items()]
    count, measured = len(verdict["findings"]), f"in {len(audit['sections'])} parts that were measured"
    tiles.append(("Found wrong", Html(count), measured))
    boxes = [tag("div", tag("dt", name), tag("dd", word), tag("dd", note), class_="tile") for name, word, note in tiles]
    facts = [f"{about['episodes']} episodes of each policy ({', '.join(about['policies'])})"]
    facts += [f"{about['starts']} starts", f"{about['samples']} samples", f"reality: {about['reality']}"]
    return tag(
        "header",
        tag("p", "Forethought audit", class_="kicker"),
        tag("h1", f"World model of {about['env']}"),
        tag("p", " \N{MIDDLE DOT} ".join([*facts, f"seed {about['seed']}"]), class_="facts"),
        tag("p", judged(verdict), class_=f"verdict {WORDS[verdict['status']][0]}"),
        tag("dl", *boxes, class_="tiles"),
    )


def tile(name: str, judged: dict[str, Any], horizon: int) -> tuple[str, Html, str]:
    """Name, word and note of a tile for the verdict as a whole, or for that on one use."""
    level, word = WORDS[judged["status"]]
    return name, tag("span", word, class_=level), _reach(judged["safe_horizon"], horizon)


def sections(audit: dict[str, Any]) -> dict[str, Html]:
    """The parts of an audit as sections of a page, by title; one that was not measured says why.

    Raises ValueError, naming the part and what is wrong, where it is not as an audit writes it."""
    shown = {}
    for title, (name, body) in PARTS.items():
        part = audit["verdict"] if name == "verdict" else audit["sections"].get(name)
        why = audit["missing"].get(name, "the audit does not say why")
        try:
            shown[title] = page.missing(why) if part is None else body(part, audit)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"audit.json: {name}: not as an audit writes it ({error!r})") from error
    return shown


def judged(verdict: dict[str, Any]) -> str:
    """The verdict in two sentences: for which uses, and how far ahead."""
    by: dict[str, list[str]] = {}
    for use, said in verdict["uses"].items():
        by.setdefault(said["status"], []).append(use)
    says = {"fail": "may not be trusted for", "pass": "may be trusted for", "not measured": "was not judged for"}
    clauses = [f"{text} {listed(by[status])}" for status, text in says.items() if status in by]
    far = _reach(verdict["safe_horizon"], verdict["horizon"])
    ahead = (
        f"Taken together, its predictions are shown to {far.replace('holds', 'hold')}."
        if far
        else "How far ahead its predictions hold was not measured."
    )
    return f"The world model {'; it '.join(clauses) or 'was not judged'}. {ahead}"


def _reach(safe: int | None, horizon: int) -> str:
    return "" if safe is None else f"holds {safe} of {horizon} steps ahead"


def _verdict(verdict: Part, audit: Part) -> Html:
    found = []
    for finding in verdict["findings"]:
        out = [use for use, said in verdict["uses"].items() if finding["text"] in said["reasons"]]
        found.append((finding["text"], listed(out) if out else "none of these uses"))
    findings = [page.table(found, ("finding", "rules out"))] if found else []
    sure = "Each is beyond its tolerance and beyond chance." if found else "Nothing beyond tolerance and beyond chance."
    caption = (
        "A use passes where everything it rests on is shown to be within tolerance up to the last step, and nothing "
        "that was found rules it out. A step holds only where the upper end of its interval is within tolerance."
    )
    units = (
        "Error, reward, termination, region, spread and drift are shares of the variance of real rows; exploitation is "
        "in standard deviations of real returns; regret and value are shares of the range of the policies' real "
        "returns; the others are plain shares."
    )
    limits = [(name.replace("_", " "), brief(value)) for name, value in audit["about"]["tolerances"].items()]
    uses = tag("div", page.table(_uses(verdict, audit), ("use", "verdict", "why")), class_="uses")
    return page.join(
        [
            page.lead(judged(verdict)),
            page.figure("may it be used?", [uses], caption),
            page.figure("what was found wrong", findings, sure),
            page.fold("Tolerances", page.join([page.table(limits), tag("p", units)])),
        ]
    )


def _uses(verdict: Part, audit: Part) -> list[tuple[str, ...]]:
    cells, depths = [], {finding["text"]: finding["depth"] or 0 for finding in verdict["findings"]}
    for use, said in verdict["uses"].items():
        meaning, rests = USES[use]
        level, word = WORDS[said["status"]]
        reasons = {
            "fail": sorted(said["reasons"], key=lambda reason: depths.get(reason, 0)),
            "pass": ["all that it rests on is within tolerance"],
            "not measured": [audit["missing"][part] for part in rests if part in audit["missing"]],
        }[said["status"]]
        whys = [tag("li", reason) for reason in reasons[:REASONS]]
        whys += [tag("li", f"and {len(reasons) - REASONS} more, below")] if len(reasons) > REASONS else []
        far = tag("span", _reach(said["safe_horizon"], verdict["horizon"]), class_="note")
        name = tag("span", tag("strong", use), tag("span", meaning, class_="note"))
        cells.append((name, tag("span", tag("strong", word, class_=level), far), tag("ul", *whys)))
    return cells


def _provenance(part: Part, audit: Part) -> Html:
    given = {name: value if isinstance(value, dict) else {"value": value} for name, value in part.items()}
    steps = [f"{_entry(x['value'])} {name.replace('/', ' ')}" for name, x in given.items() if name.endswith("steps")]
    sentence = (
        f"What trained this model took {listed(steps)}."
        if steps
        else f"{len(given)} facts are on record about what trained this model."
    )
    cells = [(name, _entry(x["value"]), x.get("unit", "")) for name, x in given.items()]
    table = page.table(cells, ("what", "value", "unit"))
    return page.join([page.lead(sentence), page.figure("training", [table], "As it was last recorded.")])


def _entry(value: Any) -> str:
    if isinstance(value, str):
        return value
    return show(value) if isinstance(value, int | float) and not isinstance(value, bool) else json.dumps(value)


PARTS: dict[str, tuple[str, Callable[[Part, Part], Html]]] = {
    "Verdict": ("verdict", _verdict),
    "Error by depth": ("error_by_depth", error_by_depth),
    "Calibration": ("calibration", calibration),
    "Exploitation": ("exploitation", exploitation),
    "Ranking": ("ranking", ranking),
    "Support": ("support", support),
    "Mismatch": ("mismatch", mismatch),
    "Diagnosis": ("diagnosis", diagnosis),
    "Drift": ("drift", drift),
    "Provenance": ("provenance", _provenance),
}
"""By title: the part's name in the JSON, and what shows it."""
