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

import jax
import numpy as np
from jaxtyping import PyTree

from forethought.auditing import calibration, depth, diagnosis, exploitation, mismatch, support, values
from forethought.auditing.drift import drift
from forethought.auditing.exploitation import Budget, exploit
from forethought.auditing.reality import HostReality, LoggedReality, Played, PureReality, Reality
from forethought.auditing.subject import ModelSubject, Subject, subject
from forethought.auditing.trial import Trial, attempt, quantities
from forethought.auditing.verdict import USES, Tolerances, judge
from forethought.collect import RandomPolicy, ZeroPolicy
from forethought.protocols import AbstractEnv, AbstractPolicy, AbstractWorldModel, EnsembleModel, HostEnv
from forethought.types import Box, Spec, Step, TimeStep

SCHEMA = 1
SOUGHT = "sought in the model"
"""The name of the policy that the audit itself seeks in the model."""


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
        """The kinds of everything that was found wrong (verdict.KINDS)."""
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
    codes: Callable[[TimeStep], tuple[np.ndarray, np.ndarray]] | None = None,
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
        policies: whose episodes the model is measured on and which it is to rank; the first is the one it is used by. The
            random policy, always doing nothing, and one that is sought in the model are added. With `data` alone they are
            not asked: the episodes are the recorded ones.
        data: real episodes in the order they were made: what the model learned from, or, without an environment, what
            it is measured on.
        spec: of the recorded episodes, where there is no environment.
        checkpoints: earlier policies and models of the same run, oldest first.
        codes: of real rows [M], the codes [M, D] of the model's and the policy's encoders.
        provenance: what trained the model, for the record.
        horizon: H, imagined steps up to which the model is judged.
        episodes: of each policy. More make intervals narrower.
        starts: real rows per policy from which the model imagines.
        samples: K, rollouts per start where the model draws random numbers, and replays where the environment does; None:
            64 where fresh noise can be had, whose error is then taken off, else 16.
        uses: what the verdict is about; of `verdict.USES`.
        seed: of everything random here. It should not be one that the model was trained with.
        progress: told what is being done.

    Raises:
        ValueError: neither environment nor episodes, an unknown use, or episodes too short to imagine anything.
    """
    tolerances, budget = tolerances or Tolerances(), budget or Budget()
    if unknown := set(uses) - set(USES):
        raise ValueError(f"audit: '{min(unknown)}' is no use; there are {', '.join(USES)}")
    if horizon < 1 or episodes < 2 or starts < episodes:
        raise ValueError(f"audit: horizon {horizon}, episodes {episodes}, starts {starts}; give at least 1, 2, and a start per episode")
    reality = _reality(env, data, spec)
    samples = samples or (64 if reality.fresh else 16)
    asked = _Asked(subject(model), reality, horizon, starts, samples, seed)
    try:
        return _audit(asked, policies or {}, data, checkpoints or {}, codes, provenance, episodes, budget, tolerances, tuple(uses), progress)
    finally:
        if isinstance(reality, HostReality):
            reality.close()


class _Asked:
    """The model and its environment, with what is common to all questions."""

    def __init__(self, subject: Subject, reality: Reality, horizon: int, starts: int, samples: int, seed: int):
        self.subject, self.reality, self.spec = subject, reality, reality.spec
        self.horizon, self.starts, self.samples, self.seed = horizon, starts, samples, seed

    def play(self, policy: AbstractPolicy | None, episodes: int) -> tuple[Played, PyTree]:
        """Episodes of a policy, and the model's latents at their rows."""
        assert policy is not None or isinstance(self.reality, LoggedReality)
        played = self.reality.play(policy, episodes, seed=self.seed)  # pyright: ignore[reportArgumentType]
        if played.length.max() < 3:
            raise ValueError(f"{self.spec.name}: no episode has more than one step; there is nothing to imagine")
        return played, self.subject.filter(played.rows, seed=self.seed + 1)

    def attempt(self, played: Played, latents: PyTree, who: Subject | None = None) -> Trial:
        return attempt(who or self.subject, latents, self.reality, played, self.horizon, count=self.starts,
                       samples=self.samples, seed=self.seed + 2)  # fmt: skip


