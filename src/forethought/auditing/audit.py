"""The audit: may this world model be trusted, for what, and how far ahead?

Each section asks one question of the model, of held-out real episodes and, where there is one, of the environment. What
cannot be asked (no environment to go back to, a model that predicts no reward, one member) is reported as not measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forethought.auditing import calibration, depth, diagnosis, exploitation, mismatch, support, trial, values
from forethought.auditing.asked import Asked, rows
from forethought.auditing.drift import drift
from forethought.auditing.exploitation import Budget
from forethought.auditing.findings import USES
from forethought.auditing.mismatch import Codes
from forethought.auditing.reality import HostReality, LoggedReality, PureReality, Reality
from forethought.auditing.subject import Subject, subject
from forethought.auditing.tolerances import Tolerances
from forethought.auditing.verdict import judge
from forethought.collect import RandomPolicy, ZeroPolicy
from forethought.protocols import AbstractEnv, AbstractPolicy, AbstractWorldModel, HostEnv
from forethought.types import Spec, Step

SCHEMA = 1
WATCHED = 4
"""The most policies on whose episodes the model is measured; all are ranked."""
FAR = 15
"""The most steps of a plan."""


@dataclasses.dataclass(frozen=True)
class Audit:
    """What an audit found; all of it is JSON."""

    about: dict[str, Any]
    """What was audited, against what, with which budgets and seeds."""
    sections: dict[str, Any]
    """By name; a section that was not measured is not there."""
    missing: dict[str, str]
    """Why, for each section that is not there."""
    verdict: dict[str, Any]

    @property
    def passed(self) -> bool:
        return self.verdict["status"] == "pass"

    @property
    def kinds(self) -> set[str]:
        """The kinds of everything that was found wrong (findings.KINDS)."""
        return {finding["kind"] for finding in self.verdict["findings"]}

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the audit as JSON; an older one stays until the new one is whole."""
        target = Path(path)
        partial = target.with_name(f"{target.name}.partial")
        partial.write_text(json.dumps(self.as_dict(), allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, target)


def audit(
    model: AbstractWorldModel | Subject,
    env: AbstractEnv | Callable[[int], HostEnv] | None = None,
    *,
    policies: Mapping[str, AbstractPolicy] | None = None,
    data: Sequence[Step] | None = None,
    spec: Spec | None = None,
    checkpoints: Mapping[str, tuple[AbstractPolicy, AbstractWorldModel]] | None = None,
    codes: Codes | None = None,
    provenance: dict[str, Any] | None = None,
    horizon: int = 15,
    episodes: int = 16,
    starts: int = 128,
    samples: int | None = None,
    budget: Budget | None = None,
    tolerances: Tolerances | None = None,
    uses: Sequence[str] = USES,
    seed: int = 1_000_000,
    progress: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Audits a world model against an environment, or against recorded episodes.

    Args:
        model: an `AbstractWorldModel`, or a `HostModel` of three functions of one's own.
        env: a pure environment, or a function that makes a HostEnv of so many copies; None: `data` is all there is.
        policies: whose episodes the model is measured on and which it is to rank; the first is the one it is used by.
            The random policy, always doing nothing, and one that is sought in the model are added. With `data` alone
            they are not asked: the episodes are the recorded ones.
        data: real episodes in the order they were made: what the model learned from, or, without an environment, what
            it is measured on.
        spec: of the recorded episodes, where there is no environment.
        checkpoints: earlier policies and models of the same run, oldest first.
        codes: of real rows [M], the codes [M, D] of the model's and the policy's encoders.
        provenance: what trained the model, for the record.
        horizon: H, imagined steps up to which the model is judged.
        episodes: of each policy. More make intervals narrower.
        starts: real rows per policy from which the model imagines.
        samples: K, rollouts per start where the model draws random numbers, and replays where the environment does;
            None: 64 where fresh noise can be had, else 16.
        budget: how hard plans are sought.
        tolerances: what is still good enough.
        uses: what the verdict is about; of `findings.USES`.
        seed: of everything random here. It should not be one that the model was trained with.
        progress: told what is being done.

    Raises:
        ValueError: neither environment nor episodes, an unknown use, or episodes too short to imagine anything.
    """
    tolerances, budget = tolerances or Tolerances(), budget or Budget()
    if unknown := set(uses) - set(USES):
        raise ValueError(f"audit: '{min(unknown)}' is no use; there are {', '.join(USES)}")
    if horizon < 1 or episodes < 2 or starts < episodes:
        given = f"horizon {horizon}, episodes {episodes}, starts {starts}"
        raise ValueError(f"audit: {given}; give at least 1, 2, and a start per episode")
    reality = _reality(env, data, spec)
    samples = samples or (64 if reality.fresh else 16)
    asked = Asked(subject(model), reality, horizon, starts, samples, seed)
    run = _Run(asked, policies or {}, list(data) if data is not None else None, episodes, budget, tolerances, progress)
    try:
        return run.audit(checkpoints or {}, codes, provenance, tuple(uses))
    finally:
        if isinstance(reality, HostReality):
            reality.close()


def _reality(env: Any, data: Sequence[Step] | None, spec: Spec | None) -> Reality:
    if isinstance(env, AbstractEnv):
        return PureReality(env)
    if env is not None:
        return HostReality(env)
    if data is None or spec is None:
        raise ValueError("audit: give an environment, or recorded episodes (data) and their spec")
    return LoggedReality(spec, list(data))


class _Run:
    """One audit under way: its sections as they come, and why others do not."""

    def __init__(
        self, asked: Asked, policies: Mapping[str, AbstractPolicy], data: list[Step] | None, episodes: int,
        budget: Budget, tolerances: Tolerances, progress: Callable[[str], None],
    ):  # fmt: skip
        self.asked, self.data, self.episodes, self.budget = asked, data, episodes, budget
        self.tolerances, self.progress = tolerances, progress
        self.sections: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.logged = isinstance(asked.reality, LoggedReality)
        self.everyone: dict[str, Any] = {"recorded episodes": None} if self.logged else dict(policies)
        if not self.logged:
            self.everyone |= {"random": RandomPolicy(asked.spec.action), "zero action": ZeroPolicy(asked.spec.action)}

    def audit(self, checkpoints: Mapping[str, Any], codes: Any, provenance: Any, uses: tuple[str, ...]) -> Audit:
        asked = self.asked
        self.progress("playing")
        watched = [name for name in self.everyone if name != "zero action"][:WATCHED]
        played = {name: asked.play(self.everyone[name], self.episodes) for name in watched}
        # An episode of one step leaves nothing to imagine from what was seen in it.
        self.played = {name: both for name, both in played.items() if both[0].length.max() > 2}
        self.first = watched[0]
        if self.first not in self.played:
            raise ValueError(f"{asked.spec.name}: no episode of '{self.first}' has more than one step")
        self.rows = rows([played for played, _ in self.played.values()])
        self.curves()
        self.plans()
        self.policies()
        self.progress("mismatch")
        self.sections["mismatch"] = mismatch.measure(
            asked, self.played[self.first][0], self.trials[self.first], self.found[self.first],
            checkpoints=checkpoints, codes=codes, episodes=self.episodes,
        )  # fmt: skip
        self.changes(provenance)
        sections = _plain(self.sections)
        reach = min(asked.horizon, int(max(p.length.max() for p, _ in self.played.values())) - 1)
        return Audit(self.about(), sections, self.missing, _plain(judge(sections, self.tolerances, reach, uses)))

    def curves(self) -> None:
        """What the model predicts, beside what came: error by depth, calibration, diagnosis."""
        asked, spec = self.asked, self.asked.spec
        self.progress("error by depth")
        self.trials = {name: asked.attempt(*played) for name, played in self.played.items()}
        self.found = {name: trial.quantities(spec, one, self.rows) for name, one in self.trials.items()}
        table = {
            name: depth.error_by_depth(one, self.found[name])
            | {"termination": depth.termination(one, self.tolerances.missed)}
            for name, one in self.trials.items()
        }
        fresh, first = asked.reality.fresh, self.trials[self.first]
        self.sections["error_by_depth"] = {
            "depth": list(range(1, asked.horizon + 1)), "policies": table, "fresh": fresh, "episodes": self.episodes,
            "starts": asked.starts,
        }  # fmt: skip
        self.progress("calibration")
        self.random = trial.samples(first) > 1
        self.sections["calibration"] = {
            "random": self.random, "fresh": fresh,
            "dispersion": calibration.dispersion(first, self.found[self.first]),
            "coverage": calibration.coverage(first, self.found[self.first]),
            "members": calibration.members(asked, self.played[self.first][0], first),
        }  # fmt: skip
        self.progress("diagnosis")
        both = {name: (self.played[name][0], one) for name, one in self.trials.items()}
        self.sections["diagnosis"] = {
            "non_finite": diagnosis.broken(*(one.predicted for one in self.trials.values())),
            "hypotheses": diagnosis.hypotheses(asked.subject, spec, both, self.rows, seed=asked.seed + 1),
            "region": diagnosis.region(list(self.trials.values()), list(self.found.values()), spec),
        }

    def plans(self) -> None:
        """What plans promise, beside what they bring."""
        asked, (played, latents) = self.asked, self.played[self.first]
        self.near = support.known(asked, self.played, self.data)
        if self.trials[self.first].predicted.reward is None:
            self.missing["exploitation"] = "the model predicts no reward"
            return
        self.progress("exploitation")
        plans = exploitation.exploit(
            asked.subject, latents, asked.reality, played, min(asked.horizon, FAR), budget=self.budget,
            support=self.near, random=self.random, seed=asked.seed + 3,
        )  # fmt: skip
        if plans is None:
            why = "there is no environment that can be taken back to a real row, so no plan can be tried"
            self.missing["exploitation"] = why
        else:
            self.sections["exploitation"] = plans | exploitation.summary(plans, list(self.trials.values()))

    def policies(self) -> None:
        """What policies are promised, beside what they earn, and how far from the data their dreams lead."""
        asked, predicted, why = self.asked, self.trials[self.first].predicted, None
        if self.logged:
            why = "there is no environment, so no policy can be tried"
        elif predicted.reward is None or asked.spec.obs.keys() - (predicted.obs or {}).keys():
            why = "the model does not predict all observations and the reward, so no policy can act in it"
        if why is not None:
            self.missing |= {"ranking": why, "support": why}
            return
        self.progress("policies")
        ranking, dreams = values.measure(asked, self.everyone, self.played, self.episodes)
        self.sections["ranking"] = ranking
        if self.near is None:
            self.missing["support"] = "distances between observations of bytes mean nothing"
        else:
            dream = dreams[self.first]
            self.sections["support"] = support.by_depth(self.near, dream.obs, dream.going) | {"policy": self.first}

    def changes(self, provenance: Any) -> None:
        """What training and time did."""
        asked, data = self.asked, self.data
        changed = None if data is None else drift(asked.subject, asked.spec, data, seed=asked.seed)
        if changed is None:
            why = "no recorded episodes were given" if data is None else "fewer than 8 recorded episodes"
            self.missing["drift"] = why
        else:
            self.sections["drift"] = changed
        if provenance:
            self.sections["provenance"] = _plain(provenance)
        else:
            self.missing["provenance"] = "the model was given without a record of its training"

    def about(self) -> dict[str, Any]:
        asked = self.asked
        kind = {PureReality: "fresh replays", HostReality: "snapshots", LoggedReality: "recorded"}[type(asked.reality)]
        return {
            "env": asked.spec.name, "horizon": asked.horizon, "episodes": self.episodes, "starts": asked.starts,
            "samples": asked.samples, "seed": asked.seed, "policies": list(self.everyone), "reality": kind,
            "tolerances": dataclasses.asdict(self.tolerances),
        }  # fmt: skip


def _plain(tree: Any) -> Any:
    """JSON of it: NumPy's numbers as Python's, and what is not finite as None."""
    if isinstance(tree, dict):
        return {str(k): _plain(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(v) for v in tree]
    if isinstance(tree, np.ndarray):
        return _plain(tree.tolist())
    if isinstance(tree, np.bool_ | np.integer):
        return tree.item()
    if isinstance(tree, float | np.floating):
        return float(tree) if np.isfinite(tree) else None
    return tree
