"""Looks an environment over before anyone trains on it: what becomes of each key, and what is wrong."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console, ConsoleOptions, Group
from rich.table import Table
from rich.text import Text

from forethought.envs import gym, made_pure, make, names
from forethought.envs.host import HostBatch
from forethought.envs.hosted import Hosted
from forethought.envs.probe import Probe
from forethought.envs.single import EnvironmentFault
from forethought.protocols import HostEnv
from forethought.types import Box, Discrete, Space, Spec, TimeStep

EPISODES = 3
"""Episodes that should end before their endings are judged."""
CAP = 5
"""How many times the decisions asked for may be taken to see them end."""


@dataclasses.dataclass(frozen=True)
class KeyRow:
    """What becomes of one observation key, or of the action."""

    key: str
    native: str
    ours: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong (an error) or looks wrong (a warning)."""

    kind: str
    severity: str
    message: str


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The result of `check`; prints as tables with rich, and `as_dict` is JSON."""

    name: str
    unit: str
    time_limit: int | None
    rows: tuple[KeyRow, ...]
    findings: tuple[Finding, ...]
    steps: int
    """Decisions taken, over both runs."""
    episodes: int
    """Episodes that ended in the first run."""
    note: str | None = None
    """What the check could not see."""

    @property
    def ok(self) -> bool:
        """Whether no error was found; warnings are for a person to judge."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ok": self.ok}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Group]:
        # Text, not strings: keys and messages come from outside and may hold rich's markup.
        table = Table("key", "environment", "forethought", title=Text(self.name))
        for row in self.rows:
            table.add_row(Text(row.key), Text(row.native), Text(row.ours))
        limit = "none declared" if self.time_limit is None else f"{self.time_limit} decisions, a truncation"
        taken = f"{self.steps} decisions taken, {self.episodes} episodes ended"
        lines = [Text(f"duration in {self.unit}s; time limit: {limit}; {taken}")]
        for finding in self.findings:
            style = "red" if finding.severity == "error" else "yellow"
            lines.append(Text(f"{finding.severity}: {finding.kind}: {finding.message}", style=style))
        if self.note is not None:
            lines.append(Text(f"note: {self.note}"))
        yield Group(table, *lines, *([] if self.findings else [Text("nothing wrong found", style="green")]))


