"""A run is a directory: training that is logged, checkpointed, and resumed by the same call.

DIR/config.json       every field, versions, git sha, the environment's spec
DIR/metrics.jsonl     a line per chunk of training; the same in DIR/tensorboard
DIR/checkpoints/      see `checkpoint`; DIR/replay/ holds the replay's segments
DIR/snapshots/        agents of earlier steps
DIR/evaluation.json   episodes of the final policy beside zero and random actions
DIR/audit.json        what the audit of the model found
DIR/report.html       all of it on one page
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from rich.console import Console

from forethought import agent as agents
from forethought import checkpoint, devices, report
from forethought.auditing import evaluation
from forethought.envs import made_pure
from forethought.examination import examine
from forethought.imagine import open_loop
from forethought.logs import Display, MetricsLog, errors_name
from forethought.loop import CHUNK, Chunk, HostLoop, PureLoop, prefill_ticks
from forethought.protocols import AbstractEnv, AbstractWorldModel
from forethought.settings import Settings, agreed, learner
from forethought.settings import read as read_settings
from forethought.types import Array, Outcome, PerStep


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a call of `train` ended."""

    directory: Path
    steps: int
    stopped_by: int | None
    """The signal that stopped it before its last step; the same call goes on."""


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
        CheckpointError, OSError: nothing more can be written.
        EnvironmentFault, FloatingPointError: something was not finite.
    Whatever is raised, the last checkpoint, if there is one, is good.
    """
    root, console = Path(directory), console or Console(quiet=True)
    cfg = settings.config()
    env = agents.environment(settings, num=cfg.envs, seed=settings.seed)
    try:
        _check_budget(settings, cfg)
        if settings.eval_env is not None:  # now, not after the training
            agents.check_fits(env.spec, settings, settings.eval_env)
        with _locked(root):
            config = agreed(root, settings, env.spec, override)
            rule = PerStep(cfg.gamma)  # per decision: an environment that counts otherwise is refused
            kind: Any = PureLoop if isinstance(env, AbstractEnv) else HostLoop
            num_devices = devices.sharing(cfg.batch, settings.devices)
            loop = kind(learner(settings.algorithm), cfg, env, rule, seed=settings.seed, num_devices=num_devices)
            console.print(_replay_line(loop), highlight=False, soft_wrap=True)
            seconds = _resume(root, loop, console)
            # Not before all of it fits what was asked for: settings that cannot run are not what the run began with.
            if config is not None:
                _write_json(root / "config.json", config)
            with _signals() as stopped:
                steps = _train(root, settings, loop, console, seconds, stopped)
            if stopped:
                console.print(f"{root}: stopped at step {steps:,}; the same command goes on", soft_wrap=True)
                return Finished(root, steps, stopped[0])
            try:
                if not _evaluated(root, steps):
                    evaluate(root, episodes=settings.eval_episodes, env=settings.eval_env, console=console)
                    if settings.audit_episodes:
                        with console.status("auditing the model") as status:
                            say = lambda what: status.update(f"auditing the model: {what}")  # noqa: E731
                            examine(root, episodes=settings.audit_episodes, progress=say)
            finally:  # a run that cannot be evaluated has its page too
                with errors_name(root / "report.html"):
                    report.write(root)
            return Finished(root, steps, None)
    finally:
        if not isinstance(env, AbstractEnv):
            env.close()


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
    evaluation.json; returns its content. `seed` should not be one that an agent was trained with."""
    root, console = Path(directory), console or Console(quiet=True)
    settings, _ = read_settings(root)
    agent, found = agents.loaded(root, greedy=greedy)
    _say_broken(found, console)
    name = env or settings.env
    agents.check_fits(agent.spec, settings, name)
    drawn = made_pure(settings.env, settings.env_args)
    with console.status(f"evaluating {episodes} episodes of {name}"):
        result = evaluation.evaluate(
            agent, agent.model, lambda num: agents.hosted(settings, name, num), episodes, seed=seed, drawn=drawn
        )
    result |= {"step": agent.step, "rule": "greedy" if greedy else "sampled", "env": name, "seeds": [seed]}
    _write_json(root / "evaluation.json", result)
    return result


