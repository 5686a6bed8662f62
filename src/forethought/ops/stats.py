"""Statistics: what is carried along while training, and what is said of many seeds afterwards."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Float

FEW = 5
"""With fewer seeds than this no interval is claimed."""
RESAMPLES = 2000


class RunningStats(eqx.Module):
    """Mean and variance per dimension over all that was ever added (Chan et al. 1983, pairwise update).

    Adding returns a new object: evaluation, which only calls `normalize`, cannot change it.
    """

    count: Float[Array, ""]
    mean: Float[Array, " D"]
    squares: Float[Array, " D"]
    """Sum of squared deviations from the mean."""

    @classmethod
    def empty(cls, dims: int) -> "RunningStats":
        return cls(jnp.zeros(()), jnp.zeros(dims), jnp.zeros(dims))

    def add(self, batch: Float[Array, "N D"]) -> "RunningStats":
        size = batch.shape[0]
        count = self.count + size
        delta = batch.mean(0) - self.mean
        squares = self.squares + batch.var(0) * size + delta**2 * self.count * size / count
        return RunningStats(count, self.mean + delta * size / count, squares)

    def scale(self) -> Float[Array, " D"]:
        """The standard deviation, at least 1e-3; 1 before anything was added."""
        spread = jnp.sqrt(self.squares / jnp.maximum(self.count, 1.0))
        return jnp.where(self.count == 0, 1.0, jnp.maximum(spread, 1e-3))

    def normalize(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return (x - self.mean) / self.scale()


class ReturnScale(eqx.Module):
    """The range from the 5th to the 95th percentile of returns, as a moving average (Hafner et al. 2023, eq. 11)."""

    low: Float[Array, ""]
    high: Float[Array, ""]

    @classmethod
    def initial(cls) -> "ReturnScale":
        return cls(jnp.zeros(()), jnp.zeros(()))

    def add(self, returns: Float[Array, "..."], rate: float) -> "ReturnScale":
        low, high = jnp.percentile(returns, jnp.array([5.0, 95.0]))
        return ReturnScale(self.low + rate * (low - self.low), self.high + rate * (high - self.high))

    def value(self, least: float = 1.0) -> Float[Array, ""]:
        """What advantages are divided by: at least 1, so that small returns are not blown up to noise."""
        return jnp.maximum(least, self.high - self.low)


def iqm(x: Float[np.ndarray, "S *rest"]) -> Float[np.ndarray, "*rest"]:
    """The interquartile mean over seeds: the mean of the middle half (Agarwal et al. 2021, sec. 4)."""
    return np.asarray(scipy.stats.trim_mean(x, 0.25, 0))


def optimality_gap(x: Float[np.ndarray, "S *rest"]) -> Float[np.ndarray, "*rest"]:
    """By how much scores fall short of 1 on average, those above it counted as 1 (Agarwal et al. 2021, sec. 4)."""
    return np.asarray(np.maximum(1 - x, 0).mean(0))


def profile(x: Float[np.ndarray, "S *rest"], tau: Float[np.ndarray, " K"]) -> Float[np.ndarray, "K *rest"]:
    """The share of scores above each tau, a performance profile (Agarwal et al. 2021, sec. 4)."""
    return np.array([(x > threshold).mean(0) for threshold in tau])


def improvement(
    x: Sequence[Float[np.ndarray, "_ *rest"]], y: Sequence[Float[np.ndarray, "_ *rest"]]
) -> Float[np.ndarray, "*rest"]:
    """The probability that a run of X scores above one of Y on the same task, averaged over tasks, a tie counting half.

    `x` and `y` hold the seeds of each task. On one task it is Mann and Whitney's U over the number of pairs (Agarwal
    et al. 2021, sec. 4).
    """
    by_task = [np.sign(a[:, None] - b).mean((0, 1)) for a, b in zip(x, y, strict=True)]
    return np.asarray((1 + np.mean(by_task, 0)) / 2)


def resample(
    tasks: Sequence[Float[np.ndarray, " _"]], *, rng: np.random.Generator
) -> list[Float[np.ndarray, "_ R"]] | None:
    """The seeds of each task drawn anew from that task, R times over; None where a task has fewer than 5."""
    if min(map(len, tasks)) < FEW:
        return None
    return [rng.choice(x, (RESAMPLES, len(x))).T for x in tasks]


def interval(
    statistic: Callable[..., Float[np.ndarray, "*rest R"]], *drawn: list[np.ndarray] | None
) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"]] | None:
    """The 95 % percentile interval of a statistic of methods that `resample` drew; None if one of them is None."""
    if any(method is None for method in drawn):
        return None
    low, high = np.quantile(statistic(*drawn), [0.025, 0.975], -1)
    return np.asarray(low), np.asarray(high)


def iqm_interval(x: Float[np.ndarray, " S"], *, rng: np.random.Generator) -> tuple[float, float] | None:
    """A 95 % percentile-bootstrap interval of the interquartile mean over S seeds; None for fewer than 5."""
    found = interval(lambda drawn: iqm(drawn[0]), resample([x], rng=rng))
    return found and (float(found[0]), float(found[1]))


def discordant(a: np.ndarray, b: np.ndarray) -> tuple[int, int, float]:
    """Of paired events: how often only a, how often only b, and McNemar's exact two-sided p for their being equal."""
    only_a, only_b = int(np.sum(a & ~b)), int(np.sum(b & ~a))
    tried = only_a + only_b
    return only_a, only_b, float(scipy.stats.binomtest(only_a, tried, 0.5).pvalue) if tried else 1.0


def rank_correlation(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"]) -> float:
    """Spearman's, of which neither side may be constant."""
    return float(np.corrcoef(scipy.stats.rankdata(x), scipy.stats.rankdata(y))[0, 1])
