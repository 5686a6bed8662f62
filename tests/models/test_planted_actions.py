"""The planted faults of actions and of noise: other actions, and less noise, to the exact model."""

import jax.numpy as jnp
import numpy as np
import pytest
from planted_pairs import ACTIONS, CONTINUOUS, ENVS, KEY, SURE, pair, same, seen

from forethought.models.oracle import Oracle
from forethought.models.planted import planted


@pytest.mark.parametrize("name", CONTINUOUS)
def test_delayed_action_blends_with_the_one_before(name):
    size = ENVS[name].spec.action.shape
    previous, action = jnp.full(size, -0.6), jnp.full(size, 0.8)
    model, exact = planted(ENVS[name], "delayed_action", 0.25), Oracle(ENVS[name])
    for latent, effective in (
        (seen(model, previous=previous), 0.8),  # on a first row the action argument is void
        (seen(model, previous=previous, elapsed=1), 0.75 * 0.8 - 0.25 * 0.6),
        (model.imagine(seen(model), previous, key=KEY)[0], 0.75 * 0.8 - 0.25 * 0.6),
    ):
        found, outcome = model.imagine(latent, action, key=KEY)
        same((found.state, outcome), exact.imagine(latent.state, jnp.full(size, effective), key=KEY))
        np.testing.assert_array_equal(found.previous, action)


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("fault, factors", [("action_sign", [-0.3, 1.0]), ("ignores_action", [0.7, 0.7])])
def test_faulty_actions_are_other_actions_to_the_exact_model(name, fault, factors):
    action = ACTIONS[name]
    found, _ = pair(name, fault, 0.3, action)
    _, exact = pair(name, fault, 0.3, action * jnp.array(factors[: action.size]))
    same(found, exact)


@pytest.mark.parametrize(
    "fault, action, shares",
    [
        ("delayed_action", 3, [0, 0.4, 0, 0.6]),  # the one before was 1
        ("action_sign", 2, [0, 0, 0.6, 0.4]),
        ("action_sign", 3, [0, 0, 0.4, 0.6]),
        ("action_sign", 1, [0, 1, 0, 0]),
        ("ignores_action", 0, [0.7, 0.1, 0.1, 0.1]),
    ],
)
def test_faulty_moves_come_with_their_probability(fault, action, shares):
    """4000 draws: a share of 0.4 has a standard error of 0.0077."""
    row = dict(position=(5, 2), previous=jnp.int32(1), elapsed=1)
    (state, _), _ = pair("jax/grid", fault, 0.4, action, envs=SURE, draws=4000, **row)
    arrived = [(4, 2), (6, 2), (5, 1), (5, 3)]
    found = [np.mean((state.row == row) & (state.column == column)) for row, column in arrived]
    np.testing.assert_allclose(found, shares, atol=0.035)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_overconfident_shrinks_and_mode_collapse_drops_the_noise(name):
    """What the velocity is beyond that without noise: 0.75 of the exact model's, or at times nothing."""
    (calm, _), _ = pair(name, "overconfident", 1.0, ACTIONS[name])
    found, exact = pair(name, "overconfident", 0.25, ACTIONS[name], draws=2000)
    same(found[0].velocity - calm.velocity, 0.75 * (exact[0].velocity - calm.velocity), atol=1e-5)
    found, exact = pair(name, "mode_collapse", 0.3, ACTIONS[name], draws=2000)
    collapsed = np.all(np.abs(found[0].velocity - calm.velocity) < 1e-6, axis=1)
    assert collapsed.mean() == pytest.approx(0.3, abs=0.045)  # standard error 0.01
    same(found[0].velocity[~collapsed], exact[0].velocity[~collapsed])


@pytest.mark.parametrize("fault, m, slips", [("overconfident", 0.5, 0.1), ("mode_collapse", 0.75, 0.05)])
def test_grid_slips_less_often_or_at_fewer_steps(fault, m, slips):
    """Slips to either side come with probability 0.2; 4000 draws, standard error below 0.005."""
    (state, _), _ = pair("jax/grid", fault, m, 3, draws=4000, position=(5, 2))
    assert np.mean(state.row != 5) == pytest.approx(slips, abs=0.02)
