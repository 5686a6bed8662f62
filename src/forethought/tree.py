"""What JAX lacks for trees: frozen modules, masked selection, Polyak averages, names for arrays."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree


def frozen(tree: Any) -> Any:
    """Stops the gradient at every array of a module (jax.lax.stop_gradient raises on equinox modules)."""
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, tree)


def select(where: Bool[Array, "*batch"], this: PyTree, that: PyTree) -> PyTree:
    """Takes leaves of `this` where the mask holds and of `that` elsewhere; the mask leads each leaf's axes."""

    def pick(a: Any, b: Any) -> Any:
        return jnp.where(where.reshape(where.shape + (1,) * (jnp.ndim(a) - where.ndim)), a, b)

    return jax.tree.map(pick, this, that)


def polyak(target: Any, online: Any, rate: float | Float[Array, ""]) -> Any:
    """Moves the arrays of `target` a share `rate` of the way to `online`."""
    return jax.tree.map(lambda t, o: t + rate * (o - t) if eqx.is_inexact_array(t) else t, target, online)


def copy(tree: Any) -> Any:
    """Copies every array, so that one tree can be donated and the other lives on."""
    return jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, tree)


def named_arrays(tree: Any) -> dict[str, Any]:
    """The array leaves of a tree by their path, such as 'model/encoder/layers/0/weight'."""
    leaves = jax.tree_util.tree_flatten_with_path(eqx.filter(tree, eqx.is_array))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def num_params(tree: Any) -> int:
    """The number of floating-point parameters in a module."""
    return sum(x.size for x in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)))
