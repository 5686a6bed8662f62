"""The comparison: methods over tasks and seeds, from finished runs, and what so many seeds allow to be claimed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forethought.ops import stats
from forethought.page import show
from forethought.record import Record, read


@dataclasses.dataclass(frozen=True)
class Run:
    """What a comparison needs of a run."""

    directory: str
    settings: dict[str, Any]
    """What makes its method: algorithm, preset, steps and the algorithm's fields."""
    task: str
    """The environment, and where and how the agent was evaluated if not there and greedily."""
    seed: int
    score: float
    """Mean return of the agent over its evaluation episodes."""
    random: float | None
    """Mean return of random actions over as many; None where it was not measured."""
    episodes: int
    step: int
    version: str
    """The commit that it ran from, or the version of the package."""


Methods = dict[str, dict[str, list[Run]]]
"""Runs in the order of their seeds, by method and task."""


def compare(
    directories: Sequence[Path], ranges: Sequence[tuple[str, tuple[float, float]]] = (), *, rng: np.random.Generator
) -> dict[str, Any]:
    """Compares the methods of finished runs, ready for JSON (docs/compare.md has the equations).

    `ranges` says for a task which returns become score 0 and 1; without one these are the mean return of random
    actions and that of the best method. Raises ValueError or OSError, in one line, where runs cannot be compared.
    """
    methods = _methods([_run(directory) for directory in directories])
    scales = _scales(methods, ranges)
    scores = {
        name: [np.array([_scaled(run.score, scales[task]) for run in runs[task]]) for task in scales]
        for name, runs in methods.items()
    }
    drawn = {name: stats.resample(tasks, rng=rng) for name, tasks in scores.items()}

    def estimate(statistic: Callable[..., np.ndarray], *names: str) -> dict[str, Any]:
        value = statistic(*(scores[name] for name in names))
        low, high = stats.interval(statistic, *(drawn[name] for name in names)) or (None, None)
        return {key: x if x is None else x.tolist() for key, x in {"value": value, "low": low, "high": high}.items()}

    def by_task(name: str, i: int, task: str) -> dict[str, Any]:
        low, high = scales[task]["low"], scales[task]["high"]
        iqm = estimate(lambda tasks: low + (high - low) * stats.iqm(tasks[i]), name)
        kept = ("seed", "score", "directory", "step", "episodes", "version")
        runs = [{key: getattr(run, key) for key in kept} for run in methods[name][task]]
        return {
            "iqm": iqm,
            "runs": [{**run, "scaled": x} for run, x in zip(runs, scores[name][i].tolist(), strict=True)],
        }

    every = np.concatenate([x for tasks in scores.values() for x in tasks])
    tau = np.linspace(min(0.0, every.min()), max(1.0, every.max()), 201)
    iqm = lambda tasks: stats.iqm(np.concatenate(tasks))  # noqa: E731
    found = [
        {
            "name": name,
            "settings": next(iter(runs.values()))[0].settings,
            "iqm": estimate(iqm, name),
            "mean": estimate(lambda tasks: np.concatenate(tasks).mean(0), name),
            "optimality_gap": estimate(lambda tasks: stats.optimality_gap(np.concatenate(tasks)), name),
            "profile": estimate(lambda tasks: stats.profile(np.concatenate(tasks), tau), name),
            "tasks": {task: by_task(name, i, task) for i, task in enumerate(scales)},
        }
        for name, runs in methods.items()
    ]
    pairs = [
        {
            "a": a,
            "b": b,
            "improvement": estimate(stats.improvement, a, b),
            "difference": estimate(lambda x, y: iqm(x) - iqm(y), a, b),
        }
        for a, b in itertools.permutations(methods, 2)
    ]
    result = {"scales": scales, "methods": found, "pairs": pairs, "tau": tau.tolist(), "resamples": stats.RESAMPLES}
    verdict, summary = _summary(result)
    return {"verdict": verdict, "summary": summary, **result}


def _run(directory: Path) -> Run:
    try:
        return _measured(directory, read(directory))
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory}: is not a run's record ({type(error).__name__}: {error})") from error


def _measured(directory: Path, record: Record) -> Run:
    config, evaluation, returns = record.config, record.evaluation, record.returns()
    if "agent" not in returns:
        raise ValueError(f"was not evaluated; forethought eval {directory} does it")
    if unfit := [name for name, values in returns.items() if not np.isfinite(values).all()]:
        raise ValueError(f"evaluation.json: returns: {unfit[0]}: not finite, so there is no mean to compare")
    fields, steps, step = config["fields"], config["steps"], evaluation["step"]
    if steps - step >= math.prod(fields.get(name, 1) for name in ("ticks", "envs", "action_repeat")):
        raise ValueError(f"was evaluated at step {step} of {steps}; train it to its end and evaluate it again")
    task = config["env"] + (f" {json.dumps(config['env_args'], sort_keys=True)}" if config["env_args"] else "")
    task += f", played in {evaluation['env']}" if evaluation["env"] != config["env"] else ""
    task += f", {evaluation['rule']}" if evaluation["rule"] != "greedy" else ""
    return Run(
        directory=str(directory),
        settings={name: config[name] for name in ("algorithm", "preset", "steps")} | fields,
        task=task,
        seed=config["seed"],
        score=float(returns["agent"].mean()),
        random=float(returns["random"].mean()) if "random" in returns else None,
        episodes=len(returns["agent"]),
        step=step,
        version=config["git"] or config["versions"]["forethought"],
    )


