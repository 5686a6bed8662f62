"""Gymnasium's environments, one at a time: by id, by instance or by a function that makes one."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

from forethought.envs.single import AbstractSingle, EnvironmentFault, Frame, scalar_reward
from forethought.envs.sketch import stick_figure
from forethought.envs.spaces import action_space, leaves
from forethought.types import Spec


class GymSingle(AbstractSingle):
    """A Gymnasium environment; a snapshot of it is its seed and its actions."""

    def __init__(self, env: gymnasium.Env, name: str | None = None):
        name = name or (env.spec.id if env.spec is not None else type(env.unwrapped).__name__)
        try:
            self._leaves = leaves(env.observation_space)
            action, self._native_action = action_space(env.action_space)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        self._env = env
        self.native = {leaf.key: str(leaf.native) for leaf in self._leaves} | {"action": str(env.action_space)}
        self.spec = Spec(name, {leaf.key: leaf.space for leaf in self._leaves}, action, time_limit=time_limit(env))

    def reset(self, seed: int) -> Frame:
        answer = self._env.reset(seed=seed)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvironmentFault("value", "reset returned something else than (observation, info)")
        return Frame(self._read(answer[0]))

    def step(self, action: np.ndarray) -> Frame:
        answer = self._env.step(self._native_action(action))
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise EnvironmentFault(
                "value", "step returned something else than (obs, reward, terminated, truncated, info)"
            )
        obs, reward, terminated, truncated, _ = answer
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                raise EnvironmentFault("dtype", f"{name} is a {type(flag).__name__}, not a bool")
        return Frame(self._read(obs), scalar_reward(reward), bool(terminated), bool(truncated))

    def sketch(self) -> np.ndarray | None:
        model, data = (getattr(self._env.unwrapped, name, None) for name in ("model", "data"))
        if type(model).__name__ != "MjModel" or type(data).__name__ != "MjData":
            return None
        return stick_figure(model, data)

    def close(self) -> None:
        self._env.close()

    def _read(self, obs: Any) -> dict[str, np.ndarray]:
        return {leaf.key: leaf.read(obs) for leaf in self._leaves}


def time_limit(env: gymnasium.Env) -> int | None:
    """Steps after which the outermost of the environment's TimeLimit wrappers truncates; None: it has none."""
    limits = []
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            limits.append(env._max_episode_steps)  # Gymnasium has no public name for it
        env = env.env
    return min(limits, default=None)


def by_id(name: str, kwargs: dict[str, Any]) -> GymSingle:
    """Makes a registered environment; its observations are checked here, so not by Gymnasium's passive checker."""
    return GymSingle(gymnasium.make(name, disable_env_checker=True, **kwargs), name)


def by_function(function: Callable[..., gymnasium.Env], kwargs: dict[str, Any]) -> GymSingle:
    """Makes an environment with a function of one's own."""
    return GymSingle(function(**kwargs))


def apart(vector: VectorEnv) -> list[Callable[[], GymSingle]]:
    """The single environments of a vector environment, one maker each.

    Stepped one by one they give the same transitions whatever the auto-reset mode: a vector environment that resets by
    itself replaces final observations (SAME_STEP) or takes an ignored action (NEXT_STEP). Raises ValueError for one
    whose parts cannot be had.
    """
    if isinstance(vector, SyncVectorEnv):
        return [lambda env=env: GymSingle(env) for env in vector.envs]
    if isinstance(vector, AsyncVectorEnv):
        vector.close()  # its processes give way to ours
        return [lambda make=make: GymSingle(make()) for make in vector.env_fns]
    raise ValueError(
        f"{type(vector).__name__}: this vector environment cannot be taken apart into single ones; give the id "
        "or a function that makes a single environment, with num="
    )


def nearest(name: str, more: list[str]) -> list[str]:
    """The known names most like a wrong one."""
    known = {known.lower(): known for known in [*gymnasium.registry, *more]}
    return [known[match] for match in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)]
