"""Two levels on a learned world model, beside flat agents of the same model and budget: what each earns, and whether
its levels agree.

Of every seed: the reward of training over time, greedy play at its end, what the goals' runs were like, and two checks
on the data: are the levels paid for the same, and is what replay holds what both levels would do now.
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

from forethought import collect, devices, levels, loop, page
from forethought.algos import director
from forethought.envs import mazes
from forethought.protocols import AbstractEnv
from forethought.types import PerStep

SEEDS = 6
"""Unless it is said; as many on each of two devices."""
TASKS: dict[str, tuple[AbstractEnv, int]] = {
    "4 rooms": (mazes.many_rooms(2, 2, 3, time_limit=100), 10_000),
    "9 rooms": (mazes.many_rooms(3, 3, 4, time_limit=200), 16_000),
}
"""Environment and rows of training, the random prefill and resets included."""
ARMS: dict[str, dict[str, Any]] = {
    "two levels": {},
    "flat": {"goals": False, "novelty": 0.0},
    "flat, with novelty": {"goals": False},
    "two levels, paid by similarity": {"low_reward": "similarity"},
    "two levels, by similarity, over when reached": {"low_reward": "similarity", "reach": 0.6},
}
PARTS = [("4 rooms", arm) for arm in ARMS] + [("9 rooms", arm) for arm in list(ARMS)[:2]]
CHUNK = 50
"""Iterations between two points of a curve."""
EPISODES, ROWS = 10, 2_000
"""Greedy episodes at the end, and rows of sampled play that the levels are compared on."""


def train(cfg: Any, env: AbstractEnv, rows: int, seeds: int) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Trains seeds 0 .. seeds - 1 at once.

    Returns loops and rings, leaves [S, ...], and curves [points, S]: reward, episodes, and cells (how many states were
    ever visited), each after every CHUNK iterations.
    """
    rule, num = PerStep(cfg.gamma), devices.sharing(seeds)
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    held = jax.jit(devices.apart(lambda key: loop.begin(director, cfg, env, key=key)[:2], num))(keys)
    states: Any = env.spec.obs["state"]

    def step(held: Any, _: None) -> tuple[Any, Any]:
        pure, ring, new = loop.iterate(director, cfg, env, rule, *held)
        seen = new[1].time_step
        reward = jnp.where(seen.first, 0.0, seen.reward).sum()
        return (pure, ring), (
            reward,
            seen.last.sum(),
            jnp.zeros(states.n, bool).at[seen.obs["state"].ravel()].set(True),
        )

    def chunk(held: Any) -> Any:
        held, (reward, ended, visited) = jax.lax.scan(step, held, None, CHUNK)
        return held, (reward.sum(), ended.sum(), visited.any(0))

    go, found = jax.jit(devices.apart(chunk, num), donate_argnums=0), []
    for _ in range((rows - loop.prefill_ticks(cfg) * cfg.envs) // (CHUNK * cfg.ticks * cfg.envs)):
        held, new = go(held)
        found.append(jax.tree.map(np.asarray, new))
    reward, episodes, visited = (np.stack(x) for x in zip(*found, strict=True))
    return *held, {
        "reward": reward, "episodes": episodes, "cells": np.logical_or.accumulate(visited).sum(-1),
    }  # fmt: skip


def play(cfg: Any, env: AbstractEnv, agent: Any, *, key: PRNGKeyArray) -> tuple[Array, Any]:
    """Returns [EPISODES] of one agent's greedy play, and ROWS rows of its sampled play."""
    greedy, sampled = (director.policy(cfg, agent, greedy=x) for x in (True, False))
    greedy_key, sampled_key = jax.random.split(key)
    once = lambda key: collect.episode(env, greedy, policy_version=agent.updates, key=key).time_step  # noqa: E731
    seen = jax.vmap(once)(jax.random.split(greedy_key, EPISODES))
    stream = collect.begin(env, sampled, 0, key=sampled_key)
    rows = collect.collect(env, sampled, stream, ROWS, policy_version=agent.updates)[1]
    alone = jnp.cumsum(seen.last, 1) - seen.last == 0  # rows of the first episode, which may end before its limit
    return jnp.where(seen.first | ~alone, 0.0, seen.reward).sum(1), rows


def checks(cfg: Any, agent: Any, fresh: Any, replayed: Any, *, key: PRNGKeyArray) -> dict[str, Any]:
    """What one agent's goals were like in its fresh rows, whether its levels agree in them, and how far those and the
    replayed rows are from what both levels would do now."""
    policy = director.policy(cfg, agent)
    record, own = director.recorded(policy, fresh, PerStep(cfg.gamma), key=key)
    found = levels.runs(record, own)
    told = {
        "runs": len(found.begin), "steps": float(found.steps.mean()), "ends": levels.ends(found),
        "agreement": levels.agreement(found)[0], "own": float(found.own.mean()), "task": float(found.task.mean()),
    }  # fmt: skip
    for name, rows in {"fresh": fresh, "replayed": replayed}.items():
        high, low = (np.asarray(x) for x in jax.jit(director.log_probs)(policy, rows, key=key))
        started, acted = np.asarray(rows.extras.started), ~np.asarray(rows.time_step.last)
        acted &= np.asarray(rows.policy_version) > 0  # the random prefill is no policy of levels
        if (started & acted).sum():
            at = started & acted
            told[f"{name}/high"] = levels.same_policy(np.asarray(rows.extras.log_prob)[at], high[at])
            told[f"{name}/low"] = levels.same_policy(np.asarray(rows.log_prob)[acted], low[acted])
    return told


def run(
    out: Path, *, seeds: int, quick: bool, progress: Callable[[int, int, str], None], about: dict[str, Any]
) -> dict[str, Any]:
    """Runs what `out`/results.json does not hold yet (quick: a tenth of the rows), each part kept at once."""
    path = out / "results.json"
    out.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text())["results"] if path.exists() else []
    for done, (task, arm) in enumerate(PARTS):
        (env, rows), cfg = TASKS[task], director.Config(**(director.PRESETS["cpu"] | ARMS[arm]))
        rows = max(rows // 10, 2_000) if quick else rows
        if any((x["task"], x["arm"], x["seeds"], x["rows"]) == (task, arm, seeds, rows) for x in found):
            continue
        progress(done, len(PARTS), f"{task}, {arm}")
        found.append({"task": task, "arm": arm, "seeds": seeds, "rows": rows} | _part(cfg, env, rows, seeds) | about)
        page.write(path, json.dumps({"results": found}, allow_nan=False) + "\n")
    progress(len(PARTS), len(PARTS), "all arms")
    return {"results": found}


def count(found: dict[str, Any]) -> int:
    """How many parts were run."""
    return len(found["results"])


def _part(cfg: Any, env: AbstractEnv, rows: int, seeds: int) -> dict[str, Any]:
    begun = time.monotonic()
    loops, rings, curves = train(cfg, env, rows, seeds)
    seconds, agents = time.monotonic() - begun, loops.agent
    keys = jax.random.split(jax.random.key(1_000_000), seeds)
    look = devices.apart(lambda item: play(cfg, env, item[0], key=item[1]), devices.sharing(seeds))
    returns, fresh = jax.jit(look)((agents, keys))
    told = []
    for i in range(seeds) if cfg.goals else ():
        agent, new, ring = jax.tree.map(lambda x, i=i: x[i], (agents, fresh, rings))
        replayed = jax.tree.map(lambda x: x[0], ring.sample(1, min(ROWS, rows // cfg.envs), key=keys[i]))
        told.append(checks(cfg, agent, new, replayed, key=keys[i]))
    updates = int(agents.updates[0])
    return {
        "every": CHUNK * cfg.ticks * cfg.envs, "prefill": loop.prefill_ticks(cfg) * cfg.envs, "seconds": seconds,
        "real_rows": rows, "imagined_steps": updates * cfg.batch * cfg.starts * cfg.horizon, "updates": updates,
        "returns": np.asarray(returns).tolist(), "checks": told,
        **{name: x.T.astype(float).round(3).tolist() for name, x in curves.items()},
    }  # fmt: skip
