"""Ensembles of nearly exact models: how wrong their members are, how they differ, and which are copies."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.envs.control import Pendulum
from forethought.envs.trial import Balance, Grid, Hover
from forethought.imagine import open_loop
from forethought.models.members import SPREAD, WRONG_MOVES, ensemble
from forethought.models.oracle import Oracle
from forethought.models.planted import planted
from forethought.protocols import EnsembleModel

KEY = jax.random.key(0)
ENVS = {"jax/hover": Hover(), "jax/balance": Balance(), "jax/grid": Grid()}


def rows(name, count):
    """Observations [count] all over the space and actions, with keys."""
    state_key, action_key, key = jax.random.split(KEY, 3)
    if name == "jax/grid":
        cells = jax.random.randint(state_key, (2, count), 0, 8, jnp.int32)
        obs, action = dict(zip(("row", "column"), cells, strict=True)), jax.random.randint(action_key, (count,), 0, 4)
    else:
        spread = 1.5 * jnp.asarray(SPREAD[name]) * jax.random.normal(state_key, (count, 4))
        obs = {"position": spread[:, :2], "velocity": spread[:, 2:]}
        size = ENVS[name].spec.action.shape
        action = jax.random.uniform(action_key, (count, *size), minval=-1.0, maxval=1.0)
    return obs, action, jax.random.split(key, count)


@eqx.filter_jit
def step(model, obs, action, keys):
    def one(obs, action, key):
        latent = model.observe(model.initial(), action, obs, jnp.ones((), bool), key=key)
        return model.imagine(latent, action, key=key)[1].obs

    return jnp.concatenate([x.reshape(len(keys), -1) for x in jax.vmap(one)(obs, action, keys).values()], axis=1)


@pytest.mark.parametrize("name", ["jax/hover", "jax/balance"])
def test_members_are_wrong_by_little_and_each_in_its_own_way(name):
    """0.02 min(rms z, 2) |sin| is at most 0.04; the errors of two members are as good as unrelated over the space."""
    exact = step(Oracle(ENVS[name]), *rows(name, 2000))
    found = [step(member, *rows(name, 2000)) for member in ensemble(ENVS[name]).members]
    error = np.stack([(x - exact) / np.asarray(SPREAD[name]) for x in found])
    assert 0.005 < np.sqrt(np.mean(error**2)) < 0.04 and np.abs(error).max() < 0.0401
    related = np.corrcoef(error.reshape(5, -1)) - np.eye(5)
    assert np.abs(related).max() < 0.5


def test_grids_members_go_the_wrong_way_at_times():
    """Of 20,000 moves on average 1.5% and at most 3%; a wrong one ends two cells off, or one at the border."""
    exact = step(Oracle(ENVS["jax/grid"]), *rows("jax/grid", 20_000))
    wrong = np.stack([step(m, *rows("jax/grid", 20_000)) != exact for m in ensemble(ENVS["jax/grid"]).members]).any(2)
    assert (wrong.mean(1) > WRONG_MOVES / 4).all() and (wrong.mean(1) < WRONG_MOVES).all()


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("copies, distinct", [(0, 5), (1, 5), (2, 4), (3, 3), (5, 1)])
def test_identical_members_are_copies_of_the_first(name, copies, distinct):
    model = planted(ENVS[name], "identical_members", float(copies))
    assert isinstance(model, EnsembleModel)
    found = [step(member, *rows(name, 2000)) for member in model.members]
    assert len({np.asarray(x).tobytes() for x in found}) == distinct
    same = [np.array_equal(x, found[0]) for x in found]
    assert same == [i < max(copies, 1) for i in range(5)]


@pytest.mark.parametrize("name", ENVS)
def test_the_ensembles_step_is_one_of_its_members(name):
    """Each member takes a fifth of 2000 steps: a standard error of 0.009."""
    model = ensemble(ENVS[name])
    found = step(model, *rows(name, 2000))
    equal = np.stack([np.isclose(step(m, *rows(name, 2000)), found, atol=1e-7).all(1) for m in model.members])
    assert equal.any(0).all()
    if name != "jax/grid":  # where members mostly agree
        np.testing.assert_allclose(equal.mean(1), 0.2, atol=0.04)


def test_members_keep_the_ensembles_latents_and_roll_out():
    model = ensemble(ENVS["jax/hover"])
    obs = jax.tree.map(lambda x: x[:2], rows("jax/hover", 2)[0])
    actions, first = jnp.full((9, 2), 0.25), jnp.array([True, False])
    latents, outcomes = open_loop(model, obs, actions, first, key=KEY)
    for member in model.members:
        other, _ = open_loop(member, obs, actions, first, key=KEY)
        assert jax.tree.map(jnp.shape, other) == jax.tree.map(jnp.shape, latents)
    assert outcomes.reward.shape == (8,) and latents.position.shape == (10, 2)


def test_ensembles_are_of_trial_environments():
    with pytest.raises(ValueError, match="jax/pendulum: ensembles are made of models of jax/hover"):
        ensemble(Pendulum())
