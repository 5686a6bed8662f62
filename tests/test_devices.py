"""Two CPU devices: what an axis shares, averages and gathers, and who may use how many."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought import devices
from forethought.devices import ALONE, SHARED


def test_an_axis_shares_averages_and_gathers():
    """Rows 0..3 on two devices: each sees two of them, the means of the halves are 0.5 and 2.5."""

    def seen(x):
        part = SHARED.share({"x": x})["x"]
        tree = {"mean": part.mean(0), "twice": 2 * part.sum()}
        return SHARED.mean(tree), SHARED.gather(part, 0), SHARED.gather(part[:, None], 1), jnp.asarray(SHARED.size)

    x = jnp.arange(4.0)
    means, whole, pairs, size = jax.jit(devices.replicated(seen, 2))(x)
    assert means == {"mean": 1.5, "twice": 6.0} and size == 2
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(pairs, [[0, 2], [1, 3]])


def test_alone_there_is_nothing_to_exchange():
    x = {"x": jnp.arange(4.0)}
    assert ALONE.size == 1
    for found in (ALONE.share(x), ALONE.mean(x), ALONE.gather(x, 0)):
        assert found is x
    assert devices.replicated(seen := lambda x: x, 1) is seen


def test_seeds_apart_are_seeds_alone():
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key: jax.random.normal(key, (3,))  # noqa: E731
    found = jax.jit(devices.apart(draw, 2))(keys)
    np.testing.assert_array_equal(found, jnp.stack([draw(key) for key in keys]))
    assert len(found.sharding.device_set) == 2
    np.testing.assert_array_equal(devices.apart(draw, 1)(keys), found)


def test_copies_everywhere_and_the_first_of_them():
    x = {"x": jnp.arange(3.0)}
    spread = devices.spread(x, 2)
    assert len(spread["x"].sharding.device_set) == 2 and devices.spread(x, 1) is x
    one = devices.first(spread)["x"]
    assert one.sharding.device_set == {jax.devices()[0]}
    np.testing.assert_array_equal(one, x["x"])
    np.testing.assert_array_equal(devices.first(x)["x"], x["x"])  # what is on one device only


def test_how_many_devices_share_a_batch():
    assert (devices.sharing(16), devices.sharing(5), devices.sharing(16, 1)) == (2, 1, 1)
    with pytest.raises(ValueError, match="devices is 3, but JAX sees 2"):
        devices.sharing(16, 3)
    with pytest.raises(ValueError, match="does not divide a batch of 5"):
        devices.sharing(5, 2)


def test_devices_are_made_before_jax_starts():
    code = "from forethought import cpu_devices; cpu_devices(3); import jax; print(len(jax.devices())); cpu_devices(2)"
    clean = {"PATH": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
    assert done.stdout == "3\n" and "RuntimeError" in done.stderr
