"""Alignment of two representations of one observation: losses that pull, and measures that only look.

A model's code and a policy's code [D] of the same observation; the first `shared` dimensions of each are its shared
part, the rest its private part. No function here stops a gradient: whoever calls one freezes the side that is not to
move. The probe and the angles need a decomposition and are for reports: NumPy and SciPy, on the host. The rest is JAX.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float, Int

TINY = 1e-12
"""Added to squared lengths: a code of zeros has no direction, and then no gradient either."""


def shared_part(code: Float[Array, "*batch D"], shared: int | Int[Array, ""]) -> Float[Array, "*batch D"]:
    """The code with its private dimensions set to 0, so that the split may differ between programs run as one."""
    return jnp.where(jnp.arange(code.shape[-1]) < shared, code, 0.0)


def unit(code: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """The code's direction: code / |code|."""
    return code * jax.lax.rsqrt(jnp.sum(code**2, -1, keepdims=True) + TINY)


def cosine(a: Float[Array, "*batch D"], b: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
    """The cosine of the angle between two codes."""
    return jnp.sum(unit(a) * unit(b), -1)


def partial_alignment(
    model: Float[Array, " D"], policy: Float[Array, " D"], shared: int | Int[Array, ""]
) -> Float[Array, ""]:
    """| s / |s| - t / |t| |^2 of the shared parts s and t, in [0, 4]; 2 - 2 cos of the angle between them.

    With all D dimensions shared it is full soft alignment, with none it is 0. It says nothing of lengths.
    """
    gap = unit(shared_part(model, shared)) - unit(shared_part(policy, shared))
    return jnp.sum(gap**2)


def info_nce(
    model: Float[Array, "N D"], policy: Float[Array, "N D"], temperature: float | Float[Array, ""]
) -> Float[Array, ""]:
    """The contrastive loss of N pairs, in nats: entry n of one is to find entry n of the other by its cosine.

    The mean of both directions (van den Oord et al. 2018, eq. 4, with the symmetry of Radford et al. 2021). It is
    log N where nothing is told apart.
    """
    logits = unit(model) @ unit(policy).T / temperature
    both = jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)
    return -jnp.mean(jnp.diagonal(both)) / 2


def value_weighted(
    predicted: Float[Array, " D"], real: Float[Array, " D"], slope: Float[Array, " D"]
) -> Float[Array, ""]:
    """The model loss of VaGraM: sum_i (dV/ds_i (predicted_i - real_i))^2 (Voelcker et al. 2022, eq. 10).

    Args:
        slope: the gradient of the value at `real`, frozen by the caller.
    """
    return jnp.sum((slope * (predicted - real)) ** 2)


def value_equivalent(
    value: Callable[[Array], Float[Array, ""]], predicted: Float[Array, " D"], real: Float[Array, " D"]
) -> Float[Array, ""]:
    """The model loss of IterVAML: (V(predicted) - V(real))^2 (Farahmand 2018, eq. 4), for one value function.

    Over a set of value functions its mean is the value-equivalence loss (Grimm et al. 2020, eq. 3). A model with
    noise of its own is biased by it, since the square is taken of a sample (Voelcker et al. 2023).
    """
    return (value(predicted) - value(real)) ** 2


def linear_cka(a: Float[Array | np.ndarray, "N D"], b: Float[Array | np.ndarray, "N E"]) -> Float[Array, ""]:
    """Centred kernel alignment of two representations of N inputs, in [0, 1] (Kornblith et al. 2019, eq. 4).

    1 where one is a rotation and scaling of the other; NaN where one is constant.
    """
    a, b = (jnp.asarray(x) - x.mean(0) for x in (a, b))
    square = lambda x: jnp.sum(x**2)  # noqa: E731
    return square(a.T @ b) / jnp.sqrt(square(a.T @ a) * square(b.T @ b))


def ridge_r2(
    code: Float[np.ndarray, "N D"], target: Float[np.ndarray, "N K"], penalty: float = 1e-3
) -> Float[np.ndarray, " K"]:
    """How much of each target a linear probe finds in a code: R^2 on the second half of N inputs, fitted on the first.

    Codes are standardised by the first half; `penalty` counts per input. 0 is what the first half's mean would give,
    and below it the probe is worse than that. NaN for a target that is constant on the second half.
    """
    if len(code) < 4:
        raise ValueError(f"ridge_r2: {len(code)} inputs; a probe needs at least 4")
    half = len(code) // 2
    code, target = np.asarray(code, np.float64), np.asarray(target, np.float64)
    mean, spread = code[:half].mean(0), code[:half].std(0)
    code = (code - mean) / np.where(spread > 0, spread, 1.0)
    centre = target[:half].mean(0)
    gram = code[:half].T @ code[:half] + penalty * half * np.eye(code.shape[1])
    weights = scipy.linalg.solve(gram, code[:half].T @ (target[:half] - centre), assume_a="pos")
    missed = ((target[half:] - centre - code[half:] @ weights) ** 2).sum(0)
    around = ((target[half:] - centre) ** 2).sum(0)
    return 1 - missed / np.where(around > 0, around, np.nan)


def principal_angles(
    a: Float[np.ndarray, "N D"], b: Float[np.ndarray, "N E"], variance: float = 0.99
) -> Float[np.ndarray, " K"]:
    """Angles in radians, ascending, between what two representations of N inputs span (Bjorck & Golub 1973).

    Each is cut to the fewest principal components that hold `variance` of it, so that noise spans nothing; there
    are as many angles as the smaller has components.
    """
    return scipy.linalg.subspace_angles(*(_scores(np.asarray(x, np.float64), variance) for x in (a, b)))[::-1]


def _scores(x: np.ndarray, variance: float) -> np.ndarray:
    """Orthonormal columns [N, K]: the leading principal components' scores."""
    left, sizes, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    if not sizes[0] > 0:
        raise ValueError("principal_angles: a representation that is constant spans nothing")
    share = np.cumsum(sizes**2) / np.sum(sizes**2)
    return left[:, : int(np.searchsorted(share, variance)) + 1]


def jacobian_share(
    encode: Callable[[Float[Array, " O"]], Float[Array, " D"]], obs: Float[Array, "N O"]
) -> Float[Array, " O"]:
    """Which share of an encoder's sensitivity each dimension of the observation has; sums to 1.

    The squares of the Jacobian's entries, summed over the code and over N observations. Of an encoder that does not
    react at all, NaN.
    """
    squares = jnp.sum(jax.vmap(jax.jacfwd(encode))(obs) ** 2, (0, 1))
    return squares / jnp.sum(squares)