def _reality(env: Any, data: Sequence[Step] | None, spec: Spec | None) -> Reality:
    if isinstance(env, AbstractEnv):
        return PureReality(env)
    if env is not None:
        return HostReality(env)
    if data is None or spec is None:
        raise ValueError("audit: give an environment, or recorded episodes (data) and their spec")
    return LoggedReality(spec, list(data))


def _audit(
    asked: _Asked, policies: Mapping[str, AbstractPolicy], data: Sequence[Step] | None, checkpoints: Mapping[str, Any],
    codes: Any, provenance: Any, episodes: int, budget: Budget, tolerances: Tolerances, uses: tuple[str, ...],
    progress: Callable[[str], None],
) -> Audit:  # fmt: skip
    spec, seed, sections, missing = asked.spec, asked.seed, {}, {}
    logged = isinstance(asked.reality, LoggedReality)
    everyone: dict[str, Any] = {"recorded episodes": None} if logged else dict(policies)
    if not logged:
        everyone |= {"random": RandomPolicy(spec.action), "zero action": ZeroPolicy(spec.action)}
    progress("playing")
    watched = [name for name in everyone if name != "zero action"][:4]
    played = {name: asked.play(everyone[name], episodes) for name in watched}
    rows = _flat_rows([played[name][0] for name in watched])
    first = watched[0]

    progress("error by depth")
    trials = {name: asked.attempt(*played[name]) for name in watched}
    found = {name: quantities(spec, trial, rows) for name, trial in trials.items()}
    table = {
        name: depth.error_by_depth(trials[name], found[name]) | {"termination": depth.termination(trials[name], tolerances.missed)}
        for name in watched
    }
    sections["error_by_depth"] = {"depth": list(range(1, asked.horizon + 1)), "policies": table, "fresh": asked.reality.fresh,
                                  "episodes": episodes, "starts": asked.starts}  # fmt: skip
    drawn = next(x for x in (trials[first].predicted.reward, *(trials[first].predicted.obs or {}).values()) if x is not None)
    random = drawn.shape[1] > 1

    progress("calibration")
    sections["calibration"] = {
        "random": random, "fresh": asked.reality.fresh,
        "dispersion": calibration.dispersion(trials[first], found[first]),
        "coverage": calibration.coverage(trials[first], found[first]),
        "members": _members(asked, played[first][0], trials[first]),
    }  # fmt: skip

    progress("diagnosis")
    sections["diagnosis"] = {
        "non_finite": diagnosis.broken(*(trial.predicted for trial in trials.values())),
        "hypotheses": diagnosis.hypotheses(asked.subject, spec, {n: (played[n][0], trials[n]) for n in watched}, rows, seed=seed + 1),
        "region": diagnosis.region(_joined(trials), _joined_quantities(found), spec),
    }

    near = _support(asked, played, data, seed)
    predicts = trials[first].predicted
    if predicts.reward is None:
        missing["exploitation"] = missing["ranking"] = "the model predicts no reward"
    else:
        progress("exploitation")
        plans = exploit(asked.subject, played[first][1], asked.reality, played[first][0], min(asked.horizon, 15),
                        budget=budget, support=near, random=random, seed=seed + 3)  # fmt: skip
        if plans is None:
            missing["exploitation"] = "there is no environment that can be taken back to a real row, so no plan can be tried"
        else:
            sections["exploitation"] = plans | _summary(plans, trials)
    if logged:
        missing |= {name: "there is no environment, so no policy can be tried" for name in ("ranking", "support")}
    elif predicts.obs is None or predicts.reward is None:
        missing["support"] = "the model predicts no observations, so no policy can act in it"
        missing.setdefault("ranking", missing["support"])
    else:
        progress("policies")
        sections["ranking"], dreams = _ranking(asked, everyone, played, episodes, budget)
        assert near is not None
        dreamt = dreams[first]
        sections["support"] = support.by_depth(near, dreamt.obs, dreamt.going) | {"policy": first}
    progress("mismatch")
    sections["mismatch"] = _mismatch(asked, played[first][0], trials[first], found[first], checkpoints, codes, episodes)
    changed = None if data is None else drift(asked.subject, spec, list(data), seed=seed)
    if changed is None:
        missing["drift"] = "no recorded episodes were given" if data is None else "fewer than 8 recorded episodes"
    else:
        sections["drift"] = changed
    if provenance:
        sections["provenance"] = provenance
    else:
        missing["provenance"] = "the model was given without a record of its training"
    about = {"env": spec.name, "horizon": asked.horizon, "episodes": episodes, "starts": asked.starts, "samples": asked.samples,
             "seed": seed, "policies": list(everyone), "tolerances": dataclasses.asdict(tolerances),
             "reality": {PureReality: "fresh replays", HostReality: "snapshots", LoggedReality: "recorded"}[type(asked.reality)]}  # fmt: skip
    sections = _plain(sections)
    reach = min(asked.horizon, int(max(p.length.max() for p, _ in played.values())) - 1)
    return Audit(about, sections, missing, _plain(judge(sections, tolerances, reach, uses)))


