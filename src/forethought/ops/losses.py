"""Loss terms and the codes they work on: symlog, two-hot, balanced KL."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float


def symlog(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compresses magnitudes: sign(x) ln(1 + |x|) (Hafner et al. 2023, eq. 9)."""
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The inverse of `symlog`: sign(x) (exp|x| - 1)."""
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


def symexp_bins(n: int, limit: float) -> np.ndarray:
    """Bins at symexp of n equal steps from -limit to limit, exactly symmetric about an exact 0; n is odd.

    Raises ValueError for an even n and for a limit that gives no strictly increasing float32 bins."""
    if n < 3 or n % 2 == 0:
        raise ValueError(f"symexp_bins: n is {n}; it must be odd and at least 3, so that one bin is 0")
    if not 0 < limit <= 88:
        raise ValueError(f"symexp_bins: limit is {limit}; it must be positive and at most 88, where float32 ends")
    half = np.expm1(np.linspace(0, limit, n // 2 + 1)).astype(np.float32)
    return np.concatenate([-half[:0:-1], half])


def two_hot(target: Float[Array, ""], bins: Float[Array | np.ndarray, " K"]) -> Float[Array, " K"]:
    """Spreads a scalar over its two neighbouring bins so that the mean is the scalar (Hafner et al. 2023, eq. 10).

    A target beyond the bins goes to the outer bin; a target at a bin to that bin alone. NaN has no code: the
    weights are all NaN, and outside of jit and vmap it is an error.

    Args:
        target: in the units of `bins`; computed in float32 whatever its type.
        bins: strictly increasing.

    Returns:
        Weights, at least 0, that sum to 1; at most two, adjacent ones, are positive.
    """
    if not isinstance(target, Tracer) and bool(jnp.isnan(target)):
        raise ValueError("two_hot: the target is NaN; only numbers have a two-hot code")
    bins = jnp.asarray(bins, jnp.float32)
    value = jnp.clip(target.astype(jnp.float32), bins[0], bins[-1])
    rise = (value - bins[:-1]) / jnp.diff(bins)  # of the hat functions between bins k and k + 1
    return jnp.maximum(0.0, jnp.minimum(jnp.append(jnp.inf, rise), jnp.append(1 - rise, jnp.inf)))


def two_hot_mean(logits: Float[Array, "*batch K"], bins: Float[Array | np.ndarray, " K"]) -> Float[Array, "*batch"]:
    """The mean of softmax(logits) over bins that are symmetric about 0, exactly 0 for symmetric logits.

    Mirrored bins go in pairs: with symexp bins (up to 4.9e8) a plain sum of the large terms, which cancel, loses
    the small ones. Each pair's exponentials are subtracted before they are multiplied, and taken at the same place
    of two arrays, because compiled code rounds exp differently from place to place and fuses products with sums:
    half a billion times such a rounding error is not small.
    """
    logits = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    half = logits.shape[-1] // 2
    parts = logits[..., -half:], logits[..., half - 1 :: -1], logits[..., half:-half]
    above, below, middle = (jnp.exp(part - top) for part in parts)
    total = above.sum(-1) + below.sum(-1) + middle.sum(-1)
    return jnp.sum((above - below) * jnp.asarray(bins, jnp.float32)[-half:], -1) / total


def two_hot_loss(
    logits: Float[Array, " K"], target: Float[Array, ""], bins: Float[Array | np.ndarray, " K"]
) -> Float[Array, ""]:
    """Cross-entropy between the two-hot code of a target and softmax(logits), in nats."""
    return -jnp.sum(two_hot(target, bins) * jax.nn.log_softmax(logits))


def categorical_kl(p_logits: Float[Array, "*shape C"], q_logits: Float[Array, "*shape C"]) -> Float[Array, "*shape"]:
    """KL(p || q) of categorical distributions, in nats, over the last axis; logits are log-probabilities."""
    return jnp.sum(jnp.exp(p_logits) * (p_logits - q_logits), -1)


def balanced_kl(
    post_logits: Float[Array, "S C"], prior_logits: Float[Array, "S C"], free_nats: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The two halves of the balanced KL with free nats (Hafner et al. 2023, eq. 5).

    Args:
        post_logits, prior_logits: log-probabilities of S categorical variables with C classes.
        free_nats: each half is at least this (and then has no gradient).

    Returns:
        (dynamics, representation): KL(sg(posterior) || prior), which trains the prior, and
        KL(posterior || sg(prior)), which trains the posterior; both summed over S, in nats.
    """
    stop = jax.lax.stop_gradient
    dynamics = categorical_kl(stop(post_logits), prior_logits).sum()
    representation = categorical_kl(post_logits, stop(prior_logits)).sum()
    return jnp.maximum(dynamics, free_nats), jnp.maximum(representation, free_nats)
