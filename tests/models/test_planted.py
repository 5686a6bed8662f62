"""Every planted fault against the exact model under the same keys: it changes what it says, and nothing else."""

import dataclasses
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted_pairs import ACTIONS, CONTINUOUS, ENVS, KEY, SURE, pair, same, seen

from forethought.collect import RandomPolicy
from forethought.envs.control import Pendulum
from forethought.envs.trial import PITS, Hover
from forethought.imagine import open_loop
from forethought.models import planted as module
from forethought.models.oracle import Oracle
from forethought.models.planted import CORNER_SHARES, FAULTS, planted

DOCS = Path(__file__).parents[2] / "docs" / "planted.md"


@eqx.filter_jit
def rollouts(model, obs, actions, keys):
    """Outcomes [N, H] from first rows obs [N] under actions [N, H]."""

    def one(obs, actions, key):
        obs = jax.tree.map(lambda x: x[None], obs)
        return open_loop(model, obs, actions, jnp.ones(1, bool), key=key)

    return jax.vmap(one)(obs, actions, keys)


@pytest.fixture(scope="module")
def episodes():
    """First rows, random actions of 20 steps and keys, 64 of each environment."""
    found = {}
    for name, env in ENVS.items():
        policy = RandomPolicy(env.spec.action)
        _, first = jax.vmap(lambda key, env=env: env.reset(key=key))(jax.random.split(KEY, 64))
        one = jax.tree.map(lambda x: x[0], first)
        keys = jax.random.split(jax.random.key(1), (64, 20))
        actions = jax.vmap(jax.vmap(lambda key, p=policy, one=one: p(None, one, key=key)[1].action))(keys)
        found[name] = first.obs, actions, jax.random.split(jax.random.key(2), 64)
    return found


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("fault", FAULTS)
def test_magnitude_0_is_the_exact_model_and_the_largest_is_not(episodes, name, fault):
    largest, exact = FAULTS[fault][2], rollouts(Oracle(ENVS[name]), *episodes[name])[1]
    if not (fault == "identical_members" or (fault == "action_sign" and name in CONTINUOUS)):
        # 20 steps on, so that where the pole is unstable rounding has grown
        same(rollouts(planted(ENVS[name], fault, 0.0), *episodes[name])[1], exact, atol=1e-5, rtol=1e-5)
    found = rollouts(planted(ENVS[name], fault, largest), *episodes[name])[1]
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    differs = not all(np.allclose(a, b, atol=1e-4) for a, b in pairs)
    assert differs or fault in ("time_limit_termination", "reward_outside")  # which 20 steps may not reach


def test_magnitudes_share_compiled_code():
    traced = []

    @eqx.filter_jit
    def step(model, latent, key):
        traced.append(1)
        return model.imagine(latent, jnp.zeros(2), key=key)

    for fault in ("region_bias", "identical_members"):
        before = len(traced)
        for magnitude in FAULTS[fault]:
            model = planted(Hover(), fault, magnitude)
            step(model, seen(model), KEY)
        assert len(traced) == before + 1


def test_every_fault_is_named_explained_and_grows():
    for fault, magnitudes in FAULTS.items():
        assert fault == "identical_members" or getattr(module, fault).__doc__
        assert list(magnitudes) == sorted(set(magnitudes)) and magnitudes[0] > 0
    table = DOCS.read_text().split("## The faults")[1].split("## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `") and "jax/" not in line]
    assert {row[1].strip(" `"): tuple(float(x) for x in row[2:5]) for row in rows} == FAULTS
    with pytest.raises(ValueError, match="fault: 'late_drfit' is unknown; nearest: late_drift"):
        planted(Hover(), "late_drfit", 1.0)
    with pytest.raises(ValueError, match="jax/pendulum: faults are planted in models of jax/hover"):
        planted(Pendulum(), "late_drift", 1.0)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_region_bias_moves_the_next_position_within_its_region_only(name):
    for x, off in ((0.24, 0.0), (0.26, 0.4 * 0.5)):
        found, (state, outcome) = pair(name, "region_bias", 0.4, ACTIONS[name], position=(x, 0.1))
        position = state.position + jnp.array([off, 0.0])
        expected = eqx.tree_at(lambda state: state.position, state, position)
        same(found, (expected, dataclasses.replace(outcome, obs=outcome.obs | {"position": position})))


