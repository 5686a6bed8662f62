"""Statistics: what is carried along while training, and what is said of many seeds afterwards."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Float


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

    def value(self) -> Float[Array, ""]:
        """What advantages are divided by: at least 1, so that small returns are not blown up to noise."""
        return jnp.maximum(1.0, self.high - self.low)


def iqm(x: Float[np.ndarray, "S *rest"]) -> Float[np.ndarray, "*rest"]:
    """The interquartile mean over seeds: the mean of the middle half (Agarwal et al. 2021, sec. 4)."""
    return np.asarray(scipy.stats.trim_mean(x, 0.25, 0))


def iqm_interval(
    x: Float[np.ndarray, " S"], *, rng: np.random.Generator, level: float = 0.95
) -> tuple[float, float] | None:
    """A percentile-bootstrap interval of the interquartile mean over S seeds; None for fewer than 5."""
    if len(x) < 5:
        return None
    drawn = np.sort(rng.choice(x, (2000, len(x))), 1)
    low, high = np.quantile(iqm(drawn.T), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def discordant(a: np.ndarray, b: np.ndarray) -> tuple[int, int, float]:
    """Of paired events: how often only a, how often only b, and McNemar's exact two-sided p for their being equal."""
    only_a, only_b = int(np.sum(a & ~b)), int(np.sum(b & ~a))
    tried = only_a + only_b
    return only_a, only_b, float(scipy.stats.binomtest(only_a, tried, 0.5).pvalue) if tried else 1.0
