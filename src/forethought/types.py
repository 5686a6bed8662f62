"""The nouns: time steps, rows of data, what an environment declares, and the rules that discount."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Int, PyTree

if TYPE_CHECKING:
    Array = Any  # the same fields hold JAX arrays on the device and NumPy's on the host
else:
    Array = jax.Array | np.ndarray


class TimeStep(eqx.Module):
    """What an environment says at one moment.

    One time step has scalar fields; collected or batched ones share leading axes (`*batch`).

    Time: `obs` is at t; `reward`, `discount`, `duration` and `reward_delay` are the consequence of the
    action at t - 1 and void (0, 1, 0, 0) on a first time step.
    """

    obs: PyTree[Array]
    """A dict of arrays, one per key of `Spec.obs`."""
    reward: Float[Array, "*batch"]
    discount: Float[Array, "*batch"]
    """0.0 only on true termination; 1.0 otherwise, -1.0 where the other player moves next."""
    first: Bool[Array, "*batch"]
    last: Bool[Array, "*batch"]
    """The episode ended here for any reason; truncated = last and discount != 0."""
    duration: Float[Array, "*batch"]
    """Primitive time that passed since the previous time step, in `Spec.unit`."""
    reward_delay: Float[Array, "*batch"]
    """When, after the action, the reward came, in `Spec.unit`; 0.0 is the discrete convention."""
    legal: Bool[Array, "*batch choices"] | None = None
    """Mask over discrete actions; None: all are legal."""


class Decision(eqx.Module):
    """What a policy did at one time step."""

    action: PyTree[Array]
    """An array, as environments take; a tree where a model's actions say more (models/goals.py)."""
    log_prob: Float[Array, "*batch"] | None
    """Log-density of the behaviour policy; None for planners, the same for a whole run."""
    extras: PyTree = None
    """What the algorithm declares (search targets, raw samples, latents)."""


class EndReason(enum.IntEnum):
    """Why an option, a goal or a skill of the lower level is over."""

    RUNNING = 0
    STOPPED = 1
    """It drew its own stop (beta)."""
    GOAL = 2
    """What it was to reach is reached."""
    INTERRUPTED = 3
    """The level above prefers another one here."""
    LIMIT = 4
    """It ran as long as it may."""
    EPISODE = 5
    """The environment's episode ended, terminated or truncated."""
    FAILURE = 6
    """It cannot go on; what follows is the level above's affair."""


class Step(eqx.Module):
    """A row of data: a time step, what was done then, and where it comes from.

        row 0: obs0 first --a0--> row 1: obs1, reward1, ... --a1--> ... row T: obsT, last, void action

    Transitions are consecutive rows of one episode; a transition's depth is its later row's.
    """

    time_step: TimeStep
    action: PyTree[Array]
    """Void (zeros) where `time_step.last`."""
    log_prob: Float[Array, "*batch"] | None
    depth: Int[Array, "*batch"]
    """0 from a real environment, k >= 1 the k-th imagined step."""
    policy_version: Int[Array, "*batch"]
    """Number of updates behind the policy that acted, so that staleness is reported, not guessed."""
    extras: PyTree = None


