"""What is still good enough: the tolerances of an audit, and whether a curve with bounds is within one."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """What is still good enough. Errors are shares of the variance of real rows, beyond what noise explains."""

    error: float = 0.1
    """Of every part of an observation, at every depth up to the horizon."""
    reward: float = 0.1
    """Of the reward, likewise."""
    termination: float = 0.1
    """Of the probability of having terminated, over its variance."""
    missed: float = 0.25
    """Share of terminations that the model does not predict."""
    time_limit: float = 0.2
    """Probability of a termination that the model gives to steps at which an episode was only cut."""
    region: float = 0.05
    """Error of the first step in the worst region, summed over quantities, where it is five times that elsewhere."""
    exploitation: float = 0.25
    """Mean of promised minus real return of plans sought in the model, in standard deviations of real returns."""
    false_plans: float = 0.25
    """Share of those plans that promise a gain and bring less than half of it."""
    spread: float = 0.02
    """Below this error the model's uncertainty is not judged."""
    regret: float = 0.1
    """Of choosing among policies by the model, over the range of their real returns."""
    value: float = 0.25
    """Largest difference of a policy's promised and real mean return, over that range."""
    support: float = 0.5
    """Share of imagined rows that are farther from the data than 99 in 100 real ones."""
    drift: float = 0.02
    """One-step error on newer data, where it is four times that on older."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"tolerance {field.name} is {value}; it must be finite and at least 0")

    @classmethod
    def read(cls, path: Path) -> Tolerances:
        """Reads a TOML file of names and numbers. Raises ValueError naming what is wrong."""
        try:
            found = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: not TOML: {error}") from error
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := found.keys() - set(names):
            raise ValueError(f"{path}: '{min(unknown)}' is no tolerance; there are {', '.join(names)}")
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{path}: tolerance {name} is {value!r}; it must be a number")
        try:
            return cls(**{name: float(value) for name, value in found.items()})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def held(curve: dict[str, Any], tolerance: float) -> list[str | None]:
    """By depth: 'holds', 'broken' or 'open'; None where too few steps of this depth were seen to say."""
    found = []
    for mean, low, high in zip(curve["mean"], curve["low"], curve["high"], strict=True):
        if mean is None or (low is None and high is None):
            found.append(None)
        elif high is not None and high <= tolerance:
            found.append("holds")
        else:
            found.append("broken" if low is not None and low > tolerance else "open")
    return found


def of(name: str, tolerances: Tolerances) -> float:
    return tolerances.reward if name == "reward" else tolerances.error
