"""The report: one page that shows what a run did, made from the files that the run wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forethought import audit_report, page
from forethought.page import Html, show, tag
from forethought.record import Record, read, rows, total

DIMS = 6
"""The most dimensions drawn of one observation key."""
FRAMES = 2000
"""The most frames kept of an animation."""
FEW = 5
"""With fewer episodes than this, no interval is drawn and no verdict given."""
STEPS = "environment steps"


def write(directory: Path) -> Path:
    """Writes `directory`/report.html and returns its path; an older report stays until the new one is whole.

    Sections whose data the run did not write say so. Errors are those of `record.read`.
    """
    record = read(directory)
    title = f"{record.config.get('algorithm', 'run')} on {record.config.get('env', 'an unnamed environment')}"
    learning, rest = {"Learning": _learning(record)}, {name: body(record) for name, body in SECTIONS.items()}
    text = page.render(title, _header(record, title), learning | _audit(record) | rest)
    return page.write(directory / "report.html", text)


def _header(record: Record, title: str) -> Html:
    config, evaluation, returns = record.config, record.evaluation, record.returns()
    steps = max((float(x.max()) for x, _ in record.metrics.values()), default=None)
    tiles: list[tuple[str, str, str]] = [("Environment steps", "none yet" if steps is None else show(steps), "")]
    for name, values in returns.items():
        note = f"{len(values)} episodes:\n{show(values.min())} to {show(values.max())}"
        tiles.append((f"Mean return, {name}", show(values.mean()), note))
    wall = _counter(record, "time/wall_seconds")[1]
    if record.audit:
        tiles.append(audit_report.tile("World model", record.audit["verdict"], record.audit["verdict"]["horizon"]))
    tiles.append(("Wall time", page.show_time(wall[-1]) if len(wall) else "not measured", ""))
    facts = [f"{name} {config[name]}" for name in ("preset", "seed") if config.get(name) is not None]
    if returns:
        facts.append(f"evaluated at step {evaluation.get('step')} in {evaluation.get('env')}")
        facts.append(f"acting rule: {evaluation.get('rule')}")
    level, verdict = _verdict(returns)
    boxes = [
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note), class_="tile") for name, value, note in tiles
    ]
    torn = "The last line of metrics.jsonl was cut off while it was written; it is left out."
    return tag(
        "header",
        tag("p", "Forethought run", class_="kicker"),
        tag("h1", title),
        tag("p", " \N{MIDDLE DOT} ".join(facts), class_="facts"),
        tag("p", verdict, class_=f"verdict {level}"),
        *([tag("p", torn, class_="missing")] if record.torn else []),
        tag("dl", *boxes, class_="tiles"),
    )


def _verdict(returns: dict[str, np.ndarray]) -> tuple[str, str]:
    """Compares the agent's mean return with the others': told apart where two standard errors lie between."""
    others = {name: values for name, values in returns.items() if name != "agent"}
    if "agent" not in returns or not others:
        return "unsure", "The return was not measured beside other policies, so nothing is said about the agent."
    if min(len(values) for values in returns.values()) < FEW:
        return "unsure", f"Fewer than {FEW} episodes of some policy were measured: too few to tell policies apart."
    sides: dict[str, list[str]] = {"above": [], "below": [], "not told apart from": []}
    for name, values in others.items():
        difference = returns["agent"].mean() - values.mean()
        error = np.sqrt(sum(sample.var(ddof=1) / len(sample) for sample in (returns["agent"], values)))
        side = "above" if difference > 2 * error else "below" if difference < -2 * error else "not told apart from"
        sides[side].append(name)
    level = "good" if len(sides["above"]) == len(others) else "bad" if sides["below"] else "unsure"
    found = "; ".join(f"{side} {' and '.join(names)}" for side, names in sides.items() if names)
    return level, f"Mean return of this one trained agent: {found} (by two standard errors over episodes)."


def _metric(record: Record, key: str, role: str, levels: dict[str, float] | None = None) -> Html:
    steps, values = record.metrics[key]
    unit, explanation = record.config.get("metrics", {}).get(key, ("", ""))
    name = key.partition("/")[2] or key
    traces = [page.trace(name, role, steps, values)]
    notes = [f"{explanation[0].upper()}{explanation[1:]}." if explanation else f"{name} against {STEPS}."]
    if len(values) > 200:
        width = len(values) // 50
        mean = page.trace(f"mean of {width}", role, steps, page.smooth(values, width))
        traces = [{**traces[0], "faint": True}, mean]
        notes.append(f"Bold: the mean of {width} neighbouring points.")
    if levels:
        notes.append(f"Dashed lines: evaluated mean return of {' and '.join(levels)}.")
    finite = values[np.isfinite(values)]
    if len(finite) < len(values):
        notes.append(f"{len(values) - len(finite)} of {len(values)} values were not finite and show as gaps.")
    if len(finite):
        notes.append(f"Last: {show(finite[-1])}{f' {unit}' if unit else ''}.")
    return page.figure(name, [page.plot(traces, x=STEPS, y=unit, levels=levels or {})], " ".join(notes))


def _learning(record: Record) -> Html:
    returns = record.returns()
    levels = {name: float(values.mean()) for name, values in returns.items() if name != "agent"}
    levels = {name: level for name, level in levels.items() if np.isfinite(level)}
    elsewhere = ("real/", "imagined/", "time/")
    keys = [key for key in record.metrics if key.startswith("real/episode") or not key.startswith(elsewhere)]
    keys.sort(key=lambda key: (not key.endswith("return"), not key.startswith("real/episode")))
    figures = [_metric(record, key, "real", levels if key.endswith("return") else None) for key in keys]
    if returns:
        boxes = [
            {"name": name, "role": "real" if name == "agent" else "baseline0", "box": page.numbers(values)}
            for name, values in returns.items()
        ]
        caption = "One dot per evaluation episode; the box is the middle half with the median. Higher is better."
        figures.insert(1, page.figure("evaluation episodes", [page.plot(boxes, x="", y="return")], caption))
    return _grid(figures) if figures else page.missing("metrics.jsonl holds no episode return")


def _audit(record: Record) -> dict[str, Html]:
    if not record.audit:
        return {"Audit": page.missing("there is no audit.json; forethought audit DIR audits the model of a run in DIR")}
    return audit_report.sections(record.audit)


def _losses(record: Record) -> Html:
    groups = []
    for role, title, text in (
        ("real", "Real", "Measured on steps that happened in the environment (depth 0)."),
        ("imagined", "Imagined", "Measured on steps that the model made up (depth 1 and deeper)."),
    ):
        keys = [key for key in record.metrics if key.startswith(f"{role}/") and not key.startswith("real/episode")]
        keys.sort(key=lambda key: "/loss" not in key)
        figures = [_metric(record, key, role) for key in keys]
        body = _grid(figures) if figures else page.missing(f"metrics.jsonl holds no {role} metric")
        groups.append(tag("div", tag("h3", title, class_="badge"), tag("p", text), body, class_=f"world {role}"))
    return page.join(groups)


def _open_loop(record: Record) -> Html:
    loop = record.evaluation.get("open_loop")
    if not loop:
        return page.missing("evaluation.json holds no open-loop prediction")
    context = int(loop["context"])
    signals = {**loop["keys"], **{name: loop[name] for name in ("reward", "discount") if loop.get(name)}}
    legend = {"what happened": "real", "what the model predicted": "imagined", "context": "context"}
    figures = []
    for name, signal in signals.items():
        true, predicted = (rows(signal[side], f"open_loop: {name}: {side}") for side in ("true", "predicted"))
        if true.shape != predicted.shape:
            raise ValueError(f"evaluation.json: open_loop: {name}: true is {true.shape}, predicted {predicted.shape}")
        x = np.arange(len(true))
        layout: dict[str, Any] = {"x": "step", "shade": [-0.5, context - 0.5]}
        if name == "discount":
            layout["range"] = [-1.05 if np.nanmin(true, initial=0) < 0 else -0.05, 1.05]
        plots = []
        for i in _most_varied(true):
            pair = [("happened", "real", true), ("predicted", "imagined", predicted)]
            traces = [page.trace(label, role, x, values[:, i]) for label, role, values in pair]
            plots.append(page.plot(traces, title=f"{name}[{i}]" if true.shape[1] > 1 else "", **layout))
        gaps = int(np.isnan(true).sum() + np.isnan(predicted).sum())
        caption = (
            f"The closer dashed follows solid, the better: in the shaded first {context} steps the model sees what "
            f"happened, the {len(true) - context} after them it imagines from the actions alone.{_drawn(true)}"
        )
        caption += f" {gaps} values were not finite and show as gaps." if gaps else ""
        figures.append(page.figure(name, plots, caption, legend))
    return page.join(figures)


def _episode(record: Record) -> Html:
    episode, dream = record.evaluation.get("episode"), record.evaluation.get("imagined_episode")
    if not episode:
        return page.missing("evaluation.json holds no episode")
    worlds = {"real": episode, **({"imagined": dream} if dream else {})}
    length = len(episode["reward"])
    kept = slice(None, None, max(1, -(-length // FRAMES)))

    def panels(name: str, signals: dict[str, Any]) -> Iterator[dict[str, Any]]:
        arrays = {role: rows(values, f"episode: {role}: {name}") for role, values in signals.items()}
        true = arrays["real"]
        for i in _most_varied(true):
            lines = [{"role": role, "y": page.numbers(array[kept, i])} for role, array in arrays.items()]
            yield {"title": f"{name}[{i}]" if true.shape[1] > 1 else name, "lines": lines}

    notes = ["Press play or drag the slider: the marks on the curves follow the episode."]
    curves = [*panels("reward", {role: world["reward"] for role, world in worlds.items()})]
    if episode.get("action"):
        curves += panels("action", {"real": episode["action"]})
    if not episode.get("sketch"):
        notes.append("This environment draws no picture, so the observations play as curves.")
        for key, values in episode["obs"].items():
            seen = {role: world["obs"] or {} for role, world in worlds.items()}  # a model may predict no observations
            curves += panels(key, {role: obs[key] for role, obs in seen.items() if key in obs})
            note = _drawn(rows(values, f"episode: {key}"))
            notes += [f"{key}:{note}"] if note else []
    if dream:
        notes.append("Both sides begin alike and take the same actions; the first steps of the imagined one are seen.")
    if kept.step > 1:
        notes.append(f"One frame in {kept.step} of {length} is kept.")
    context = int((record.evaluation.get("open_loop") or {}).get("context", 0))
    scenes = [{"role": role, "frames": _sketch(world.get("sketch"))[kept]} for role, world in worlds.items()]
    film: dict[str, Any] = {"length": len(range(length)[kept]), "stride": kept.step, "context": context}
    film |= {"scenes": [scene for scene in scenes if scene["frames"]], "curves": curves}
    legend = {"what happened": "real", **({"what the model imagined": "imagined"} if dream else {})}
    return page.figure("one episode", [page.data("film", film)], " ".join(notes), legend)


def _sketch(sketch: Any) -> list[list[list[float | None]]]:
    """Line segments (x0, y0, x1, y1, radius) by frame, rounded: a page is to be sent by mail."""
    frames = [rows(frame, "episode: sketch") if frame else np.zeros((0, 5)) for frame in sketch or []]
    if any(frame.shape[1] != 5 for frame in frames):
        raise ValueError("evaluation.json: episode: sketch: expected segments (x0, y0, x1, y1, radius)")
    return [[page.numbers(segment, 4) for segment in frame] for frame in frames]


def _timing(record: Record) -> Html:
    phases = {key.removeprefix("time/seconds/"): key for key in record.metrics if key.startswith("time/seconds/")}
    figures = []
    if phases:
        spent = {phase: _counter(record, key) for phase, key in phases.items()}
        roles = {phase: f"phase{i % 8}" for i, phase in enumerate(spent)}
        traces = [page.trace(phase, roles[phase], x, y, stack=True) for phase, (x, y) in spent.items() if len(y)]
        plot = page.plot(traces, x=STEPS, y="seconds")
        figures.append(
            page.figure("where the time went", [plot], "The height of a layer is the time spent in it so far.", roles)
        )
        ends = {phase: float(y[-1]) for phase, (_, y) in spent.items() if len(y)}
        wall = _counter(record, "time/wall_seconds")[1]
        if len(wall):
            ends["everything else"] = max(float(wall[-1]) - sum(ends.values()), 0.0)
        whole = sum(ends.values()) or 1.0
        cells = [(phase, page.show_time(end), f"{end / whole:.1%}") for phase, end in ends.items()]
        caption = "Everything else is the wall time that no phase counts."
        shares = page.table(cells, ("phase", "time", "share"))
        figures.append(page.figure("shares", [shares], caption))
    shown = {"time/wall_seconds", *phases.values()}
    others = [key for key in record.metrics if key.startswith("time/") and key not in shown]
    figures += [_metric(record, key, "baseline0") for key in others]
    return _grid(figures) if figures else page.missing("metrics.jsonl holds no times")


def _configuration(record: Record) -> Html:
    tables = {"run": {}} | {name: value for name, value in record.config.items() if isinstance(value, dict)}
    tables["run"] = {name: value for name, value in record.config.items() if name not in tables}
    folds = []
    for name, content in tables.items():
        body = page.table([(path, text) for path, text in _flat(content)])
        folds.append(
            tag("details", tag("summary", f"{name} ({len(content)})"), body, **({} if folds else {"open": ""}))
        )
    return page.join(folds)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    else:
        yield path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _counter(record: Record, key: str) -> tuple[np.ndarray, np.ndarray]:
    """The finite points of a counter of seconds as a running total over resumed runs; empty where not measured."""
    steps, values = record.metrics.get(key, (np.zeros(0), np.zeros(0)))
    there = np.isfinite(values)
    return steps[there], total(values[there])


def _grid(figures: list[Html]) -> Html:
    return tag("div", *figures, class_="grid")


def _most_varied(array: np.ndarray) -> list[int]:
    """The dimensions that are drawn, in their order."""
    return sorted(np.argsort(-np.nan_to_num(array).std(axis=0), kind="stable")[:DIMS].tolist())


def _drawn(array: np.ndarray) -> str:
    dims = array.shape[1]
    return f" {DIMS} of {dims} dimensions are drawn, those that vary most." if dims > DIMS else ""


SECTIONS: dict[str, Callable[[Record], Html]] = {
    "Losses": _losses,
    "Open loop": _open_loop,
    "Episode": _episode,
    "Timing": _timing,
    "Configuration": _configuration,
}
