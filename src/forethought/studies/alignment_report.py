"""What the alignment study found: results.json and the page."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from forethought import page
from forethought.envs.distractor import Distractor
from forethought.ops import stats
from forethought.page import Html, show, tag
from forethought.studies.alignment import STAGES, Condition, Pair

LIMIT = 1e3
"""A run has diverged if its last return is larger than this or not finite; in means it counts as minus this."""
FLOOR = -10.0
"""Where the page's plots of returns end."""
DRAWN = 8
"""Conditions drawn beside each other at most."""

Found = dict[Condition, dict[str, np.ndarray]]


def results(found: Found, questions: dict[str, list[Pair]]) -> dict[str, Any]:
    """Everything that is said of conditions, by name, and of pairs of them, ready for JSON.

    Medians are over seeds, the diverged ones included; a number that is not finite becomes null.
    """
    rng = np.random.default_rng(0)
    asked = {each: [q for q, pairs in questions.items() for c, _ in pairs if c == each] for each in found}
    env = Distractor()
    untrained = np.concatenate([x["return"][:, 0] for x in found.values()])
    references = {
        "optimal": env.optimal_return(),
        "optimal_bounded": Distractor(action_bound=1.0).optimal_return(),
        "do_nothing": env.open_loop_return(),
        "random": env.open_loop_return(1.0),
        "untrained": float(untrained.mean()),
        "evaluation_standard_error": float(np.nanmedian([np.median(x["final/return_error"]) for x in found.values()])),
    }
    conditions = [{**_condition(each, x, rng), "questions": asked[each]} for each, x in found.items()]
    compared = dict.fromkeys(pair for pairs in questions.values() for pair in pairs if pair[1] is not None)
    paired = [_paired(a, b, found, rng) for a, b in compared if b is not None]
    return {"conditions": conditions, "references": references, "paired": paired}


