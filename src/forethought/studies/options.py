"""Options in rooms: what is exact of them, what they do to learning, where they help and where they do not.

Sutton, Precup & Singh (1999), section 4, and learning on equal budgets of primitive steps: in a grid of rooms with one
reward far away, to which options lead from door to door, and in a larger one with the reward nearby, from which they
lead away.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from forethought import levels, page
from forethought.algos import smdp
from forethought.discovery import door_options
from forethought.envs import mazes
from forethought.envs.mazes import FOUR_ROOMS, Layout
from forethought.envs.tabular import Tabular
from forethought.ops import dynamic, stats
from forethought.ops.dynamic import Tables
from forethought.options import TabularOption
from forethought.studies.dyna import over_seeds
from forethought.types import EndReason, PerStep

SEEDS = 32
"""Unless it is said."""
GAMMA = 0.9
NINE, SIXTEEN = mazes.rooms(3, 3, 4), mazes.rooms(4, 4, 5)
HALL, MIDDLE = (7, 9), (9, 9)
"""The paper's goals G1 and G2: the east hallway, and a cell inside the lower right room."""
TASKS: dict[str, tuple[Tabular, Layout, int, float]] = {
    "nine rooms, goal in the last": (mazes.many_rooms(3, 3, 4, time_limit=400), NINE, 60_000, 0.98),
    "sixteen rooms, goal in the first": (
        mazes.maze(SIXTEEN, start=(1, 1), goal=(5, 5), time_limit=400, name="jax/near-goal"),
        SIXTEEN,
        20_000,
        0.98,
    ),
    "four rooms, goal in a hallway": (mazes.four_rooms(HALL, time_limit=300), FOUR_ROOMS, 30_000, GAMMA),
    "four rooms, goal in a room": (mazes.four_rooms(MIDDLE, time_limit=300), FOUR_ROOMS, 30_000, GAMMA),
}
"""Environment, its map, ticks of learning and gamma."""
ARMS: dict[str, dict[str, Any]] = {
    "actions": {"method": "smdp"},
    "options": {"method": "smdp"},
    "both": {"method": "smdp"},
    "both, intra-option": {"method": "intra"},
    "both, interrupted": {"method": "intra", "interrupt": True},
}
ALPHA, EPSILON = 0.25, 0.1
POINTS = 200
"""Points of a curve."""


def exact() -> dict[str, Any]:
    """The paper's numbers: values with actions, with hallway options and with both, and how fast sweeps spread them.

    Its goal is worth 1 and nothing is paid."""
    env = mazes.four_rooms(HALL)
    actions = env.tables(GAMMA)._replace(reward=np.zeros((104, 4)))
    options = together(actions, door_options(FOUR_ROOMS.arrivals()))
    goal = np.asarray(env.terminal, float)
    told = {}
    for name, model in {"actions": actions, "options": options, "both": actions.beside(options)}.items():
        value = dynamic.value_iteration(model, goal)
        swept, zeros, shown = goal, [], []
        for _ in range(4):
            swept = dynamic.sweep(model, swept)
            zeros.append(int((swept == 0).sum()))
            shown.append(swept.tolist())
        corner = float(value[FOUR_ROOMS.index(1, 1)])
        told[name] = {"value": value.tolist(), "corner": corner, "mean": float(value.mean()), "zeros": zeros,
                      "sweeps": shown}  # fmt: skip
    return told


def interruption() -> dict[str, Any]:
    """Theorem 2 on the map: hallway options chosen at random and followed to their ends, and given up wherever choosing
    anew, at random too, is worth more. (The best of them are never given up with this goal.)

    Returns the values [S] of both, and the largest, least and mean gain."""
    actions, doors = mazes.four_rooms(HALL).tables(GAMMA), door_options(FOUR_ROOMS.arrivals())
    model = together(actions, doors)
    choice = model.legal / np.maximum(model.legal.sum(1, keepdims=True), 1)
    value = dynamic.policy_evaluation(model, choice)
    worth = dynamic.action_values(model, value)
    given_up = [
        dataclasses.replace(o, stop=dynamic.interrupted(np.asarray(o.stop), np.where(o.initiation, worth[:, i], value),
                                                        value))
        for i, o in enumerate(doors)
    ]  # fmt: skip
    freer = dynamic.policy_evaluation(together(actions, given_up), choice)
    gain = freer - value
    return {"value": value.tolist(), "interrupted": freer.tolist(), "largest": float(gain.max()),
            "least": float(gain.min()), "mean": float(gain.mean())}  # fmt: skip


def together(actions: Tables, options: list[TabularOption]) -> Tables:
    """The exact models of options side by side."""
    tables = [(np.asarray(o.initiation), np.asarray(o.policy), np.asarray(o.stop)) for o in options]
    model, *rest = (dynamic.option_model(actions, *each) for each in tables)
    for other in rest:
        model = model.beside(other)
    return model


def choices(arm: str, layout: Layout) -> list[TabularOption]:
    """What an arm chooses from."""
    flat, doors = smdp.one_step(len(layout.cells), 4), door_options(layout.arrivals())
    return {"actions": flat, "options": doors}.get(arm, [*flat, *doors])


