"""Rollouts inside a world model: the only place where steps of depth 1 and more are made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key, PRNGKeyArray, PyTree

from forethought.ops import loops
from forethought.protocols import AbstractWorldModel, Actor, HeadedModel
from forethought.types import Outcome, Step, TimeStep


def imagine(
    model: AbstractWorldModel,
    actor: Actor,
    latent: PyTree,
    start: TimeStep,
    horizon: int,
    *,
    depth: Int[Array, " N"],
    policy_version: Int[Array, ""],
    key: Key[Array, " N"],
) -> tuple[PyTree, Step]:
    """Lets an actor act in a model for `horizon` steps, from N starts at once.

        row 0: start --a0--> row 1: imagined --a1--> ... row H: imagined, last, void action

    Time leads: under a vmap over starts the rows of a dream would lie apart in memory, and be copied.

    Args:
        latent: leaves [N, ...], the model's latents at the starts.
        start: the time steps [N] of row 0; their obs is dropped where the model predicts none.
        depth: of the starts: 0 for a row of real data, or that of the imagined row the rollout goes on from.
        policy_version: of the actor.
        key: [N], one per start.

    Returns:
        Latents [H + 1, N, ...] and rows [H + 1, N]. A start that had terminated (discount 0) gives its rollout no
        weight: `ops.returns.survival` over the rows' factors takes care of that.
    """

    def act(latent: Any, key: PRNGKeyArray) -> tuple[Any, Any]:
        actor_key, model_key = jax.random.split(key)
        decision = actor(latent, key=actor_key)
        if isinstance(model, HeadedModel):  # heads are computed for all rows at once, outside of the loop
            return model.advance(latent, decision.action, key=model_key), (decision, None)
        later, outcome = model.imagine(latent, decision.action, key=model_key)
        return later, (decision, outcome)

    def row(latent: Any, turn: tuple[Array, Key[Array, " N"]]) -> tuple[Any, Any]:
        h, keys = turn
        # Differentiated, a step is computed anew: to keep what lies between costs more memory than it saves work.
        go = lambda: jax.checkpoint(jax.vmap(act))(latent, keys)  # noqa: E731
        made = jax.eval_shape(go)[1]
        stay = lambda: (latent, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made))  # noqa: E731
        later, made = jax.lax.cond(h < horizon, go, stay)
        return later, (latent, *made)

    # The last row has a turn in which nothing is done: to join it to the others afterwards would copy them all.
    keys = jax.vmap(lambda key: jax.random.split(key, horizon + 1), out_axes=1)(key)
    latents, decisions, outcomes = jax.lax.scan(row, latent, (jnp.arange(horizon + 1), keys))[1]
    if isinstance(model, HeadedModel):
        outcomes = jax.tree.map(lambda x: x[1:], loops.in_chunks(jax.vmap(model.outcome), latents))
    else:
        outcomes = jax.tree.map(lambda x: x[:-1], outcomes)
    return latents, Step(
        time_step=_time_steps(start, outcomes, horizon),
        action=decisions.action,
        log_prob=decisions.log_prob,
        depth=depth + jnp.arange(horizon + 1)[:, None],
        policy_version=jnp.full((horizon + 1, *depth.shape), policy_version),
        extras=decisions.extras,
    )


def open_loop(
    model: AbstractWorldModel,
    obs: PyTree,
    action: Array,
    first: Bool[Array, " C"],
    *,
    key: PRNGKeyArray,
) -> tuple[PyTree, Outcome]:
    """Filters C real rows, then imagines the consequences of the actions that follow, seeing nothing more.

    Args:
        obs: dict of [C, ...], the context.
        action: [C - 1 + H, ...]; entry t was done at row t, so entry C - 1 leads to the first imagined row.
        first: [C]; normally set at entry 0 only.

    Returns:
        Latents [C + H], filtered then imagined, and the outcomes [H] of the imagined part.
    """
    context = first.shape[0]
    filter_key, imagine_key = jax.random.split(key)
    before = jax.tree.map(lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), x[: context - 1]]), action)

    def observe(latent: Any, row: tuple[Any, ...]) -> tuple[Any, Any]:
        action, obs, first, key = row
        latent = model.observe(latent, action, obs, first, key=key)
        return latent, latent

    def advance(latent: Any, row: tuple[Any, ...]) -> tuple[Any, Any]:
        latent, outcome = model.imagine(latent, row[0], key=row[1])
        return latent, (latent, outcome)

    rows = (before, obs, first, jax.random.split(filter_key, context))
    latent, filtered = jax.lax.scan(observe, model.initial(), rows)
    ahead = jax.tree.map(lambda x: x[context - 1 :], action)
    length = jax.tree.leaves(ahead)[0].shape[0]
    imagined, outcomes = jax.lax.scan(advance, latent, (ahead, jax.random.split(imagine_key, length)))[1]
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), filtered, imagined), outcomes


def _time_steps(start: TimeStep, outcomes: Outcome, horizon: int) -> TimeStep:
    """Row 0 as it was and the outcomes as rows 1 .. H, the last of which ends the dream by truncation."""

    def join(name: str) -> Any:
        ahead, now = getattr(outcomes, name), getattr(start, name)
        if ahead is None:  # the model predicts no such field, so row 0 drops it too
            return None
        return jax.tree.map(lambda x, xs: jnp.concatenate([jnp.asarray(x)[None].astype(xs.dtype), xs]), now, ahead)

    fields = ("obs", "reward", "discount", "duration", "reward_delay", "legal")
    places = jnp.broadcast_to(jnp.arange(horizon + 1)[:, None], (horizon + 1, *start.first.shape))
    return TimeStep(**{name: join(name) for name in fields}, first=(places == 0) & start.first, last=places == horizon)