def returns(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The last returns [S], those of diverged runs set to -LIMIT."""
    last = arrays["final/return"].astype(np.float64)
    return np.where(diverged(arrays), -LIMIT, last)


def diverged(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return ~(np.abs(arrays["final/return"]) <= LIMIT)


def _condition(each: Condition, arrays: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
    cfg, factors, last = each.config, each.factors, returns(arrays)
    interval = stats.iqm_interval(last, rng=rng) or (None, None)
    error = arrays["final/error"]  # [S, T, O]
    with np.errstate(all="ignore"):
        gap = arrays["final/promised"].astype(np.float64) - arrays["final/return"]
        numbers = {
            "cosine": arrays["final/cosine"] if factors.shared else np.full(len(last), np.nan),
            "model_error_1": error[:, 0].mean(-1),
            "model_error_5": error[:, -1].mean(-1),
            "model_error_relevant_1": error[:, 0, :2].mean(-1),
            "model_error_relevant_5": error[:, -1, :2].mean(-1),
            "model_error_distractor_1": error[:, 0, 2:].mean(-1),
            "model_error_distractor_5": error[:, -1, 2:].mean(-1),
            "exploitation_gap": gap,
            "jacobian_relevant_model": arrays["final/jacobian_model"][:, :2].sum(-1),
            "jacobian_relevant_policy": arrays["final/jacobian_policy"][:, :2].sum(-1),
            "cka": arrays["final/cka"],
            "angle": arrays["final/angle"],
            **{
                f"r2_{part}_{what}": arrays[f"final/r2_{part}"][:, dims].mean(-1)
                for part in ("model_shared", "model_private", "policy_shared", "policy_private")
                for what, dims in {"relevant": slice(0, 2), "distractor": slice(2, 4)}.items()
            },
            "gradient_norm": arrays["grad_norm"][:, -1],
        }
        medians = {name: _finite(np.median(x.astype(np.float64))) for name, x in numbers.items()}
    own = {"stage": cfg.stage, "shared": int(factors.shared), "weight": float(factors.weight)}
    stage = next(
        (name for name, fields in STAGES.items() if fields and fields.items() <= own.items()), "dual + partial"
    )
    return {
        "name": each.name,
        "stage": stage,
        "base": each.base,
        "shared": int(factors.shared),
        "private": cfg.width - int(factors.shared),
        "weight": float(factors.weight),
        "policy_loss": cfg.policy_loss,
        "bounded": bool(factors.bounded),
        "target_networks": float(factors.target_rate) < 1,
        "frozen": bool(factors.frozen),
        "horizon_end": "bootstrap" if factors.bootstrap else "end",
        "learning_rate": float(factors.learning_rate),
        "partner": cfg.partner,
        "moves_model": bool(factors.moves_model),
        "moves_policy": bool(factors.moves_policy),
        "layer_norm": cfg.layer_norm,
        "model_loss": cfg.model_loss,
        "weight_decay": float(factors.weight_decay),
        "clip": _finite(float(factors.clip)),
        "seeds": len(last),
        "episodes": int(arrays["episodes"]),
        "diverged": int(diverged(arrays).sum()),
        "stuck": int(np.sum(diverged(arrays) & (arrays["return"][:, -1] == arrays["return"][:, -2]))),
        "overflown": int(arrays["overflown"][:, -1].sum()),
        "iqm": float(stats.iqm(last)),
        "ci_low": interval[0],
        "ci_high": interval[1],
        "start": float(arrays["return"][:, 0].mean()),
        "end": float(last.mean()),
        "spread": float(last.std(ddof=1)) if len(last) > 1 else None,
        **medians,
        "file": f"seeds/{each.file}",
    }


def _paired(a: Condition, b: Condition, found: Found, rng: np.random.Generator) -> dict[str, Any]:
    """Seed by seed: who diverged, and the difference of returns."""
    one, other = found[a], found[b]
    only_a, only_b, p = stats.discordant(diverged(one), diverged(other))
    difference = returns(one) - returns(other)
    low, high = stats.iqm_interval(difference, rng=rng) or (None, None)
    return {
        "a": a.name, "b": b.name, "only_a_diverged": only_a, "only_b_diverged": only_b, "p": p,
        "difference": float(stats.iqm(difference)), "difference_low": low, "difference_high": high,
    }  # fmt: skip


def _finite(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def save(out: Path, said: dict[str, Any]) -> None:
    """Writes `out`/results.json."""
    page.write(out / "results.json", json.dumps(said, indent=1, allow_nan=False) + "\n")


def write(out: Path, found: Found, questions: dict[str, list[Pair]], said: dict[str, Any]) -> Path:
    """Writes `out`/report.html from what was found and what `results` says of it."""
    by_name = {each["name"]: each for each in said["conditions"]}
    sections = {"Yardsticks": _yardsticks(said)}
    for question, pairs in questions.items():
        conditions = list(dict.fromkeys(c for c, _ in pairs))
        sections[question[0].upper() + question[1:]] = _question(conditions, found, said, by_name)
    sections["Seed by seed"] = _pairs(said["paired"])
    sections["All conditions"] = _all(said["conditions"])
    some = said["conditions"][0]
    runs = sum(each["seeds"] for each in said["conditions"])
    header = tag(
        "header",
        tag("p", "Forethought study", class_="kicker"),
        tag("h1", "Disentangled partial alignment"),
        tag("p", f"{len(by_name)} conditions \N{MIDDLE DOT} {some['seeds']} seeds each, paired \N{MIDDLE DOT} "
                 f"{some['episodes']:,} episodes of five decisions \N{MIDDLE DOT} {runs:,} runs", class_="facts"),
        tag("p", "Two encoders of one observation, one for the model and one for the policy, each code split into a "
                 "shared and a private part, and only the shared parts aligned. Does it help, and what else does?"),
    )  # fmt: skip
    text = page.render("Disentangled partial alignment", header, sections)
    return page.write(out / "report.html", text)


def _yardsticks(said: dict[str, Any]) -> Html:
    what = {
        "optimal": "the best possible return, actions unbounded",
        "optimal_bounded": "the best possible return with |a| at most 1",
        "do_nothing": "action 0 throughout",
        "random": "actions drawn from a unit Gaussian",
        "untrained": "networks as they were drawn, averaged over all runs",
        "evaluation_standard_error": "of one run's last return, from its episodes alone",
    }
    rows = [(name.replace("_", " "), f"{said['references'][name]:.3f}", text) for name, text in what.items()]
    caption = (
        "The first four are exact: dynamic programming and closed forms. A policy that has learned something lies "
        "above doing nothing; one that lies below it would have done better not to learn."
    )
    return page.figure("what a return is worth", [page.table(rows, ("", "return", ""))], caption)


def _question(conditions: list[Condition], found: Found, said: dict[str, Any], by_name: dict[str, Any]) -> Html:
    groups = itertools.groupby(conditions, lambda each: (each.config.policy_loss, each.base))
    figures = []
    for (policy_loss, base), group in groups:
        several = list(group)
        for start in range(0, len(several), DRAWN):
            figures += _figures(f"{policy_loss}, {base}", several[start : start + DRAWN], found, said, by_name)
    return tag("div", *figures, class_="grid")


def _figures(
    title: str, some: list[Condition], found: Found, said: dict[str, Any], by_name: dict[str, Any]
) -> list[Html]:
    roles = {_short(each): f"phase{i}" for i, each in enumerate(some)}
    levels = {"optimal": said["references"]["optimal"], "doing nothing": said["references"]["do_nothing"]}
    boxes, curves, bars = [], [], []
    for each, (name, role) in zip(some, roles.items(), strict=True):
        arrays, own = found[each], by_name[each.name]
        boxes.append({"name": name, "role": role, "box": page.numbers(np.maximum(returns(arrays), FLOOR))})
        bars.append({"name": name, "role": role, "bar": own["diverged"]})
        points = np.where(np.isfinite(arrays["return"]), arrays["return"], -np.inf).clip(FLOOR)
        at = np.arange(points.shape[1]) * (own["episodes"] / points.shape[1])
        curves.append(page.trace(name, role, at, np.median(points, 0)))
    seeds = by_name[some[0].name]["seeds"]
    cut = f"Returns below {show(FLOOR)} are drawn there."
    last = page.plot(boxes, x="", y="return", levels=levels, legend=True)
    learning = page.plot(curves, x="episodes", y="return", levels=levels)
    beyond = page.plot(bars, x="", y="seeds", range=[0, seeds], legend=True)
    dots = f"A dot per seed; the box: the middle half, with the median. {cut}"
    limit = f"Seeds of {seeds} whose last return is beyond {LIMIT:,.0f} or not finite."
    return [
        page.figure(f"{title}: last return", [last], dots, roles),
        page.figure(f"{title}: learning", [learning], f"Median over seeds. {cut}", roles),
        page.figure(f"{title}: diverged", [beyond], limit, roles),
    ]


def _short(each: Condition) -> str:
    """A condition's name without what its figure's title says."""
    return ", ".join(each.name.split(", ")[2:])


def _pairs(paired: list[dict[str, Any]]) -> Html:
    rows = [
        (p["a"], p["b"], f"{p['difference']:+.2f}", _interval(p["difference_low"], p["difference_high"]),
         str(p["only_a_diverged"]), str(p["only_b_diverged"]), f"{p['p']:.2g}")
        for p in paired
    ]  # fmt: skip
    head = ("condition", "beside", "difference", "95 %", "only it diverged", "only the other", "exact p")
    caption = (
        "Interquartile mean over seeds of the difference in return, and its bootstrap interval; McNemar's test of "
        f"who diverged. {len(paired)} comparisons: of so many, one in twenty would cross p = 0.05 by chance."
    )
    return page.figure("paired comparisons", [page.table(rows, head)], caption)


def _all(conditions: list[dict[str, Any]]) -> Html:
    rows = [
        (c["name"], f"{c['iqm']:.2f}", _interval(c["ci_low"], c["ci_high"]), f"{c['diverged']} of {c['seeds']}",
         *(("not finite" if c[key] is None else show(c[key])) for key in
           ("cosine", "model_error_1", "model_error_5", "exploitation_gap")))
        for c in conditions
    ]  # fmt: skip
    head = (
        "condition",
        "return (IQM)",
        "95 %",
        "diverged",
        "cosine",
        "error, 1 step",
        "error, 5 steps",
        "promised - real",
    )
    caption = (
        f"Diverged runs count as {show(-LIMIT)} in the interquartile mean; the other columns are medians over seeds. "
        "results.json holds more of each, seeds/ every seed."
    )
    return page.figure("all conditions", [page.table(rows, head)], caption)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"
