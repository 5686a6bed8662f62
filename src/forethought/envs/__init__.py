"""Environments by name: pure ones in JAX, Gymnasium's, DMControl's, and one's own."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forethought.envs.distract import distract as distracted
from forethought.envs.host import EnvironmentFault as EnvironmentFault
from forethought.envs.host import HostBatch as HostBatch
from forethought.envs.pure import Repeated
from forethought.envs.seat import Rules
from forethought.envs.single import AbstractSingle
from forethought.envs.workers import Maker
from forethought.protocols import AbstractEnv

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

PURE = {
    "jax/action-obs-reward": ("tabular", "action_obs_reward"),
    "jax/action-reward": ("tabular", "action_reward"),
    "jax/balance": ("trial", "Balance"),
    "jax/cartpole-swingup": ("control", "CartPoleSwingUp"),
    "jax/constant-reward": ("tabular", "constant_reward"),
    "jax/corridor": ("tabular", "corridor"),
    "jax/delayed-reward": ("tabular", "delayed_reward"),
    "jax/distractor": ("distractor", "Distractor"),
    "jax/dyna-maze": ("mazes", "dyna_maze"),
    "jax/four-rooms": ("mazes", "four_rooms"),
    "jax/grid": ("trial", "Grid"),
    "jax/hover": ("trial", "Hover"),
    "jax/many-rooms": ("mazes", "many_rooms"),
    "jax/obs-reward": ("tabular", "obs_reward"),
    "jax/pendulum": ("control", "Pendulum"),
    "jax/truncated-reward": ("tabular", "truncated_reward"),
}
"""Names of the pure environments, and the module and class or function that makes each."""


def make(
    env: str | gymnasium.Env | VectorEnv | Callable[..., gymnasium.Env] | AbstractEnv,
    *,
    num: int = 1,
    seed: int = 0,
    processes: int = 0,
    action_repeat: int = 1,
    unit: str = "decision",
    time_limit: int | None = None,
    distract: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> AbstractEnv | HostBatch:
    """Makes an environment from a name, an instance or a function.

    `env` is 'jax/NAME' (a pure environment, see `PURE`), 'dmc/DOMAIN-TASK' (DMControl's suite), a Gymnasium id,
    'module:attribute' (a class or function of one's own that makes a pure environment or a gymnasium.Env), an
    AbstractEnv, a gymnasium.Env, a function that returns one, or a Sync- or AsyncVectorEnv, which is taken apart so
    that its auto-reset mode does not matter. `kwargs` go to whatever makes the environment.

    One decision takes `action_repeat` simulator steps and lasts 1 in the unit 'decision', or, in host environments,
    the steps really taken in the unit 'simulator step'. For host environments: `num` copies on `processes` worker
    processes (0: in this one); the seed of an episode is a function of (seed, environment, episode); `time_limit`
    truncates after that many decisions, and so it does in those pure ones, made by name, that have such a field.
    `distract` adds distractors, such as dict(kind="relevant", dims=8, dynamics="sine"); see `envs.distract`. A pure
    environment is returned unbatched, so `num`, `seed` and `processes` are the caller's affair.

    Raises, in one line, ValueError for an unknown name (with the nearest ones) or a setting that does not fit, and
    EnvironmentFault where the environment itself raises when it is made.
    """
    if isinstance(env, str) and env.startswith("jax/") and time_limit is not None:
        kwargs, time_limit = kwargs | {"time_limit": time_limit}, None
    rules = Rules(action_repeat, unit, time_limit)
    pure = made_pure(env, kwargs, distract)
    if pure is not None:
        if (rules.unit, rules.time_limit) != (Rules().unit, Rules().time_limit):
            raise ValueError("unit and time_limit are for host environments; a pure one has fields of its own")
        return pure if action_repeat == 1 else Repeated(pure, action_repeat)
    makers = _makers(env, num, processes, kwargs)
    if distract is not None:
        makers = [functools.partial(_distracted, maker, dict(distract)) for maker in makers]
    return HostBatch(makers, seed=seed, rules=rules, processes=processes)


def names() -> list[str]:
    """The names of the pure environments and, where it is installed, of DMControl's tasks."""
    from forethought.envs import dmc

    try:
        return [*PURE, *dmc.names()]
    except ImportError:
        return [*PURE]


def made_pure(env: Any, kwargs: dict[str, Any], distract: Mapping[str, Any] | None = None) -> AbstractEnv | None:
    """The pure environment that `env` is or names; None: it runs on the host. Raises as `make` does.

    `distract` may stand among `kwargs`, which `make` is given."""
    kwargs = dict(kwargs)
    distract = kwargs.pop("distract", distract)
    if distract is not None:
        pure = made_pure(env, kwargs)
        return pure if pure is None else distracted(pure, **distract)
    if not isinstance(env, str):
        return env if isinstance(env, AbstractEnv) else None
    import gymnasium

    from forethought.envs import gym

    if env.startswith("jax/"):
        if env not in PURE:
            nearest = difflib.get_close_matches(env, PURE, n=3, cutoff=0.3) or list(PURE)
            raise ValueError(f"env: '{env}' is unknown; nearest: {', '.join(nearest)}")
        module, attribute = PURE[env]
        function = getattr(importlib.import_module(f"forethought.envs.{module}"), attribute)
    else:
        function = gym.named(env) if ":" in env else None
    if function is None or (isinstance(function, type) and not issubclass(function, AbstractEnv)):
        return None
    with gym.making(env):
        made = function(**kwargs)
    if isinstance(made, AbstractEnv):
        return made
    # What a function makes shows only when it is called: a host environment is made again, where it will run.
    if isinstance(made, gymnasium.Env):
        made.close()
    return None


def _makers(env: Any, num: int, processes: int, kwargs: dict[str, Any]) -> Sequence[Maker]:
    from gymnasium import Env
    from gymnasium.vector import VectorEnv

    from forethought.envs import gym

    if isinstance(env, Env | VectorEnv):
        if num != 1 or processes or kwargs:
            kind = type(env).__name__
            raise ValueError(
                f"{kind}: an instance takes no num, processes or further settings; give an id or a function"
            )
        return [functools.partial(gym.single, env, kwargs)] if isinstance(env, Env) else gym.apart(env)
    if isinstance(env, str) and env.startswith("dmc/"):
        domain, _, task = env.removeprefix("dmc/").partition("-")
        return [functools.partial(_dmc, domain, task, kwargs)] * num
    if isinstance(env, str):
        gym.check_id(env, names())
    elif not callable(env):
        kind = type(env).__name__
        raise ValueError(f"env: a {kind} is no environment; give a name, a gymnasium.Env or a function that makes one")
    return [functools.partial(gym.single, env, kwargs)] * num


def _distracted(maker: Maker, settings: dict[str, Any]) -> AbstractSingle:
    return distracted(maker(), **settings)


def _dmc(domain: str, task: str, kwargs: dict[str, Any]) -> AbstractSingle:
    from forethought.envs import dmc, gym

    name = f"dmc/{domain}-{task}"
    with gym.making(name) if name in dmc.names() else contextlib.nullcontext():
        return dmc.DMCSingle(domain, task, kwargs)  # for an unknown task it raises the ValueError itself
