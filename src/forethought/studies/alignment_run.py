"""The alignment study's runs: a program for each kind of agent, all its conditions and seeds at once."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray

from forethought import collect, devices
from forethought.algos import aligned
from forethought.algos.aligned import Config, Factors
from forethought.envs.distractor import Distractor
from forethought.imagine import imagine, open_loop
from forethought.models.coded import Latent
from forethought.ops import align
from forethought.protocols import AbstractEnv
from forethought.studies.alignment import Condition, Pair
from forethought.types import Outcome, Step

POINTS = 10
"""Evaluations after the one before training; a run's episodes are divided among them."""
EPISODES = 256
"""Of an evaluation."""
TOGETHER = 256
"""Runs in one call of a program; a call's results are kept at once."""
SEEN = 256
"""Observations on which representations are measured."""


def run(
    out: Path,
    questions: dict[str, list[Pair]],
    *,
    seeds: int,
    episodes: int,
    progress: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> dict[Condition, dict[str, np.ndarray]]:
    """Runs every condition that `out`/seeds does not hold yet, and returns what was found of each, by seed.

    Seed s is the same initial networks, starts and noise in every condition. A call's results are written before the
    next begins, whole files at a time, so that a study which was stopped goes on.

    Returns:
        Arrays [S, ...] of a condition: the curves of `train`, and 'final/...' of what it found in
        the end, with what `_probed` says in place of what was seen.

    Raises:
        ValueError: episodes that POINTS does not divide, or a file of other seeds or episodes.
    """
    if episodes % POINTS:
        raise ValueError(f"episodes is {episodes}; it must be a multiple of {POINTS}, the evaluations of a run")
    folder = out / "seeds"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(c for pairs in questions.values() for pair in pairs for c in pair if c is not None))
    found: dict[Condition, dict[str, np.ndarray]] = {}
    for each in wanted:
        if (folder / each.file).exists():
            found[each] = _read(folder / each.file, seeds, episodes)
    missing: dict[Config, list[Condition]] = {}
    for each in wanted:
        if each not in found:
            missing.setdefault(each.config, []).append(each)
    for cfg, conditions in missing.items():
        calls = -(-len(conditions) * seeds // TOGETHER)
        size = -(-len(conditions) // calls)
        go = program(cfg, episodes, size * seeds)
        for start in range(0, len(conditions), size):
            some = conditions[start : start + size]
            progress(len(found), len(wanted), some[0].name)
            padded = [*some, *[some[-1]] * (size - len(some))]
            factors = jax.tree.map(lambda *xs: jnp.repeat(jnp.asarray(xs), seeds), *[c.factors for c in padded])
            arrays = jax.device_get(go((factors, jnp.tile(jnp.arange(seeds), size))))
            for i, each in enumerate(some):
                own = {name: x[i * seeds : (i + 1) * seeds] for name, x in arrays.items()}
                found[each] = _probed(own, int(each.factors.shared)) | {"episodes": np.asarray(episodes)}
                _write(folder / each.file, found[each])
    progress(len(wanted), len(wanted), "all conditions")
    return {each: found[each] for each in wanted}


def program(cfg: Config, episodes: int, runs: int) -> Callable[[tuple[Factors, jax.Array]], dict[str, jax.Array]]:
    """The compiled function of (factors, seed), both with leaves [runs], that trains and measures so many agents."""
    env = Distractor()

    def one(item: tuple[Factors, jax.Array]) -> dict[str, jax.Array]:
        factors, seed = item
        found, curves = train(cfg, factors, env, points=POINTS, every=episodes // POINTS, key=jax.random.key(seed))
        return curves | {f"final/{name}": x for name, x in found.items()}

    return jax.jit(devices.apart(one, devices.sharing(runs)))


def _probed(arrays: dict[str, np.ndarray], shared: int) -> dict[str, np.ndarray]:
    """Puts in place of what was seen, by seed: how well a linear probe finds each dimension of the observation in
    every part of both codes (`ops.align.ridge_r2`), and the largest angle in radians between what the codes span."""
    obs = arrays.pop("final/obs")
    codes = {side: arrays.pop(f"final/code_{side}") for side in ("model", "policy")}
    fine = np.all([np.isfinite(x).all((1, 2)) & (np.abs(x) < 1e15).all((1, 2)) for x in (obs, *codes.values())], 0)
    parts = {f"{side}_shared": code[..., :shared] for side, code in codes.items()}
    parts |= {f"{side}_private": code[..., shared:] for side, code in codes.items()}
    for name, part in parts.items():
        r2 = np.full((len(obs), obs.shape[-1]), np.nan)
        for s in np.flatnonzero(fine) if part.shape[-1] else ():
            r2[s] = align.ridge_r2(part[s], obs[s])
        arrays[f"final/r2_{name}"] = r2
    angle = np.full(len(obs), np.nan)
    for s in np.flatnonzero(fine & (np.ptp(codes["model"], 1).max(-1) > 0) & (np.ptp(codes["policy"], 1).max(-1) > 0)):
        angle[s] = align.principal_angles(codes["model"][s], codes["policy"][s]).max()
    arrays["final/angle"] = angle
    return arrays


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    os.replace(partial, path)


def _read(path: Path, seeds: int, episodes: int) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        there = len(arrays["return"]), int(arrays["episodes"])
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path}: not a whole file of this study ({error}); delete it to run its condition again"
        ) from None
    if there != (seeds, episodes):
        raise ValueError(
            f"{path}: holds {there[0]} seeds of {there[1]} episodes, not {seeds} of {episodes}; "
            "give another --out, or the same --seeds and --episodes"
        )
    return arrays


def train(
    cfg: Config, factors: Factors, env: AbstractEnv, *, points: int, every: int, key: PRNGKeyArray
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Plays and learns from points * every episodes one after the other, and measures before, between and after; pure,
    to be vmapped over conditions and seeds, of which those with one key meet the same starts and the same noise.

    Returns:
        What `measure` found in the end; and curves. By measurement [points + 1]: 'return', 'promised', 'cosine',
        'cka', and 'error' at the first and the last depth [2, O]. By what came after it [points]: 'moved', how far
        all parameters went; 'overflown', whether a squared gradient did not fit into the optimiser's float32; and
        the last episode's losses and gradient norm.
    """
    init_key, train_key, measure_key = jax.random.split(key, 3)

    def episode(_: Any, carry: tuple[aligned.State, Any]) -> tuple[aligned.State, dict[str, Array]]:
        state = carry[0]
        act_key, learn_key = jax.random.split(jax.random.fold_in(train_key, state.episodes))
        acting = aligned.policy(cfg, factors, state)
        rows = collect.episode(env, acting, policy_version=state.episodes, key=act_key)
        return aligned.update(cfg, factors, state, rows, key=learn_key)

    def look(state: aligned.State) -> dict[str, Array]:
        return measure(cfg, factors, state, env, EPISODES, key=measure_key)

    def point(carry: tuple[aligned.State, Any], index: Array) -> tuple[tuple[aligned.State, Any], Any]:
        state, found = carry[0], look(carry[0])
        kept = {name: found[name] for name in ("return", "promised", "cosine", "cka")}
        kept["error"] = found["error"][jnp.array([0, -1])]
        before, losses = state.params, _like(lambda: episode(0, (state, None))[1])
        # The last turn only looks: one program for what is measured, which takes longest to compile.
        state, losses = jax.lax.fori_loop(0, jnp.where(index < points, every, 0), episode, (state, losses))
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, *eqx.filter((state.params, before), eqx.is_inexact_array)))
        overflown = jnp.stack([jnp.any(~jnp.isfinite(x)) for x in jax.tree.leaves(state.opt_state.nu)]).any()
        return (state, found), (kept, {"moved": moved, "overflown": overflown} | losses)

    state = aligned.init(cfg, env, key=init_key)
    begin = state, _like(lambda: look(state))
    (_, found), (seen, came) = jax.lax.scan(point, begin, jnp.arange(points + 1))
    return found, seen | jax.tree.map(lambda x: x[:-1], came)


def _like(function: Callable[[], Any]) -> Any:
    """Zeros of the shapes that a function returns."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function))


def measure(
    cfg: Config, factors: Factors, state: aligned.State, env: AbstractEnv, episodes: int, *, key: PRNGKeyArray
) -> dict[str, Array]:
    """Plays without noise, and asks the model what it makes of the same starts.

    Returns:
        return, return_error: of an episode, and its standard error.
        promised: the return of the policy's dreams from the same starts.
        error: [T, O], mean squared error of the observation by depth, with the real actions; error_reward: [T].
        obs, code_model, code_policy: [SEEN, ...], what was seen and what both encoders make of it; and of these,
        cosine: of the shared parts. cka: of the whole codes.
        jacobian_model, jacobian_policy: [O], `align.jacobian_share` of the encoders.
    """
    acting, model = aligned.policy(cfg, factors, state, greedy=True), state.params.model(cfg)
    play_key, dream_key, loop_key = jax.random.split(key, 3)
    play = lambda key: collect.episode(env, acting, policy_version=state.episodes, key=key)  # noqa: E731
    rows = jax.vmap(play)(jax.random.split(play_key, episodes))
    obs, reward = rows.time_step.obs["obs"], rows.time_step.reward[:, 1:]
    read = aligned.reader(cfg, factors, state.params)
    start = jax.tree.map(lambda x: x[:, 0], rows)
    latent = Latent(model.encoder(obs[:, 0]), model.policy_encoder(obs[:, 0]))
    dreamer = aligned.Dreamer(read, state.params.actor, factors.bounded, jnp.zeros(()))
    dream = imagine(
        model, dreamer, latent, start.time_step, reward.shape[1], depth=start.depth, policy_version=state.episodes,
        key=jax.random.split(dream_key, episodes),
    )[1]  # fmt: skip

    def loop(rows: Step) -> Outcome:
        first = jax.tree.map(lambda x: x[:1], rows.time_step)
        return open_loop(model, first.obs, rows.action[:-1], first.first, key=loop_key)[1]

    foreseen = jax.vmap(loop)(rows)
    returns = reward.sum(1)
    seen = obs.reshape(-1, obs.shape[-1])[:SEEN]
    codes = model.encoder(seen), state.params.encoder(seen)
    shared = [align.shared_part(code, factors.shared) for code in codes]
    assert isinstance(foreseen.obs, dict)
    return {
        "return": returns.mean(),
        "return_error": returns.std(ddof=1) / episodes**0.5,
        "promised": dream.time_step.reward[1:].sum(0).mean(),
        "error": jnp.mean((foreseen.obs["obs"] - obs[:, 1:]) ** 2, 0),
        "error_reward": jnp.mean((foreseen.reward - reward) ** 2, 0),
        "obs": seen,
        "code_model": codes[0],
        "code_policy": codes[1],
        "cosine": align.cosine(*shared).mean(),
        "cka": align.linear_cka(*codes),
        "jacobian_model": align.jacobian_share(model.encoder, seen),
        "jacobian_policy": align.jacobian_share(state.params.encoder, seen),
    }
