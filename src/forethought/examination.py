"""The audit of a run: its model, judged with what the run's directory holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forethought import agent as agents
from forethought import record
from forethought.auditing.audit import Audit, audit
from forethought.auditing.findings import USES
from forethought.auditing.tolerances import Tolerances
from forethought.protocols import AbstractEnv
from forethought.settings import learner
from forethought.settings import read as read_settings
from forethought.types import Step, TimeStep

FILE = "audit.json"


def examine(
    directory: str | os.PathLike[str],
    *,
    env: str | None = None,
    policies: Sequence[str | os.PathLike[str]] = (),
    data: Sequence[Step] | None = None,
    horizon: int = 15,
    episodes: int = 16,
    tolerances: Tolerances | None = None,
    uses: Sequence[str] = USES,
    seed: int = 1_000_000,
    progress: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Audits the model of a run's newest checkpoint and writes DIR/audit.json.

    Args:
        env: another environment with the same spaces; None: the one trained in.
        policies: further runs, whose newest policies the model is to rank.
        data: recorded episodes to measure the model on instead of an environment.
        horizon, episodes, tolerances, uses, seed, progress: as `audit` takes them.

    Raises ValueError or CheckpointError in one line, as loading does, and where spaces differ.
    """
    settings, spec = read_settings(directory)
    agent, _ = agents.loaded(directory, greedy=True)
    name = env or settings.env
    agents.check_fits(spec, settings, name)
    others = {str(Path(path)): agents.load(path) for path in policies}
    for path, other in others.items():
        _check_spaces(path, other, agent)
    before = agents.snapshots(directory)
    earlier = {f"step {step:,}": one for step, one in before.items() if step < agent.step}
    checkpoints = {**earlier, f"step {agent.step:,}": agent}
    oldest = dict(list(earlier.items())[:1])
    found = audit(
        agent.model,
        None if data is not None else _world(settings, name),
        policies={"agent": agent, **oldest, **others},
        data=agents.replayed(directory) if data is None else data,
        spec=spec,
        checkpoints={key: (one, one.model) for key, one in checkpoints.items()},
        codes=_codes(settings, agent),
        provenance=_provenance(Path(directory)),
        horizon=horizon,
        episodes=episodes,
        tolerances=tolerances,
        uses=uses,
        seed=seed,
        progress=progress,
    )
    found.write(Path(directory) / FILE)
    return found


def _world(settings: Any, name: str) -> Any:
    """A pure environment as it is, so that it can be gone back to with fresh noise; others by what makes them."""
    env = agents.environment(agents.elsewhere(settings, name), num=1, seed=0)
    if isinstance(env, AbstractEnv):
        return env
    env.close()
    return lambda num: agents.hosted(settings, name, num)


def _check_spaces(path: str, other: Any, agent: Any) -> None:
    theirs, ours = ((dict(x.spec.obs), x.spec.action) for x in (other, agent))
    if theirs != ours:
        raise ValueError(
            f"{path}: was trained with other observations or actions than the audited run; it cannot be ranked"
        )


def _codes(settings: Any, agent: Any) -> Callable[[TimeStep], tuple[np.ndarray, np.ndarray]] | None:
    """What the encoders of model and policy make of real rows, where the algorithm has two."""
    codes = learner(settings.algorithm).codes(agent.policy)
    if codes is None:
        return None

    def of(rows: TimeStep) -> tuple[np.ndarray, np.ndarray]:
        model, policy = codes(rows.obs)
        return np.asarray(model), np.asarray(policy)

    return of


def _provenance(directory: Path) -> dict[str, Any]:
    """How many real and imagined steps trained what, how stale the data were, and the last losses, real and imagined
    apart: the run's last metrics."""
    run = record.read(directory)
    last = {name: float(y[np.isfinite(y)][-1]) for name, (_, y) in run.metrics.items() if np.isfinite(y).any()}
    kept = ("real/steps", "real/rows_replayed", "real/staleness", "imagined/steps", "update/count")
    shown = [name for name in last if name in kept or "/loss/" in name]
    meanings = run.config.get("metrics", {})
    return {name: {"value": last[name], "unit": meanings.get(name, ["", ""])[0]} for name in sorted(shown)}
