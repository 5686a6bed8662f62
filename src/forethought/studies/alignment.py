"""The alignment study: which conditions, and what each is compared with.

docs/alignment.md explains the design. A condition differs from one of two bases in what its name says:

    sound      bounded actions; the policy's loss moves neither value nor model
    literal    the sum of losses as it is written: unbounded actions, and every loss moves all that it depends on
"""

from __future__ import annotations

import dataclasses
from typing import Any

from forethought.algos.aligned import Config, Factors

POLICY_LOSSES = ("actor-critic", "deterministic", "rollout", "imagined")
BASES: dict[str, dict[str, Any]] = {"sound": {}, "literal": {"bounded": False, "frozen": False}}
STAGES: dict[str, dict[str, Any]] = {
    "shared encoder + InfoNCE": {"stage": "shared InfoNCE", "shared": 32},
    "dual + InfoNCE": {"stage": "dual InfoNCE", "shared": 32},
    "dual + full soft": {"shared": 32},
    "dual + partial": {},
    "dual without alignment": {"weight": 0.0},
}


@dataclasses.dataclass(frozen=True)
class Condition:
    """A base, and what differs from it."""

    base: str
    changes: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        fields = dict(self.changes)
        policy_loss = fields.pop("policy_loss", "deterministic")
        stage = next((name for name, stage in STAGES.items() if stage and stage.items() <= fields.items()), None)
        for field in STAGES.get(stage or "", {}):
            fields.pop(field)
        rest = [f"{field} {value}" for field, value in sorted(fields.items())]
        return ", ".join([policy_loss, self.base, stage or "dual + partial", *rest])

    @property
    def config(self) -> Config:
        names = {field.name for field in dataclasses.fields(Config)}
        return Config(**{name: value for name, value in self.changes if name in names})

    @property
    def factors(self) -> Factors:
        names = {field.name for field in dataclasses.fields(Factors)}
        changes = {**BASES[self.base], **{name: value for name, value in self.changes if name in names}}
        return Factors(**changes)

    @property
    def file(self) -> str:
        return "".join(x if x.isalnum() or x in ".+" else "-" for x in self.name.replace(", ", "--")) + ".npz"


Pair = tuple[Condition, Condition | None]
"""A condition, and the one that it is compared with."""


def condition(base: str, *changes: dict[str, Any]) -> Condition:
    """Changes to a base, later ones first; what a base or a default says already is left out."""
    merged: dict[str, Any] = {}
    for change in changes:
        merged |= change
    default = {f.name: f.default for kind in (Config, Factors) for f in dataclasses.fields(kind)} | BASES[base]
    return Condition(base, tuple(sorted((k, v) for k, v in merged.items() if v != default[k])))


def design() -> dict[str, list[Pair]]:
    """Every question's conditions, each with the one that it is compared with."""
    partial, unaligned = STAGES["dual + partial"], STAGES["dual without alignment"]
    centres = [("deterministic", "sound"), ("deterministic", "literal"), ("imagined", "sound")]
    questions = {f"stage: {loss}, {base}": _stages(loss, base) for loss in POLICY_LOSSES for base in BASES}
    questions["shared and private dimensions"] = _around([{"shared": n} for n in (0, 4, 8, 16, 24, 28, 32)], centres)
    questions["weight"] = _around([{"weight": x} for x in (0.0, 0.05, 0.2, 1.0, 5.0)], centres)

    # With and without alignment: what keeps a run in bounds? Rollouts have no target networks of their own.
    factorial = []
    for loss, index in [("deterministic", i) for i in range(16)] + [("rollout", i) for i in range(8)]:
        bounded, frozen, bootstrap, fast = (bool(index >> bit & 1) for bit in range(4))
        cell = {"policy_loss": loss, "bounded": bounded, "frozen": frozen, "bootstrap": bootstrap}
        cell["target_rate"] = 1.0 if fast else 0.005
        base = "sound" if bounded or frozen else "literal"
        factorial += _both(condition(base, cell, partial), condition(base, cell, unaligned))
    questions["bounds, frozen, horizon, targets"] = factorial

    rates = []
    for loss, base in [*centres[:2], ("rollout", "literal")]:
        for rate in (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2):
            cell = {"policy_loss": loss, "learning_rate": rate}
            rates += _both(condition(base, cell, partial), condition(base, cell, unaligned))
    questions["learning rate"] = rates

    controls = [{"partner": "random"}, {"partner": "self"}, {"moves_model": False}, {"moves_policy": False}]
    questions["controls"] = _around(controls, [centres[0], centres[2]])
    limits = [{"layer_norm": True}, {"weight_decay": 0.01}, {"weight_decay": 1.0}, {"clip": 1.0}]
    questions["limits"] = _around(limits, [("rollout", "literal"), ("deterministic", "literal")])
    value_aware = [{"model_loss": "value-weighted"}, {"model_loss": "value-equivalent"}]
    questions["value-aware model losses"] = _around(value_aware, [("rollout", "sound"), ("imagined", "sound")])
    questions["direction and length"] = [
        pair
        for stage in ("dual + partial", "dual + full soft")
        for pair in _around([{"layer_norm": True}], [("imagined", "sound")], STAGES[stage])
    ]
    return questions


def _around(changes: list[dict[str, Any]], centres: list[tuple[str, str]], *more: dict[str, Any]) -> list[Pair]:
    """Each change by itself, compared with the centre (a way to learn a policy, and a base)."""
    pairs = []
    for policy_loss, base in centres:
        centre = condition(base, {"policy_loss": policy_loss}, *more)
        pairs += [(condition(base, {"policy_loss": policy_loss}, *more, change), centre) for change in changes]
    return [(each, None if each == centre else centre) for each, centre in pairs]


def _both(partial: Condition, without: Condition) -> list[Pair]:
    return [(partial, without), (without, None)]


def _stages(policy_loss: str, base: str) -> list[Pair]:
    made = {name: condition(base, {"policy_loss": policy_loss}, stage) for name, stage in STAGES.items()}
    return [(c, None if name == "dual + partial" else made["dual + partial"]) for name, c in made.items()]


def quick() -> dict[str, list[Pair]]:
    """The stages alone, with one way to learn a policy."""
    return {f"stage: deterministic, {base}": _stages("deterministic", base) for base in BASES}
