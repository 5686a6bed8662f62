"""A faulty model's step beside the exact one's: from the same row, under the same keys."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from forethought.envs.trial import Balance, Grid, Hover
from forethought.models.oracle import Oracle
from forethought.models.planted import planted

KEY = jax.random.key(0)
ENVS = {"jax/hover": Hover(), "jax/balance": Balance(), "jax/grid": Grid()}
SURE = {"jax/hover": Hover(noise=0.0), "jax/balance": Balance(noise=0.0), "jax/grid": Grid(noise=0.0)}
CONTINUOUS = ["jax/hover", "jax/balance"]


@eqx.filter_jit
def taken(model, latent, action, keys):
    """One imagined step per key: (latents, outcomes), with a leading axis."""
    return jax.vmap(lambda key: model.imagine(latent, jnp.asarray(action), key=key))(keys)


def seen(model, position=(0.1, 0.2), velocity=(0.3, -0.4), previous=None, elapsed=0):
    """The latent after a row that shows this state, `elapsed` decisions into an episode; Grid's cell is `position`."""
    env = model.env
    if isinstance(env, Grid):
        obs = {name: jnp.int32(x) for name, x in zip(("row", "column"), position, strict=True)}
    else:
        obs = {"position": jnp.float32(position), "velocity": jnp.float32(velocity)}
    previous = env.spec.action.void() if previous is None else previous
    latent = model.observe(model.initial(), jnp.asarray(previous), obs, jnp.ones((), bool), key=KEY)
    for _ in range(elapsed):
        latent = model.observe(latent, jnp.asarray(previous), obs, jnp.zeros((), bool), key=KEY)
    return latent


def pair(name, fault, magnitude, action, *, envs=ENVS, draws=1, **row):
    """The faulty model's step and the exact one's from the same row, under `draws` keys each."""
    model, exact, keys = planted(envs[name], fault, magnitude), Oracle(envs[name]), jax.random.split(KEY, draws)
    latent, found = taken(model, seen(model, **row), action, keys)
    state, expected = taken(exact, seen(model, **row).state, action, keys)
    return (latent.state, found), (state, expected)


def same(found, expected, **tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **({"rtol": 1e-6, "atol": 1e-6} | tolerance))


ACTIONS = {"jax/hover": jnp.array([0.8, -0.4]), "jax/balance": jnp.array([0.8]), "jax/grid": jnp.int32(3)}
