"""The page of the options study: values on the map as sweeps spread them, options drawn, and curves of learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from forethought import page
from forethought.discovery import door_options
from forethought.envs.mazes import FOUR_ROOMS
from forethought.ops import stats
from forethought.page import Html, tag
from forethought.studies import options
from forethought.studies.dyna_report import picture


def write(out: Path, found: dict[str, Any]) -> Path:
    """Writes `out`/report.html from what `options.run` found."""
    sections = {
        "What is exact": _exact(found["exact"]),
        "Sweeps on the map": _sweeps(found["exact"]),
        "The options": _drawn(),
        "Given up for a better one": _interruption(found["interruption"]),
        "Do they help?": _compared(found["compared"]),
        **{task: _task(task, found["learned"]) for task in options.TASKS},
        "Learned models": _models(found["models"]),
    }
    header = tag(
        "header",
        tag("p", "Forethought study", class_="kicker"),
        tag("h1", "Options: acting for a while, and learning over it"),
        tag("p", f"{found['seeds']} seeds of everything \N{MIDDLE DOT} equal budgets of primitive steps \N{MIDDLE DOT} "
                 f"alpha {options.ALPHA}, epsilon {options.EPSILON}", class_="facts"),
    )  # fmt: skip
    return page.write(out / "report.html", page.render("Options", header, sections))


def _exact(exact: dict[str, Any]) -> Html:
    rows = [
        (name, f"{x['corner']:.6f}", f"{x['mean']:.6f}", ", ".join(map(str, x["zeros"]))) for name, x in exact.items()
    ]
    head = ("choices", "V(1, 1)", "mean V", "states still worth 0 after 1, 2, 3, 4 sweeps")
    text = "With options alone some value is lost, since they go to doors only; beside the actions they lose nothing."
    return tag("div", page.lead(f"{text} They carry a value from room to room in one sweep."), page.table(rows, head))


def _sweeps(exact: dict[str, Any]) -> Html:
    figures = [
        page.figure(f"{name}, sweep {k}", [picture(FOUR_ROOMS, np.array(exact[name]["sweeps"][k - 1]))], "")
        for k in (1, 2, 3) for name in ("actions", "both")
    ]  # fmt: skip
    return tag(
        "div",
        page.lead("The value of the east hallway, spread by value iteration."),
        tag("div", *figures, class_="grid"),
    )


def _drawn() -> Html:
    figures = []
    for i, option in enumerate(door_options(FOUR_ROOMS.arrivals())):
        home = np.asarray(option.initiation)
        greedy = np.where(home, np.asarray(option.policy).argmax(1), -1).tolist()
        figures.append(page.figure(f"option {i}", [picture(FOUR_ROOMS, 0.5 * home, greedy)], ""))
    text = "Found from the map alone: a door is a cell without which its surroundings fall apart."
    return tag("div", page.lead(f"{text} Shaded: where an option may start; arrows: what it does."),
               tag("div", *figures, class_="grid"))  # fmt: skip


def _interruption(exact: dict[str, Any]) -> Html:
    value, freer = np.array(exact["value"]), np.array(exact["interrupted"])
    shown = {
        "followed to their ends": (value, 1.0),
        "given up": (freer, 1.0),
        "gain": (freer - value, exact["largest"]),
    }
    figures = [page.figure(name, [picture(FOUR_ROOMS, x, scale=most)], "") for name, (x, most) in shown.items()]
    text = "The eight hallway options, chosen at random, with the goal in the east hallway, exactly: one under way is"
    rest = f"given up where choosing anew is worth more. Nowhere is less earned (theorem 2; least {exact['least']:.1g})"
    last = f"the largest gain is {exact['largest']:.4f}, the mean {exact['mean']:.4f}."
    return tag("div", page.lead(f"{text} {rest}; {last}"), tag("div", *figures, class_="grid"))


def _compared(told: list[dict[str, Any]]) -> Html:
    rows = []
    for x in told:
        interval = "too few seeds" if x["low"] is None else f"{x['low']:+.0f} to {x['high']:+.0f}"
        rows.append((x["task"], x["arm"], f"{x['difference']:+.0f}", interval, x["verdict"]))
    head = ("task", "choices", "reward beyond actions alone", "95 %", "verdict")
    text = "Differences of interquartile means of all reward collected, on the same number of primitive steps."
    return tag("div", page.lead(text), page.table(rows, head))


def _task(task: str, learned: list[dict[str, Any]]) -> Html:
    some = [x for x in learned if x["task"] == task]
    roles = {x["arm"]: f"phase{i}" for i, x in enumerate(some)}
    curves, rng = [], np.random.default_rng(0)
    for x in some:
        reward = np.array(x["reward"], float)
        at = x["every"] * np.arange(1, reward.shape[1] + 1)
        keep = np.linspace(0, len(at) - 1, 40).astype(int)
        bands = [stats.iqm_interval(reward[:, k], rng=rng) or (np.nan, np.nan) for k in keep]
        band = [np.array([b[side] for b in bands]) for side in (0, 1)]
        curves.append(page.trace(x["arm"], roles[x["arm"]], at[keep], stats.iqm(reward)[keep], band=band))
    plot = page.plot(curves, x="primitive steps, resets included", y="reward so far")
    head = ("choices", "how many", "reward, IQM", "95 %", "seeds without", "steps of a run", "runs of seed 0 ended by")
    figures = [page.figure("Reward collected", [plot], "Interquartile mean over seeds with its 95 % bootstrap.", roles)]
    layout = options.TASKS[task][1]
    for x in some:
        if run := x["gave_way"]:
            where, arrows = np.full(len(layout.cells), 0.0), np.full(len(layout.cells), -1)
            where[run["states"]], arrows[run["states"]] = 0.5, run["actions"]
            text = f"Option {run['option']} for {len(run['states'])} steps of seed 0, until another was worth more."
            figures.append(page.figure("A run that gave way", [picture(layout, where, arrows.tolist())], text))
    return tag("div", tag("div", *figures, class_="grid"), page.table(map(_row, some), head))


def _row(x: dict[str, Any]) -> tuple[str, ...]:
    none, ends = f"{x['never']} of {len(x['reward'])}", ", ".join(f"{k} {n:,}" for k, n in x["ends"].items() if n)
    total = f"{x['iqm']:.0f}", _interval(x["interval"])
    return (x["arm"], str(x["options"]), *total, none, f"{x['mean_steps']:.2f}", ends)


def _interval(x: list[float] | None) -> str:
    return "too few seeds" if x is None else f"{x[0]:.0f} to {x[1]:.0f}"


def _models(found: dict[str, Any]) -> Html:
    gaps = found["gap"]
    text = f"Planned with models that were learned from {found['ticks']:,} random steps, values are at most"
    return page.lead(f"{text} {max(gaps):.3g} from the exact ones ({len(gaps)} seeds).")
