"""Gradients that stop, masks that select rows, averages by hand, and names that name every array."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from forethought import tree
from forethought.nets import MLP

KEY = jax.random.key(0)


def net(scale=1.0):
    return MLP(2, 3, 1, 2, scale=scale, key=KEY)


def test_frozen_gives_the_same_values_and_no_gradient():
    x = jnp.array([1.0, -2.0])
    slope = eqx.filter_grad(lambda m: (tree.frozen(m)(x) * m.output.bias).sum())(net())
    np.testing.assert_array_equal(slope.output.bias, net()(x))
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(slope.trunk))
    # What is done to the input still has its gradient.
    assert np.abs(jax.grad(lambda x: tree.frozen(net())(x).sum())(x)).min() > 0


def test_frozen_leaves_integers_keys_and_functions_alone():
    held = {"count": jnp.array(3), "key": KEY, "name": "x", "call": jnp.sin, "none": None}
    assert tree.frozen(held) == held


def test_select_takes_rows():
    this = {"a": jnp.arange(3), "b": jnp.ones((3, 2, 2)), "none": None}
    that = {"a": -jnp.ones(3, jnp.int32), "b": jnp.zeros((3, 2, 2)), "none": None}
    found = tree.select(jnp.array([True, False, True]), this, that)
    np.testing.assert_array_equal(found["a"], [0, -1, 2])
    np.testing.assert_array_equal(found["b"][:, 1, 0], [1, 0, 1])
    assert found["a"].dtype == jnp.int32 and found["none"] is None


def test_select_chooses_random_keys_like_other_arrays():
    """Two keys a row and two rows: a mask that did not lead the axes would mix them up."""
    this, that = (jax.random.split(jax.random.key(i), (2, 2)) for i in range(2))
    found = tree.select(jnp.array([True, False]), this, that)
    expected = [jax.random.key_data(this)[0], jax.random.key_data(that)[1]]
    np.testing.assert_array_equal(jax.random.key_data(found), expected)
    one = tree.select(jnp.array(False), this[0, 0], that[0, 0])
    np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(that)[0, 0])


def test_polyak_moves_a_share_of_the_way():
    target, online = {"w": jnp.array([0.0, 8.0]), "n": jnp.array(1)}, {"w": jnp.array([4.0, 0.0]), "n": jnp.array(9)}
    found = tree.polyak(target, online, 0.25)
    np.testing.assert_array_equal(found["w"], [1, 6])
    assert found["n"] == 1  # what is no parameter does not move


def test_a_copy_outlives_the_donated_original():
    original = {"w": jnp.arange(4.0), "key": jax.random.key(3), "label": "x"}
    copied = tree.copy(original)
    original["w"].delete()
    np.testing.assert_array_equal(copied["w"], np.arange(4))
    assert copied["label"] == "x" and copied["key"] == jax.random.key(3)


def test_every_array_has_its_name():
    named = tree.named_arrays({"net": net(), "rest": (1, jnp.zeros(2), np.ones(3))})
    names = ["net/trunk/layers/0/dense/weight", "net/trunk/layers/0/dense/bias", "net/trunk/layers/0/norm/scale"]
    names += ["net/output/weight", "net/output/bias", "rest/1", "rest/2"]
    assert list(named) == names
    assert named["net/output/weight"].shape == (2, 3)


def test_parameters_are_counted():
    # 2 x 3 + 3 dense, 3 norm, 3 x 2 + 2 out = 20; an integer is no parameter.
    assert tree.num_params((net(), jnp.arange(5))) == 20