class Outcome(eqx.Module):
    """What a world model predicts for one imagined step; fields as in `TimeStep`."""

    obs: PyTree[Array] | None
    """None where the model predicts no observations."""
    reward: Float[Array, "*batch"]
    discount: Float[Array, "*batch"]
    """Expected discount: the probability of going on, in [0, 1]."""
    duration: Float[Array, "*batch"]
    reward_delay: Float[Array, "*batch"]
    legal: Bool[Array, "*batch choices"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Arrays of one shape, with bounds per element.

    A continuous action is always in [-1, 1] where its bounds are finite: the environment maps it to
    [low, high] per dimension (`native`). An unbounded dimension is passed through.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: np.ndarray | float = -np.inf
    high: np.ndarray | float = np.inf

    # By value: what is compiled for a space serves every equal one.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        bounds = (np.broadcast_to(np.asarray(x, np.float64), self.shape).tobytes() for x in (self.low, self.high))
        return (self.shape, self.dtype, *bounds)

    @property
    def bounded(self) -> bool:
        return bool(np.all(np.isfinite(self.low)) and np.all(np.isfinite(self.high)))

    def void(self) -> np.ndarray:
        return np.zeros(self.shape, self.dtype)

    def rest(self) -> np.ndarray:
        """The action that the environment takes for 0 in every dimension, or for the bound nearest to it."""
        low, high = np.broadcast_to(self.low, self.shape), np.broadcast_to(self.high, self.shape)
        bounded = np.isfinite(low) & np.isfinite(high) & (high > low)
        low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
        return np.clip(-(high + low) / (high - low), -1.0, 1.0).astype(self.dtype)

    def native(self, action: Array) -> Array:
        """Maps an action in [-1, 1] to [low, high] per dimension; unbounded dimensions pass through."""
        low, high = np.broadcast_to(self.low, self.shape), np.broadcast_to(self.high, self.shape)
        bounded = np.isfinite(low) & np.isfinite(high)
        half = np.where(bounded, (np.where(bounded, high, 1) - np.where(bounded, low, -1)) / 2, 1)
        middle = np.where(bounded, (np.where(bounded, high, 0) + np.where(bounded, low, 0)) / 2, 0)
        return middle.astype(self.dtype) + half.astype(self.dtype) * action


@dataclasses.dataclass(frozen=True)
class Discrete:
    """Integers 0 .. n - 1, as int32 scalars."""

    n: int
    shape: tuple[int, ...] = ()
    dtype: str = "int32"

    def void(self) -> np.ndarray:
        return np.zeros(self.shape, self.dtype)

    def rest(self) -> np.ndarray:
        """Action 0, whatever it does."""
        return self.void()


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """A vector of integers, element i in 0 .. n[i] - 1; observations only."""

    n: tuple[int, ...]
    dtype: str = "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.n),)


Space = Box | Discrete | MultiDiscrete


@dataclasses.dataclass(frozen=True)
class Region:
    """Continuous actions with low <= action <= high in every element, both bounds included.

    Elements stand in C order and are what a policy gives, so in [-1, 1] where the space is bounded; an infinite bound
    leaves an element free. Bounds are compared in the dtype of the action.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Spec:
    """What an environment declares about itself."""

    name: str
    obs: dict[str, Space]
    action: Box | Discrete
    unit: str = "decision"
    """The unit of `duration` and `reward_delay`: 'decision', 'simulator step' or 'second'."""
    duration: float | None = 1.0
    """Duration of an ordinary decision in that unit; None: it varies."""
    time_limit: int | None = None
    """Decisions after which an episode is truncated, where known."""
    irreversible: tuple[int, ...] | tuple[Region, ...] = ()
    """The actions that cannot be undone: indices in ascending order, or regions. See `gate`."""

    def __post_init__(self) -> None:
        _check_irreversible(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return (self.name, *self.obs.items(), self.action, self.unit, self.duration, self.time_limit, self.irreversible)


def _check_irreversible(spec: Spec) -> None:
    """Raises ValueError for a declaration that no action could meet: it would guard nothing."""
    declared, action = spec.irreversible, spec.action
    if isinstance(action, Discrete):
        indices = [x for x in declared if type(x) is int and 0 <= x < action.n]
        if len(indices) < len(declared) or declared != tuple(sorted({*indices})):
            raise ValueError(
                f"{spec.name}: irreversible is {declared}; give indices in 0 .. {action.n - 1}, ascending, each once"
            )
        return
    size = int(np.prod(action.shape))
    bounded = np.broadcast_to(np.isfinite(action.low) & np.isfinite(action.high), action.shape).ravel()
    for region in declared:
        if not isinstance(region, Region) or not len(region.low) == len(region.high) == size:
            raise ValueError(f"{spec.name}: irreversible holds {region}; give a Region with {size} bounds on each side")
        if not all(low <= high for low, high in zip(region.low, region.high, strict=True)):
            raise ValueError(f"{spec.name}: irreversible holds {region}, in which no action lies")
        bounds = np.array([region.low, region.high])[:, bounded]
        if (np.isfinite(bounds) & (np.abs(bounds) > 1)).any():
            raise ValueError(f"{spec.name}: irreversible holds {region}; give its bounds as a policy acts, in [-1, 1]")


class PerStep(eqx.Module):
    """Discounts by gamma per unit of duration: the factor of a backup is discount * gamma^k."""

    gamma: float
    unit: str = eqx.field(static=True, default="decision")

    def __call__(self, time_step: TimeStep | Outcome) -> tuple[jax.Array, jax.Array]:
        """Returns the reward as valued at its action, and the factor of the bootstrap value."""
        reward = time_step.reward * self.gamma**time_step.reward_delay
        return reward, time_step.discount * self.gamma**time_step.duration


class PerTime(eqx.Module):
    """Discounts continuous time: the factor is discount * exp(-rate * dt) (Bradtke & Duff 1995).

    `PerTime.of(gamma0, dt0, unit)` is the rule with gamma0 per dt0: Gamma(dt) = gamma0^(dt / dt0).
    """

    rate: float
    unit: str = eqx.field(static=True, default="second")

    @classmethod
    def of(cls, gamma: float, per: float, unit: str = "second") -> PerTime:
        return cls(-float(np.log(gamma)) / per, unit)

    def __call__(self, time_step: TimeStep | Outcome) -> tuple[jax.Array, jax.Array]:
        """Returns the reward discounted at its own arrival time, and the factor of the bootstrap value."""
        reward = time_step.reward * jax.numpy.exp(-self.rate * time_step.reward_delay)
        return reward, time_step.discount * jax.numpy.exp(-self.rate * time_step.duration)

    def flow(self, per_unit: ArrayLike, duration: ArrayLike) -> jax.Array:
        """The reward with `reward_delay` 0 that equals a flow of `per_unit` a unit of time for `duration`: the integral
        of per_unit exp(-rate t), which is per_unit (1 - exp(-rate duration)) / rate."""
        x = jax.numpy.asarray(self.rate * duration)
        share = jax.numpy.where(x == 0, 1.0, -jax.numpy.expm1(-x) / jax.numpy.where(x == 0, 1.0, x))
        return jax.numpy.asarray(per_unit) * duration * share


Discount = PerStep | PerTime


def check_unit(rule: Discount, spec: Spec) -> None:
    """Raises ValueError unless the rule discounts in the unit that the environment declares."""
    if rule.unit != spec.unit:
        raise ValueError(
            f"{spec.name}: discount rule {type(rule).__name__} counts in '{rule.unit}' but the environment's "
            f"duration is in '{spec.unit}'; give the rule unit='{spec.unit}' and a rate that fits it"
        )


def describe(space: Spec | Space) -> dict[str, Any]:
    """The JSON form of a Spec or Space; `spec_from` is its inverse."""
    if isinstance(space, Spec):
        own = {f.name: getattr(space, f.name) for f in dataclasses.fields(space)}
        own["obs"] = {key: describe(value) for key, value in space.obs.items()}
        # Absent where nothing is declared, so that what was written before there were declarations still fits.
        if declared := own.pop("irreversible"):
            own["irreversible"] = [x if isinstance(x, int) else _texts(x) for x in declared]
        return {**own, "action": describe(space.action)}
    own = {"kind": type(space).__name__}
    if isinstance(space, Box):
        # As text, since JSON has no infinity.
        bounds = {name: getattr(space, name) for name in ("low", "high")}
        texts = {k: [str(x) for x in np.broadcast_to(v, space.shape).ravel()] for k, v in bounds.items()}
        return own | {"shape": list(space.shape), "dtype": space.dtype} | texts
    return own | {"n": list(space.n) if isinstance(space, MultiDiscrete) else space.n}


def spec_from(described: dict[str, Any]) -> Spec:
    """The Spec that `describe` described. Raises KeyError where a field is missing."""
    obs = {key: _space_from(value) for key, value in described["obs"].items()}
    given = {**described, "obs": obs, "action": _space_from(described["action"])}
    declared = [x if isinstance(x, int) else _region_from(x) for x in described.get("irreversible", ())]
    return Spec(**{**given, "irreversible": tuple(declared)})


def _texts(region: Region) -> dict[str, list[str]]:
    # As text, since JSON has no infinity.
    return {"low": [str(x) for x in region.low], "high": [str(x) for x in region.high]}


def _region_from(described: dict[str, list[str]]) -> Region:
    return Region(*(tuple(float(x) for x in described[name]) for name in ("low", "high")))


def _space_from(described: dict[str, Any]) -> Any:
    if described["kind"] == "Discrete":
        return Discrete(described["n"])
    if described["kind"] == "MultiDiscrete":
        return MultiDiscrete(tuple(described["n"]))
    shape, dtype = tuple(described["shape"]), described["dtype"]
    low, high = (np.array(described[k], np.float64).astype(dtype).reshape(shape) for k in ("low", "high"))
    return Box(shape, dtype, low, high)
