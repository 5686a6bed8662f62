"""Alignment inside a real agent: dreamer with and without an encoder of its own, with and without distractors.

Five arms of equal budget, many seeds at once. Of every seed: the greedy return, the model's error by depth on what the
task is about and on the distractor apart, and the exploitation gap, what the model promises the policy of the next
steps minus what they bring.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from forethought import collect, devices, envs, loop, page
from forethought.algos import dreamer
from forethought.envs.distract import KEY
from forethought.imagine import imagine, open_loop
from forethought.ops import stats
from forethought.page import tag
from forethought.protocols import AbstractEnv
from forethought.types import PerStep

ARMS: dict[str, dict[str, Any]] = {
    "shared encoder": {},
    "own encoder": {"policy_encoder": "own"},
    "own, partial": {"policy_encoder": "own", "alignment": "partial", "shared": 32},
    "own, full": {"policy_encoder": "own", "alignment": "partial", "shared": 64},
    "own, contrast": {"policy_encoder": "own", "alignment": "contrast"},
}
DISTRACTORS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "irrelevant sine": {"kind": "irrelevant", "dynamics": "sine", "dims": 16},
    "controllable switching": {"kind": "controllable", "dynamics": "switching", "dims": 16},
}
STEPS = {"jax/pendulum": 8_000, "jax/cartpole-swingup": 8_000}
"""Simulator steps of training."""
BUDGET = {"starts": 1, "updates": 8, "learning_rate": 1e-3}
"""Less work per step than the preset's, and larger steps, since 30 combinations of many seeds are trained."""
EPISODES, CONTEXT, HORIZON = 10, 5, 15
"""Greedy episodes; rows that the model sees before it imagines, and steps that it imagines."""


