"""Faults that the audit was not made with: each changes what the exact model says as it should, and nothing else."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted_pairs import ACTIONS, CONTINUOUS, ENVS, KEY, SURE, same, seen, taken

from forethought.envs.control import Pendulum
from forethought.models.oracle import Oracle
from forethought.models.planted import FAULTS as FORESEEN

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("further_faults", ROOT / "bench" / "further_faults.py")
further = importlib.util.module_from_spec(_spec)
sys.modules["further_faults"] = further
_spec.loader.exec_module(further)
FAULTS, MEANS, planted = further.FAULTS, further.MEANS, further.planted

KINDS = {"error", "reward", "missed_termination", "false_termination", "region", "overconfident", "underconfident"}


def pair(name, fault, magnitude, action, *, envs=ENVS, draws=1, **row):
    """The faulty model's step and the exact one's from the same row, under `draws` keys each."""
    model, exact, keys = planted(envs[name], fault, magnitude), Oracle(envs[name]), jax.random.split(KEY, draws)
    latent, found = taken(model, seen(model, **row), action, keys)
    return (latent.state, found), taken(exact, seen(model, **row).state, action, keys)


def moves(state, position):
    """Shares of the draws that went up, down, left, right and nowhere."""
    off = np.stack([np.asarray(state.row) - position[0], np.asarray(state.column) - position[1]], -1)
    return [np.mean((off == way).all(-1)) for way in ((-1, 0), (1, 0), (0, -1), (0, 1), (0, 0))]


@eqx.filter_jit
def imagined(model, obs, later, actions, keys):
    """Outcomes [B, H] after two rows each, under keys [B, H]."""

    def one(obs, later, actions, keys):
        latent = model.observe(model.initial(), jnp.zeros_like(actions[0]), obs, jnp.ones((), bool), key=keys[0])
        latent = model.observe(latent, actions[0], later, jnp.zeros((), bool), key=keys[1])
        return jax.lax.scan(lambda now, x: model.imagine(now, x[0], key=x[1]), latent, (actions, keys))[1]

    return jax.vmap(one)(obs, later, actions, keys)


@pytest.fixture(scope="module")
def rollouts():
    """Two consecutive rows, random actions and keys: 64 rollouts of 15 steps on each environment."""
    found = {}
    for name, env in ENVS.items():
        keys = jax.random.split(jax.random.key(1), (64, 15))
        shape = (64, 15, *env.spec.action.shape)
        drawn = jax.random.randint(KEY, shape, 0, 4) if name == "jax/grid" else jax.random.uniform(KEY, shape) * 2 - 1
        state, first = jax.vmap(lambda key, env=env: env.reset(key=key))(keys[:, 2])
        _, later = jax.vmap(lambda s, a, key, env=env: env.step(s, a, key=key))(state, drawn[:, 0], keys[:, 3])
        found[name] = first.obs, later.obs, drawn, keys
    return found


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("fault", FAULTS)
def test_magnitude_0_is_the_exact_model_and_the_largest_is_not(rollouts, name, fault):
    exact = imagined(Oracle(ENVS[name]), *rollouts[name])
    same(imagined(planted(ENVS[name], fault, 0.0), *rollouts[name]), exact, atol=1e-5, rtol=1e-5)  # rounding grows
    found = imagined(planted(ENVS[name], fault, FAULTS[fault][2]), *rollouts[name])
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    assert not all(np.allclose(a, b, atol=1e-3) for a, b in pairs)


def test_magnitudes_share_compiled_code():
    traced = []

    @eqx.filter_jit
    def step(model, latent, key):
        traced.append(1)
        return model.imagine(latent, jnp.zeros(2), key=key)

    for magnitude in FAULTS["wall"]:
        model = planted(ENVS["jax/hover"], "wall", magnitude)
        step(model, seen(model), KEY)
    assert len(traced) == 1


def test_every_fault_is_new_explained_and_grows():
    assert not set(FAULTS) & set(FORESEEN) and set(MEANS) == set(FAULTS) == set(further._TAKEN)
    for fault, magnitudes in FAULTS.items():
        assert list(magnitudes) == sorted(set(magnitudes)) and magnitudes[0] > 0
        assert 1 <= len(MEANS[fault]) <= 3 and set(MEANS[fault]) <= KINDS
    text = (ROOT / "docs" / "planted.md").read_text().partition("## Further faults")[2]
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| 0.")]
    table = {row[4].strip("`"): (tuple(float(x) for x in row[1:4]), tuple(row[6].split(", "))) for row in rows}
    assert table == {fault: (FAULTS[fault], MEANS[fault]) for fault in FAULTS}
    with pytest.raises(ValueError, match="jax/hover, 'walls': there are saturated_action, "):
        planted(ENVS["jax/hover"], "walls", 1.0)
    with pytest.raises(ValueError, match="jax/pendulum, 'wall': there are .* for jax/hover, jax/balance, jax/grid"):
        planted(Pendulum(), "wall", 1.0)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_saturated_action_cuts_off_beyond_1_minus_m(name):
    action = ACTIONS[name]  # 0.8, and on Hover -0.4
    for m, acts in ((0.7, [0.3, -0.3]), (0.5, [0.5, -0.4])):
        found, _ = pair(name, "saturated_action", m, action)
        same(found, pair(name, "saturated_action", 0.0, jnp.array(acts[: action.size]))[1])


@pytest.mark.parametrize("action, shares", [(3, [0.3, 0, 0, 0.7, 0]), (0, [1, 0, 0, 0, 0]), (2, [0, 0, 1, 0, 0])])
def test_saturated_action_leaves_grid_three_actions(action, shares):
    (state, _), _ = pair("jax/grid", "saturated_action", 0.3, action, envs=SURE, draws=2000, position=(6, 3))
    np.testing.assert_allclose(moves(state, (6, 3)), shares, atol=0.045)  # a standard error of 0.01


@pytest.mark.parametrize("name", CONTINUOUS)
def test_friction_is_a_step_from_a_slower_state(name):
    found, _ = pair(name, "friction", 0.25, ACTIONS[name], velocity=(0.4, -0.8))
    same(found, pair(name, "friction", 0.0, ACTIONS[name], velocity=(0.3, -0.6))[1])


def test_friction_keeps_grid_where_it_is():
    """Right from (3, 6) is the goal: reward 1 and an end in 70 %, else a step's -0.02."""
    (state, outcome), _ = pair("jax/grid", "friction", 0.3, 3, envs=SURE, draws=2000, position=(3, 6))
    np.testing.assert_allclose(moves(state, (3, 6)), [0, 0, 0, 0.7, 0.3], atol=0.045)
    there = state.column == 7
    same((outcome.reward, outcome.discount), (jnp.where(there, 1.0, -0.02), jnp.where(there, 0.0, 1.0)))
    same(outcome.obs, {"row": state.row, "column": state.column})


