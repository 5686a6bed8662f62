"""The page of the Dyna study: curves, values drawn on their maps, and what is exact beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from forethought import page
from forethought.envs import mazes
from forethought.envs.mazes import Layout
from forethought.envs.tabular import Tabular
from forethought.page import Html, tag
from forethought.studies import dyna

ARROWS = "\N{UPWARDS ARROW}\N{DOWNWARDS ARROW}\N{LEFTWARDS ARROW}\N{RIGHTWARDS ARROW}"
CELL = 30
"""Pixels of a cell at its natural size."""


def write(out: Path, found: dict[str, Any]) -> Path:
    """Writes `out`/report.html from what `dyna.run` found."""
    sections = {
        "Yardsticks": _yardsticks(found["exact"]),
        "The Dyna maze": _maze(found),
        "Walls that move": _changes(found),
        "What is planned first": _race(found["race"]),
        "Values on their maps": _maps(found),
        "What the model knows": _models(found),
    }
    header = tag(
        "header",
        tag("p", "Forethought study", class_="kicker"),
        tag("h1", "Dyna: learning, planning and acting with one update"),
        tag("p", f"{found['seeds']} seeds of everything \N{MIDDLE DOT} mazes of Sutton & Barto (2018), chapter 8 "
                 f"\N{MIDDLE DOT} gamma {dyna.GAMMA}, epsilon {dyna.EPSILON}", class_="facts"),
        tag("p", "Q-learning from what happens, and by the same update from what a learned model says would happen."),
    )  # fmt: skip
    return page.write(out / "report.html", page.render("Dyna", header, sections))


def picture(
    layout: Layout, value: Float[np.ndarray, " S"], greedy: list[int] | None = None, scale: float = 1.0
) -> Html:
    """Values as shades on the map, walls dark, and an arrow where a greedy action is given and the value is not 0.

    The full shade is `scale`; each cell says its value when pointed at."""
    drawn, cells = layout.picture(value), {tuple(cell): s for s, cell in enumerate(layout.cells.tolist())}
    marks = []
    for (row, column), shade in np.ndenumerate(drawn):
        at = {"x": column * CELL, "y": row * CELL, "width": CELL, "height": CELL}
        wall = bool(np.isnan(shade))
        fill = "var(--ink)" if wall else "var(--imagined)"
        opacity = 0.85 if wall else min(max(float(shade) / scale, 0.0), 1.0) * 0.9
        said = "wall" if wall else f"({row}, {column}): {shade:.3f}"
        style = f"fill:{fill};fill-opacity:{opacity:.3f};stroke:var(--line)"
        marks.append(tag("rect", tag("title", said), **at, style=style))
        if greedy is not None and not wall and shade > 0:
            middle = {"x": column * CELL + CELL // 2, "y": row * CELL + CELL // 2 + 5, "text_anchor": "middle"}
            arrow = ARROWS[greedy[cells[row, column]]]
            marks.append(tag("text", arrow, **middle, style="fill:var(--ink);font-size:14px;pointer-events:none"))
    height, width = (CELL * size for size in drawn.shape)
    return tag("svg", *marks, viewBox=f"0 0 {width} {height}", style=f"width:100%;max-width:{width}px", role="img")


def _yardsticks(exact: dict[str, Any]) -> Html:
    rows = [
        ("Dyna maze, shortest path", f"{exact['maze']['shortest']:.2f}"),
        ("Dyna maze, optimal policy with epsilon 0.1", f"{exact['maze']['epsilon_greedy']:.2f}"),
        ("Dyna maze, random walk", f"{exact['maze']['random']:.1f}"),
        *((f"{name} maze, shortest path before and after", " and ".join(f"{x:.0f}" for x in exact[name]))
          for name in dyna.CHANGES),
    ]  # fmt: skip
    caption = "Exact: linear equations and policy iteration over the mazes' own tables. Everything else is measured."
    return page.figure("expected steps of an episode", [page.table(rows, ("", "steps"))], caption)


def _maze(found: dict[str, Any]) -> Html:
    roles = {f"n = {each['planning']}": f"phase{i}" for i, each in enumerate(found["maze"])}
    curves, rows = [], []
    for each, (name, role) in zip(found["maze"], roles.items(), strict=True):
        length = np.array(each["length"])
        edges = np.quantile(length, [0.25, 0.75], 0)
        at = np.arange(1, length.shape[1] + 1)
        curves.append(page.trace(name, role, at[1:], length.mean(0)[1:], band=[edges[0][1:], edges[1][1:]]))
        low, high = each["first_interval"]
        rows.append(
            (name, str(each["first"]), f"{low:.0f} to {high:.0f}", f"{length[:, -10:].mean():.1f}",
             f"{each['real_updates']:,}", f"{each['imagined_updates']:,}")
        )  # fmt: skip
    levels = {"epsilon-greedy at best": found["exact"]["maze"]["epsilon_greedy"]}
    levels["shortest"] = found["exact"]["maze"]["shortest"]
    plot = page.plot(curves, x="episode", y="steps", levels=levels, range=[0, 200])
    caption = (
        "Mean over seeds and their middle half, from the second episode on (the first is a random walk whatever n is); "
        "longer episodes are cut off. Figure 8.2 of the book."
    )
    head = ("planning steps", "first good episode", "95 %", "steps, last ten", "real updates", "imagined")
    what = (
        f"Good: the mean over seeds is at most 1.25 times the best possible ({found['bound']:.2f}). The interval "
        "resamples the seeds. The exact targets are about 29, 6 and 3."
    )
    first = page.figure("steps per episode", [plot], caption, roles)
    return tag("div", first, page.figure("when it is good", [page.table(rows, head)], what))


def _changes(found: dict[str, Any]) -> Html:
    roles = {arm: f"phase{i}" for i, arm in enumerate(dyna.ARMS)}
    figures, rows = [], []
    for name, env in dyna.CHANGES.items():
        some = [each for each in found["change"] if each["maze"] == name]
        curves = []
        for each in some:
            reward = np.array(each["reward"])
            at, edges = 10 * np.arange(1, reward.shape[1] + 1), np.quantile(reward, [0.25, 0.75], 0)
            curves.append(page.trace(each["arm"], roles[each["arm"]], at, reward.mean(0), band=list(edges)))
            walked = [np.inf if x is None else x for x in each["late"]]
            rows.append(
                (name, each["arm"], f"{reward[:, -1].mean():.0f}",
                 f"{sum(each['found'])} of {len(reward)}" if name == "shortcut" else "",
                 f"{sum(each['walks'])} of {len(reward)}", page.show(float(np.median(walked))))
            )  # fmt: skip
        plot = page.plot(curves, x="real steps", y="reward so far", shade=[env.since[1], dyna.CHANGE_STEPS[name]])
        before, after = found["exact"][name]
        caption = f"Shortest path {before:.0f}, and {after:.0f} where shaded. Mean over seeds and their middle half."
        figures.append(page.figure(f"{name} maze", [plot], caption, roles))
    head = ("maze", "", "reward in all", "found the shortcut", "walk the new path", "steps at the end")
    cfg = dyna.ARMS["Dyna-Q+"]
    caption = (
        "Found: seeds with an episode shorter than the old shortest path, which only the shortcut allows. Walk: seeds "
        "whose median episode in the last thousand steps takes at most 1.25 times the new shortest path; steps at the "
        "end: the median of those medians. The book prints neither alpha, kappa nor n here; these are alpha "
        f"{cfg.alpha}, kappa {cfg.kappa}, n {cfg.planning}."
    )
    grid = tag("div", *figures, class_="grid")
    return tag("div", grid, page.figure("what was found", [page.table(rows, head)], caption))


def _race(races: list[dict[str, Any]]) -> Html:
    roles = {racer: f"phase{i}" for i, racer in enumerate(dyna.RACERS)}
    boxes, rows = [], []
    for each in races:
        total = np.array(each["real_updates"]) + np.array(each["imagined_updates"])
        total = np.where(each["solved"], total, np.nan)
        name = f"{each['states']} states, {each['racer']}"
        boxes.append({"name": name, "role": roles[each["racer"]], "box": page.numbers(np.log10(total))})
        median = np.median(np.where(each["solved"], total, np.inf))
        rows.append(
            (f"{each['states']}", f"{each['shortest']}", each["racer"], page.show(float(median)),
             f"{sum(each['solved'])} of {len(total)}")
        )  # fmt: skip
    plot = page.plot(boxes, x="", y="updates, log10", legend=True)
    head = ("states", "shortest path", "", "median updates", "solved")
    caption = (
        "Real and imagined updates until the greedy path from the start is a shortest one. A dot per seed, from the "
        "smallest maze to the largest; the same maze with finer cells. After example 8.4 of the book."
    )
    first = page.figure("updates until the path is optimal", [plot], caption, roles)
    return tag("div", first, page.figure("in numbers", [page.table(rows, head)], ""))


def _maps(found: dict[str, Any]) -> Html:
    def drawn(title: str, env: Tabular, layout: Layout, value: list[float] | None, caption: str) -> Html:
        exact, q = env.optimal_values(dyna.GAMMA)
        shown, greedy = (exact, q.argmax(1).tolist()) if value is None else (np.array(value), None)
        return page.figure(title, [picture(layout, shown, greedy)], caption)

    env = mazes.dyna_maze()
    figures = [drawn("Dyna maze: exact", env, mazes.DYNA, None, "Optimal values and a best move in each cell.")]
    for each in found["maze"]:
        caption = f"max q of seed 0 after {dyna.SEEN_AFTER:,} real steps."
        figures.append(drawn(f"Dyna maze: n = {each['planning']}", env, mazes.DYNA, each["value"], caption))
    for name, several in dyna.CHANGES.items():
        last = several.mazes[-1]
        layout = (mazes.WALLED_LEFT, mazes.OPEN_BOTH)[name == "shortcut"]
        whole = several.layout.cells
        inside = np.array([layout.rows[r][c] != "#" for r, c in whole])
        figures.append(
            page.figure(f"{name} maze: exact", [picture(layout, last.optimal_values(dyna.GAMMA)[0][inside])],
                        "Optimal values after the change.")
        )  # fmt: skip
        for each in (x for x in found["change"] if x["maze"] == name):
            caption = "max q of seed 0 at the end" + (", bonus included." if each["arm"] == "Dyna-Q+" else ".")
            value = np.array(each["value"])[inside]
            title = f"{name} maze: {each['arm']}"
            figures.append(page.figure(title, [picture(layout, value, scale=max(value.max(), 1.0))], caption))
    return tag("div", *figures, class_="grid")


def _models(found: dict[str, Any]) -> Html:
    rows = [
        (f"n = {each['planning']}", f"{np.median(each['value_error']):.3f}",
         f"{np.median(each['model_value_error']):.2g}",
         f"{np.mean(np.array(each['model_value_error']) < 1e-9):.0%}")
        for each in found["maze"]
    ]  # fmt: skip
    head = ("planning steps", "largest error of max q", "of the model's own optimal values", "models without error")
    caption = (
        f"Against the exact values, after {dyna.SEEN_AFTER:,} real steps, medians over seeds. The second column is "
        "value iteration on the learned model to the end: what planning could know, beside what it has worked out."
    )
    return page.figure("what was known and what was made of it", [page.table(rows, head)], caption)