def _methods(runs: list[Run]) -> Methods:
    """Runs that differ in seed and task alone are one method."""
    settings = {json.dumps(run.settings, sort_keys=True): run.settings for run in runs}
    names = dict(zip(settings, _names(list(settings.values())), strict=True))
    tasks = list(dict.fromkeys(run.task for run in runs))
    methods: Methods = {name: {task: [] for task in tasks} for name in names.values()}
    for run in sorted(runs, key=lambda run: run.seed):
        name = names[json.dumps(run.settings, sort_keys=True)]
        there = methods[name][run.task]
        if there and there[-1].seed == run.seed:
            raise ValueError(
                f"{run.directory}: {name} on {run.task} with seed {run.seed} is in {there[-1].directory} too; "
                "give each seed of a method once"
            )
        there.append(run)
    if len(methods) < 2:
        raise ValueError(f"these runs are all of one method, {next(iter(methods))}; give runs of two or more")
    for name, task in itertools.product(methods, tasks):
        if not methods[name][task]:
            raise ValueError(f"{name}: has no run on {task}; every method needs the same tasks: {', '.join(tasks)}")
    return methods


def _names(settings: list[dict[str, Any]]) -> list[str]:
    """Algorithm and preset, and what sets a method apart from others of that algorithm and preset."""
    names = []
    for one in settings:
        kin = [x for x in settings if (x["algorithm"], x["preset"]) == (one["algorithm"], one["preset"])]
        against = {name: settings if name == "steps" else kin for name in one}
        apart = [name for name in one if any(name not in x or x[name] != one[name] for x in against[name])]
        names.append(", ".join([one["algorithm"], one["preset"], *(f"{name} {one[name]}" for name in apart)]))
    return names


def _scales(methods: Methods, ranges: Sequence[tuple[str, tuple[float, float]]]) -> dict[str, dict[str, Any]]:
    """By task: the returns that become score 0 and 1, and what they are."""
    tasks, given = list(next(iter(methods.values()))), dict(ranges)
    if len(given) < len(ranges):
        raise ValueError("--range: a task was given twice; give each task one range")
    if unknown := [task for task in given if task not in tasks]:
        raise ValueError(f"--range: no run is on '{unknown[0]}'; the tasks are: {', '.join(tasks)}")
    scales = {}
    for task in tasks:
        randoms = [run.random for runs in methods.values() for run in runs[task]]
        means = {name: float(np.mean([run.score for run in runs[task]])) for name, runs in methods.items()}
        best = max(means, key=lambda name: means[name])
        cure = f"give --range '{task}=LOW,HIGH'"
        if task in given:
            low, high = given[task]
            scales[task] = {"low": low, "high": high, "from": "given"}
        elif None in randoms:
            raise ValueError(f"{task}: random actions were not evaluated in every run; evaluate those again or {cure}")
        else:
            low = float(np.mean(np.array(randoms, float)))
            scales[task] = {"low": low, "high": means[best], "from": f"random actions, and the mean of {best}"}
            if means[best] <= low:
                raise ValueError(
                    f"{task}: no method is above random actions ({show(low)}), so there is no scale; {cure}"
                )
    return scales


def _scaled(score: float, scale: dict[str, Any]) -> float:
    return (score - scale["low"]) / (scale["high"] - scale["low"])


def _summary(result: dict[str, Any]) -> tuple[str, str]:
    """Whether the best method is told apart from the next, and the sentence that says so."""
    ranked = sorted(result["methods"], key=lambda method: -method["iqm"]["value"])
    best, other = ranked[:2]
    a, b = best["name"], other["name"]
    by = next(pair["difference"] for pair in result["pairs"] if (pair["a"], pair["b"]) == (a, b))
    few = [(len(x["runs"]), task, m["name"]) for m in ranked for task, x in m["tasks"].items()]
    number, task, name = min(few)
    if number < stats.FEW:
        return "unsure", (
            f"Too few seeds to say which method is better: {name} has {number} on {task}, and with fewer than "
            f"{stats.FEW} no interval is claimed. Every seed is shown."
        )
    apart = by["low"] > 0
    rest = "better than" if len(ranked) == 2 else f"best of {len(ranked)} methods, before"
    said = f"{a} does {rest} {b}" if apart else f"{a} and {b} are not told apart"
    said += (
        f": their interquartile mean scores are {two(best['iqm']['value'])} and {two(other['iqm']['value'])}, a "
        f"difference of {two(by['value'])}. Its 95 % interval, {two(by['low'])} to {two(by['high'])}, "
        f"{'lies above zero' if apart else 'contains zero, which is no difference'}."
    )
    if len(result["scales"]) == 1:
        ((task, scale),) = result["scales"].items()
        value, low, high = (show(by[key] * (scale["high"] - scale["low"])) for key in ("value", "low", "high"))
        said += f" In return on {task} the difference is {value} ({low} to {high})."
    return "good" if apart else "unsure", said


def two(value: float) -> str:
    """With two decimals, as a score is written."""
    return f"{value:z.2f}".replace("-", "\N{MINUS SIGN}")
