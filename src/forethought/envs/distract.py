"""Distractors: observation dimensions that are added to any environment, pure or host.

There are four kinds, by whether actions move them and whether the reward depends on them, and three dynamics:

    noise       x' = C a + e                                    nothing to be predicted but what actions do
    sine        x = sin(phase), phase' = phase + w + C a        easy to predict
    switching   x' = tanh(A_m x + b_m + C a) + 0.05 e           a nonlinear system that changes its mode m at times

with e ~ N(0, 1), a the action (one-hot where it is discrete), and everything else drawn once from a seed. C is 0 where
actions have no effect. The observation gets a key 'distractor', scale * x; if the reward depends on it, it gets
reward_scale * mean(x). One time step of a distractor is one step of the environment below, whatever is repeated above.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from forethought.envs.single import AbstractSingle, Frame
from forethought.protocols import AbstractEnv
from forethought.types import Box, Discrete, Spec, TimeStep

KEY = "distractor"
KINDS = {
    "irrelevant": (False, False),
    "controllable": (True, False),
    "relevant": (False, True),
    "controllable and relevant": (True, True),
}
"""Whether actions move the distractor, and whether the reward depends on it."""
DYNAMICS = ("noise", "sine", "switching")
MODES, SWITCH = 3, 0.05
"""Modes of 'switching', and the probability that a step draws a new one."""


@dataclasses.dataclass(frozen=True)
class Distractors:
    """What distractors are added; `state` is x or the phases [dims], and the mode."""

    kind: str = "irrelevant"
    dims: int = 8
    dynamics: str = "sine"
    scale: float = 1.0
    reward_scale: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"distract: kind is '{self.kind}'; it must be one of {', '.join(KINDS)}")
        if self.dynamics not in DYNAMICS:
            raise ValueError(f"distract: dynamics is '{self.dynamics}'; it must be one of {', '.join(DYNAMICS)}")
        if self.dims < 1 or not np.isfinite([self.scale, self.reward_scale]).all() or self.seed < 0:
            raise ValueError("distract: dims must be at least 1, scales finite and the seed not negative")

    def drawn(self, spec: Spec) -> dict[str, np.ndarray]:
        """The matrices of the dynamics, which the seed decides."""
        rng, dims = np.random.default_rng(self.seed), self.dims
        size = spec.action.n if isinstance(spec.action, Discrete) else int(np.prod(spec.action.shape))
        found = {
            "push": 0.5 * rng.standard_normal((dims, size)) / size**0.5 * KINDS[self.kind][0],
            "speed": rng.uniform(0.05, 0.5, dims),
            "matrix": 1.5 * rng.standard_normal((MODES, dims, dims)) / dims**0.5,
            "bias": 0.5 * rng.standard_normal((MODES, dims)),
        }
        return {name: x.astype(np.float32) for name, x in found.items()}

    def spec(self, spec: Spec) -> Spec:
        """The environment's spec with the new key. Raises ValueError where it has one of that name."""
        if KEY in spec.obs:
            raise ValueError(f"{spec.name}: it has an observation '{KEY}' already")
        limit = abs(self.scale) if self.dynamics == "sine" else np.inf
        obs = spec.obs | {KEY: Box((self.dims,), low=-limit, high=limit)}
        return dataclasses.replace(spec, name=f"{spec.name}+{self.dims} {self.kind} {self.dynamics}", obs=obs)

    def begin(self, normal: Any, coin: Any) -> tuple[Any, Any]:
        """The state at an episode's start, from dims normal draws and one uniform draw in [0, 1)."""
        return 2 * normal if self.dynamics == "sine" else normal, (coin * MODES).astype("int32")

    def advance(
        self, drawn: dict[str, Any], state: tuple[Any, Any], action: Any, normal: Any, coins: Any, xp: Any
    ) -> Any:
        """The next state, from dims normal draws and two uniform ones; `xp` is jax.numpy or numpy."""
        x, mode = state
        pushed = drawn["push"] @ action
        if self.dynamics == "noise":
            return normal + pushed, mode
        if self.dynamics == "sine":
            return x + drawn["speed"] + pushed, mode
        mode = xp.where(coins[0] < SWITCH, (coins[1] * MODES).astype("int32"), mode)
        return xp.tanh(drawn["matrix"][mode] @ x + drawn["bias"][mode] + pushed) + 0.05 * normal, mode

    def seen(self, state: tuple[Any, Any], xp: Any) -> tuple[Any, Any]:
        """What the observation gets, and what the reward gets."""
        x = xp.sin(state[0]) if self.dynamics == "sine" else state[0]
        return self.scale * x, (self.reward_scale * KINDS[self.kind][1]) * x.mean()


class DistractedState(eqx.Module):
    """The environment's state, and the distractor's."""

    env: PyTree
    x: Float[Array, " dims"]
    mode: Int[Array, ""]


