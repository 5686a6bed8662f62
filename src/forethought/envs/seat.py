"""A seat: one environment with its seeds, its action repeat and what it takes to restore it.

The seed of an episode is a function of (run's seed, environment, episode), so a stream depends on nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from forethought.envs.single import AbstractSingle, EnvironmentFault, float32
from forethought.types import Spec

T = TypeVar("T")
UNITS = ("decision", "simulator step")


class Row(NamedTuple):
    """One environment's part of a batched time step."""

    obs: dict[str, np.ndarray]
    reward: float
    discount: float
    first: bool
    last: bool
    duration: float


@dataclasses.dataclass(frozen=True)
class Rules:
    """How decisions become simulator steps."""

    action_repeat: int = 1
    """Simulator steps per decision; rewards add up, and the repeat stops where the episode ends."""
    unit: str = "decision"
    """What `duration` counts: 'decision' (1 each) or 'simulator step' (those really taken)."""
    time_limit: int | None = None
    """Decisions after which an episode is truncated, besides the environment's own limit."""

    def __post_init__(self):
        if self.action_repeat < 1:
            raise ValueError(f"action_repeat: {self.action_repeat} is not a number of steps; give 1 or more")
        if self.unit not in UNITS:
            raise ValueError(f"unit: '{self.unit}' is not counted by host environments; give one of {UNITS}")
        if self.time_limit is not None and self.time_limit < 1:
            raise ValueError(f"time_limit: {self.time_limit} is not a number of decisions; give 1 or more")

    def spec(self, single: Spec) -> Spec:
        """The Spec of the environment under these rules."""
        own = None if single.time_limit is None else -(-single.time_limit // self.action_repeat)
        limit = self.time_limit or own
        if own is not None and limit is not None and limit > own:
            raise ValueError(
                f"time_limit: {limit} decisions, but {single.name} itself ends after {own}; give {own} or fewer"
            )
        duration = 1.0 if self.unit == "decision" else float(self.action_repeat)
        return dataclasses.replace(single, unit=self.unit, duration=duration, time_limit=limit)


def episode_seed(seed: int, environment: int, episode: int) -> int:
    """The seed (31 bits) of one episode of one environment in a run."""
    return int(np.random.SeedSequence((seed, environment, episode)).generate_state(1)[0] >> 1)


class Seat:
    """Runs one environment: resets it with the next episode's seed, repeats actions, remembers the actions."""

    def __init__(self, single: AbstractSingle, index: int, seed: int, rules: Rules):
        self.single, self.index, self.seed, self.rules = single, index, seed, rules
        self.spec = rules.spec(single.spec)
        self.episode = -1
        self.decisions = 0
        self.log: list[np.ndarray] = []
        self.row: Row | None = None

    def reset(self, seed: int | None) -> Row:
        """Begins the next episode; with a seed, the first episode of that seed's stream."""
        if seed is not None:
            self.seed, self.episode = seed, -1
        self.episode += 1
        return self._begin()

    def step(self, action: np.ndarray) -> Row:
        """Takes one decision; the caller keeps ended environments out."""
        return self._guarded(self._step, action)

    def state(self) -> dict[str, np.ndarray]:
        """What `restore` needs, as named arrays."""
        assert self.row is not None
        scalars = {"seed": self.seed, "episode": self.episode, "decisions": self.decisions}
        arrays = {name: np.asarray(value, np.int64) for name, value in scalars.items()}
        arrays |= {f"row/{name}": np.asarray(value) for name, value in self.row._asdict().items() if name != "obs"}
        arrays |= {f"obs/{key}": value for key, value in self.row.obs.items()}
        if self.single.copyable:
            return arrays | {f"state/{name}": value for name, value in self.single.state().items()}
        action = self.spec.action
        return arrays | {"actions": np.asarray(self.log, action.dtype).reshape(-1, *action.shape)}

    def restore(self, arrays: dict[str, np.ndarray]) -> Row:
        """Goes back to where `state` was called: by copy, or by replaying the episode's actions.

        A replay that ends on another row than the saved one is a fault: the environment is not a function of its
        seed and actions.
        """
        self.seed, self.episode = int(arrays["seed"]), int(arrays["episode"])
        obs = {key: arrays[f"obs/{key}"] for key in self.spec.obs}
        saved = Row(obs, *(arrays[f"row/{name}"].item() for name in Row._fields[1:]))
        if self.single.copyable:
            state = {name.removeprefix("state/"): value for name, value in arrays.items() if name.startswith("state/")}
            self._guarded(self.single.restore, state)
            self.row = saved
        else:
            self._begin()
            actions = arrays["actions"]
            for n in range(len(actions)):
                self.step(actions[n, ...])
            if not same(saved, self.row):
                self._fault(
                    "not reproducible", "the same seed and actions led to another row, so it cannot be restored"
                )
        self.decisions = int(arrays["decisions"])
        return saved

    def sketch(self) -> np.ndarray | None:
        return self.single.sketch()

    def close(self) -> None:
        self.single.close()

    def _begin(self) -> Row:
        self.decisions, self.log = 0, []
        frame = self._guarded(self.single.reset, episode_seed(self.seed, self.index, self.episode))
        self.row = Row(frame.obs, 0.0, 1.0, first=True, last=False, duration=0.0)
        return self.row

    def _step(self, action: np.ndarray) -> Row:
        if not self.single.copyable:
            self.log.append(np.array(action, self.spec.action.dtype))
        self.decisions += 1
        frame = self.single.step(action)
        reward, steps = frame.reward, 1
        while steps < self.rules.action_repeat and not (frame.terminated or frame.truncated):
            frame = self.single.step(action)
            reward, steps = reward + frame.reward, steps + 1
        late = self.rules.time_limit is not None and self.decisions >= self.rules.time_limit
        self.row = Row(
            frame.obs,
            float(float32("reward", np.asarray(reward))),
            0.0 if frame.terminated else 1.0,
            first=False,
            last=frame.terminated or frame.truncated or late,
            duration=1.0 if self.rules.unit == "decision" else float(steps),
        )
        return self.row

    def _guarded(self, call: Callable[[Any], T], argument: Any) -> T:
        try:
            return call(argument)
        except EnvironmentFault as fault:
            self._fault(fault.kind, fault.message, fault)
        except Exception as error:
            self._fault("raised", f"raised {type(error).__name__}: {error}", error)

    def _fault(self, kind: str, what: str, cause: Exception | None = None) -> NoReturn:
        where = f"environment {self.index}, episode {self.episode}, step {self.decisions}"
        raise EnvironmentFault(kind, f"{self.spec.name}: {where}: {what}") from cause


def same(a: Row | None, b: Row | None) -> bool:
    """Whether two rows are equal bit for bit."""
    if a is None or b is None or a[1:] != b[1:] or a.obs.keys() != b.obs.keys():
        return False
    return all(a.obs[key].tobytes() == b.obs[key].tobytes() for key in a.obs)
