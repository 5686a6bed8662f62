"""The evaluation of a trained agent: its returns beside those of no policy, and an episode beside what is imagined of
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from forethought.auditing.depth import as_lists
from forethought.auditing.episodes import play, returns
from forethought.collect import RandomPolicy, ZeroPolicy
from forethought.envs.pure import SketchedEnv
from forethought.imagine import open_loop
from forethought.protocols import AbstractEnv, AbstractPolicy, AbstractWorldModel, HeadedModel, HostEnv
from forethought.types import Step

CONTEXT = 5
"""Real rows that the model sees before it imagines."""
HORIZON = 45
"""Imagined steps after the context."""

_roll = eqx.filter_jit(lambda model, obs, action, first, key: open_loop(model, obs, action, first, key=key))


def evaluate(
    policy: AbstractPolicy,
    model: AbstractWorldModel,
    env: Callable[[int], HostEnv],
    episodes: int,
    *,
    seed: int,
    drawn: AbstractEnv | None = None,
) -> dict[str, Any]:
    """Plays and measures; the result is JSON.

    Args:
        env: makes an environment of so many copies.
        episodes: for each of the three policies, on the same environment seeds.
        seed: of the environments and of everything random here.
        drawn: a pure environment whose `sketch` can draw observations, real and imagined, if there is one.

    Returns:
        returns {"agent", "zero action", "random"}, open_loop, episode and imagined_episode.
    """
    host: Any = env(min(episodes, 25))
    try:
        key = jax.random.key(seed)
        play_key, zero_key, random_key, model_key = jax.random.split(key, 4)
        sketches: list[np.ndarray | None] = []
        watch = lambda: sketches.append(host.sketch(0))  # noqa: E731
        agent = play(host, policy, episodes, seed=seed, key=play_key, watch=watch)
        zero = play(host, ZeroPolicy(host.spec.action), episodes, seed=seed, key=zero_key)
        random = play(host, RandomPolicy(host.spec.action), episodes, seed=seed, key=random_key)
    finally:
        host.close()
    table = {"agent": agent, "zero action": zero, "random": random}
    result: dict[str, Any] = {"returns": {name: returns(played).tolist() for name, played in table.items()}}
    shown, drawings = agent[0], sketches[: len(agent[0].depth)]
    sketch = as_lists(drawings) if all(x is not None for x in drawings) else _drawn(drawn, shown.time_step.obs)
    result["episode"] = {
        "obs": as_lists(shown.time_step.obs),
        "reward": as_lists(shown.time_step.reward),
        "action": as_lists(shown.action),
        "sketch": sketch,
    }
    if len(shown.depth) <= CONTEXT:
        return result | {"open_loop": None, "imagined_episode": None}
    return result | _open_loop(model, shown, drawn, key=model_key)


def _open_loop(model: AbstractWorldModel, episode: Step, drawn: Any, *, key: Any) -> dict[str, Any]:
    """The first rows of an episode, and what the model imagines of them after the context under the same actions."""
    step, action = jax.tree.map(lambda x: x[: CONTEXT + HORIZON], (episode.time_step, episode.action))
    context = jax.tree.map(lambda x: x[:CONTEXT], step)
    latents, outcome = _roll(model, context.obs, action[:-1], context.first, key)
    # What a model reconstructs of the context, where it can; else what was seen.
    filtered = jax.tree.map(lambda x: x[:CONTEXT], latents)
    seen = model.outcome(filtered) if isinstance(model, HeadedModel) else context

    def whole(seen: Any, imagined: Any) -> np.ndarray:
        return np.concatenate([seen, imagined])

    imagined = outcome.obs or {}
    predicted = {name: whole((seen.obs or {})[name], imagined[name]) for name in imagined}
    pair = lambda t, p: {"true": as_lists(t), "predicted": as_lists(p)}  # noqa: E731
    reward, discount = whole(seen.reward, outcome.reward), whole(seen.discount, outcome.discount)
    sketch = _drawn(drawn, predicted)
    return {
        "open_loop": {
            "context": CONTEXT,
            "horizon": len(reward) - CONTEXT,
            "keys": {name: pair(step.obs[name], predicted[name]) for name in predicted},
            "reward": pair(step.reward, reward),
            "discount": pair(step.discount, discount),
        },
        "imagined_episode": {"obs": as_lists(predicted), "reward": as_lists(reward), "sketch": sketch},
    }


def _drawn(env: Any, obs: dict[str, np.ndarray]) -> list[Any] | None:
    """Line segments for every row of observations, where a pure environment can draw them."""
    if not isinstance(env, SketchedEnv) or obs.keys() != env.spec.obs.keys():
        return None
    rows = len(next(iter(obs.values())))
    return [as_lists(env.sketch({name: x[t] for name, x in obs.items()})) for t in range(rows)]
