"""Gymnasium's environments, one at a time: by id, by instance or by a function that makes one."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import UnregisteredEnv
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

from forethought.envs.single import AbstractSingle, EnvironmentFault, Frame, scalar_reward
from forethought.envs.sketch import stick_figure
from forethought.envs.spaces import action_space, leaves
from forethought.types import Spec


class GymSingle(AbstractSingle):
    """A Gymnasium environment; a snapshot of it is its seed and its actions."""

    def __init__(self, env: gymnasium.Env):
        name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        try:
            self._leaves = leaves(env.observation_space)
            action, self._native_action = action_space(env.action_space)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        self._env = env
        declared = {leaf.key: leaf.native for leaf in self._leaves} | {"action": env.action_space}
        self.native = {key: " ".join(str(space).split()) for key, space in declared.items()}
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


def native(env: str | gymnasium.Env | Callable[..., Any], kwargs: dict[str, Any]) -> gymnasium.Env:
    """The Gymnasium environment of an id, of 'module:attribute', of an instance or of a function.

    Observations are checked here, key by key, so Gymnasium's own passive checker is left out. Raises ValueError where
    an id cannot be made or something else comes out, EnvironmentFault where the environment raises when it is made.
    """
    if isinstance(env, gymnasium.Env):
        return env
    name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    function = (named(env) if ":" in env else None) if isinstance(env, str) else env
    with making(name):
        made = function(**kwargs) if function else gymnasium.make(name, disable_env_checker=True, **kwargs)
    if not isinstance(made, gymnasium.Env):
        kind = type(made).__name__
        raise ValueError(f"env: '{name}' makes a {kind}; give a class or function that makes a gymnasium.Env")
    return made


@contextlib.contextmanager
def making(name: str) -> Iterator[None]:
    """Turns what an environment raises when it is made into one line: an EnvironmentFault, or a ValueError where
    Gymnasium refuses to make it or a package is missing."""
    try:
        yield
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"env: '{name}' cannot be made: {error}") from error
    except Exception as error:
        said = " ".join(str(error).split())
        raise EnvironmentFault("raised", f"{name}: making it raised {type(error).__name__}: {said}") from error


def named(name: str) -> Callable[..., Any] | None:
    """The class or function 'module:attribute'; None: the module has none, so the rest may be a Gymnasium id.

    Modules of the current directory are found too. Raises ValueError for a module that cannot be imported and for an
    attribute that makes nothing.
    """
    module, _, attribute = name.partition(":")
    here = [] if {"", os.getcwd()} & set(sys.path) else [os.getcwd()]
    sys.path[:0] = here
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"env: '{name}': the module '{module}' cannot be imported: {said}") from error
    finally:
        del sys.path[: len(here)]
    if found is not None and not callable(found):
        raise ValueError(f"env: '{name}' is a {type(found).__name__}; give a class or function that makes one")
    return found


def single(env: str | gymnasium.Env | Callable[..., Any], kwargs: dict[str, Any]) -> GymSingle:
    """One environment of ours over an id, an instance or a function."""
    return GymSingle(native(env, kwargs))


def apart(vector: VectorEnv) -> list[Callable[[], AbstractSingle]]:
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


def check_id(name: str, others: list[str]) -> None:
    """Raises ValueError, with the nearest of the known names, unless it is 'module:attribute' or Gymnasium's id."""
    module, _, rest = name.rpartition(":")
    if module and named(name) is not None:
        return
    try:
        gymnasium.spec(rest)  # given the whole name it would not import the module
    except UnregisteredEnv as error:
        known = {known.lower(): known for known in [*gymnasium.registry, *others]}
        if module:
            known |= {attribute.lower(): f"{module}:{attribute}" for attribute in vars(sys.modules[module])}
        near = [known[match] for match in difflib.get_close_matches(rest.lower(), known, n=3, cutoff=0.4)]
        raise ValueError(f"env: '{name}' is unknown; nearest: {', '.join(near) or 'none'}") from error
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"env: '{name}' cannot be made: {error}") from error