def check(
    env: Any,
    *,
    seed: int = 0,
    steps: int = 1000,
    action_repeat: int = 1,
    unit: str = "decision",
    time_limit: int | None = None,
    distract: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Runs one environment with random actions, twice with the same seed, and reports what it finds.

    Arguments as for `make`; each run takes `steps` decisions, the first as many more, up to `CAP` times `steps`, as
    `EPISODES` episodes take to end. Errors: values that are not finite, wrong shapes and
    dtypes, a reward that is no number, whatever the environment raises, two runs that differ under one seed, a seed
    without effect, termination at the declared time limit, arrays written to after they were returned, a space without
    counterpart. Warnings: observations outside their bounds, the longest episodes all terminating at one step.
    Raises ValueError where there is no such environment or a setting does not fit, EnvironmentFault where making it
    raises.
    """
    probe, pure = None, made_pure(env, kwargs)
    if pure is not None:
        env, kwargs = pure, {}
    elif not (isinstance(env, str) and env.startswith("dmc/")):
        if isinstance(env, str):
            gym.check_id(env, names())
        probe, kwargs = Probe(gym.native(env, kwargs)), {}
        try:
            gym.GymSingle(probe)
        except ValueError as error:
            return CheckReport(str(env), unit, None, (), (Finding("space", "error", str(error)),), 0, 0)
        env = probe
    settings: Any = dict(action_repeat=action_repeat, unit=unit, time_limit=time_limit, distract=distract)
    made = make(env, seed=seed, **settings, **kwargs)
    host = made if isinstance(made, HostBatch) else Hosted(made, 1, key=jax.random.key(seed))
    try:
        return _report(host, probe, seed, steps)
    finally:
        host.close()


def _report(host: HostBatch | Hosted, probe: Probe | None, seed: int, steps: int) -> CheckReport:
    findings: list[Finding] = []
    first, again = _run(host, seed, steps, findings, episodes=EPISODES), []
    if not findings:
        # What others draw from the global generators must not reach the environment.
        np.random.random()
        random.random()
        again = _run(host, seed, steps, findings)
    if not findings:
        findings += _differences(first, again) + _seed(host, seed, probe)
    findings += _bounds(host.spec, first) + _endings(host.spec, first)
    for key in sorted(probe.mutated) if probe else []:
        what = f"the array of observation '{key}' was written to after it was returned; return a copy"
        findings.append(Finding("mutation", "error", what))
    ended, taken = sum(bool(ts.last[0]) for ts in first), sum(not ts.first[0] for ts in first)
    few = f"episodes ended in {taken} decisions: {ended}; endings need {EPISODES} to be judged, so give more steps"
    return CheckReport(
        host.spec.name,
        host.spec.unit,
        host.spec.time_limit,
        tuple(_key_rows(host.spec, host.native if isinstance(host, HostBatch) else {})),
        tuple(findings),
        taken + sum(not ts.first[0] for ts in again),
        ended,
        few if ended < EPISODES else None,
    )


def _run(host: HostEnv, seed: int, steps: int, findings: list[Finding], episodes: int = 0) -> list[TimeStep]:
    """Time steps of `steps` decisions with actions of their own seed, or as far as the first fault.

    Goes on until `episodes` have ended, up to `CAP` times `steps`.
    """
    generator = np.random.default_rng(seed)
    time_steps: list[TimeStep] = []
    try:
        time_steps.append(host.reset(seed=seed))
        for taken in range(CAP * steps):
            if taken >= steps and episodes <= 0:
                break
            if time_steps[-1].last[0]:
                time_steps.append(host.reset())
            host.send(random_action(host.spec.action, generator)[None])
            time_steps.append(host.recv())
            episodes -= int(time_steps[-1].last[0])
    except EnvironmentFault as fault:
        findings.append(Finding(fault.kind, "error", fault.message))
    return time_steps


def random_action(space: Box | Discrete, generator: np.random.Generator) -> np.ndarray:
    """Uniform over what is allowed; standard normal, kept within a single bound, where a dimension is unbounded."""
    if isinstance(space, Discrete):
        return np.asarray(generator.integers(space.n), space.dtype)
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    free = np.clip(generator.standard_normal(space.shape), space.low, space.high)
    return np.where(bounded, generator.uniform(-1, 1, space.shape), free).astype(space.dtype)


def _differences(first: list[TimeStep], again: list[TimeStep]) -> list[Finding]:
    for number, (a, b) in enumerate(zip(first, again, strict=False)):
        for key, (x, y) in _parts(a, b).items():
            if not np.array_equal(x, y):
                what = f"row {number}: {key} is {_short(x)}, then {_short(y)} with the same seed and actions"
                return [Finding("non-determinism", "error", what)]
    return []


def _parts(a: TimeStep, b: TimeStep) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    pairs = {f"observation '{key}'": (np.asarray(a.obs[key]), np.asarray(b.obs[key])) for key in a.obs}
    fields = ("reward", "discount", "last", "duration")
    return pairs | {name: (np.asarray(getattr(a, name)), np.asarray(getattr(b, name))) for name in fields}


def _seed(host: HostEnv, seed: int, probe: Probe | None) -> list[Finding]:
    """Whether seeds lead to different starts, if starts differ at all."""
    starts = [host.reset(seed=s) for s in (seed, seed + 1, seed + 2)]
    if not all(_equal(starts[0], other) for other in starts[1:]):
        return []
    episodes = [host.reset() for _ in range(3)]
    if all(_equal(starts[0], episode) for episode in episodes) and not (probe is not None and probe.varies_unseeded()):
        return []  # this reset is deterministic
    return [Finding("seed", "error", "resets differ, but not with the seed: every seed begins the same way")]


def _equal(a: TimeStep, b: TimeStep) -> bool:
    return all(np.array_equal(x, y) for x, y in _parts(a, b).values())


def _bounds(spec: Spec, time_steps: list[TimeStep]) -> list[Finding]:
    found = []
    for key, space in spec.obs.items():
        if not isinstance(space, Box) or not time_steps:
            continue
        values = np.stack([np.asarray(ts.obs[key][0]) for ts in time_steps])
        outside = (values < space.low) | (values > space.high)
        if outside.any():
            what = (
                f"observation '{key}' is {values[outside][0]}, outside its bounds ({int(outside.sum())} values in all)"
            )
            found.append(Finding("bounds", "warning", what))
    return found


def _endings(spec: Spec, time_steps: list[TimeStep]) -> list[Finding]:
    """Terminations that look like a time limit: at the declared one, or piled up at the longest episode's end."""
    terminated, truncated, length = Counter(), Counter(), 0
    for ts in time_steps:
        length = 0 if ts.first[0] else length + 1
        if ts.last[0]:
            (terminated if ts.discount[0] == 0 else truncated)[length] += 1
    ended = terminated + truncated
    longest = spec.time_limit or max(ended, default=0)
    if truncated[longest] or not terminated[longest] or longest == 1:
        return []
    what = f"{terminated[longest]} of {ended.total()} episodes terminated at step {longest}"
    advice = "return terminated=False, truncated=True there"
    if longest == spec.time_limit:
        return [Finding("time limit", "error", f"{what}, the declared time limit, which is a truncation: {advice}")]
    # Lengths that end by chance thin out towards the longest; a limit piles them up there.
    if terminated[longest] < 2 or terminated[longest] <= ended[longest - 1]:
        return []
    return [Finding("time limit", "warning", f"{what}, the longest; if that is a time limit, {advice}")]


def _key_rows(spec: Spec, native: dict[str, str]) -> list[KeyRow]:
    rows = [KeyRow(key, native.get(key, "the same"), _space(space)) for key, space in spec.obs.items()]
    action = spec.action
    ours = _space(action)
    if isinstance(action, Box):
        low, high = np.broadcast_to(action.low, action.shape), np.broadcast_to(action.high, action.shape)
        bounded = np.isfinite(low) & np.isfinite(high)
        ranges = zip(low.flat, high.flat, bounded.flat, strict=True)
        maps = {f"[-1, 1] to [{a:g}, {b:g}]" if finite else "passed through" for a, b, finite in ranges}
        ours = f"{action.dtype}{list(action.shape)}; {', '.join(sorted(maps))}"
    return [*rows, KeyRow("action", native.get("action", "the same"), ours)]


def _space(space: Space) -> str:
    if isinstance(space, Box):
        low, high = np.min(space.low), np.max(space.high)
        return f"{space.dtype}{list(space.shape)} in [{low:g}, {high:g}]"
    return f"{space.dtype}{list(space.shape)}, {space.n} values"


def _short(value: np.ndarray) -> str:
    return np.array2string(np.asarray(value)[0], threshold=6, precision=6)
