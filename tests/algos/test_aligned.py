"""The dual-encoder agent: what each loss moves, and learning to a known return."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought import collect
from forethought.algos import aligned
from forethought.algos.aligned import Config, Factors
from forethought.envs.distractor import Distractor

ENV = Distractor()
KEY = jax.random.key(3)


def episode(cfg, factors, state, key=KEY):
    policy = aligned.policy(cfg, factors, state)
    stream = collect.begin(ENV, policy, 0, key=key)
    return collect.collect(ENV, policy, stream, ENV.horizon + 1, policy_version=state.episodes)[1]


def slopes(cfg, factors, name):
    """The largest gradient entry of one loss in each part of the agent."""
    state = aligned.init(cfg, ENV, key=KEY)
    # Away from the start, where target networks are the networks themselves.
    state = dataclasses.replace(state, slow=jax.tree.map(lambda x: 0.9 * x if eqx.is_array(x) else x, state.slow))
    rows = episode(cfg, factors, state)
    loss = lambda params: aligned.losses(cfg, factors, params, state, rows, KEY)[name]  # noqa: E731
    grads = eqx.filter_jit(eqx.filter_grad(loss))(state.params)
    top = lambda part: max(float(jnp.abs(x).max()) for x in jax.tree.leaves(part))  # noqa: E731
    return {field.name: top(getattr(grads, field.name)) for field in dataclasses.fields(grads)}


def moved(cfg, factors, name):
    return {part for part, size in slopes(cfg, factors, name).items() if size > 0}


MODEL = {"model_encoder", "step", "decoder", "reward"}


@pytest.mark.parametrize("policy_loss", ["actor-critic", "deterministic", "rollout", "imagined"])
def test_a_frozen_policy_loss_moves_only_the_policy(policy_loss):
    assert moved(Config(policy_loss=policy_loss), Factors(bootstrap=True), "policy") == {"encoder", "actor"}


@pytest.mark.parametrize(
    "policy_loss, beside",
    [("actor-critic", {"critic"}), ("deterministic", {"critic"}), ("rollout", MODEL | {"critic"}),
     ("imagined", MODEL | {"critic"})],
)  # fmt: skip
def test_else_it_moves_all_that_it_depends_on(policy_loss, beside):
    found = moved(Config(policy_loss=policy_loss), Factors(bootstrap=True, frozen=False), "policy")
    # A target is data: imagined rewards reach the imagined advantage only as such.
    assert found == {"encoder", "actor"} | (beside - {"reward", "decoder"} if policy_loss == "imagined" else beside)


@pytest.mark.parametrize("policy_loss", ["actor-critic", "deterministic", "rollout", "imagined"])
def test_the_value_loss_moves_the_critic_and_the_code_it_reads(policy_loss):
    assert moved(Config(policy_loss=policy_loss), Factors(), "value") == {"encoder", "critic"}


def test_what_the_model_losses_move():
    assert moved(Config(), Factors(), "dynamics") == {"model_encoder", "step", "decoder"}
    assert moved(Config(), Factors(), "reward") == {"model_encoder", "step", "reward"}
    shared = Config(stage="shared InfoNCE")
    assert moved(shared, Factors(), "dynamics") == {"encoder", "step", "decoder"}


def test_which_side_the_alignment_moves():
    assert moved(Config(), Factors(), "alignment") == {"encoder", "model_encoder"}
    assert moved(Config(), Factors(moves_policy=False), "alignment") == {"model_encoder"}
    assert moved(Config(), Factors(moves_model=False), "alignment") == {"encoder"}
    assert moved(Config(), Factors(shared=0), "alignment") == set()
    assert moved(Config(partner="random"), Factors(), "alignment") == {"model_encoder"}
    assert aligned.losses(
        Config(partner="self"), Factors(), (state := aligned.init(Config(), ENV, key=KEY)).params, state,
        episode(Config(), Factors(), state), KEY,
    )["alignment"] == pytest.approx(0.0, abs=1e-6)  # fmt: skip


def test_only_the_shared_dimensions_are_aligned():
    cfg, factors = Config(), Factors(shared=4)
    state = aligned.init(cfg, ENV, key=KEY)
    rows = episode(cfg, factors, state)
    loss = lambda params: aligned.losses(cfg, factors, params, state, rows, KEY)["alignment"]  # noqa: E731
    slope = np.abs(eqx.filter_grad(loss)(state.params).encoder.net.output.weight).max(1)
    assert (slope[:4] > 0).all() and (slope[4:] == 0).all()


@pytest.mark.parametrize("policy_loss", ["actor-critic", "deterministic"])
def test_stopped_on_the_policy_side_it_leaves_the_policy_as_if_there_were_none(policy_loss):
    cfg = Config(policy_loss=policy_loss)

    def trained(factors, seed):
        def step(state, key):
            rows = episode(cfg, factors, state, key)
            return aligned.update(cfg, factors, state, rows, key=key)[0], rows

        key = jax.random.key(seed)
        return jax.lax.scan(step, aligned.init(cfg, ENV, key=key), jax.random.split(key, 60))

    runs = [Factors(moves_policy=False), Factors(moves_policy=False, weight=0.0), Factors()]
    factors = jax.tree.map(lambda *xs: jnp.stack(xs), *runs)
    run = jax.jit(jax.vmap(jax.vmap(trained, (None, 0)), (0, None)))
    state, rows = run(factors, jnp.arange(3))
    for part in (state.params.encoder, state.params.actor, state.params.critic, rows.time_step, rows.action):
        for x in jax.tree.leaves(part):
            np.testing.assert_array_equal(x[0], x[1])
    assert (state.params.model_encoder.net.output.weight[0] != state.params.model_encoder.net.output.weight[1]).any()
    assert (rows.action[2] != rows.action[1]).any()


def test_the_horizon_s_end_is_an_end_unless_it_is_looked_past():
    cfg = Config(policy_loss="actor-critic")
    state = aligned.init(cfg, ENV, key=KEY)
    rows = episode(cfg, Factors(), state)
    params = state.params
    value = params.critic(params.encoder(rows.time_step.obs["obs"]))[:, 0]
    reward = rows.time_step.reward
    for bootstrap in (False, True):
        factor = np.full(5, 0.99) * np.array([1, 1, 1, 1, bootstrap])
        expected = np.mean((value[:-1] - (reward[1:] + factor * value[1:])) ** 2)
        found = aligned.losses(cfg, Factors(bootstrap=bootstrap), params, state, rows, KEY)["value"]
        assert found == pytest.approx(float(expected), rel=1e-5)


def test_actions_keep_their_bounds_and_unbounded_ones_have_none():
    cfg = Config()
    state = aligned.init(cfg, ENV, key=KEY)
    state = eqx.tree_at(lambda s: s.params.actor.output.bias, state, jnp.array([5.0]))
    assert (np.abs(episode(cfg, Factors(), state).action) <= 1).all()
    assert (episode(cfg, Factors(bounded=False), state).action[:-1] > 1).all()


def test_update_descends_by_adam_with_decay_and_clips_the_whole_gradient():
    cfg, state = Config(), aligned.init(Config(), ENV, key=KEY)
    rows = episode(cfg, Factors(), state)
    plain, metrics = aligned.update(cfg, Factors(learning_rate=0.01), state, rows, key=KEY)
    # Adam's first move is the sign of the gradient, whatever its size.
    step = plain.params.actor.output.bias - state.params.actor.output.bias
    assert np.abs(step) == pytest.approx(0.01, rel=1e-3)
    decayed, _ = aligned.update(cfg, Factors(learning_rate=0.01, weight_decay=0.5), state, rows, key=KEY)
    weight = state.params.decoder.output.weight
    gap = plain.params.decoder.output.weight - decayed.params.decoder.output.weight
    np.testing.assert_allclose(gap, 0.01 * 0.5 * weight, atol=1e-7)
    clipped, _ = aligned.update(cfg, Factors(clip=1e-3), state, rows, key=KEY)
    moment = lambda state: np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(state.opt_state.mu)))  # noqa: E731
    assert metrics["grad_norm"] > 1
    assert moment(clipped) == pytest.approx(0.1 * 1e-3, rel=1e-4)  # the first moment is a tenth of the gradient
    assert moment(plain) == pytest.approx(0.1 * float(metrics["grad_norm"]), rel=1e-4)


def test_imagined_latents_are_read_as_the_predicted_shared_code_beside_the_last_private_one():
    cfg, factors = Config(policy_loss="imagined"), Factors(shared=4)
    state = aligned.init(cfg, ENV, key=KEY)
    code, seen = jnp.arange(32.0), -jnp.arange(32.0)
    read = aligned.reader(cfg, factors, state.params)(aligned.Latent(code, seen))
    np.testing.assert_array_equal(read, [0, 1, 2, 3, *range(-4, -32, -1)])


def test_value_aware_model_losses_need_no_observation_that_the_value_ignores():
    state = aligned.init(Config(), ENV, key=KEY)
    blind = eqx.tree_at(lambda s: s.slow.critic.output.weight, state, jnp.zeros((1, 64)))
    rows = episode(Config(), Factors(), state)
    for model_loss in ("value-weighted", "value-equivalent"):
        cfg = Config(model_loss=model_loss)
        loss = lambda params, cfg=cfg: aligned.losses(cfg, Factors(), params, blind, rows, KEY)["dynamics"]  # noqa: E731
        assert all((x == 0).all() for x in jax.tree.leaves(eqx.filter_grad(loss)(state.params).decoder))


def test_actor_critic_learns_the_known_return():
    """Seeds 0 to 3, 1,500 episodes; the best with bounds is 3.881 and doing nothing 3.335."""
    cfg, factors = Config(policy_loss="actor-critic"), Factors()

    def learn(key):
        def step(state, key):
            return aligned.update(cfg, factors, state, episode(cfg, factors, state, key), key=key)[0], None

        state = jax.lax.scan(step, aligned.init(cfg, ENV, key=key), jax.random.split(key, 1500))[0]
        policy = aligned.policy(cfg, factors, state, greedy=True)

        def play(key):
            stream = collect.begin(ENV, policy, 0, key=key)
            rows = collect.collect(ENV, policy, stream, ENV.horizon + 1, policy_version=state.episodes)[1]
            return rows.time_step.reward[1:].sum()

        return jax.vmap(play)(jax.random.split(jax.random.key(99), 1000)).mean()

    found = np.asarray(jax.jit(jax.vmap(learn))(jax.vmap(jax.random.key)(jnp.arange(4))))
    assert (found > 3.5).all() and (found < 3.881 + 0.15).all()  # one mean of 1,000 episodes errs by about 0.05
