import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.envs import mazes, tabular
from forethought.imagine import imagine
from forethought.models.tabular import Counts, Deterministic, draw
from forethought.ops.dynamic import policy_iteration, value_iteration
from forethought.types import Decision

KEY = jax.random.key(0)
learn = jax.jit(lambda model, *step: model.learn(*step))


def told(model, *steps):
    """The model after transitions (state, action, reward, discount, arrived)."""
    for at, step in enumerate(steps, 1):
        model = learn(model, *map(jnp.asarray, step), jnp.asarray(at))
    return model


def test_an_index_is_drawn_by_its_weight():
    weights = jnp.array([0.0, 1.0, 0.0, 3.0, 0.0])
    drawn = [int(draw(jnp.cumsum(weights), jnp.float32(x))) for x in (0.0, 0.2499, 0.25, 0.9999999)]
    assert drawn == [1, 1, 3, 3]  # never an index without weight


@pytest.mark.parametrize("model", [Deterministic.empty(3, 2), Counts.empty(3, 2)])
def test_what_was_never_tried_stays_for_nothing(model):
    reward, discount, arrived = model.sample(jnp.int32(2), jnp.int32(1), jnp.float32(0.7))
    assert (float(reward), float(discount), int(arrived)) == (0, 1, 2)
    assert not model.tried.any()
    tables = model.tables(0.9)
    np.testing.assert_allclose(tables.arrival, 0.9 * np.eye(3)[:, None] * np.ones((1, 2, 1)))
    assert not tables.reward.any() and not tables.terminal.any()


def test_the_last_outcome_is_what_happens():
    model = told(Deterministic.empty(3, 2), (0, 1, 5.0, 1.0, 2), (0, 1, 7.0, 0.0, 1), (2, 0, -1.0, 1.0, 2))
    later, outcome = model.imagine(jnp.int32(0), jnp.int32(1), key=KEY)
    assert (int(later), float(outcome.reward), float(outcome.discount)) == (1, 7, 0)
    assert int(outcome.obs["state"]) == 1 and float(outcome.duration) == 1
    assert model.tried.tolist() == [[False, True], [False, False], [True, False]]
    assert model.tried_at.tolist() == [[0, 2], [0, 0], [3, 0]]
    assert int(model.observe(model.initial(), jnp.int32(0), {"state": jnp.int32(2)}, jnp.bool_(True), key=KEY)) == 2


def test_a_model_that_was_told_everything_is_the_environment():
    env, model = tabular.corridor(5), Deterministic.empty(5, 2)
    for state in range(4):
        for action in range(2):
            arrived = int(env.transition[state, action].argmax())
            step = (state, action, env.reward[state, action, arrived], 1.0 - env.terminal[arrived], arrived)
            model = told(model, step)
    exact, learned = env.tables(0.9), model.tables(0.9)
    assert learned.terminal.tolist() == [False] * 4 + [True]
    # What ended the episode has discount 0 here and a terminal state of value 0 there: the same values.
    np.testing.assert_allclose(value_iteration(learned), value_iteration(exact), rtol=1e-12)
    assert value_iteration(learned)[0] == pytest.approx(0.9**3)
    np.testing.assert_allclose(policy_iteration(learned)[0], value_iteration(exact))


def test_counts_by_hand():
    steps = [(0, 1, 1.0, 1.0, 1)] * 3 + [(0, 1, 2.0, 0.0, 2)]
    model = told(Counts.empty(3, 2, prior=0.5), *steps)
    tables = model.tables(0.9)
    # (0, 3, 1) + 0.5 each of 5.5; arrival in 2 ended the episode; (3 * 1 + 2) / 4 was paid.
    np.testing.assert_allclose(tables.arrival[0, 1], 0.9 * np.array([0.5, 3.5, 0]) / 5.5, rtol=1e-6)
    assert tables.reward[0, 1] == pytest.approx(1.25) and tables.terminal.tolist() == [False, False, True]
    np.testing.assert_allclose(tables.arrival[0, 0], 0.3 * np.ones(3))  # the prior alone
    chances = (np.arange(5500) + 0.5) / 5500
    reward, discount, arrived = jax.vmap(lambda x: model.sample(jnp.int32(0), jnp.int32(1), x))(jnp.float32(chances))
    np.testing.assert_allclose(np.bincount(arrived, minlength=3), [500, 3500, 1500], atol=1)
    assert (reward == 1.25).all() and (discount == (arrived != 2)).all()
    certain = told(Counts.empty(3, 2), *steps)
    np.testing.assert_allclose(certain.tables(0.9).arrival[0, 1], [0, 0.9 * 3 / 4, 0])
    for wrong in (-1.0, float("inf")):
        with pytest.raises(ValueError, match="prior is"):
            Counts.empty(3, 2, prior=wrong)


def test_counts_come_to_the_exact_values():
    env = mazes.maze(mazes.Layout(("...", ".#.")), start=(1, 0), goal=(1, 2), slip=0.3, name="slippery")
    exact = value_iteration(env.tables(0.9))
    pairs = jnp.array([(s, a) for s in range(5) for a in range(4) if not env.terminal[s]])

    def gap(each, key):
        """The largest error of a value after so many tries of each pair."""
        order = jnp.tile(pairs, (each, 1))

        def learn(model, turn):
            at, step, key = turn
            _, seen = env.step(env.state({"state": at[0]}), at[1], key=key)
            return model.learn(*at, seen.reward, seen.discount, seen.obs["state"], step), None

        keys = jax.random.split(key, len(order))
        model = jax.lax.scan(learn, Counts.empty(5, 4, prior=0.1), (order, jnp.arange(len(order)) + 1, keys))[0]
        return np.abs(value_iteration(jax.jit(lambda x: x)(model).tables(0.9)) - exact).max()

    few, many = gap(20, KEY), gap(4000, KEY)
    # A probability of 0.3 from 4,000 tries has a standard error of 0.007; values are below 1, paths three steps long.
    assert many < 0.02 < few


def test_dreams_begin_at_the_models_states():
    model = told(Deterministic.empty(3, 2), (0, 1, 0.0, 1.0, 1), (1, 1, 1.0, 0.0, 2))
    env = tabular.corridor(3)
    start = jax.tree.map(lambda x: jnp.stack([x, x]), env.reset(key=KEY)[1])
    right = lambda latent, *, key: Decision(jnp.int32(1), None)  # noqa: E731
    latents, rows = imagine(
        model, right, jnp.array([0, 1]), start, 2, depth=jnp.zeros(2, int), policy_version=jnp.int32(0),
        key=jax.random.split(KEY),
    )  # fmt: skip
    assert latents.tolist() == [[0, 1], [1, 2], [2, 2]]
    assert rows.time_step.reward[1:].tolist() == [[0, 1], [1, 0]] and rows.depth[:, 0].tolist() == [0, 1, 2]
