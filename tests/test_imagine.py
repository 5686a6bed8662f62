"""Dreams in a toy model whose every row is known by hand, and the RSSM's with and without its heads' shortcut."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.imagine import imagine, open_loop
from forethought.models.rssm import RSSM
from forethought.ops.returns import survival
from forethought.protocols import AbstractWorldModel, HeadedModel
from forethought.types import Box, Decision, Outcome, PerStep, Spec, TimeStep

KEY = jax.random.key(0)


class Counter(HeadedModel):
    """The latent adds up actions, with noise if asked for; everything it predicts is a function of the sum."""

    blind: bool = eqx.field(static=True, default=False)
    noise: float = eqx.field(static=True, default=0.0)

    def initial(self):
        return {"sum": jnp.zeros(1)}

    def observe(self, latent, action, obs, first, *, key):
        kept = jnp.where(first, 0.0, latent["sum"] + action)
        return {"sum": kept + obs["x"] + self.noise * jax.random.normal(key, (1,))}

    def advance(self, latent, action, *, key):
        return {"sum": latent["sum"] + action + self.noise * jax.random.normal(key, (1,))}

    def outcome(self, latent):
        (value,) = latent["sum"]  # one latent at a time: a model knows nothing of batches
        obs = None if self.blind else {"x": latent["sum"]}
        return Outcome(obs, 10 * value, jnp.where(value > 6, 0.0, 0.5), jnp.full((), 3.0), jnp.full((), 0.25))


class Plain(AbstractWorldModel):
    """Another model behind the three methods alone."""

    model: AbstractWorldModel

    def initial(self):
        return self.model.initial()

    def observe(self, latent, action, obs, first, *, key):
        return self.model.observe(latent, action, obs, first, key=key)

    def imagine(self, latent, action, *, key):
        return self.model.imagine(latent, action, key=key)


def double(latent, *, key):
    """Acts with the latent itself, so that it doubles: from 1 on 2, 4, 8."""
    return Decision(latent["sum"], jnp.full((), -0.5), {"seen": latent["sum"][0]})


def noisy(latent, *, key):
    return Decision(jax.random.normal(key, (1,)), None)


def start(discount=1.0, first=False, dtype=jnp.float32):
    one = jnp.ones(())
    yes = jnp.asarray
    return TimeStep(
        {"x": jnp.array([7]).astype(dtype)}, 3 * one, discount * one, yes(first), yes(True), 2 * one, 0 * one
    )


def dream(model, actor=double, horizon=3, time_step=None, depth=0, **latent):
    latent = {"sum": jnp.ones(1)} | latent
    time_step = start() if time_step is None else time_step
    return alone(model, actor, latent, time_step, horizon, jnp.array(depth), jnp.array(11))


def alone(model, actor, latent, time_step, horizon, depth, policy_version):
    """A single dream: a batch of one, taken out of it."""
    latent, time_step, depth = jax.tree.map(lambda x: jnp.asarray(x)[None], (latent, time_step, depth))
    found = imagine(model, actor, latent, time_step, horizon, depth=depth, policy_version=policy_version, key=KEY[None])
    return jax.tree.map(lambda x: x[:, 0], found)


@pytest.mark.parametrize("model", [Counter(), Plain(Counter())])
def test_rows_by_hand(model):
    """Latents 1, 2, 4, 8; the start keeps what it was."""
    latents, rows = dream(model)
    step = rows.time_step
    np.testing.assert_array_equal(latents["sum"][:, 0], [1, 2, 4, 8])
    np.testing.assert_array_equal(rows.action[:, 0], [1, 2, 4, 0])  # the last action is void
    np.testing.assert_array_equal(rows.log_prob, [-0.5, -0.5, -0.5, 0])
    np.testing.assert_array_equal(rows.extras["seen"], [1, 2, 4, 0])
    np.testing.assert_array_equal(step.obs["x"][:, 0], [7, 2, 4, 8])
    np.testing.assert_array_equal(step.reward, [3, 20, 40, 80])
    np.testing.assert_array_equal(step.discount, [1, 0.5, 0.5, 0])
    np.testing.assert_array_equal(step.duration, [2, 3, 3, 3])
    np.testing.assert_array_equal(step.reward_delay, [0, 0.25, 0.25, 0.25])
    np.testing.assert_array_equal(rows.depth, [0, 1, 2, 3])
    np.testing.assert_array_equal(rows.policy_version, [11] * 4)
    # The dream of a truncated start goes on, and ends by its horizon alone.
    np.testing.assert_array_equal(step.last, [False, False, False, True])
    np.testing.assert_array_equal(step.first, [False] * 4)


def test_a_dream_may_go_on_from_a_dream():
    latents, rows = dream(Counter(), horizon=2, depth=5, time_step=start(first=True))
    np.testing.assert_array_equal(rows.depth, [5, 6, 7])
    np.testing.assert_array_equal(rows.time_step.first, [True, False, False])
    assert latents["sum"].shape == (3, 1)


def test_horizon_one_is_one_imagined_row():
    rows = dream(Counter(), horizon=1)[1]
    np.testing.assert_array_equal(rows.time_step.last, [False, True])
    np.testing.assert_array_equal(rows.action[:, 0], [1, 0])


@pytest.mark.parametrize("discount, weights", [(1.0, [1, 0.25, 0.0625, 0]), (0.0, [0, 0, 0, 0])])
def test_a_start_that_had_terminated_gives_its_dream_no_weight(discount, weights):
    """gamma^3 = 1/2 per decision of duration 3, times the predicted discount of a half, and 0 past 6."""
    rows = dream(Counter(), time_step=dataclasses.replace(start(discount), duration=jnp.zeros(())))[1]
    factor = PerStep(0.5 ** (1 / 3))(rows.time_step)[1]
    np.testing.assert_allclose(survival(factor), weights, rtol=1e-5)


@pytest.mark.parametrize("wrap", [lambda m: m, Plain])
def test_a_model_without_obs_gives_rows_without_them(wrap):
    rows = dream(wrap(Counter(blind=True)))[1]
    assert rows.time_step.obs is None and rows.time_step.legal is None
    np.testing.assert_array_equal(rows.time_step.reward, [3, 20, 40, 80])
    legal = dataclasses.replace(start(), legal=jnp.ones(4, bool))  # which the model does not predict either
    assert dream(wrap(Counter()), time_step=legal)[1].time_step.legal is None


def test_row_zero_takes_the_models_dtype():
    rows = dream(Counter(), time_step=start(dtype=jnp.uint8))[1]
    assert rows.time_step.obs["x"].dtype == jnp.float32 and rows.time_step.obs["x"][0, 0] == 7


def test_dreams_of_a_batch_are_those_of_its_members():
    """Three starts at once, each with its own key, against each of them alone."""
    keys, sums = jax.random.split(KEY, 3), jnp.array([[1.0], [-2.0], [5.0]])
    steps = jax.tree.map(lambda x: jnp.stack([x, (2 * x).astype(x.dtype), x]), start())
    run = lambda pick: imagine(  # noqa: E731
        Counter(noise=1.0), noisy, {"sum": sums[pick]}, jax.tree.map(lambda x: x[pick], steps), 4,
        depth=jnp.arange(3)[pick], policy_version=jnp.array(0), key=keys[pick],
    )  # fmt: skip
    together = run(jnp.arange(3))
    for i in range(3):
        one = jax.tree.map(lambda x: x[:, 0], run(jnp.array([i])))
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(x, y[:, i], rtol=1e-6)


def test_noise_differs_between_rows_and_between_actor_and_model():
    latents, rows = dream(Counter(noise=1.0), noisy, horizon=6)
    actions, moves = rows.action[:-1, 0], np.diff(latents["sum"][:, 0])
    noise = moves - actions
    assert np.unique(np.round(np.concatenate([actions, noise]), 4)).size == 12
    assert rows.log_prob is None


@pytest.fixture(scope="module")
def rssm():
    spec = Spec("toy", {"x": Box((1,))}, Box((1,), low=-1.0, high=1.0))
    sizes = dict(deter=8, hidden=6, stoch=2, classes=3, units=6, blocks=2, layers=1, bins=11, bin_limit=3.0)
    return RSSM(spec, **sizes, key=KEY)


def bounded(latent, *, key):
    return Decision(jnp.tanh(latent.deter[0, :1] + jax.random.normal(key, (1,))), None)


def test_heads_outside_of_the_loop_change_nothing(rssm):
    run = jax.jit(lambda model: alone(model, bounded, rssm.initial(), start(), 4, jnp.array(0), jnp.array(0)))
    for one, other in zip(jax.tree.leaves(run(rssm)), jax.tree.leaves(run(Plain(rssm))), strict=True):
        # One matrix product over all rows instead of one per row: equal to rounding.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("context, first", [(1, [0]), (3, [0]), (4, [0, 2])])
def test_open_loop_is_filtering_then_imagining(context, first):
    """Action t is done at row t: the first one seen leads to row 1, entry C - 1 to the first imagined row."""
    horizon, model = 3, Counter(noise=0.5)
    action = jnp.arange(1.0, context + horizon)[:, None]
    obs = {"x": 100.0 * jnp.arange(1.0, context + 1)[:, None]}
    first = jnp.isin(jnp.arange(context), jnp.array(first))
    latents, outcomes = open_loop(model, obs, action, first, key=KEY)
    filter_key, imagine_key = jax.random.split(KEY)
    filter_keys, imagine_keys = jax.random.split(filter_key, context), jax.random.split(imagine_key, horizon)
    latent, expected = model.initial(), []
    for t in range(context):
        before = action[t - 1] if t else jnp.zeros(1)
        latent = model.observe(latent, before, {"x": obs["x"][t]}, first[t], key=filter_keys[t])
        expected.append(latent["sum"])
    for h in range(horizon):
        latent, outcome = model.imagine(latent, action[context - 1 + h], key=imagine_keys[h])
        expected.append(latent["sum"])
        np.testing.assert_allclose(outcomes.reward[h], outcome.reward, rtol=1e-6)
    np.testing.assert_allclose(latents["sum"], expected, rtol=1e-6)
    assert outcomes.reward.shape == (horizon,)


def test_open_loop_adds_up_by_hand():
    """obs 1, 10 with action 2 between them: 1, then 1 + 2 + 10 = 13; then actions 3, 4: 16, 20."""
    latents, outcomes = open_loop(
        Counter(),
        {"x": jnp.array([[1.0], [10.0]])},
        jnp.array([[2.0], [3.0], [4.0]]),
        jnp.array([True, False]),
        key=KEY,
    )
    np.testing.assert_array_equal(latents["sum"][:, 0], [1, 13, 16, 20])
    np.testing.assert_array_equal(outcomes.obs["x"][:, 0], [16, 20])


def test_a_dream_carries_the_gradient_of_its_actions(rssm):
    """What the first action does reaches the last row's reward in the toy, where 8 = 2 * (2 * (1 + a0))."""

    def total(push):
        first = lambda latent, *, key: Decision(latent["sum"] + jnp.where(latent["sum"] == 1, push, 0.0), None)  # noqa: E731
        return dream(Counter(), first)[1].time_step.reward[-1]

    assert jax.grad(total)(0.0) == pytest.approx(40.0)