@pytest.mark.parametrize("name", CONTINUOUS)
def test_stale_observation_goes_on_from_between_two_rows(name):
    """0.75 of the later row and 0.25 of the one before; a first row has none before."""
    model, void = planted(ENVS[name], "stale_observation", 0.25), jnp.zeros(ENVS[name].spec.action.shape)
    rows = [{"position": jnp.full(2, x), "velocity": jnp.full(2, -x)} for x in (0.0, 0.4, 1.2)]
    latent, found = model.initial(), []
    for obs, first in ((rows[1], True), (rows[0], False), (rows[2], False), (rows[1], True)):
        latent = model.observe(latent, void, obs, jnp.asarray(first), key=KEY)
        found.append(float(latent.state.position[1]))
        assert float(latent.state.velocity[0]) == -found[-1]
    np.testing.assert_allclose(found, [0.4, 0.25 * 0.4, 0.75 * 1.2, 0.4], rtol=1e-6)


def test_stale_observation_stands_on_grids_last_cell_with_its_probability():
    model = planted(ENVS["jax/grid"], "stale_observation", 0.3)
    later = {"row": jnp.int32(3), "column": jnp.int32(4)}
    observe = lambda key: model.observe(seen(model, position=(2, 5)), 1, later, jnp.zeros((), bool), key=key)  # noqa: E731
    state = jax.vmap(observe)(jax.random.split(KEY, 2000)).state
    assert np.mean(state.row == 2) == pytest.approx(0.3, abs=0.045)
    np.testing.assert_array_equal(state.row == 2, state.column == 5)


