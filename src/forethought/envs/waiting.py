"""Time that passes, made to matter where nothing discounts it: as a cost, or as a deadline.

    Cost       reward - rate * duration                        waiting is paid for
    Deadline   obs gets 'time_left'; at the limit the episode terminates, and what is earned later does not count

Both stand below options (`OptionEnv(waiting(env, Deadline(8.0, "second")), ...)`), so that the time inside an option
counts. A third way, a budget of expected time, is `ops.dynamic.constrained`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from safetensors.numpy import load, save

from forethought.protocols import AbstractEnv, HostEnv
from forethought.types import Box, Spec, TimeStep

KEY = "time_left"
SLACK = 1e-5
"""The share of a limit that sums of float32 durations may be off."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Time costs `rate` a unit. The cost falls due with the reward of its step, undiscounted within it."""

    rate: float
    unit: str

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)

    def spec(self, spec: Spec) -> Spec:
        """What the environment declares then. Raises ValueError for one that counts in another unit."""
        _check_unit(self, spec)
        return dataclasses.replace(spec, name=f"{spec.name} at {self.rate:g} per {self.unit}")

    def after(self, arrived: TimeStep, before: Any, xp: Any) -> tuple[TimeStep, Any]:
        """What an arrival `before` units into the episode is then, and the time that has passed by now."""
        paid = dataclasses.replace(arrived, reward=arrived.reward - xp.float32(self.rate) * arrived.duration)
        return paid, before + arrived.duration


@dataclasses.dataclass(frozen=True)
class Deadline:
    """An episode has so much time. At the deadline it terminates (discount 0, not a truncation).

    A reward counts if it arrives by then: after its `reward_delay`, or where that is 0 and says nothing, when its step
    is over. The step under way is cut there, so that an episode's durations never sum to more than the limit.
    """

    limit: float
    unit: str

    def __post_init__(self) -> None:
        _check_positive("limit", self.limit)

    def spec(self, spec: Spec) -> Spec:
        """What the environment declares then. Raises ValueError for one that counts in another unit, or has an
        observation of that name."""
        _check_unit(self, spec)
        if KEY in spec.obs:
            raise ValueError(f"{spec.name}: it has an observation '{KEY}' already")
        obs = spec.obs | {KEY: Box((), low=0.0, high=self.limit)}
        return dataclasses.replace(spec, name=f"{spec.name} within {self.limit:g} {self.unit}", obs=obs)

    def after(self, arrived: TimeStep, before: Any, xp: Any) -> tuple[TimeStep, Any]:
        """What an arrival `before` units into the episode is then, and the time that has passed by now."""
        limit, slack = xp.float32(self.limit), xp.float32(SLACK * self.limit)
        over = before + arrived.duration >= limit - slack
        arrival = before + xp.where(arrived.reward_delay > 0, arrived.reward_delay, arrived.duration)
        counts = (arrival <= limit + slack) | ~xp.isfinite(arrived.reward)  # a fault is seen, however late
        now = xp.where(over, limit, before + arrived.duration)
        cut = dataclasses.replace(
            arrived, obs={**arrived.obs, KEY: limit - now}, reward=xp.where(counts, arrived.reward, 0),
            discount=xp.where(over, 0, arrived.discount), last=arrived.last | over,
            duration=xp.minimum(arrived.duration, limit - before),
        )  # fmt: skip
        return cut, now


