"""Dyna on the book's mazes: planning steps, walls that move, and which pairs are planned first.

Sutton & Barto (2018), figures 8.2, 8.4, 8.5 and example 8.4. Their yardsticks are exact: shortest paths, expected steps
and optimal values by dynamic programming over the mazes' own tables. The whole study takes a minute or two and is run
anew each time.
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
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, PRNGKeyArray

from forethought import devices, page
from forethought.algos import dyna
from forethought.envs import mazes
from forethought.envs.tabular import Tabular
from forethought.ops.dynamic import policy_evaluation, value_iteration

SEEDS = 30
"""Unless it is said."""
GAMMA, EPSILON = 0.95, 0.1
PLANNING = (0, 5, 50)
EPISODES, MAZE_STEPS = 50, 20_000
"""Episodes that are shown, and real steps in which every seed has made as many."""
CHANGES = {
    "blocking": mazes.Changing(
        (mazes.WALLED_RIGHT, mazes.WALLED_LEFT), (0, 1000), start=(5, 3), goal=(0, 8), name="blocking"
    ),
    "shortcut": mazes.Changing(
        (mazes.WALLED_LEFT, mazes.OPEN_BOTH), (0, 3000), start=(5, 3), goal=(0, 8), name="shortcut"
    ),
}
CHANGE_STEPS = {"blocking": 3000, "shortcut": 6000}
ARMS = {
    "Dyna-Q": dyna.Config(method="q", alpha=0.5, planning=50),
    "Dyna-Q+": dyna.Config(method="plus", alpha=0.5, planning=50, kappa=1e-3),
}
"""The book prints no alpha, kappa or n for walls that move; these are our choice."""
SCALES = {1: 10_000, 2: 40_000, 3: 120_000}
"""How many times finer than the Dyna maze, and real steps at most."""
RACERS = {
    "Dyna-Q": dyna.Config(method="q", alpha=0.5, planning=5),
    "prioritised sweeping": dyna.Config(method="sweeping", alpha=0.5, planning=5),
}
BLOCK = 10
"""Real steps between two looks at whether the greedy path is the shortest."""
SEEN_AFTER = 1500
"""Real steps after which the values of the Dyna maze are drawn."""


def over_seeds(function: Callable[[PRNGKeyArray], Any], seeds: int) -> Any:
    """What a function of a key returns for seeds 0 .. S - 1, as NumPy leaves [S, ...].

    On each core its seeds follow each other: what one of them needs stays in the cache."""
    apart = devices.apart(sequential_vmap(function), devices.sharing(seeds))
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return jax.tree.map(np.asarray, jax.jit(apart)(keys))


def best_policy(env: Tabular, epsilon: float = 0.0) -> Float[np.ndarray, "S A"]:
    """The optimal policy, all best actions equally likely, or what epsilon-greedy makes of it."""
    _, q = env.optimal_values(GAMMA)
    best = np.isclose(q, q.max(1, keepdims=True))
    return (1 - epsilon) * best / best.sum(1, keepdims=True) + epsilon / q.shape[1]


def expected_steps(env: Tabular, policy: Float[np.ndarray, "S A"]) -> float:
    """How long an episode of a policy is on average, exactly: the undiscounted value of a reward of 1 per step."""
    tables = env.tables(1.0)
    counted = tables._replace(reward=np.where(env.terminal[:, None], 0.0, np.ones_like(tables.reward)))
    return float(policy_evaluation(counted, policy) @ env.start)


def yardsticks() -> dict[str, Any]:
    """The exact numbers: shortest paths, and what the Dyna maze takes epsilon-greedily and at random."""
    env = mazes.dyna_maze()
    shortest = lambda env: expected_steps(env, best_policy(env))  # noqa: E731
    return {
        "maze": {
            "shortest": shortest(env),
            "epsilon_greedy": expected_steps(env, best_policy(env, EPSILON)),
            "random": expected_steps(env, np.full((len(env.start), 4), 0.25)),
        },
        **{name: [shortest(each) for each in change.mazes] for name, change in CHANGES.items()},
    }


def lengths(record: dyna.Record, episodes: int) -> Float[np.ndarray, "S E"]:
    """Steps of the first episodes of every seed. Raises ValueError where a seed has made fewer."""
    made = int(record.last.sum(1).min())
    if made < episodes:
        raise ValueError(f"a seed has ended only {made} episodes of {episodes}")
    return np.array([one[last][:episodes] for one, last in zip(record.elapsed, record.last, strict=True)], float)


def first_within(length: Float[np.ndarray, "S E"], bound: float) -> int:
    """The first episode (from 1) whose mean length over seeds is at most `bound`; 0: none."""
    good = length.mean(0) <= bound
    return int(good.argmax()) + 1 if good.any() else 0


def maze(planning: int, seeds: int, bound: float) -> dict[str, Any]:
    """Figure 8.2: steps per episode with so many planning steps; and what the learned models are worth.

    `first` is the first episode whose mean over seeds is at most `bound`, `first_interval` its 95 % bootstrap."""
    env, cfg = mazes.dyna_maze(), dyna.Config(planning=planning)

    def one(key: PRNGKeyArray) -> Any:
        early, _ = dyna.run(cfg, env, SEEN_AFTER, key=key)
        return early[0], dyna.run(cfg, env, MAZE_STEPS, key=key)[1]

    early, record = over_seeds(one, seeds)
    length, rng = lengths(record, EPISODES), np.random.default_rng(0)
    drawn = [first_within(length[rng.integers(seeds, size=seeds)], bound) for _ in range(1000)]
    exact = value_iteration(env.tables(GAMMA))
    models = [jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), early.model) for i in range(seeds)]
    gaps = [np.abs(value_iteration(each.tables(GAMMA)) - exact).max() for each in models]
    return {
        "planning": planning,
        "length": length.tolist(),
        "first": first_within(length, bound),
        "first_interval": [float(x) for x in np.quantile(drawn, [0.025, 0.975])],
        "real_updates": int(record.real[0, -1]),
        "imagined_updates": int(record.imagined[0, -1]),
        "value": early.q[0].max(1).tolist(),
        "value_error": np.abs(early.q.max(2) - exact).max(1).tolist(),
        "model_value_error": [float(x) for x in gaps],
    }


def change(name: str, arm: str, seeds: int) -> dict[str, Any]:
    """Figures 8.4 and 8.5: the reward collected so far, and whether the new shortest path was found and is walked.

    `found`: a seed has made an episode shorter than the old shortest path after the change, as only a shortcut allows.
    `late`: the median length of the episodes of its last thousand steps. `walks`: that is at most 1.25 times the new
    shortest path."""
    env, steps = CHANGES[name], CHANGE_STEPS[name]
    (state, _), record = over_seeds(lambda key: dyna.run(ARMS[arm], env, steps, key=key), seeds)
    old, new = (expected_steps(each, best_policy(each)) for each in env.mazes)
    after = np.arange(steps) >= env.since[1]
    late = [
        np.median(one[last & (np.arange(steps) >= steps - 1000)]) if last[-1000:].any() else float("inf")
        for one, last in zip(record.elapsed, record.last, strict=True)
    ]
    return {
        "maze": name,
        "arm": arm,
        **{key: getattr(ARMS[arm], key) for key in ("alpha", "planning", "kappa")},
        "reward": np.cumsum(record.reward, 1)[:, 9::10].astype(int).tolist(),
        "found": ((record.elapsed < old) & record.last & after).any(1).tolist(),
        "walks": [bool(x <= 1.25 * new) for x in late],
        "late": [float(x) if np.isfinite(x) else None for x in late],
        "value": state.q[0].max(1).tolist(),
    }


def finer(scale: int) -> Tabular:
    """The Dyna maze with every cell made scale x scale cells; its goal the corner, its start the cell above the middle
    row's first."""
    rows = tuple("".join(x * scale for x in row) for row in mazes.DYNA.rows for _ in range(scale))
    name = f"jax/dyna-maze-{scale}"
    return mazes.maze(mazes.Layout(rows), start=(2 * scale, 0), goal=(0, 9 * scale - 1), name=name)