def _flat_rows(played: list[Played]) -> TimeStep:
    """The rows that happened, of all policies, [M], but for episodes' first ones, which no action led to."""
    some = [p for p in played]
    masks = [np.arange(p.rows.action.shape[1]) < p.length[:, None] for p in some]
    for mask in masks:
        mask[:, 0] = False
    cut = [jax.tree.map(lambda x, m=m: x[m], p.rows.time_step) for p, m in zip(some, masks, strict=True)]
    return jax.tree.map(lambda *xs: np.concatenate(xs), *cut)


def _joined(trials: Mapping[str, Trial]) -> Trial:
    return jax.tree.map(lambda *xs: np.concatenate(xs), *[t._replace(fresh=np.zeros(0)) for t in trials.values()])  # pyright: ignore


def _joined_quantities(found: Mapping[str, list[Any]]) -> list[Any]:
    def join(*same: Any) -> Any:
        stack = lambda name: np.concatenate([getattr(q, name) for q in same])  # noqa: E731
        return same[0]._replace(model=stack("model"), real=stack("real"), still=stack("still"))

    return [join(*same) for same in zip(*found.values(), strict=True)]


def _members(asked: _Asked, played: Played, trial: Trial) -> dict[str, Any] | None:
    """How the members of an ensemble disagree; None where there is one."""
    model = asked.subject.model if isinstance(asked.subject, ModelSubject) else None
    if not isinstance(model, EnsembleModel) or len(model.members) < 2:
        return None
    told = []
    for member in model.members:
        one = ModelSubject(member)
        latents = one.filter(played.rows, seed=asked.seed + 1)
        at = jax.tree.map(lambda x: x[trial.starts[:, 0], trial.starts[:, 1]], latents)
        told.append(one.unroll(at, trial.action, seed=asked.seed + 2))
    return calibration.disagreement(trial, told)


def _support(asked: _Asked, played: Mapping[str, tuple[Played, Any]], data: Sequence[Step] | None, seed: int) -> Any:
    """The data that imagined rows are compared with: what the model learned from, or the episodes played."""
    if data is not None and len(data) >= 2:
        episodes = [e.time_step for e in data]
        order = np.random.default_rng(seed).permutation(len(episodes))
        episodes = [episodes[i] for i in order]
    else:
        cut = lambda p, e: jax.tree.map(lambda x: x[e, : p.length[e]], p.rows.time_step)  # noqa: E731
        episodes = [cut(p, e) for e in range(min(len(p.length) for p, _ in played.values())) for p, _ in played.values()]
    if not all(isinstance(space, Box) and space.dtype != "uint8" or not isinstance(space, Box) for space in asked.spec.obs.values()):
        return None
    return support.Support(asked.spec, episodes, np.random.default_rng(seed))