class Distracted(AbstractEnv):
    """A pure environment with distractors."""

    env: AbstractEnv
    distractors: Distractors = eqx.field(static=True)

    @property
    def spec(self) -> Spec:
        return self.distractors.spec(self.env.spec)

    def reset(self, *, key: PRNGKeyArray) -> tuple[DistractedState, TimeStep]:
        env_key, normal_key, coin_key = jax.random.split(key, 3)
        state, time_step = self.env.reset(key=env_key)
        normal = jax.random.normal(normal_key, (self.distractors.dims,))
        x, mode = self.distractors.begin(normal, jax.random.uniform(coin_key))
        return DistractedState(state, x, mode), self._seen(time_step, (x, mode), 0.0)

    def step(self, state: DistractedState, action: Array, *, key: PRNGKeyArray) -> tuple[DistractedState, TimeStep]:
        env_key, normal_key, coin_key = jax.random.split(key, 3)
        inner, time_step = self.env.step(state.env, action, key=env_key)
        normal = jax.random.normal(normal_key, (self.distractors.dims,))
        space = self.env.spec.action
        flat = jax.nn.one_hot(action, space.n) if isinstance(space, Discrete) else action.reshape(-1)
        drawn = jax.tree.map(jnp.asarray, self.distractors.drawn(self.env.spec))
        coins = jax.random.uniform(coin_key, (2,))
        x, mode = self.distractors.advance(drawn, (state.x, state.mode), flat, normal, coins, jnp)
        return DistractedState(inner, x, mode), self._seen(time_step, (x, mode), 1.0)

    def _seen(self, time_step: TimeStep, state: tuple[Array, Array], earns: float) -> TimeStep:
        obs, reward = self.distractors.seen(state, jnp)
        return dataclasses.replace(time_step, obs={**time_step.obs, KEY: obs}, reward=time_step.reward + earns * reward)


class DistractedSingle(AbstractSingle):
    """A host environment with distractors; what they draw is a function of the episode's seed."""

    def __init__(self, env: AbstractSingle, distractors: Distractors):
        self.env, self.distractors = env, distractors
        self.spec, self.copyable = distractors.spec(env.spec), env.copyable
        self.native = env.native | {KEY: f"{distractors.dims} {distractors.kind} dimensions, {distractors.dynamics}"}
        self._drawn = distractors.drawn(env.spec)
        self._rng = np.random.Generator(np.random.Philox(0))
        self._state = distractors.begin(np.zeros(distractors.dims, np.float32), np.zeros(()))

    def reset(self, seed: int) -> Frame:
        self._rng = np.random.Generator(np.random.Philox(key=[seed, self.distractors.seed]))
        self._state = self.distractors.begin(self._normal(), np.asarray(self._rng.random()))
        return self._seen(self.env.reset(seed), 0.0)

    def step(self, action: np.ndarray) -> Frame:
        space = self.env.spec.action
        flat = np.eye(space.n, dtype=np.float32)[int(action)] if isinstance(space, Discrete) else action.reshape(-1)
        normal, coins = self._normal(), self._rng.random(2)
        self._state = self.distractors.advance(self._drawn, self._state, flat, normal, coins, np)
        return self._seen(self.env.step(action), 1.0)

    def state(self) -> dict[str, np.ndarray]:
        random = self._rng.bit_generator.state
        own = {
            "x": self._state[0],
            "mode": self._state[1],
            **{name: random["state"][name] for name in ("counter", "key")},
        }
        own |= {"buffer": random["buffer"], "at": np.asarray(random["buffer_pos"])}
        own |= {"has_half": np.asarray(random["has_uint32"]), "half": np.asarray(random["uinteger"], np.uint64)}
        inner = {f"env/{name}": array for name, array in self.env.state().items()}
        return inner | {f"{KEY}/{name}": np.asarray(array) for name, array in own.items()}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        own = {name.removeprefix(f"{KEY}/"): array for name, array in state.items() if name.startswith(f"{KEY}/")}
        self.env.restore({k.removeprefix("env/"): array for k, array in state.items() if k.startswith("env/")})
        self._state = own["x"], own["mode"]
        self._rng.bit_generator.state = {
            "bit_generator": "Philox", "state": {"counter": own["counter"], "key": own["key"]}, "buffer": own["buffer"],
            "buffer_pos": int(own["at"]), "has_uint32": int(own["has_half"]), "uinteger": int(own["half"]),
        }  # fmt: skip

    def sketch(self) -> np.ndarray | None:
        return self.env.sketch()

    def close(self) -> None:
        self.env.close()

    def _normal(self) -> np.ndarray:
        return self._rng.standard_normal(self.distractors.dims, np.float32)

    def _seen(self, frame: Frame, earns: float) -> Frame:
        obs, reward = self.distractors.seen(self._state, np)
        obs = {**frame.obs, KEY: obs.astype(np.float32)}
        return frame._replace(obs=obs, reward=frame.reward + earns * float(reward))


def distract(env: AbstractEnv | AbstractSingle, kind: str = "irrelevant", dims: int = 8, **settings: Any) -> Any:
    """Adds distractors to an environment; `settings` are the further fields of `Distractors`.

    For a name, a gymnasium.Env or a batch of host environments, give them to `make` as `distract=dict(kind=...)`.
    Raises ValueError for an unknown kind or setting."""
    names = [field.name for field in dataclasses.fields(Distractors)]
    unknown = settings.keys() - {*names}
    if unknown:
        raise ValueError(f"distract: '{min(unknown)}' is unknown; the settings are {', '.join(names)}")
    distractors = Distractors(kind, dims, **settings)
    if isinstance(env, AbstractSingle):
        return DistractedSingle(env, distractors)
    return Distracted(env, distractors)
