"""A batch of environments on the host: the `HostEnv` over single environments of any make.

action = policy(ts); env.send(action, where=~ts.last); env.reset(where=ts.last); ...the device works...; ts = env.recv()
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from forethought.envs.seat import Row, Rules
from forethought.envs.single import EnvironmentFault as EnvironmentFault
from forethought.envs.workers import Maker, Seats, SeatsHere, SeatsInWorkers
from forethought.types import Box, Spec, TimeStep, describe

SNAPSHOT_FORMAT = 1


class HostBatch:
    """B single environments as one `HostEnv`; see `protocols.HostEnv` for what each method promises.

    `reset` returns with the rows of its own environments; steps that were started before it arrive with `recv`.
    After an `EnvironmentFault` the batch can only be reset as a whole, or closed.
    """

    spec: Spec
    num: int

    def __init__(self, makers: Sequence[Maker], *, seed: int = 0, rules: Rules | None = None, processes: int = 0):
        self.num = len(makers)
        if self.num < 1:
            raise ValueError("num: a batch needs at least one environment")
        if not 0 <= processes <= self.num:
            raise ValueError(f"processes: {processes} for {self.num} environments; give 0 (none) to {self.num}")
        if seed < 0:
            raise ValueError(f"seed: {seed} is negative; give 0 or more")
        rules = rules or Rules()
        self._seats: Seats = (
            SeatsInWorkers(makers, seed, rules, processes) if processes else SeatsHere(makers, seed, rules)
        )
        self.spec, self.native = self._seats.specs[0], self._seats.native
        if any(describe(spec) != describe(self.spec) for spec in self._seats.specs):
            self.close()
            raise ValueError(f"{self.spec.name}: the environments of a batch declare different spaces or limits")
        self._action_repeat = rules.action_repeat
        self._obs = {key: np.zeros((self.num, *space.shape), space.dtype) for key, space in self.spec.obs.items()}
        self._reward, self._duration = (np.zeros(self.num, np.float32) for _ in range(2))
        self._discount = np.ones(self.num, np.float32)
        self._first, self._last, self._ready, self._stepping = (np.zeros(self.num, bool) for _ in range(4))

    def reset(self, where: np.ndarray | None = None, *, seed: int | None = None) -> TimeStep:
        """Begins the next episode of the environments in `where` (bool [B]; None: all).

        With a seed, which needs where=None, every environment begins with its episode 0 of that seed.
        """
        mask = self._mask(where)
        if seed is not None and (where is not None or seed < 0):
            raise ValueError(f"seed: {seed} begins every stream anew; it needs where=None and must not be negative")
        if where is None:
            self._discard()
        if (mask & self._stepping).any():
            raise ValueError(f"{self.spec.name}: {self._named(mask & self._stepping)} is being stepped; recv first")
        self._ready &= ~mask
        self._write(self._seats.ask("reset", {int(i): (seed,) for i in np.flatnonzero(mask)}))
        return self._time_step()

    def send(self, action: np.ndarray, where: np.ndarray | None = None) -> None:
        """Starts the steps of the environments in `where`; other rows of `action` are void and not looked at.

        Raises ValueError for an ended environment and for an action outside the action space (nothing is clipped),
        EnvironmentFault for one that is not finite.
        """
        mask = self._mask(where)
        if self._stepping.any():
            raise ValueError(f"{self.spec.name}: send was called twice; recv comes in between")
        if (mask & ~self._ready).any():
            raise ValueError(f"{self.spec.name}: {self._named(mask & ~self._ready)} is at no step; reset it first")
        action = self._checked(np.asarray(action), mask)
        self._stepping = mask
        self._seats.start({int(i): action[i, ...] for i in np.flatnonzero(mask)})

    def recv(self) -> TimeStep:
        """Waits for the started steps and returns the whole batch's time step, in arrays of its own."""
        if self._stepping.any():
            # Until their rows are here, these environments are nowhere: a fault leaves them so.
            self._ready &= ~self._stepping
            self._stepping = np.zeros(self.num, bool)
            self._write(self._seats.finish())
        return self._time_step()

    def snapshot(self) -> bytes:
        """Seeds, episodes and states or action logs of all environments, as safetensors bytes.

        They can be restored in another process that makes the same batch. Raises ValueError between send and recv, and
        before the first reset.
        """
        if self._stepping.any() or not (self._ready | self._last).all():
            raise ValueError(f"{self.spec.name}: a snapshot is taken after recv, of environments that were all reset")
        states = self._seats.ask("state", {i: () for i in range(self.num)})
        arrays = {f"{i}/{name}": np.array(array, order="C") for i in states for name, array in states[i].items()}
        return save({"about": np.frombuffer(json.dumps(self._about()).encode(), np.uint8), **arrays})

    def restore(self, snapshot: bytes) -> TimeStep:
        """Goes back to where `snapshot` was taken, bit for bit, and returns the time step of that moment.

        Raises ValueError for a snapshot of another environment, and EnvironmentFault where replaying an episode's
        actions does not lead back to its row.
        """
        arrays = load(snapshot)
        if "about" not in arrays:
            raise ValueError(f"{self.spec.name}: these bytes are no snapshot of a HostBatch")
        about, own = json.loads(arrays.pop("about").tobytes()), self._about()
        for name in own:
            if about.get(name) != own[name]:
                raise ValueError(
                    f"{self.spec.name}: the snapshot's {name} is {about.get(name)}, this batch has {own[name]}"
                )
        self._discard()
        parts: dict[int, dict[str, np.ndarray]] = {i: {} for i in range(self.num)}
        for path, array in arrays.items():
            index, name = path.split("/", 1)
            parts[int(index)][name] = array
        self._ready[:] = False
        self._write(self._seats.ask("restore", {i: (part,) for i, part in parts.items()}))
        return self._time_step()

    def sketch(self, index: int = 0) -> np.ndarray | None:
        """Line segments [n, 5] (x0, y0, x1, y1, radius) that draw one environment's state; None where it has none."""
        return self._seats.ask("sketch", {index: ()})[index]

    def close(self) -> None:
        self._seats.close()

    def _about(self) -> dict[str, Any]:
        """What a snapshot and the batch that restores it must agree on."""
        own = {"format": SNAPSHOT_FORMAT, "num": self.num, "action_repeat": self._action_repeat}
        return own | json.loads(json.dumps(describe(self.spec)))

    def _discard(self) -> None:
        """Lets started steps end unseen."""
        if self._stepping.any():
            self._stepping = np.zeros(self.num, bool)
            self._seats.finish()

    def _write(self, rows: dict[int, Row]) -> None:
        for i, row in rows.items():
            for key, value in row.obs.items():
                self._obs[key][i] = value
            self._reward[i], self._discount[i], self._duration[i] = row.reward, row.discount, row.duration
            self._first[i], self._last[i], self._ready[i] = row.first, row.last, not row.last

    def _time_step(self) -> TimeStep:
        return TimeStep(
            obs={key: value.copy() for key, value in self._obs.items()},
            reward=self._reward.copy(),
            discount=self._discount.copy(),
            first=self._first.copy(),
            last=self._last.copy(),
            duration=self._duration.copy(),
            reward_delay=np.zeros(self.num, np.float32),
        )

    def _mask(self, where: np.ndarray | None) -> np.ndarray:
        mask = np.ones(self.num, bool) if where is None else np.asarray(where)
        if mask.shape != (self.num,) or mask.dtype != bool:
            raise ValueError(f"{self.spec.name}: where is {mask.dtype}{list(mask.shape)}; give bool[{self.num}]")
        return mask.copy()

    def _checked(self, action: np.ndarray, mask: np.ndarray) -> np.ndarray:
        space = self.spec.action
        kind, want = (np.floating, "floats") if isinstance(space, Box) else (np.integer, "integers")
        if action.shape != (self.num, *space.shape) or not np.issubdtype(action.dtype, kind):
            found = f"{action.dtype}{list(action.shape)}"
            raise ValueError(f"{self.spec.name}: action is {found}; give {want} of shape {[self.num, *space.shape]}")
        if isinstance(space, Box):
            bounded = np.isfinite(space.low) & np.isfinite(space.high)
            low, high = np.where(bounded, -1, space.low), np.where(bounded, 1, space.high)
            allowed = "[-1, 1]" if bounded.all() else "[-1, 1], or its own bounds where one is infinite"
            finite = np.isfinite(action).reshape(self.num, -1).all(1)
            if (mask & ~finite).any():
                raise EnvironmentFault(
                    "non-finite", f"{self.spec.name}: action of {self._named(mask & ~finite)} is not finite"
                )
        else:
            low, high, allowed = 0, space.n - 1, f"0 .. {space.n - 1}"
        inside = ((action >= low) & (action <= high)).reshape(self.num, -1).all(1)
        if (mask & ~inside).any():
            wrong = np.flatnonzero(mask & ~inside)[0]
            raise ValueError(f"{self.spec.name}: action {action[wrong]} of environment {wrong} is outside {allowed}")
        return action.astype(space.dtype)

    def _named(self, mask: np.ndarray) -> str:
        return f"environment {np.flatnonzero(mask)[0]}"
