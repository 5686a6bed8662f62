"""Chunks against the one large batch that they stand for, differentiated by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.ops import loops

KEY = jax.random.key(0)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def loss(params, inputs, data):
    """A mean over rows that is not linear in anything."""
    logits = jnp.tanh(inputs["x"] @ params)
    error = jnp.sum((logits - data["y"]) ** 2, -1) * data["weight"]
    return error.mean(), {"error": error.mean(), "size": jnp.abs(logits).mean()}


@pytest.mark.parametrize("size, chunks", [(12, 1), (6, 2), (5, 3), (1, 12)])
def test_chunked_is_the_loss_of_all_rows(size, chunks):
    """12 rows and three that stand behind them; 5 do not divide 12, so 4 are taken at a time."""
    assert loops._chunks(12, size) == chunks
    params, inputs = normal(3, 2), {"x": normal(12, 3, seed=1)}
    data = {"y": normal(15, 2, seed=2), "weight": jnp.arange(15.0)}
    front = jax.tree.map(lambda x: x[:12], data)

    def total(evaluate, params, inputs):
        value, metrics = evaluate(params, inputs)
        return 3.0 * value, metrics

    chunked = lambda params, inputs: loops.chunked(loss, params, inputs, data, size)  # noqa: E731
    whole = lambda params, inputs: loss(params, inputs, front)  # noqa: E731
    found, expected = (
        jax.value_and_grad(lambda *at: total(f, *at), (0, 1), has_aux=True)(params, inputs)  # noqa: B023
        for f in (chunked, whole)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(chunked(params, inputs)[0], whole(params, inputs)[0], rtol=1e-6)


def test_chunked_under_vmap_keeps_seeds_apart():
    params, inputs = normal(4, 3, 2), {"x": normal(12, 3, seed=1)}
    data = {"y": normal(12, 2, seed=2), "weight": jnp.ones(12)}
    slope = jax.grad(lambda p: loops.chunked(loss, p, inputs, data, 5)[0])
    together = jax.vmap(slope)(params)
    for i in range(4):
        np.testing.assert_allclose(together[i], slope(params[i]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_in_chunks_is_the_function_of_all_rows(size):
    rows = {"x": normal(3, 4, 2)}
    found = jax.jit(lambda rows: loops.in_chunks(lambda part: {"sum": part["x"].sum(-1)}, rows, size))(rows)
    np.testing.assert_allclose(found["sum"], rows["x"].sum(-1), rtol=1e-6)
    slope = jax.grad(lambda rows: jnp.sum(loops.in_chunks(lambda part: part["x"] ** 3, rows, size)))(rows)["x"]
    np.testing.assert_allclose(slope, 3 * rows["x"] ** 2, rtol=1e-5)