def _summary(plans: dict[str, Any], trials: Mapping[str, Trial]) -> dict[str, Any]:
    """The plans' gaps in standard deviations of real returns of as many steps, with one-sided bounds."""
    real = np.concatenate([np.sum(t.real.going * t.real.reward, -1).mean(1)[t.valid[:, -1] | ~t.valid[:, 0]] for t in trials.values()])
    every = np.concatenate([np.sum(t.real.going * t.real.reward, -1).mean(1) for t in trials.values()])
    real = real if len(real) > 8 else every
    scale = max(float(real.std()), 1e-3 * max(1.0, float(np.abs(real).mean())))
    gap, false = np.array(plans["gap"]) / scale, np.array(plans["false"], float)
    finite = np.isfinite(gap).all()
    error = gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else np.inf
    # What fails to be more than noise: plans that gain nothing to speak of are not counted as false.
    false = false * (np.array(plans["gain_promised"]) > 0.1 * scale)
    share = false.mean()
    wide = 1.645 * (share * (1 - share) / len(false)) ** 0.5
    return {
        "scale": scale, "gap_mean": float(gap.mean()) if finite else None,
        "gap_low": float(gap.mean() - 1.7 * error) if finite else None,
        "gap_high": float(gap.mean() + 1.7 * error) if finite else None,
        "false_share": {"mean": float(share), "low": float(share - wide)},
    }  # fmt: skip


def _ranking(
    asked: _Asked, everyone: Mapping[str, Any], played: Mapping[str, tuple[Played, Any]], episodes: int, budget: Budget
) -> tuple[dict[str, Any], dict[str, values.Dream]]:
    """Promised and real returns of every policy over the same steps, one that is sought in the model among them."""
    length = 3 * asked.horizon
    of_rows = _flat_rows([p for p, _ in played.values()]).obs
    flat = support.flat(asked.spec, of_rows)
    scale = flat.mean(0), np.maximum(flat.std(0), 1e-3)
    some, latents = next(iter(played.values()))
    obs = values.start(some).obs
    at = jax.tree.map(lambda x: x[:, 0], latents)
    found = values.sought(asked.subject, asked.spec, at, obs, scale, length, seed=asked.seed + 5)
    promised, real, dreams = {}, {}, {}
    for name, policy in {**everyone, SOUGHT: found}.items():
        here, latents = played[name] if name in played else asked.play(policy, episodes)
        dreams[name] = values.dream(
            asked.subject, jax.tree.map(lambda x: x[:, 0], latents), values.start(here), policy, length, seed=asked.seed + 6
        )
        taken = values.taken(here, length)
        promised[name], real[name] = dreams[name].returns(taken), values.real_returns(here, length)
    finite = all(np.isfinite(x).all() for x in promised.values())
    promised = promised if finite else {name: np.nan_to_num(x, nan=-1e9, neginf=-1e9, posinf=1e9) for name, x in promised.items()}
    return values.ranking(promised, real) | {"steps": length}, dreams


def _mismatch(
    asked: _Asked, played: Played, trial: Trial, found: list[Any], checkpoints: Mapping[str, Any], codes: Any, episodes: int
) -> dict[str, Any]:
    body: dict[str, Any] = {"relevance": None, "checkpoints": None, "codes": None}
    if isinstance(asked.subject, ModelSubject):
        body["relevance"] = mismatch.relevance(asked.subject.model, asked.spec, trial, found)
    if len(checkpoints) >= 3 and not isinstance(asked.reality, LoggedReality):
        told = {}
        for name, (policy, model) in checkpoints.items():
            one, own = ModelSubject(model), asked.reality.play(policy, episodes, seed=asked.seed)
            again = asked.attempt(played, one.filter(played.rows, seed=asked.seed + 1), one)
            told[name] = mismatch.metrics(quantities(asked.spec, again, _flat_rows([played])), again) | {
                "return": float(values.real_returns(own, own.rows.action.shape[1]).mean())
            }
        body["checkpoints"] = mismatch.correlations(told)
    if codes is not None:
        body["codes"] = mismatch.agreement(*codes(_flat_rows([played])))
    return body


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