@pytest.mark.parametrize(
    "name, late",
    [  # from position (0.1, 0.2) by the actions 0.8 and -0.4
        ("jax/hover", np.exp(-0.05) - 0.05 * (0.64 + 0.16)),
        ("jax/balance", 1 - 0.1 * 0.01 - 0.01 * 0.64),
        ("jax/grid", -0.02),
    ],
)
def test_late_reward_pays_for_where_it_departs(name, late):
    row = {"position": (3, 6)} if name == "jax/grid" else {}
    found, (state, outcome) = pair(name, "late_reward", 0.25, ACTIONS[name], envs=SURE, **row)
    same(found, (state, dataclasses.replace(outcome, reward=0.75 * outcome.reward + jnp.float32(0.25 * late))))


@pytest.mark.parametrize("name", CONTINUOUS)
def test_late_reward_is_the_reward_of_the_step_before(name):
    """An imagined step, then another: what the exact model says of the first, but for the action's cost."""
    model, still = planted(SURE[name], "late_reward", 1.0), jnp.zeros(ENVS[name].spec.action.shape)
    latent, _ = model.imagine(seen(model), still, key=KEY)
    _, before = Oracle(SURE[name]).imagine(seen(model).state, still, key=KEY)
    same(model.imagine(latent, still, key=KEY)[1].reward, before.reward)


@pytest.mark.parametrize(
    "name, row, factor",
    [
        ("jax/hover", dict(position=(-1.0, 0.1)), 1 - 2 * 0.7),
        ("jax/hover", dict(position=(1.0, -0.1)), 1),
        ("jax/balance", dict(position=(-1.0, 0.1)), 1 - 2 * 0.7),
        ("jax/balance", dict(position=(1.0, -0.1)), 1),
        ("jax/grid", dict(position=(4, 3)), 1 - 2 * 0.7),  # to the pit
        ("jax/grid", dict(position=(3, 6)), 1),  # to the goal
        ("jax/grid", dict(position=(4, 4)), 1),
    ],
)
def test_reward_sign_turns_with_m(name, row, factor):
    row = row if name == "jax/grid" else row | {"velocity": (0.0, 0.0)}
    found, (state, outcome) = pair(name, "reward_sign", 0.7, ACTIONS[name], envs=SURE, **row)
    same(found, (state, dataclasses.replace(outcome, reward=factor * outcome.reward)))


@pytest.mark.parametrize(
    "name, position, ends",
    [
        ("jax/hover", (0.0, -1.88), 1),  # beyond 0.75 * 2.5 = 1.875
        ("jax/hover", (1.87, 0.0), 0),
        ("jax/balance", (1.81, 0.0), 1),  # beyond 0.75 * 2.4 = 1.8
        ("jax/balance", (0.0, 0.1575), 1),  # beyond 0.75 * 12 degrees = 0.1571
        ("jax/balance", (-1.79, -0.1565), 0),
        ("jax/grid", (4, 6), 0.25),  # to below the goal
        ("jax/grid", (4, 2), 0.25),  # to the left of a pit
        ("jax/grid", (3, 2), 0),
    ],
)
def test_early_edge_ends_before_the_bounds(name, position, ends):
    still = {"jax/hover": jnp.zeros(2), "jax/balance": jnp.zeros(1), "jax/grid": jnp.int32(3)}[name]
    found, (state, outcome) = pair(name, "early_edge", 0.25, still, envs=SURE, position=position, velocity=(0.0, 0.0))
    assert outcome.discount[0] == 1
    same(found, (state, dataclasses.replace(outcome, discount=jnp.full(1, 1.0 - ends))))


@pytest.mark.parametrize("name, place", [("jax/hover", 0.5), ("jax/balance", 0.1)])
def test_wall_holds_what_would_pass_it(name, place):
    """At 2 m/s a step goes some 0.45 (Hover) or 0.04 (Balance) far; `x` is how far before the wall it begins."""
    for x, v, passes in ((0.02, 2.0, True), (-0.02, 2.0, False), (-0.02, -2.0, False), (0.6, 2.0, False)):
        still = jnp.zeros(ENVS[name].spec.action.shape)
        row = dict(position=(place - x, 0.05), velocity=(v, 0.1))
        found, (state, outcome) = pair(name, "wall", 0.3, still, envs=SURE, draws=2000, **row)
        held = np.asarray(found[0].position[:, 0] == np.float32(place))
        assert held.mean() == pytest.approx(0.3 if passes else 0, abs=0.045 if passes else 0)
        position = state.position.at[:, 0].set(jnp.where(held, place, state.position[:, 0]))
        velocity = state.velocity.at[:, 0].multiply(~held)
        expected = eqx.tree_at(lambda s: (s.position, s.velocity), state, (position, velocity))
        obs = {"position": position, "velocity": velocity}
        same(found, (expected, dataclasses.replace(outcome, obs=obs)))