def train(cfg: Any, env: AbstractEnv, steps: int, seeds: int) -> tuple[Any, float]:
    """Trains seeds 0 .. seeds - 1 of dreamer on a pure environment at once.

    Returns the agents, leaves [S, ...], and the seconds of an update of all of them, compiling left out."""
    rule, num = PerStep(cfg.gamma), devices.sharing(seeds)
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    held = jax.jit(devices.apart(lambda key: loop.begin(dreamer, cfg, env, key=key)[:2], num))(keys)
    step = lambda _, held: loop.iterate(dreamer, cfg, env, rule, *held)[:2]  # noqa: E731
    go = devices.apart(lambda held: jax.lax.fori_loop(0, 25, step, held), num)
    chunk = jax.jit(go, donate_argnums=0)
    prefill = loop.prefill_ticks(cfg) * cfg.envs
    iterations = (steps // cfg.action_repeat - prefill) // (cfg.ticks * cfg.envs)
    seconds = []
    for _ in range(max(iterations // 25, 2)):
        begun = time.monotonic()
        held = jax.block_until_ready(chunk(held))
        seconds.append(time.monotonic() - begun)
    return held[0].agent, float(np.median(seconds[1:])) / (25 * cfg.updates)


def measure(cfg: Any, env: AbstractEnv, agent: Any, *, key: PRNGKeyArray) -> dict[str, Array]:
    """Plays EPISODES greedy episodes with one agent and looks at its model along them.

    Returns:
        return: [EPISODES].
        error/KEY, baseline/KEY: [HORIZON], mean squared error of an observation key by imagined depth, along the
        actions really taken, and that of the key's mean.
        gap: what the greedy policy's dreams promise of HORIZON steps, minus what the same policy earned in them.
    """
    policy = dreamer.policy(cfg, agent, greedy=True)
    model = policy.model
    play_key, model_key = jax.random.split(key)
    play = lambda key: collect.episode(env, policy, policy_version=agent.updates, key=key)  # noqa: E731
    rows = jax.vmap(play)(jax.random.split(play_key, EPISODES))
    places = jnp.arange(0, rows.time_step.last.shape[1] - 1 - CONTEXT - HORIZON, HORIZON)

    def foreseen(rows: Any, place: Array, key: PRNGKeyArray) -> Any:
        """From rows place .. place + CONTEXT - 1 of an episode, HORIZON steps ahead."""
        window = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, place, CONTEXT + HORIZON), rows)
        step, loop_key, dream_key = window.time_step, *jax.random.split(key)
        seen = jax.tree.map(lambda x: x[:CONTEXT], (step.obs, step.first))
        latents, outcome = open_loop(model, seen[0], window.action[:-1], seen[1].at[0].set(True), key=loop_key)
        real = jax.tree.map(lambda x: x[CONTEXT:], step.obs)
        assert isinstance(outcome.obs, dict)
        foretold = outcome.obs
        error = {name: jnp.mean((foretold[name] - real[name]) ** 2, -1) for name in real}
        start = jax.tree.map(lambda x: x[CONTEXT - 1 : CONTEXT], (latents, window))
        actor = dreamer.Dreaming(model, policy.sight, policy.actor, True)
        dream = imagine(
            model, actor, start[0], start[1].time_step, HORIZON, depth=start[1].depth, policy_version=agent.updates,
            key=dream_key[None],
        )[1]  # fmt: skip
        return error, dream.time_step.reward[1:].sum() - step.reward[CONTEXT:].sum()

    keys = jax.random.split(model_key, (EPISODES, len(places)))
    error, gap = jax.vmap(lambda rows, keys: jax.vmap(lambda p, k: foreseen(rows, p, k))(places, keys))(rows, keys)
    baseline = {name: jnp.mean((x - x.mean((0, 1))) ** 2) for name, x in rows.time_step.obs.items()}
    return {
        "return": jnp.where(rows.time_step.first, 0.0, rows.time_step.reward).sum(1),
        **{f"error/{name}": x.mean((0, 1)) for name, x in error.items()},
        **{f"baseline/{name}": x for name, x in baseline.items()},
        "gap": gap.mean(),
    }


def run(out: Path, *, seeds: int, progress: Callable[[int, int, str], None]) -> list[dict[str, Any]]:
    """Runs what `out`/results.json does not hold yet, one combination after the other, each kept at once."""
    path = out / "results.json"
    found = json.loads(path.read_text())["results"] if path.exists() else []
    out.mkdir(parents=True, exist_ok=True)
    combinations = [(name, what, arm) for name in STEPS for what in DISTRACTORS for arm in ARMS]
    for done, (name, what, arm) in enumerate(combinations):
        if any((x["env"], x["distractor"], x["arm"], x["seeds"]) == (name, what, arm, seeds) for x in found):
            continue
        progress(done, len(combinations), f"{name}, {what}, {arm}")
        fields: dict[str, Any] = dreamer.PRESETS["cpu"] | BUDGET | ARMS[arm]
        cfg = dreamer.Config(**fields)
        env: Any = envs.make(name, action_repeat=cfg.action_repeat, distract=DISTRACTORS[what])
        agents, seconds = train(cfg, env, STEPS[name], seeds)
        keys = jax.random.split(jax.random.key(1_000_000), seeds)
        look = devices.apart(lambda item: measure(cfg, env, item[0], key=item[1]), devices.sharing(seeds))  # noqa: B023
        seen = jax.tree.map(np.asarray, jax.jit(look)((agents, keys)))
        numbers = {key: np.round(x.astype(np.float64), 6).tolist() for key, x in seen.items()}
        found.append(
            {"env": name, "distractor": what, "arm": arm, "seeds": seeds, "steps": STEPS[name],
             "updates": int(agents.updates[0]), "seconds_per_update": seconds, **numbers}
        )  # fmt: skip
        page.write(path, json.dumps({"results": found}) + "\n")
        write(out, found)
    progress(len(combinations), len(combinations), "all arms")
    return found


def write(out: Path, found: list[dict[str, Any]]) -> Path:
    """Writes `out`/report.html: every seed's return, model error and exploitation gap, arm beside arm."""
    sections = {}
    for name in STEPS:
        figures = []
        for what in DISTRACTORS:
            some = [x for x in found if (x["env"], x["distractor"]) == (name, what)]
            roles = {x["arm"]: f"phase{i}" for i, x in enumerate(some)}
            for title, value in _shown(what).items():
                boxes = [{"name": x["arm"], "role": roles[x["arm"]], "box": page.numbers(value(x))} for x in some]
                plot = page.plot(boxes, x="", y=title, legend=True)
                figures.append(page.figure(f"distractor {what}: {title}", [plot], "A dot per seed.", roles))
        sections[name] = tag("div", *figures, class_="grid")
    rows = [
        (x["env"], x["distractor"], x["arm"], f"{stats.iqm(np.mean(x['return'], 1)):.0f}",
         *(f"{stats.iqm(value(x)):.3g}" for value in list(_shown(x["distractor"]).values())[1:]))
        for x in found
    ]  # fmt: skip
    head = ("environment", "distractor", "arm", "return", "error, task", "gap", "error, distractor")
    sections["All"] = page.figure("interquartile means over seeds", [page.table(rows, head)], "")
    header = tag("header", tag("h1", "Alignment inside dreamer"))
    return page.write(out / "report.html", page.render("Alignment inside dreamer", header, sections))


def _shown(what: str) -> dict[str, Callable[[dict[str, Any]], np.ndarray]]:
    """What is drawn of a combination, by seed."""

    def relative(distractor: bool) -> Callable[[dict[str, Any]], np.ndarray]:
        """The mean over keys and steps of the error, over what the key's mean would err by."""

        def share(x: dict[str, Any]) -> np.ndarray:
            names = [k.removeprefix("error/") for k in x if k.startswith("error/")]
            names = [k for k in names if (k == KEY) == distractor]
            return np.mean([np.mean(x[f"error/{k}"], 1) / np.array(x[f"baseline/{k}"]) for k in names], 0)

        return share

    shown: dict[str, Callable[[dict[str, Any]], np.ndarray]] = {
        "return": lambda x: np.mean(x["return"], 1),
        "model error, task (share of variance)": relative(False),
        "promised minus real": lambda x: np.array(x["gap"]),
    }
    return shown | ({} if what == "none" else {"model error, distractor (share of variance)": relative(True)})