def _check_positive(name: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be finite and above 0")


def _check_unit(time: Cost | Deadline, spec: Spec) -> None:
    if time.unit != spec.unit:
        raise ValueError(
            f"{spec.name}: {time} counts in '{time.unit}' but the environment's duration is in '{spec.unit}'; "
            f"give unit='{spec.unit}' and a number that fits it"
        )


class WaitingState(eqx.Module):
    """The environment's state, and how long its episode has lasted."""

    env: PyTree
    elapsed: Float[Array, ""]


class WaitingEnv(AbstractEnv):
    """A pure environment in which time matters."""

    env: AbstractEnv
    time: Cost | Deadline = eqx.field(static=True)

    def __check_init__(self) -> None:
        self.time.spec(self.env.spec)

    @property
    def spec(self) -> Spec:
        return self.time.spec(self.env.spec)

    def reset(self, *, key: PRNGKeyArray) -> tuple[WaitingState, TimeStep]:
        state, first = self.env.reset(key=key)
        shown, elapsed = self.time.after(first, jnp.zeros(()), jnp)
        return WaitingState(state, elapsed), shown

    def step(self, state: WaitingState, action: Array, *, key: PRNGKeyArray) -> tuple[WaitingState, TimeStep]:
        inner, arrived = self.env.step(state.env, action, key=key)
        shown, elapsed = self.time.after(arrived, state.elapsed, jnp)
        return WaitingState(inner, elapsed), shown


class WaitingHost:
    """A batch on the host in which time matters; draws, seeds and snapshots are the environment's."""

    spec: Spec
    num: int

    def __init__(self, env: HostEnv, time: Cost | Deadline):
        self.env, self.time, self.num, self.spec = env, time, env.num, time.spec(env.spec)
        self._before = np.zeros(self.num, np.float32)
        """When, in its episode, each environment's latest step began."""
        self._elapsed = np.zeros(self.num, np.float32)
        self._sent = np.zeros(self.num, bool)
        self._shown: TimeStep | None = None

    def reset(self, where: np.ndarray | None = None, *, seed: int | None = None) -> TimeStep:
        begun = self.env.reset(where, seed=seed)
        mask = np.ones(self.num, bool) if where is None else where
        self._before = np.where(mask, np.float32(0), self._before)
        self._sent = self._sent & ~mask
        return self._take(begun, mask)

    def send(self, action: np.ndarray, where: np.ndarray | None = None) -> None:
        """Starts steps as the environment does. Raises ValueError for an episode that a deadline ended, too."""
        mask = np.ones(self.num, bool) if where is None else np.asarray(where, bool)
        if self._shown is not None and (ended := mask & self._shown.last).any():
            i = int(np.flatnonzero(ended)[0])
            raise ValueError(f"{self.spec.name}: environment {i} cannot be stepped: it ended; reset it first")
        self.env.send(action, where)
        self._before = np.where(mask, self._elapsed, self._before)
        self._sent = mask

    def recv(self) -> TimeStep:
        sent, self._sent = self._sent, np.zeros(self.num, bool)
        return self._take(self.env.recv(), sent)

    def snapshot(self) -> bytes | None:
        inner = self.env.snapshot()
        own = {"before": self._before, "name": np.frombuffer(self.spec.name.encode(), np.uint8)}
        return None if inner is None else save(own | {"env": np.frombuffer(inner, np.uint8)})

    def restore(self, snapshot: bytes) -> TimeStep:
        """Goes on where `snapshot` was taken; raises ValueError for one of another environment, limit or rate."""
        found = load(snapshot)
        name = found["name"].tobytes().decode() if found.keys() == {"env", "before", "name"} else "something else"
        if name != self.spec.name:
            raise ValueError(f"{self.spec.name}: the snapshot is of {name}")
        inner = self.env.restore(found["env"].tobytes())
        self._before, self._sent = found["before"], np.zeros(self.num, bool)
        return self._take(inner, np.ones(self.num, bool))

    def close(self) -> None:
        self.env.close()

    def _take(self, latest: TimeStep, mask: np.ndarray) -> TimeStep:
        """The batch as it is shown: rows where the mask holds are new, the others stay."""
        shown, elapsed = self.time.after(latest, self._before, np)
        pick = lambda new, old: np.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old).astype(new.dtype)  # noqa: E731
        self._elapsed = pick(elapsed, self._elapsed)
        shown = shown if self._shown is None else jax.tree.map(pick, shown, self._shown)
        self._shown = shown
        return shown


@overload
def waiting(env: AbstractEnv, time: Cost | Deadline) -> WaitingEnv: ...
@overload
def waiting(env: HostEnv, time: Cost | Deadline) -> WaitingHost: ...
def waiting(env: Any, time: Cost | Deadline) -> WaitingEnv | WaitingHost:
    """An environment, pure or a batch on the host, in which time costs something or runs out.

    With both, put the cost above the deadline: `waiting(waiting(env, Deadline(...)), Cost(...))` bills the time up to
    the deadline and not beyond. Raises ValueError for a rate or limit in another unit than the environment's.
    """
    if not isinstance(env, AbstractEnv | HostEnv):
        raise ValueError(f"env: a {type(env).__name__} is neither a pure nor a host environment; see forethought.make")
    return WaitingEnv(env, time) if isinstance(env, AbstractEnv) else WaitingHost(env, time)
