"""Loops that are cheap to differentiate: `unroll` for recurrences, `chunked` for losses over many rows.

Both compute what plain automatic differentiation of a scan or of one large batch would, up to rounding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

CHUNK = 512
"""Rows that are worked on at a time: of a network of size 1m, what they need stays in a core's cache."""


def unroll(
    step: Callable[[Any, Any, Any], tuple[Any, Any]], params: PyTree, carry: PyTree, rows: PyTree
) -> tuple[PyTree, PyTree]:
    """Scans carry, out = step(params, carry, row) over rows [T, ...]; returns the last carry and outs [T, ...].

    Differentiated as it stands, a scan adds an outer product of a few rows to the gradient of every weight at every
    step. Here the loop backwards carries only the gradient of the carry from step to step,

        slope[t - 1] = (d step[t] / d carry)^T (slope[t], d out[t])

    and when all slopes are known, the gradients of weights and rows are those of all T steps as one batch.

    Args:
        step: may batch inside; `carry` holds floating-point arrays only.
    """

    def scan(params: PyTree, carry: PyTree, rows: PyTree) -> Any:
        return jax.lax.scan(lambda carry, row: step(params, carry, row), carry, rows)

    def forward(params: PyTree, carry: PyTree, rows: PyTree) -> Any:
        def nudged(carry: Any, row: Any) -> Any:
            row, nudge = row
            later, out = step(params, carry, row)
            return jax.tree.map(jnp.add, later, nudge), (out, carry)

        def loop(carry: PyTree, nudges: PyTree) -> Any:
            later, (out, before) = jax.lax.scan(nudged, carry, (rows, nudges))
            return (later, out), before

        length = jax.tree.leaves(rows)[0].shape[0]
        nudges = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), carry)  # their slopes are the carry's
        result, pull, before = jax.vjp(loop, carry, nudges, has_aux=True)
        return result, (pull, params, before, rows)

    def backward(saved: Any, slopes: Any) -> Any:
        pull, params, before, rows = saved
        carry_slope, later_slopes = pull(slopes)
        steps = lambda params, rows: jax.vmap(step, (None, 0, 0))(params, before, rows)  # noqa: E731
        params_slope, rows_slope = jax.vjp(steps, params, rows)[1]((later_slopes, slopes[1]))
        return params_slope, carry_slope, rows_slope

    run = jax.custom_vjp(scan)
    run.defvjp(forward, backward)
    return run(params, carry, rows)


def in_chunks(function: Callable[[Any], Any], rows: PyTree, size: int = CHUNK) -> PyTree:
    """function(rows), which works on leaves [n, ...] and keeps n, on all rows of leaves [T, N, ...], `size` at a time.

    Differentiated, it computes a chunk anew instead of keeping all that lies between."""
    lead = jax.tree.leaves(rows)[0].shape[:2]
    chunks = _chunks(lead[0] * lead[1], size)
    parts = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[2:]), rows)
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