@pytest.mark.parametrize(
    "position, action, held", [((4, 3), 3, 0.3), ((4, 4), 3, 0), ((4, 4), 2, 0), ((4, 2), 3, 0), ((4, 3), 1, 0)]
)
def test_wall_stands_behind_grids_column_3(position, action, held):
    (state, outcome), _ = pair("jax/grid", "wall", 0.3, action, envs=SURE, draws=2000, position=position)
    shares = np.zeros(5)
    shares[[action, 4]] = 1 - held, held
    np.testing.assert_allclose(moves(state, position), shares, atol=0.045)
    if held:  # the cell beyond is a pit
        same(outcome.discount, (state.column == 3).astype(jnp.float32))
        same(outcome.reward, jnp.where(state.column == 3, -0.02, -1.0))


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("fault, factors", [("extra_noise", [1.7, 1.7]), ("lopsided_noise", [0.3, 1.7])])
def test_noise_is_multiplied(name, fault, factors):
    calm = pair(name, fault, 0.0, ACTIONS[name], envs=SURE)[1][0].velocity
    found, exact = pair(name, fault, 0.7, ACTIONS[name], draws=20)
    same(found[0].velocity - calm, jnp.array(factors) * (exact[0].velocity - calm), atol=1e-5)


@pytest.mark.parametrize(
    "fault, action, shares",
    [  # up, down, left, right, nowhere; exact: 0.1 to each side
        ("extra_noise", 3, [0.16, 0.16, 0, 0.68, 0]),
        ("lopsided_noise", 3, [0.04, 0.16, 0, 0.8, 0]),
        ("lopsided_noise", 0, [0.8, 0, 0.04, 0.16, 0]),
    ],
)
def test_grids_slips_are_more_or_to_one_side(fault, action, shares):
    (state, _), _ = pair("jax/grid", fault, 0.6, action, draws=4000, position=(6, 2))
    np.testing.assert_allclose(moves(state, (6, 2)), shares, atol=0.03)  # a standard error of 0.0074 at most


@pytest.mark.parametrize("name", ENVS)
def test_frozen_noise_draws_the_first_steps_noise_again(name):
    """With m = 1 every step of a rollout is the exact step under the first one's key, until a row is seen."""
    model, exact, action = planted(ENVS[name], "frozen_noise", 1.0), Oracle(ENVS[name]), ACTIONS[name]
    row = {"position": (6, 2)} if name == "jax/grid" else {}
    latent, keys = seen(model, **row), jax.random.split(KEY, 4)
    state = latent.state
    for key in keys:
        latent, found = model.imagine(latent, action, key=key)
        state, expected = exact.imagine(state, action, key=keys[0])
        same(found, expected)
    _, obs = ENVS[name].reset(key=KEY)
    latent = model.observe(latent, action, obs.obs, jnp.zeros((), bool), key=KEY)
    same(model.imagine(latent, action, key=keys[3])[1], exact.imagine(latent.state, action, key=keys[3])[1])


def test_frozen_noise_adds_up():
    """Hover from rest, 10 steps without action: v = sum of 0.9^i e, so with one e for all 0.2 (1 - 0.9^10) / 0.1 =
    1.303 instead of 0.2 ((1 - 0.81^10) / 0.19)^0.5 = 0.430; 4000 draws, so 1.1 % of standard error."""
    keys, rest = jax.random.split(KEY, (4000, 10)), {"position": jnp.zeros((4000, 2)), "velocity": jnp.zeros((4000, 2))}
    for m, spread in ((0.0, 0.430), (1.0, 1.303)):
        model = planted(ENVS["jax/hover"], "frozen_noise", m)
        velocity = imagined(model, rest, rest, jnp.zeros((4000, 10, 2)), keys).obs["velocity"][:, -1]
        np.testing.assert_allclose(velocity.std(0), [spread, spread], rtol=0.045)