def race(racer: str, scale: int, seeds: int) -> dict[str, Any]:
    """Example 8.4: updates until the greedy path from the start is a shortest one, looked at every BLOCK real steps."""
    env, cfg = finer(scale), RACERS[racer]
    shortest = round(expected_steps(env, best_policy(env)))
    begin, end = int(env.start.argmax()), int(np.argmax(env.terminal))
    arrives = jnp.asarray(env.transition.argmax(-1))

    def solved(q: Float[Array, "S A"]) -> Array:
        walk = lambda _, state: jnp.where(state == end, end, arrives[state, q[state].argmax()])  # noqa: E731
        return jax.lax.fori_loop(0, shortest, walk, begin) == end

    def one(key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        """Solved or not, and real and imagined updates by then; stops at the first solution."""

        def block(held: Any) -> Any:
            return dyna.run(cfg, env, BLOCK, key=key, held=held)[0]

        begun = dyna.begin(cfg, env, key=key)
        goes_on = lambda held: ~solved(held[0].q) & (held[0].steps < SCALES[scale])  # noqa: E731
        state, _ = jax.lax.while_loop(goes_on, block, begun)
        return solved(state.q), state.real, state.imagined

    done, real, imagined = over_seeds(one, seeds)
    return {
        "racer": racer,
        "states": len(env.start),
        "shortest": shortest,
        **{key: getattr(cfg, key) for key in ("alpha", "planning", "theta")},
        "solved": done.tolist(),
        "real_updates": real.tolist(),
        "imagined_updates": imagined.tolist(),
    }


def run(
    out: Path, *, seeds: int, quick: bool, progress: Callable[[int, int, str], None], about: dict[str, Any]
) -> dict[str, Any]:
    """Runs everything (quick: without the finer mazes) and writes `out`/results.json; returns what it holds."""
    out.mkdir(parents=True, exist_ok=True)
    exact = yardsticks()
    bound = 1.25 * exact["maze"]["epsilon_greedy"]
    scales = [1] if quick else list(SCALES)
    parts: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        *(("maze", maze, (n, seeds, bound)) for n in PLANNING),
        *(("change", change, (name, arm, seeds)) for name in CHANGES for arm in ARMS),
        *(("race", race, (racer, scale, seeds)) for scale in scales for racer in RACERS),
    ]
    found: dict[str, Any] = {"seeds": seeds, "exact": exact, "bound": bound, "maze": [], "change": [], "race": []}
    for done, (kind, measure, what) in enumerate(parts):
        progress(done, len(parts), " ".join([kind, *map(str, what[:-1])]))
        found[kind].append(measure(*what))
    progress(len(parts), len(parts), "all of Dyna")
    configs = {"maze": dyna.Config(), **ARMS, **{f"race, {name}": cfg for name, cfg in RACERS.items()}}
    found |= about | {"configs": {name: dataclasses.asdict(cfg) for name, cfg in configs.items()}}
    page.write(out / "results.json", json.dumps(found, allow_nan=False) + "\n")
    return found


def count(found: dict[str, Any]) -> int:
    """How many conditions were run."""
    return sum(len(found[kind]) for kind in ("maze", "change", "race"))
