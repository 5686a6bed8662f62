"""Losses and heads over many rows, a cache-sized chunk at a time: equal to one large batch, up to rounding."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

CHUNK = 512
"""Rows that are worked on at a time: of a network of size 1m, what they need stays in a core's cache."""


def in_chunks(function: Callable[[Any], Any], rows: PyTree, size: int = CHUNK) -> PyTree:
    """function(rows), which works on leaves [n, ...] and keeps n, on all rows of leaves [T, N, ...], `size` at a time.

    Differentiated, it computes a chunk anew instead of keeping all that lies between."""
    lead = jax.tree.leaves(rows)[0].shape[:2]
    chunks = _chunks(lead[0] * lead[1], size)
    each = lead[0] * lead[1] // chunks  # said, since -1 is not known where an axis is empty
    parts = jax.tree.map(lambda x: x.reshape(chunks, each, *x.shape[2:]), rows)
    found = jax.lax.map(jax.checkpoint(lambda part: function(part)), parts)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[2:]), found)


def chunked(
    loss: Callable[[Any, Any, Any], tuple[Float[Array, ""], Any]],
    params: PyTree,
    inputs: PyTree,
    data: PyTree,
    size: int = CHUNK,
) -> tuple[Float[Array, ""], PyTree]:
    """Evaluates loss(params, inputs, data), a mean over rows, on about `size` rows at a time.

    The gradient of a chunk is computed along with its value, so that what lies between, such as logits over all bins,
    exists for one chunk only and stays in the processor's cache.

    Args:
        loss: returns a scalar and metrics, all of them means over the rows that it is given.
        params: gets a gradient.
        inputs: leaves [N, ...]; gets a gradient.
        data: leaves [N, ...] or longer, of which the first N rows are used; gets no gradient.
        size: the number of chunks is the smallest divisor of N that makes none larger.

    Returns:
        The scalar and the metrics over all N rows; the metrics have no gradient.
    """
    rows = jax.tree.leaves(inputs)[0].shape[0]
    chunks = _chunks(rows, size)
    each = rows // chunks

    def forward(params: PyTree, inputs: PyTree, data: PyTree) -> Any:
        def chunk(slope: PyTree, i: Array) -> Any:
            some, known = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * each, each), (inputs, data))
            value, pull, metrics = jax.vjp(lambda params, some: loss(params, some, known), params, some, has_aux=True)
            params_slope, some_slope = pull(jnp.ones_like(value) / chunks)
            return jax.tree.map(jnp.add, slope, params_slope), (value, metrics, some_slope)

        zero = jax.tree.map(jnp.zeros_like, params)
        slope, (value, metrics, slopes) = jax.lax.scan(chunk, zero, jnp.arange(chunks))
        slopes = jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), slopes)
        return jax.tree.map(lambda x: x.mean(0), (value, metrics)), (slope, slopes)

    def backward(slopes: Any, slope: Any) -> Any:
        return *jax.tree.map(lambda x: slope[0] * x, slopes), None

    run = jax.custom_vjp(lambda *at: forward(*at)[0])
    run.defvjp(forward, backward)
    return run(params, inputs, data)


def _chunks(rows: int, size: int) -> int:
    return next(n for n in range(-(-rows // size), rows + 1) if rows % n == 0)