def learn(task: str, arm: str, seeds: int, share: float) -> dict[str, Any]:
    """The reward collected by every seed over time, and what the runs of the first one's options were like."""
    env, layout, ticks, gamma = TASKS[task]
    ticks = int(ticks * share)
    cfg = smdp.Config(alpha=ALPHA, epsilon=EPSILON, **ARMS[arm])
    options, rule = choices(arm, layout), PerStep(gamma)
    every = ticks // POINTS

    def one(key: PRNGKeyArray) -> tuple[Array, Array, levels.Record]:
        state, record = smdp.run(cfg, env, options, rule, ticks, key=key)
        return jnp.cumsum(record.reward)[every - 1 :: every], state.q.max(1), record

    reward, value, record = over_seeds(one, seeds)
    one_seed = levels.Record(*(x[0] for x in record))
    first = levels.runs(one_seed)
    rng, total = np.random.default_rng(0), reward[:, -1].astype(float)
    return {
        "task": task, "arm": arm, "options": len(options), "ticks": ticks, "every": every, "gamma": gamma,
        **dataclasses.asdict(cfg), "reward": reward.astype(int).tolist(), "iqm": float(stats.iqm(total)),
        "interval": stats.iqm_interval(total, rng=rng), "never": int((total == 0).sum()),
        "value": value[0].tolist(), "runs": len(first.begin), "mean_steps": float(first.steps.mean()),
        "ends": levels.ends(first), "gave_way": gave_way(one_seed, first),
    }  # fmt: skip


def gave_way(record: levels.Record, found: levels.Runs) -> dict[str, Any] | None:
    """The longest run in the latter half that was interrupted, as the states and actions it went through."""
    late = (found.reason == EndReason.INTERRUPTED) & (found.begin > len(record.state) // 2)
    if not late.any():
        return None
    run = int(np.argmax(np.where(late, found.steps, 0)))
    rows = slice(int(found.begin[run]), int(found.begin[run] + found.steps[run]))
    return {"option": int(found.option[run]), "states": np.asarray(record.state)[rows].tolist(),
            "actions": np.asarray(record.action)[rows].tolist()}  # fmt: skip


def compared(learned: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every arm against actions alone on the same task and budget: the difference of interquartile means of the reward,
    its 95 % bootstrap interval, and the verdict that this allows: helps, hurts, or no difference shown."""
    told = []
    for task in dict.fromkeys(x["task"] for x in learned):
        totals = {x["arm"]: np.array(x["reward"], float)[:, -1] for x in learned if x["task"] == task}
        rng = np.random.default_rng(0)
        for arm in [arm for arm in totals if arm != "actions"]:
            pair = totals[arm], totals["actions"]
            drawn = [stats.resample([x], rng=rng) for x in pair]
            bounds = stats.interval(lambda a, b: stats.iqm(a[0]) - stats.iqm(b[0]), *drawn)
            low, high = (None, None) if bounds is None else map(float, bounds)
            verdict = "too few seeds" if low is None or high is None else "no difference shown"
            if low is not None and high is not None and (low > 0 or high < 0):
                verdict = "helps" if low > 0 else "hurts"
            told.append({"task": task, "arm": arm, "difference": float(stats.iqm(pair[0]) - stats.iqm(pair[1])),
                         "low": low, "high": high, "verdict": verdict})  # fmt: skip
    return told


def models(seeds: int, share: float) -> dict[str, Any]:
    """How near learned multi-time models come to the exact ones, and the values planned with them to V*."""
    env, layout = mazes.four_rooms(HALL, time_limit=300), FOUR_ROOMS
    options = choices("both", layout)
    cfg = smdp.Config(method="intra", alpha=0.1, epsilon=1.0, model=True)
    ticks = int(100_000 * share)
    state = over_seeds(lambda key: smdp.run(cfg, env, options, PerStep(GAMMA), ticks, key=key)[0], seeds)
    best = dynamic.value_iteration(env.tables(GAMMA))
    gaps = []
    for i in range(seeds):
        one = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), state)
        planned = dynamic.value_iteration(smdp.learned_model(one, options, np.asarray(env.terminal)), tolerance=1e-9)
        gaps.append(float(np.abs(planned - best).max()))
    return {"ticks": ticks, "gap": gaps}


def run(
    out: Path, *, seeds: int, quick: bool, progress: Callable[[int, int, str], None], about: dict[str, Any]
) -> dict[str, Any]:
    """Runs everything (quick: a tenth of the ticks) and writes `out`/results.json; returns what it holds."""
    out.mkdir(parents=True, exist_ok=True)
    share, parts = 0.1 if quick else 1.0, [(task, arm) for task in TASKS for arm in ARMS if possible(task, arm)]
    learned = []
    for done, (task, arm) in enumerate(parts):
        progress(done, len(parts) + 1, f"{task}, {arm}")
        learned.append(learn(task, arm, seeds, share))
    progress(len(parts), len(parts) + 1, "models")
    found = {
        "seeds": seeds,
        "exact": exact(),
        "interruption": interruption(),
        "learned": learned,
        "compared": compared(learned),
        "models": models(min(seeds, 8), share),
    } | about
    progress(len(parts) + 1, len(parts) + 1, "all of the options")
    page.write(out / "results.json", json.dumps(found, allow_nan=False) + "\n")
    return found


def possible(task: str, arm: str) -> bool:
    """Whether an arm can act everywhere in a task: door options alone do not start inside the goal's own region when
    they cannot reach it, and never reach a goal inside a room."""
    return arm != "options" or task == "four rooms, goal in a hallway"


def count(found: dict[str, Any]) -> int:
    """How many conditions were run."""
    return len(found["learned"])
