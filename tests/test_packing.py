"""Trees of arrays as bytes and back: every kind of array, and every way a template can differ."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.packing import pack, unpack

KINDS = {
    "matrix": jnp.array([[1.5, -2.0, 3.0]]),
    "scalar": jnp.array(7, jnp.int32),
    "empty": jnp.zeros((0, 3)),
    "bool": jnp.array([True, False]),
    "bytes": jnp.arange(250, 256, dtype=jnp.uint8),
    "bfloat16": jnp.array([1.0, -0.0, jnp.inf], jnp.bfloat16),
    "nan": jnp.array([jnp.nan, -jnp.inf]),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(3), (2, 2)),
    "rbg": jax.random.key(3, impl="rbg"),
    "numpy": np.array([2**53 + 1, -1], np.int64),
    "double": np.array(0.1),
    "reversed": np.arange(5.0)[::-1],
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "complex": np.array([1 + 2j], np.complex64),
}


def bits(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    leaf = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return leaf.shape, leaf.dtype, leaf.tobytes()


def zeros(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    return (np if isinstance(leaf, np.ndarray) else jnp).zeros(leaf.shape, leaf.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_comes_back_bit_for_bit(kind):
    leaf = KINDS[kind]
    restored = unpack(pack({"a": [leaf]}), {"a": [zeros(leaf)]})["a"][0]
    assert type(restored) is type(leaf) and restored.dtype == leaf.dtype and bits(restored) == bits(leaf)


def test_equal_trees_give_equal_bytes_and_a_module_comes_back():
    model = eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(0))
    tree = {"model": model, "count": 3, "keys": [KINDS["key"], KINDS["rbg"], KINDS["keys"]], "bare": KINDS["scalar"]}
    assert pack(tree) == pack(tree)
    like = {**tree, "model": eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(1)), "count": 4}
    restored = unpack(pack(tree), like)
    assert eqx.tree_equal(restored["model"], model) and restored["count"] == 4
    assert eqx.tree_equal(unpack(pack(jnp.arange(3)), jnp.zeros(3, jnp.int32)), jnp.arange(3))
    assert unpack(pack({}), {}) == {}


def test_what_comes_back_may_be_donated_and_written_to():
    content = pack({"a": jnp.ones(1000), "b": np.ones(3)})
    tree = unpack(content, {"a": jnp.zeros(1000), "b": np.zeros(3)})
    jax.jit(lambda x: x * 3, donate_argnums=0)(tree["a"]).block_until_ready()
    tree["b"][0] = 5
    assert eqx.tree_equal(unpack(content, {"a": jnp.zeros(1000), "b": np.zeros(3)})["a"], jnp.ones(1000))


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"a": jnp.zeros((2, 4)), "k": KINDS["key"]}, r"'a' is float32\[2, 3\], the template has float32\[2, 4\]"),
        ({"a": jnp.zeros((3, 2)), "k": KINDS["key"]}, r"'a' is float32\[2, 3\], the template has float32\[3, 2\]"),
        ({"a": jnp.zeros((2, 3), jnp.int32), "k": KINDS["key"]}, r"'a' is float32\[2, 3\], .* int32\[2, 3\]"),
        ({"a": np.zeros((2, 3)), "k": KINDS["key"]}, r"'a' is float32\[2, 3\], the template has float64\[2, 3\]"),
        ({"a": jnp.zeros((2, 3)), "k": jnp.zeros(2, jnp.uint32)}, r"'k' is key<fry>\[2\], .* uint32\[2\]"),
        ({"a": jnp.zeros((2, 3)), "k": KINDS["rbg"]}, r"'k' is key<fry>\[2\], the template has key<rbg>\[4\]"),
        ({"a": jnp.zeros((2, 3))}, r"'k' is key<fry>\[2\], the template has no such array"),
        ({"a": jnp.zeros((2, 3)), "k": KINDS["key"], "z": jnp.zeros(())}, r"'z' is missing, .* float32\[\]"),
        ({"b": jnp.zeros((2, 3)), "k": KINDS["key"]}, r"'b' is missing.* \(and 1 more like it\)"),
    ],
)
def test_a_template_that_differs_is_refused_by_name(like, message):
    with pytest.raises(ValueError, match=message):
        unpack(pack({"a": jnp.ones((2, 3)), "k": KINDS["key"]}), like)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"x/y": jnp.ones(1), "x": {"y": jnp.ones(1)}}, "two arrays have one name"),
        ({"x": np.ones(1, np.complex128)}, "'x' is complex128"),
        ({"x": np.ones(1, ">f4")}, "'x' is >f4"),
        ({"x": np.array(["word"])}, "'x' is <U4"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tree, message):
    with pytest.raises(ValueError, match=message):
        pack(tree)


def test_a_branch_comes_back_alone():
    tree = {"agent": {"w": jnp.arange(3.0), "key": KINDS["rbg"]}, "agents": jnp.ones(2), "w": jnp.zeros(3)}
    like = jax.tree.map(zeros, tree["agent"])
    restored = unpack(pack(tree), like, part="agent")
    assert bits(restored["w"]) == bits(tree["agent"]["w"]) and bits(restored["key"]) == bits(tree["agent"]["key"])
    assert bits(unpack(pack(tree), {"w": jnp.zeros(3), "key": KINDS["rbg"]}, part="agent")["w"]) == bits(
        jnp.arange(3.0)
    )
    with pytest.raises(ValueError, match="'key' is missing.*1 more"):
        unpack(pack(tree), like, part="critic")
    with pytest.raises(ValueError, match="'key' is key<rbg>.*, the template has no such array"):
        unpack(pack(tree), {"w": like["w"]}, part="agent")
