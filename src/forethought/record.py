"""The record of a run: what its directory says, read back and checked, for reports and comparisons."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

FIELDS = {
    "open_loop": ("context", "keys"),
    "episode": ("obs", "reward"),
    "imagined_episode": ("obs", "reward"),
}
"""What a part of evaluation.json has to hold, where the part is there at all."""
CURVES = {"open_loop": ("true", "predicted")}
"""What each of its `keys`, and its reward and discount, have to hold."""
AUDIT = {
    "about": ("env", "horizon", "episodes", "starts", "samples", "seed", "policies", "tolerances", "reality"),
    "sections": (),
    "missing": (),
    "verdict": ("findings", "uses", "safe_horizon", "horizon", "status"),
}
"""What audit.json has to hold."""


@dataclasses.dataclass(frozen=True)
class Record:
    config: dict[str, Any]
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]
    """Environment steps and values by name; a value that was null or not finite is NaN."""
    evaluation: dict[str, Any]
    """Empty where nothing was evaluated."""
    audit: dict[str, Any]
    """Empty where the model was not audited."""
    torn: bool
    """The last line of metrics.jsonl was cut off, as by a kill in the middle of writing; it is left out."""

    def returns(self) -> dict[str, np.ndarray]:
        """Episode returns of the last evaluation by policy; what is not finite is NaN."""
        returns = self.evaluation.get("returns") or {}
        return {name: rows(values, f"returns: {name}")[:, 0] for name, values in returns.items() if len(values)}


def read(directory: Path) -> Record:
    """Reads config.json, which has to be there, and metrics.jsonl, evaluation.json and audit.json where they are.

    Raises FileNotFoundError where `directory` holds no run, ValueError (file and field named) on a malformed file.
    """
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory}: no config.json there, so it is not the directory of a run")
    config = _read_object(directory / "config.json")
    for name, entry in config.get("metrics", {}).items():
        if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(text, str) for text in entry)):
            raise ValueError(f"config.json: metrics: {name}: expected [unit, explanation], found {entry!r}")
    metrics, torn = _read_metrics(directory / "metrics.jsonl")
    path = directory / "evaluation.json"
    evaluation = _read_object(path) if path.is_file() else {}
    _check(evaluation)
    path = directory / "audit.json"
    audit = _read_object(path) if path.is_file() else {}
    if path.is_file():
        check_audit(audit)
    return Record(config, metrics, evaluation, audit, torn)


def rows(values: Any, where: str, file: str = "evaluation.json") -> np.ndarray:
    """A list over time, of numbers or of vectors, as [time, dimension]; what is not finite becomes NaN."""
    try:
        array = np.asarray(values, float)
        array = array.reshape(len(array), int(np.prod(array.shape[1:])))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {where}: expected rows of numbers, all of one length ({error})") from error
    return np.where(np.isfinite(array), array, np.nan)


def total(counter: np.ndarray) -> np.ndarray:
    """Running total of a counter that starts from zero again whenever the run was resumed."""
    steps = np.diff(counter, prepend=0.0)
    return np.cumsum(np.where(steps < 0, counter, steps))


def check_audit(audit: dict[str, Any]) -> None:
    """Raises ValueError, naming the field, for what is not an audit; its parts are checked where they are shown."""
    if audit.get("schema") != 1:
        raise ValueError(f"audit.json: schema: {audit.get('schema')!r} is not 1; delete the file and audit again")
    for name, fields in AUDIT.items():
        part = audit.get(name)
        if not isinstance(part, dict):
            raise ValueError(f"audit.json: {name}: expected an object, found {type(part).__name__}")
        _need(part, fields, f"audit.json: {name}")


def _need(part: Any, fields: tuple[str, ...], where: str) -> None:
    absent = [field for field in fields if not isinstance(part, dict) or field not in part]
    if absent:
        raise ValueError(f"{where}: {', '.join(absent)}: missing")


def _check(evaluation: dict[str, Any]) -> None:
    for name, fields in FIELDS.items():
        part = evaluation.get(name)
        if part:
            _need(part, fields, f"evaluation.json: {name}")
            signals = {**part.get("keys", {}), **{key: part.get(key) for key in ("reward", "discount")}}
            for key, signal in signals.items():
                if name in CURVES and signal:
                    _need(signal, CURVES[name], f"evaluation.json: {name}: {key}")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_metrics(path: Path) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], bool]:
    text = path.read_text("utf-8") if path.is_file() else ""
    whole, _, rest = text.rpartition("\n")
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for number, line in enumerate(whole.split("\n") if whole else [], start=1):
        try:
            row = {key: _number(value) for key, value in json.loads(line).items()}
            step = row.pop("step")
        except (ValueError, AttributeError, KeyError) as error:
            raise ValueError(f"{path}: line {number}: expected numbers by name, with 'step' ({error!r})") from error
        if np.isnan(step):
            raise ValueError(f"{path}: line {number}: step: expected a number")
        for key, value in row.items():
            steps, values = curves.setdefault(key, ([], []))
            steps.append(step)
            values.append(value)
    return {key: (np.array(steps), np.array(values)) for key, (steps, values) in curves.items()}, bool(rest.strip())


def _number(value: Any) -> float:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"not a number: {value!r}")
    return float(value) if value is not None and np.isfinite(value) else np.nan