def _train(
    root: Path, settings: Settings, loop: PureLoop | HostLoop, console: Console, seconds: float, stopped: list[int]
) -> int:
    """Advances to the last step; returns the simulator steps taken in all."""
    cfg, repeat = loop.cfg, loop.cfg.action_repeat
    per_iteration, prefill = cfg.ticks * cfg.envs, prefill_ticks(cfg) * cfg.envs
    steps = saved = began = int(loop.tally.decisions) * repeat
    log = MetricsLog(root, steps)
    phases = {"train": 0.0, "checkpoint": 0.0}
    begin = time.monotonic()
    try:
        with Display(console, f"{settings.algorithm} on {settings.env}", settings.steps) as display:
            while not stopped:
                # A host loop is filled in its first call, so that is counted before it is taken.
                left = (settings.steps - (steps or prefill * repeat)) // (per_iteration * repeat)
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
                if steps > before:  # an iteration may be resets only, and a step has one line
                    log.write(steps, metrics)
                display.show(steps, metrics)
                part = settings.snapshots and steps * (settings.snapshots + 1) // settings.steps
                if (
                    part > before * (settings.snapshots + 1) // settings.steps
                    and steps < settings.steps
                    and int(loop.agent.updates)
                ):
                    with errors_name(root / agents.SNAPSHOTS):
                        agents.save_snapshot(root, steps, loop.agent)
                if steps - saved >= settings.checkpoint_every:
                    saved = steps
                    _save(root, steps, loop, seconds + time.monotonic() - begin)
                    phases["checkpoint"] += time.monotonic() - now
        if steps == began and not stopped:
            console.print(f"{root}: complete at step {steps:,}; nothing is left to train", soft_wrap=True)
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
    if found is None:
        checkpoint.rewind(root, None)
        return 0.0
    _say_broken(found, console)
    state, replay = loop.like()
    restored: Any = checkpoint.load_replay(found, replay)
    files = {name: found.file(name) for name in found.manifest["files"] if name != checkpoint.STATE}
    loop.restore(checkpoint.load(found, state), restored, files)
    checkpoint.rewind(root, found)  # not before it fits: a loop that differs removes nothing
    console.print(f"{root}: going on from step {found.step:,}", highlight=False, soft_wrap=True)
    return found.meta["seconds"]


def _say_broken(found: checkpoint.Checkpoint, console: Console) -> None:
    for line in found.broken:
        console.print(f"passed over a broken checkpoint: {line}", highlight=False, soft_wrap=True)


def _evaluated(root: Path, steps: int) -> bool:
    path = root / "evaluation.json"
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("step") == steps


def _check_budget(settings: Settings, cfg: Any) -> None:
    """Raises ValueError where the steps are used up before the first update."""
    prefill, iteration = prefill_ticks(cfg) * cfg.envs, cfg.ticks * cfg.envs
    least = (prefill + iteration) * cfg.action_repeat
    if settings.steps < least:
        raise ValueError(
            f"steps is {settings.steps}, but the random prefill and the first iteration take {least}; "
            f"give at least {least} steps, or a smaller prefill"
        )


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Keeps a second process from training into the directory; the lock ends with the process, however it ends."""
    root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{root}: another process is training into it; give another --out") from error
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):  # a run that could not begin leaves no empty folder behind
            root.rmdir()


def _replay_line(loop: PureLoop | HostLoop) -> str:
    data = loop.ring.data if isinstance(loop, PureLoop) else loop.replay.data
    size = sum(x.nbytes for x in jax.tree.leaves(data))
    streams, capacity = jax.tree.leaves(data)[0].shape[:2]
    return f"replay: {streams} streams x {capacity:,} rows, {size / 2**20:,.1f} MiB in memory"


def _write_json(path: Path, content: Any) -> None:
    """Writes beside the old file, then renames."""
    beside = path.with_suffix(".partial")
    with errors_name(path):
        beside.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
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
