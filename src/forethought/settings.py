"""What a run is asked to do, and config.json, which holds it so that the same call can go on."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forethought._version import __version__
from forethought.types import Spec, describe, spec_from

ALGORITHMS = {"dreamer": "forethought.algos.dreamer", "director": "forethought.algos.director"}
LIBRARIES = ("jax", "jaxlib", "equinox", "optax", "numpy", "gymnasium", "dm_control", "mujoco")
SCHEMA = 1

METRICS: dict[str, tuple[str, str]] = {
    "real/episode_return": ("reward", "mean undiscounted return of training episodes that ended since the last line"),
    "real/episode_length": ("simulator steps", "mean length of those episodes"),
    "real/steps": ("decisions", "actions taken in the environment, the random prefill included"),
    "real/rows_replayed": ("rows", "rows of replay trained on so far, with repetition"),
    "imagined/steps": ("steps", "steps imagined for training so far"),
    "update/count": ("updates", "updates made so far"),
    "time/steps_per_second": ("simulator steps/s", "speed since the last line, learning included"),
    "time/wall_seconds": ("s", "wall time of training so far"),
}
"""What every run logs, as unit and meaning; an algorithm adds its own METRICS."""


def learner(algorithm: str) -> Any:
    """The module of an algorithm."""
    return importlib.import_module(ALGORITHMS[algorithm])


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run is asked to do; the algorithm's own fields are in `fields`."""

    algorithm: str
    env: str
    steps: int
    """Simulator steps in all: decisions times action repeat, the random prefill included."""
    seed: int = 0
    preset: str = "cpu"
    processes: int = 0
    """Worker processes of a host environment; 0: none."""
    devices: int = 0
    """Devices that share each batch; 0: all there are, as far as they divide it."""
    checkpoint_every: int = 5000
    """Simulator steps between checkpoints."""
    eval_episodes: int = 20
    """Greedy episodes at the end."""
    eval_env: str | None = None
    """Where they are played; None: in the same environment."""
    audit_episodes: int = 16
    """Episodes of each policy with which the model is audited at the end; 0: it is not."""
    snapshots: int = 4
    """Agents of earlier steps that are kept, evenly spaced, for audits that look back; 0: none."""
    env_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What is handed to whatever makes the environment."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types({field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, Settings)
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm is '{self.algorithm}'; there are: {', '.join(ALGORITHMS)}")
        for name in ("steps", "checkpoint_every", "eval_episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("seed", "processes", "devices", "audit_episodes", "snapshots"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.audit_episodes == 1:
            raise ValueError("audit_episodes is 1; an interval needs at least 2, and 0 leaves the audit out")
        if self.seed >= 2**32:  # JAX would take it modulo 2^32 and run another seed
            raise ValueError(f"seed is {self.seed}; it must be below 2^32")

    def config(self) -> Any:
        """The algorithm's Config: the preset's fields, then `fields`."""
        module = learner(self.algorithm)
        if self.preset not in module.PRESETS:
            raise ValueError(f"preset is '{self.preset}'; {self.algorithm} has: {', '.join(module.PRESETS)}")
        known = {field.name for field in dataclasses.fields(module.Config)}
        if unknown := [name for name in self.fields if name not in known]:
            raise ValueError(f"{self.algorithm} has no field '{unknown[0]}'; it has: {', '.join(sorted(known))}")
        _check_types(self.fields, module.Config)
        return module.Config(**(module.PRESETS[self.preset] | self.fields))


def read(directory: str | os.PathLike[str]) -> tuple[Settings, Spec]:
    """The settings of a run and the spec of its environment. Raises ValueError where there is no run."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory}: is not a run (it has no config.json); name the folder that was given as --out")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in dataclasses.fields(Settings)]
        # A setting that the run's version did not know has its default.
        return Settings(**{name: config[name] for name in names if name in config}), spec_from(config["spec"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is not a run's config ({type(error).__name__}: {error})") from error


def agreed(root: Path, settings: Settings, spec: Spec, override: Sequence[str]) -> dict[str, Any] | None:
    """What to write to config.json; None: it says so already. Refuses what differs from it without an override."""
    path = root / "config.json"
    asked = dataclasses.asdict(settings) | {"fields": dataclasses.asdict(settings.config())}
    new = _flat(json.loads(json.dumps(asked)))
    if unknown := [name for name in override if name not in new]:
        raise ValueError(f"override: there is no setting or field '{unknown[0]}'; there are: {', '.join(sorted(new))}")
    config = asked | {
        "spec": describe(spec),
        "metrics": {name: list(entry) for name, entry in (METRICS | learner(settings.algorithm).METRICS).items()},
        "versions": versions(),
        "git": git_commit(),
        "schema": SCHEMA,
        "overrides": [],
    }
    if not path.is_file():
        if taken := [name for name in ("metrics.jsonl", "checkpoints", "replay") if (root / name).exists()]:
            raise ValueError(f"{root}: holds '{taken[0]}' but no config.json, so it is not a run; give another --out")
        return config
    was = _flat(dataclasses.asdict(read(root)[0]))
    changed = {name: [was.get(name), new[name]] for name in new if was.get(name) != new[name]}
    for name, (before, after) in changed.items():
        if name not in override:
            raise ValueError(
                f"{root}: this run began with {name} {before!r}, not {after!r}; "
                f"give {name} {before!r}, or --override {name} to change it, or another --out"
            )
    old = json.loads(path.read_text(encoding="utf-8"))
    latest = (old["overrides"] or [old])[-1]["versions"]
    if not changed and latest == config["versions"]:
        return None
    entry = {"changed": changed, "versions": config["versions"], "git": config["git"]}
    began = {name: old[name] for name in ("versions", "git", "schema")}
    return config | began | {"overrides": [*old["overrides"], entry]}


def _flat(asked: dict[str, Any]) -> dict[str, Any]:
    """Settings and the algorithm's fields side by side; no two have one name."""
    return {name: value for name, value in asked.items() if name != "fields"} | asked["fields"]


def _check_types(values: dict[str, Any], cls: type) -> None:
    """Raises ValueError for a value that its dataclass does not declare so; an int may stand for a float."""
    hints = typing.get_type_hints(cls)
    for name, value in values.items():
        choices, kind = typing.get_args(hints[name]), typing.get_origin(hints[name])
        if kind is typing.Literal:
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}")
            continue
        hint = dict if kind is dict else hints[name]
        fits = isinstance(value, float | int if hint is float else hint)
        if not fits or (isinstance(value, bool) and hint is not bool):
            raise ValueError(f"{name} is {value!r}; it must be of type {getattr(hint, '__name__', hint)}")


def versions() -> dict[str, str]:
    """The versions of what a run depends on, where installed."""
    found = {"forethought": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the source tree that this package runs from, with '+' if it was changed; None elsewhere."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        # An installed package may lie inside somebody else's repository, which does not track it.
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        call = [*git, "describe", "--always", "--abbrev=40", "--dirty=+"]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