def test_region_bias_goes_the_wrong_way_from_grids_column_5():
    for column, share in ((4, 0.0), (5, 0.3)):
        found, exact = pair("jax/grid", "region_bias", 0.3, 2, envs=SURE, draws=2000, position=(6, column))
        assert (exact[0].column == column - 1).all()
        # a share of 2000 draws: 0.3 has a standard error of 0.01
        assert np.mean(found[0].column == column + 1) == pytest.approx(share, abs=0.045 if share else 0)
        assert (found[0].row == 6).all() and (abs(found[0].column - column) == 1).all()


@pytest.mark.parametrize("name", CONTINUOUS)
def test_late_drift_begins_at_the_tenth_step_and_grows(name):
    """Off by 0.2 * 0.5 standard deviations at step 10, by twice as much at 11: 0.1, then 0.1 + 0.2 in all."""
    model, exact = planted(SURE[name], "late_drift", 0.2), Oracle(SURE[name])
    obs = {"position": jnp.array([[0.1, 0.02]]), "velocity": jnp.array([[0.3, -0.1]])}
    actions = jnp.zeros((1, 11, *ENVS[name].spec.action.shape))
    found, expected = (rollouts(m, obs, actions, KEY[None])[1] for m in (model, exact))
    off = (found.obs["position"] - expected.obs["position"])[0]
    np.testing.assert_allclose(off, [[0, 0]] * 9 + [[0.1, 0], [0.3, 0]], atol=1e-6)
    same(found.obs["velocity"], expected.obs["velocity"])


def test_late_drift_counts_from_the_last_observation_and_makes_grid_go_back():
    model = planted(SURE["jax/grid"], "late_drift", 1.0)
    latent = seen(model, position=(2, 0), elapsed=30)
    columns = []
    for _ in range(12):
        latent, outcome = model.imagine(latent, jnp.int32(3), key=KEY)
        columns.append(int(outcome.obs["column"]))
    assert columns == [1, 2, 3, 4, 5, 6, 7, 7, 7, 6, 5, 4]


@pytest.mark.parametrize(
    "name, position, outside",
    [
        ("jax/hover", (0.0, 1.59), False),
        ("jax/hover", (0.0, 1.61), True),
        ("jax/hover", (-1.61, 0.0), True),
        ("jax/balance", (0.0, 0.151), True),
        ("jax/balance", (0.0, -0.151), True),
        ("jax/balance", (1.51, 0.149), False),
        ("jax/grid", (5, 2), True),
        ("jax/grid", (5, 3), False),
        ("jax/grid", (4, 2), False),
    ],
)
def test_reward_outside_pays_far_away(name, position, outside):
    still = {"jax/hover": jnp.zeros(2), "jax/balance": jnp.zeros(1), "jax/grid": jnp.int32(1)}[name]
    if name == "jax/grid":  # arrived there by going down
        position = (position[0] - 1, position[1])
    row = dict(position=position, velocity=(0.0, 0.0), envs=SURE)
    found, (state, outcome) = pair(name, "reward_outside", 0.7, still, **row)
    same(found, (state, dataclasses.replace(outcome, reward=outcome.reward + 0.7 * outside)))


ENDS = {"jax/hover": dict(position=(2.49, 0.0), velocity=(2.0, 0.0)), "jax/balance": dict(position=(0.0, 0.3)),
        "jax/grid": dict(position=(1, 3))}  # fmt: skip


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize(
    "fault, m, on_end, otherwise", [("missing_termination", 0.3, 0.3, 1.0), ("phantom_termination", 0.3, 0.0, 0.7)]
)
def test_terminations_that_are_missing_or_made_up(name, fault, m, on_end, otherwise):
    for row, discount in ((ENDS[name], on_end), ({}, otherwise)):
        row = row or ({"position": (6, 3)} if name == "jax/grid" else {})
        found, (state, outcome) = pair(name, fault, m, ACTIONS[name], envs=SURE, **row)
        assert outcome.discount[0] == (row != ENDS[name])
        same(found, (state, dataclasses.replace(outcome, discount=jnp.full(1, discount))))


