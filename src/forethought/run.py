"""A run is a directory: training that is logged, checkpointed, and resumed by the same call.

DIR/config.json       every field, versions, git sha, the environment's spec
DIR/metrics.jsonl     a line per chunk of training; the same in DIR/tensorboard
DIR/checkpoints/      see `checkpoint`; DIR/replay/ holds the replay's segments
DIR/evaluation.json   episodes of the final policy beside zero and random actions, and the model's error by depth
DIR/report.html       all of it on one page
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree
from rich.console import Console

from forethought import checkpoint, report
from forethought._version import __version__
from forethought.audit import evaluation
from forethought.envs import make
from forethought.envs.hosted import Hosted
from forethought.imagine import open_loop
from forethought.logs import Display, MetricsLog
from forethought.loop import CHUNK, Chunk, HostLoop, PureLoop
from forethought.protocols import AbstractEnv, AbstractPolicy, AbstractWorldModel
from forethought.types import Decision, Outcome, PerStep, Spec, TimeStep, describe, spec_from

ALGORITHMS = {"dreamer": "forethought.algos.dreamer"}
LIBRARIES = ("jax", "jaxlib", "equinox", "optax", "numpy", "gymnasium", "dm_control", "mujoco")
SCHEMA = 1


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
    action_repeat: int = 1
    """Simulator steps per decision."""
    processes: int = 0
    """Worker processes of a host environment; 0: none."""
    checkpoint_every: int = 5000
    """Simulator steps between checkpoints."""
    eval_episodes: int = 20
    """Greedy episodes at the end."""
    eval_env: str | None = None
    """Where they are played; None: in the same environment."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm is '{self.algorithm}'; there are: {', '.join(ALGORITHMS)}")
        for name in ("steps", "action_repeat", "checkpoint_every", "eval_episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.seed < 0 or self.processes < 0:
            raise ValueError(f"seed is {self.seed} and processes {self.processes}; neither may be negative")

    def config(self) -> Any:
        """The algorithm's Config: the preset's fields, then `fields`."""
        module = learner(self.algorithm)
        if self.preset not in module.PRESETS:
            raise ValueError(f"preset is '{self.preset}'; {self.algorithm} has: {', '.join(module.PRESETS)}")
        known = {field.name for field in dataclasses.fields(module.Config)}
        if unknown := [name for name in self.fields if name not in known]:
            raise ValueError(f"{self.algorithm} has no field '{unknown[0]}'; it has: {', '.join(sorted(known))}")
        return module.Config(**(module.PRESETS[self.preset] | self.fields))


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a call of `train` ended."""

    directory: Path
    steps: int
    stopped_by: int | None
    """The signal that stopped it before its last step; the same call goes on."""


class Agent(AbstractPolicy):
    """A trained agent: its policy, the world model it learned, and where it came from.

    `carry, decision = agent(carry, time_step, key=key)` acts, from `agent.initial()` on.
    """

    policy: AbstractPolicy
    model: AbstractWorldModel
    spec: Spec = eqx.field(static=True)
    step: int = eqx.field(static=True)
    """Simulator steps behind the checkpoint."""

    def initial(self) -> PyTree:
        return self.policy.initial()

    def __call__(self, carry: PyTree, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[PyTree, Decision]:
        return self.policy(carry, time_step, key=key)


def train(
    settings: Settings,
    directory: str | os.PathLike[str],
    *,
    override: Sequence[str] = (),
    console: Console | None = None,
) -> Finished:
    """Trains into `directory`, going on from its newest checkpoint if it has one; ends with evaluation and report.

    SIGINT and SIGTERM finish the chunk under way, write a checkpoint and return.

    Args:
        override: names of settings or fields that may differ from what the run began with; they are recorded.
        console: where progress is shown; None: nowhere.

    Raises:
        ValueError: a setting that cannot be, or differs from the run's without an override.
        CheckpointError, OSError: nothing more can be written; the last checkpoint is good.
        EnvironmentFault, FloatingPointError: something was not finite; the last checkpoint is good.
    """
    root, console = Path(directory), console or Console(quiet=True)
    cfg = settings.config()
    env = _make(settings, num=cfg.envs, seed=settings.seed)
    try:
        _write_config(root, settings, cfg, env.spec, override)
        rule = PerStep(cfg.gamma, env.spec.unit)
        kind = PureLoop if isinstance(env, AbstractEnv) else HostLoop
        loop = kind(learner(settings.algorithm), cfg, env, rule, seed=settings.seed)
        console.print(_replay_line(loop), highlight=False, soft_wrap=True)
        seconds = _resume(root, loop, console)
        with _signals() as stopped:
            steps = _train(root, settings, loop, console, seconds, stopped)
    finally:
        if not isinstance(env, AbstractEnv):
            env.close()
    if stopped:
        console.print(f"{root}: stopped at step {steps:,} with a checkpoint; the same command goes on", soft_wrap=True)
        return Finished(root, steps, stopped[0])
    if not _evaluated(root, steps):
        evaluate(root, episodes=settings.eval_episodes, env=settings.eval_env, console=console)
    report.write(root)
    return Finished(root, steps, None)


def load(directory: str | os.PathLike[str], *, greedy: bool = True) -> Agent:
    """Loads the agent of a run's newest good checkpoint. Raises ValueError or CheckpointError, in one line."""
    settings, spec = read_config(directory)
    found = checkpoint.latest(directory)
    if found is None:
        raise ValueError(f"{directory}: has no checkpoint yet")
    module, cfg = learner(settings.algorithm), settings.config()
    template = eqx.filter_jit(lambda key: module.init(cfg, spec, key=key))(jax.random.key(0))
    arrays, static = eqx.partition(template, eqx.is_array)
    state = eqx.combine(checkpoint.load(found, arrays, part="agent"), static)
    return Agent(module.policy(cfg, state, greedy=greedy), state.params.model, spec, found.step)


def rollout(
    model: AbstractWorldModel, obs: dict[str, Array], actions: Array, *, key: PRNGKeyArray | None = None
) -> Outcome:
    """Imagines what follows a context of real observations under given actions.

    Args:
        model: such as `load(DIR).model`.
        obs: dict of [C, ...], the observations so far, beginning with an episode's first.
        actions: [C - 1 + H, ...]: those taken between them, then those to be imagined.
        key: of the model's randomness; None: key 0.

    Returns:
        Outcomes [H]: predicted observations, reward, discount, duration.
    """
    obs = {name: np.asarray(x) for name, x in obs.items()}
    context = len(next(iter(obs.values())))
    if len(actions) < context:
        raise ValueError(f"rollout: {context} observations need at least {context} actions, got {len(actions)}")
    first = np.arange(context) == 0
    key = jax.random.key(0) if key is None else key
    return _rollout(model, obs, np.asarray(actions), first, key)


_rollout = eqx.filter_jit(lambda model, obs, action, first, key: open_loop(model, obs, action, first, key=key)[1])


def evaluate(
    directory: str | os.PathLike[str],
    *,
    episodes: int,
    env: str | None = None,
    greedy: bool = True,
    seed: int = 1_000_000,
    console: Console | None = None,
) -> dict[str, Any]:
    """Plays the newest checkpoint's policy beside zero and random actions, measures its model, and writes
    evaluation.json; returns its content. Training never uses `seed` and the seeds after it."""
    root, console = Path(directory), console or Console(quiet=True)
    settings, _ = read_config(root)
    agent = load(root, greedy=greedy)
    name = env or settings.env
    with console.status(f"evaluating {episodes} episodes of {name}"):
        result = evaluation.evaluate(
            agent, agent.model, lambda num: _host(settings, name, num), episodes, seed=seed,
            drawn=_make(settings, num=1, seed=0) if settings.env.startswith("jax/") else None,
        )  # fmt: skip
    result |= {"step": agent.step, "rule": "greedy" if greedy else "sampled", "env": name, "seeds": [seed]}
    _write_json(root / "evaluation.json", result)
    return result


def read_config(directory: str | os.PathLike[str]) -> tuple[Settings, Spec]:
    """The settings of a run and the spec of its environment. Raises ValueError where there is no run."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory}: is not a run (it has no config.json); name the folder that was given as --out")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in dataclasses.fields(Settings)]
        return Settings(**{name: config[name] for name in names}), spec_from(config["spec"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is not a run's config ({type(error).__name__}: {error})") from error


def _train(
    root: Path, settings: Settings, loop: PureLoop | HostLoop, console: Console, seconds: float, stopped: list[int]
) -> int:
    """Advances to the last step; returns the simulator steps taken in all."""
    cfg, repeat = loop.cfg, settings.action_repeat
    per_iteration = cfg.ticks * cfg.envs
    steps = saved = int(loop.tally.decisions) * repeat
    log = MetricsLog(root, steps)
    phases = {"train": 0.0, "checkpoint": 0.0}
    begin = time.monotonic()
    try:
        with Display(console, f"{settings.algorithm} on {settings.env}", settings.steps) as display:
            while not stopped:
                left = (settings.steps - int(loop.tally.decisions) * repeat) // (per_iteration * repeat)
                if left < 1:
                    break
                started, before = time.monotonic(), steps
                chunk = loop.advance(min(left, max(1, min(CHUNK, 512 // per_iteration))))
                now = time.monotonic()
                phases["train"] += now - started
                steps = int(loop.tally.decisions) * repeat
                metrics = _metrics(cfg, loop, chunk, repeat) | {
                    "time/steps_per_second": (steps - before) / (now - started),
                    "time/wall_seconds": seconds + now - begin,
                    **{f"time/seconds/{name}": value for name, value in phases.items()},
                }
                log.write(steps, metrics)
                display.show(steps, metrics)
                if steps - saved >= settings.checkpoint_every:
                    saved = steps
                    _save(root, steps, loop, seconds + time.monotonic() - begin)
                    phases["checkpoint"] += time.monotonic() - now
        if steps > saved:
            _save(root, steps, loop, seconds + time.monotonic() - begin)
    finally:
        log.close()
    return steps


def _metrics(cfg: Any, loop: PureLoop | HostLoop, chunk: Chunk, repeat: int) -> dict[str, float]:
    """A line of metrics.jsonl but for the times."""
    metrics = dict(chunk.metrics)
    if chunk.episodes:
        returns, lengths = np.array(chunk.episodes).T
        metrics |= {"real/episode_return": returns.mean(), "real/episode_length": lengths.mean() * repeat}
    updates = int(loop.agent.updates)
    metrics |= {
        "real/steps": int(loop.tally.decisions),
        "real/rows_replayed": updates * cfg.batch * cfg.length,
        "imagined/steps": updates * cfg.batch * cfg.starts * cfg.horizon,
        "update/count": updates,
    }
    return metrics


def _save(root: Path, step: int, loop: PureLoop | HostLoop, seconds: float) -> None:
    state, replay, files = loop.save()
    checkpoint.save(root, step, state, replay=replay, files=files, meta={"seconds": seconds})


def _resume(root: Path, loop: PureLoop | HostLoop, console: Console) -> float:
    """Restores the newest good checkpoint, if there is one; returns the seconds spent before it."""
    found = checkpoint.latest(root)
    checkpoint.rewind(root, found)
    if found is None:
        return 0.0
    for line in found.broken:
        console.print(f"passed over a broken checkpoint: {line}", highlight=False, soft_wrap=True)
    state, replay = loop.like()
    files = {name: found.file(name) for name in found.manifest["files"] if name != checkpoint.STATE}
    loop.restore(checkpoint.load(found, state), checkpoint.load_replay(found, replay), files)
    console.print(f"{root}: going on from step {found.step:,}", highlight=False, soft_wrap=True)
    return found.meta["seconds"]


def _evaluated(root: Path, steps: int) -> bool:
    path = root / "evaluation.json"
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("step") == steps


def _make(settings: Settings, *, num: int, seed: int) -> Any:
    host = {} if settings.env.startswith("jax/") else dict(action_repeat=settings.action_repeat)
    if not host and settings.action_repeat != 1:
        raise ValueError(f"{settings.env}: action_repeat is {settings.action_repeat}, but a pure environment takes 1")
    return make(settings.env, num=num, seed=seed, processes=settings.processes, **host)


def _host(settings: Settings, name: str, num: int) -> Any:
    """An environment to evaluate in; a pure one is put behind the host's interface."""
    env = _make(dataclasses.replace(settings, env=name, processes=0), num=num, seed=0)
    return Hosted(env, num, key=jax.random.key(0)) if isinstance(env, AbstractEnv) else env


def _write_config(root: Path, settings: Settings, cfg: Any, spec: Spec, override: Sequence[str]) -> None:
    """Writes config.json, or compares it with the one that is there and refuses what changed without an override."""
    path = root / "config.json"
    asked = dataclasses.asdict(settings) | {"fields": dataclasses.asdict(cfg)}
    config = asked | {
        "spec": describe(spec),
        "metrics": {name: list(entry) for name, entry in learner(settings.algorithm).METRICS.items()},
        "versions": _versions(),
        "git": _git(),
        "schema": SCHEMA,
        "overrides": [],
    }
    if path.is_file():
        old = json.loads(path.read_text(encoding="utf-8"))
        flat = lambda c: {k: v for k, v in c.items() if k in asked and k != "fields"} | c["fields"]  # noqa: E731
        was, new = flat(old), flat(json.loads(json.dumps(asked)))
        changed = {name: [was.get(name), new[name]] for name in new if was.get(name) != new[name]}
        for name, (before, after) in changed.items():
            if name not in override:
                raise ValueError(
                    f"{root}: this run began with {name} {before!r}, not {after!r}; "
                    f"give {name} {before!r}, or --override {name} to change it, or another --out"
                )
        if not changed and old["versions"] == config["versions"]:
            return
        entry = {"changed": changed, "versions": config["versions"], "git": config["git"]}
        config = old | asked | {"overrides": [*old["overrides"], entry]}
    root.mkdir(parents=True, exist_ok=True)
    _write_json(path, config)


def _versions() -> dict[str, str]:
    found = {"forethought": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git() -> str | None:
    """The commit of the source tree that this package runs from, with '+' if it was changed; None elsewhere."""
    call = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        done = subprocess.run(call, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _replay_line(loop: PureLoop | HostLoop) -> str:
    data = loop.ring.data if isinstance(loop, PureLoop) else loop.replay.data
    size = sum(x.nbytes for x in jax.tree.leaves(data))
    streams, capacity = jax.tree.leaves(data)[0].shape[:2]
    return f"replay: {streams} streams x {capacity:,} rows, {size / 2**20:,.1f} MiB in memory"


def _write_json(path: Path, content: Any) -> None:
    """Writes beside the old file, then renames."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(beside, path)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in the list it yields; a second SIGINT interrupts at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
