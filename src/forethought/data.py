"""Recorded experience as rows: episodes of Gymnasium environments, and Minari datasets. Depth 0, like what is
collected."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from forethought.envs import spaces
from forethought.types import Box, Spec, Step, TimeStep


def from_gymnasium(
    observation_space: Any, action_space: Any, episodes: Sequence[dict[str, Any]], *, name: str = "recorded"
) -> tuple[list[Step], Spec]:
    """Rows of episodes that were recorded in Gymnasium's terms.

    Args:
        observation_space, action_space: of the environment (gymnasium.spaces).
        episodes: each a dict of observations (T + 1 of them: a list, or arrays stacked by leaf of the space), actions
        [T],
            rewards [T], terminations [T] and truncations [T]. An episode that neither terminates nor is truncated is
            taken to be cut at its end.

    Returns:
        The episodes, and the spec of what they hold. Continuous actions are mapped to [-1, 1].

    Raises:
        ValueError: a space without counterpart, counts that do not fit together, or values that are not finite or
        outside
            of their space, naming episode and key.
    """
    leaves = spaces.leaves(observation_space)
    action, native = spaces.action_space(action_space)
    spec = Spec(name, {leaf.key: leaf.space for leaf in leaves}, action)
    del native
    return [_episode(i, episode, leaves, spec, action_space) for i, episode in enumerate(episodes)], spec


def from_minari(dataset: str | os.PathLike[str] | Any) -> tuple[list[Step], Spec]:
    """The episodes of a Minari dataset, in its order, and their spec.

    `dataset` is a minari.MinariDataset, the id of one on this machine, or its folder. Raises ImportError naming the
    extra to install, and ValueError where there is no such dataset."""
    try:
        import minari
    except ImportError as error:
        raise ImportError("Minari is not installed; pip install 'forethought[data]'") from error
    if isinstance(dataset, str | os.PathLike):
        path = os.fspath(dataset)
        try:
            dataset = (
                minari.MinariDataset(os.path.join(path, "data")) if os.path.isdir(path) else minari.load_dataset(path)
            )
        except (FileNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"{path}: is no Minari dataset on this machine ({error})") from error
    found = [
        {"observations": e.observations, "actions": e.actions, "rewards": e.rewards,
         "terminations": e.terminations, "truncations": e.truncations}
        for e in dataset.iterate_episodes()
    ]  # fmt: skip
    name = getattr(dataset.spec, "dataset_id", "minari")
    return from_gymnasium(dataset.observation_space, dataset.action_space, found, name=name)


def _episode(number: int, episode: dict[str, Any], leaves: Any, spec: Spec, action_space: Any) -> Step:
    where = f"{spec.name}: episode {number}"
    missing = {"observations", "actions", "rewards", "terminations", "truncations"} - episode.keys()
    if missing:
        raise ValueError(f"{where}: has no '{min(missing)}'")
    rewards = np.asarray(episode["rewards"], np.float32)
    steps = len(rewards)
    ended = np.asarray(episode["terminations"], bool)
    seen = list(_rows(episode["observations"], steps + 1, where))
    obs = {leaf.key: np.stack([leaf.read(row) for row in seen]) for leaf in leaves}
    actions = _actions(np.asarray(episode["actions"]), spec, action_space, where)
    if len(actions) != steps or len(ended) != steps:
        raise ValueError(f"{where}: {len(actions)} actions and {len(ended)} terminations for {steps} rewards")
    if not np.isfinite(rewards).all():
        raise ValueError(f"{where}: a reward is not finite")
    if ended[:-1].any():
        raise ValueError(f"{where}: goes on after a termination; cut it there")
    edge = np.arange(steps + 1)
    lead = lambda first, rest: np.concatenate([[first], rest]).astype(np.float32)  # noqa: E731
    void = np.zeros_like(actions[:1])
    step = TimeStep(
        obs=obs, reward=lead(0, rewards), discount=lead(1, np.where(ended, 0, 1)), first=edge == 0,
        last=edge == steps, duration=lead(0, np.ones(steps)), reward_delay=np.zeros(steps + 1, np.float32),
    )  # fmt: skip
    zeros = np.zeros(steps + 1, np.int32)
    return Step(step, np.concatenate([actions, void]), None, zeros, zeros)


def _rows(observations: Any, count: int, where: str) -> Iterator[Any]:
    """Native observations one by one, from a list of them or from arrays stacked by leaf."""
    if isinstance(observations, list):
        if len(observations) != count:
            raise ValueError(
                f"{where}: {len(observations)} observations for {count - 1} rewards; there must be {count}"
            )
        yield from observations
        return
    sizes = {len(x) for x in jax.tree.leaves(observations)}
    if sizes != {count}:
        raise ValueError(f"{where}: {min(sizes)} observations for {count - 1} rewards; there must be {count}")
    for t in range(count):
        yield jax.tree.map(lambda x, t=t: x[t], observations)


def _actions(native: np.ndarray, spec: Spec, action_space: Any, where: str) -> np.ndarray:
    """Recorded actions in the library's terms: the inverse of what an environment does with them."""
    space = spec.action
    if isinstance(space, Box):
        unit = (native.reshape(len(native), *space.shape) - space.native(np.zeros(space.shape))) / _half(space)
        if not np.isfinite(unit).all() or (space.bounded and np.abs(unit).max() > 1 + 1e-4):
            raise ValueError(f"{where}: an action is not finite or outside of {action_space}")
        return (np.clip(unit, -1, 1) if space.bounded else unit).astype(np.float32)
    if native.ndim == 1:
        whole = native.astype(np.int64) - getattr(action_space, "start", 0)
    else:
        parts = np.asarray(getattr(action_space, "nvec", np.full(native.shape[1:], 2))).ravel()
        whole = np.ravel_multi_index(
            tuple((native - getattr(action_space, "start", 0)).reshape(len(native), -1).T), tuple(parts)
        )
    if ((whole < 0) | (whole >= space.n)).any():
        raise ValueError(f"{where}: an action is outside of {action_space}")
    return whole.astype(np.int32)


def _half(space: Box) -> np.ndarray:
    one = np.ones(space.shape)
    return np.asarray(space.native(one)) - np.asarray(space.native(0 * one))