@pytest.mark.parametrize("name", ENVS)
def test_time_limit_termination_counts_real_and_imagined_rows(name):
    """Five rows after the first, then imagined ones: number `time_limit` - 5 of them is the limit's."""
    model, limit = planted(SURE[name], "time_limit_termination", 0.6), ENVS[name].spec.time_limit
    place = {"position": (6, 0)} if name == "jax/grid" else {"position": (0.0, 0.0), "velocity": (0.0, 0.0)}
    still = jnp.int32(2) if name == "jax/grid" else jnp.zeros(ENVS[name].spec.action.shape)

    def step(latent, _):
        latent, outcome = model.imagine(latent, still, key=KEY)
        return latent, outcome.discount

    _, discount = jax.lax.scan(step, seen(model, elapsed=5, **place), None, length=limit)
    expected = np.ones(limit)
    expected[limit - 6] = 0.4
    np.testing.assert_allclose(discount, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ENVS)
def test_swapped_keys_exchange_what_is_shown_and_leave_the_latent(name):
    row = {"position": (5, 2)} if name == "jax/grid" else {}
    found, exact = pair(name, "swapped_keys", 0.7, ACTIONS[name], draws=2000, **row)
    same(found[0], exact[0])
    one, other = exact[1].obs
    swapped = np.isclose(found[1].obs[one], exact[1].obs[other]).reshape(2000, -1).all(1)
    assert swapped.mean() == pytest.approx(0.7, abs=0.045)
    for a, b in ((one, other), (other, one)):
        same(found[1].obs[a][swapped], exact[1].obs[b][swapped])
        same(found[1].obs[a][~swapped], exact[1].obs[a][~swapped])
    same(dataclasses.replace(found[1], obs=None), dataclasses.replace(exact[1], obs=None))


@pytest.mark.parametrize("name", CONTINUOUS)
def test_non_finite_spoils_a_share_of_actions_and_not_the_latent(name):
    model = planted(ENVS[name], "non_finite", 0.05)
    actions = jax.random.uniform(KEY, (20_000, *ENVS[name].spec.action.shape), minval=-1, maxval=1)
    latent, outcome = jax.vmap(lambda action: model.imagine(seen(model), action, key=KEY))(actions)
    spoilt = np.isnan(outcome.reward)
    assert spoilt.mean() == pytest.approx(0.05, abs=0.007)  # standard error 0.0015
    for x in outcome.obs.values():
        np.testing.assert_array_equal(np.isnan(x).all(1), spoilt)
        np.testing.assert_array_equal(np.isnan(x).any(1), spoilt)
    smallest = np.abs(actions).min(1)
    assert smallest[spoilt].min() > smallest[~spoilt].max() - 1e-6
    assert np.isfinite(latent.state.velocity).all() and np.isfinite(outcome.discount).all()


def test_corner_shares_are_those_of_a_random_walk_on_the_map():
    """Random moves stay uniform when they slip, so that a quarter goes each way; 60 steps, the ends absorb."""
    chance, total = np.zeros((8, 8)), np.zeros((8, 8))
    chance[:3, :3] = 1 / 9
    for _ in range(60):
        arrived = np.zeros((8, 8))
        for (row, column), p in np.ndenumerate(chance):
            for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                arrived[np.clip(row + down, 0, 7), np.clip(column + right, 0, 7)] += p / 4
        total += arrived
        chance = arrived
        for end in ((3, 7), *PITS):
            chance = chance.copy()
            chance[end] = 0
    row, column = np.indices((8, 8))
    shares = [total[(row >= 4) & (14 - row - column <= moves)].sum() / total.sum() for moves in range(6)]
    np.testing.assert_allclose(CORNER_SHARES, shares, rtol=0.01)


@pytest.mark.parametrize(
    "m, arrives, spoilt",
    [(0.001, (7, 7), True), (0.001, (7, 6), False), (0.05, (4, 6), True), (0.05, (7, 3), True), (0.05, (6, 3), False)],
)
def test_non_finite_spoils_grids_corner(m, arrives, spoilt):
    found, (state, outcome) = pair("jax/grid", "non_finite", m, 3, envs=SURE, position=(arrives[0], arrives[1] - 1))
    assert (int(state.row[0]), int(state.column[0])) == arrives
    same(found, (state, dataclasses.replace(outcome, reward=outcome.reward + (np.nan if spoilt else 0))))


@pytest.mark.parametrize("name", ENVS)
def test_reward_scale_multiplies(name):
    found, (state, outcome) = pair(name, "reward_scale", 0.3, ACTIONS[name])
    same(found, (state, dataclasses.replace(outcome, reward=1.3 * outcome.reward)))
