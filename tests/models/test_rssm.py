"""The RSSM against a recurrence written in NumPy, its filter against single steps, and episodes kept apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.special

from forethought.models.rssm import RSSM, Latent, ObsCode
from forethought.ops import losses
from forethought.tree import named_arrays
from forethought.types import Box, Discrete, MultiDiscrete, Spec

# A third of the time to compile, and at these sizes little more to run.
KEY = jax.random.key(0)
OBS = {
    "vector": Box((3,)),
    "image": Box((2, 2), "uint8", 0.0, 255.0),
    "level": Box(()),
    "digit": Discrete(4),
    "digits": MultiDiscrete((2, 3)),
}
ACTIONS = {"box": Box((2,), low=-1.0, high=1.0), "discrete": Discrete(3)}
SIZES = dict(deter=8, hidden=6, stoch=2, classes=3, units=6, blocks=2, layers=1, bins=11, bin_limit=3.0)


def shapes_of(action="box", obs=OBS, duration=2.0, **sizes):
    spec = Spec("toy", obs, ACTIONS[action], duration=duration)
    return jax.eval_shape(lambda: RSSM(spec, **SIZES | sizes, key=KEY))


@functools.cache
def make(action="box"):
    """A model whose weights are drawn by NumPy, which compiles nothing; none of them is 0 or 1."""
    leaves, form = jax.tree.flatten(shapes_of(action))
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=x.shape, scale=0.7 / x.shape[0] ** 0.5).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(form, [jnp.asarray(x) for x in weights])


def drawn(space, rows, rng):
    if isinstance(space, Discrete):
        return rng.integers(0, space.n, rows).astype(np.int32)
    if isinstance(space, MultiDiscrete):
        return rng.integers(0, space.n, (rows, len(space.n))).astype(np.int32)
    if space.dtype == "uint8":
        return rng.integers(0, 256, (rows, *space.shape)).astype(np.uint8)
    return rng.uniform(-1, 1, (rows, *space.shape)).astype(np.float32)


def window(rows, seed=0, action="box", first=(0,)):
    """(action before each row, obs, first): what `filter` takes."""
    rng = np.random.default_rng(seed)
    obs = {key: jnp.asarray(drawn(space, rows, rng)) for key, space in OBS.items()}
    return jnp.asarray(drawn(ACTIONS[action], rows, rng)), obs, jnp.isin(jnp.arange(rows), jnp.array(first))


@jax.jit
def filter_window(model, data):
    """Latents, posteriors and priors of a window."""
    return filtered(model, *data)


def filtered(model, before, obs, first):
    latents, post = model.filter(model.initial(), before, obs, first, key=KEY)
    return latents, post, model.prior_probs(latents.deter)


observe = jax.jit(lambda model, latent, action, obs, first, key: model.observe(latent, action, obs, first, key=key))
both = pytest.mark.parametrize("action", ["box", "discrete"])


def expected_gru(recurrence, deter, stoch, action):
    """The recurrence with whole matrices: block-diagonal for the state, dense for what is embedded."""
    silu = lambda x: x * scipy.special.expit(x)  # noqa: E731
    rms = lambda x: x / np.sqrt(np.mean(x**2) + 1e-4)  # noqa: E731
    embed = lambda layer, x: silu(  # noqa: E731
        rms(x @ np.asarray(layer.dense.weight).T + np.asarray(layer.dense.bias)) * np.asarray(layer.norm.scale)
    )
    layers = (recurrence.embed_deter, deter), (recurrence.embed_stoch, stoch), (recurrence.embed_action, action)
    inputs = np.concatenate([embed(layer, x) for layer, x in layers])
    weight, bias = np.asarray(recurrence.hidden.weight), np.asarray(recurrence.hidden.bias)
    groups, size = weight.shape[0], weight.shape[2]
    hidden = deter @ scipy.linalg.block_diag(*weight[:, :size]) + bias.ravel()
    hidden += np.concatenate([inputs @ weight[g, size:] for g in range(groups)])
    hidden = silu(rms(hidden) * np.asarray(recurrence.norm.scale).ravel())
    gates = [hidden[g * size : (g + 1) * size] @ np.asarray(recurrence.gates.weight)[g] for g in range(groups)]
    gates = np.stack(gates) + np.asarray(recurrence.gates.bias)
    reset, candidate, update = (gates[:, i * size : (i + 1) * size].ravel() for i in range(3))
    update = scipy.special.expit(update - 1)
    return update * np.tanh(scipy.special.expit(reset) * candidate) + (1 - update) * deter


def test_the_recurrence_is_a_gru_with_block_diagonal_matrices():
    model, rng = make(), np.random.default_rng(1)
    deter, stoch, action = rng.normal(size=8), np.eye(3)[[2, 0]], np.array([0.3, -0.9])
    latent = Latent(jnp.asarray(deter.reshape(2, 4), jnp.float32), jnp.asarray(stoch, jnp.float32))
    found = jax.jit(type(model.recurrence).__call__)(model.recurrence, latent, jnp.asarray(action, jnp.float32))
    np.testing.assert_allclose(
        found.ravel(), expected_gru(model.recurrence, deter, stoch.ravel(), action), rtol=2e-5, atol=1e-5
    )


@both
def test_the_filter_is_single_observations(action):
    model, (before, obs, first) = make(action), window(6, action=action, first=(0, 4))
    seen, *both_probs = filter_window(model, (before, obs, first))
    latent, keys = model.initial(), jax.random.split(KEY, 6)
    for t in range(6):
        latent = observe(model, latent, before[t], {key: x[t] for key, x in obs.items()}, first[t], keys[t])
        # Compiled as another program, so equal to rounding.
        np.testing.assert_allclose(latent.deter, seen.deter[t], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(latent.stoch, seen.stoch[t])
    for probs in both_probs:
        assert probs.shape == (6, 2, 3)
        np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
        assert probs.min() >= 0.01 / 3 * 0.999


@both
@pytest.mark.parametrize("other", [1.0, 1e3, np.nan])
def test_an_episode_does_not_see_the_one_before(action, other):
    """F13: [A x4, B x4] with any A, against B alone under the same noise."""
    model, (before, obs, first) = make(action), window(8, action=action, first=(0, 4))

    def changed(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x.at[:4].set((x[:4] + 1) % 2)
        return x.at[:4].multiply(-other)

    # The action that led to B's first row is void; whatever stands there must not matter either.
    theirs = (before.at[4].set(changed(before)[0]), jax.tree.map(changed, obs), first)
    seen, seen_other = filter_window(model, (before, obs, first)), filter_window(model, theirs)
    for one, another in zip(jax.tree.leaves(seen), jax.tree.leaves(seen_other), strict=True):
        np.testing.assert_array_equal(one[4:], another[4:])
    assert not np.array_equal(seen[1][:4], seen_other[1][:4])
    latent, keys = model.initial(), jax.random.split(KEY, 8)
    for t in range(4, 8):
        latent = observe(model, latent, before[t], {key: x[t] for key, x in obs.items()}, first[t], keys[t])
        np.testing.assert_allclose(latent.deter, seen[0].deter[t], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(latent.stoch, seen[0].stoch[t])


def test_an_episodes_loss_has_no_gradient_in_the_one_before():
    model, (before, obs, first) = make(), window(8, first=(0, 4))
    floats = {"vector": obs["vector"], "level": obs["level"]}

    def loss_of_b(before, floats):
        latents, post, prior = filtered(model, before, obs | floats, first)
        terms = model.obs_loss(latents.features(), obs | floats)
        kl = jax.vmap(losses.balanced_kl, (0, 0, None))(jnp.log(post), jnp.log(prior), 0.0)
        return sum(x[4:].sum() for x in (*terms.values(), *kl)) + model.outcome(latents).reward[4:].sum()

    slopes = jax.jit(jax.grad(loss_of_b, (0, 1)))(before, floats)
    for name, slope in named_arrays(slopes).items():
        np.testing.assert_array_equal(slope[:4], 0, err_msg=name)
    assert (np.asarray(slopes[0][4]) == 0).all() and (np.asarray(slopes[0][5:]) != 0).all()
    assert (np.asarray(slopes[1]["vector"][4:]) != 0).all()


@both
def test_imagination_draws_from_the_prior(action):
    model, (before, obs, first) = make(action), window(3, action=action)
    seen, _, prior = filter_window(model, (before, obs, first))
    latent = jax.tree.map(lambda x: x[1], seen)
    ahead = jax.jit(jax.vmap(lambda k: model.advance(latent, before[2], key=k)))(jax.random.split(KEY, 3000))
    np.testing.assert_allclose(ahead.deter[7], seen.deter[2], rtol=1e-5, atol=1e-6)
    # Five standard deviations of a frequency over 3000 draws are at most 0.046.
    np.testing.assert_allclose(ahead.stoch.mean(0), prior[2], atol=0.046)
    outcome, expected = jax.jit(
        lambda: (lambda one, out: (out, model.outcome(one)))(*model.imagine(latent, before[2], key=KEY))
    )()
    for found, again in zip(jax.tree.leaves(outcome), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, again, rtol=1e-5, atol=1e-6)


def test_outcomes_are_in_the_environments_units():
    model = make()
    latents = filter_window(model, window(6))[0]
    outcome = jax.jit(type(model).outcome)(model, latents)
    features = latents.features()
    probs = scipy.special.softmax(np.asarray(model.reward(features), np.float64), -1)
    np.testing.assert_allclose(outcome.reward, probs @ model.bins.astype(np.float64), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outcome.discount, scipy.special.expit(model.discount(features)[:, 0]), rtol=1e-5)
    np.testing.assert_array_equal(outcome.duration, np.full(6, 2.0))
    np.testing.assert_array_equal(outcome.reward_delay, np.zeros(6))
    for key, space in OBS.items():
        assert outcome.obs[key].shape == (6, *space.shape), key
    assert (outcome.obs["digits"] < np.array([2, 3])).all() and outcome.obs["digit"].dtype == jnp.int32
    latent = jax.tree.map(lambda x: x[0], latents)
    slope = jax.jit(jax.grad(lambda action: model.imagine(latent, action, key=KEY)[1].reward))(jnp.zeros(2))
    assert (np.asarray(slope) != 0).all()


@pytest.mark.parametrize("key", OBS)
def test_a_code_gives_back_what_it_was_made_of(key):
    space = OBS[key]
    code, x = ObsCode(key, space), jnp.asarray(drawn(space, 5, np.random.default_rng(2)))
    encoded = code.encode(x)
    assert encoded.shape == (5, code.size)
    np.testing.assert_allclose(code.decode(encoded), x, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(code.encode(x[3]), encoded[3])


def test_code_losses_by_hand():
    """A Box: squared symlog units, symlog(e - 1) = 1 and symlog(1 - e^2) = -2. Digits: nats."""
    box = ObsCode("x", Box((2,)))
    target = jnp.array([np.e - 1, 1 - np.e**2], jnp.float32)
    assert box.loss(jnp.array([1.5, 0.0]), target) == pytest.approx(0.25 + 4, rel=1e-5)
    digit = ObsCode("x", Discrete(3))
    assert digit.loss(jnp.log(jnp.array([2.0, 3.0, 5.0])), jnp.array(1)) == pytest.approx(-np.log(0.3), rel=1e-5)
    digits = ObsCode("x", MultiDiscrete((2, 3)))
    logits = jnp.log(jnp.array([1.0, 3.0, 2.0, 3.0, 5.0]))
    assert digits.loss(logits, jnp.array([0, 2])) == pytest.approx(-np.log(0.25) - np.log(0.5), rel=1e-5)


def test_each_key_has_its_own_part_of_the_decoder():
    model, (_, obs, _) = make(), window(4)
    features = jnp.asarray(np.random.default_rng(3).normal(size=(4, 14)), jnp.float32)
    obs_loss = jax.jit(lambda obs: model.obs_loss(features, obs))
    base = obs_loss(obs)
    for key in OBS:
        moved = obs_loss(obs | {key: 1 - obs[key]})
        assert {k for k in OBS if not np.array_equal(moved[k], base[k])} == {key}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(duration=None), "toy: .*duration"),
        (dict(obs={"image": Box((64, 65), "uint8", 0.0, 255.0)}), "'image' has 4160 elements"),
        (dict(deter=9), "deter 9 is not a multiple of blocks 2"),
        (dict(bins=10), None),
    ],
)
def test_what_cannot_be_modelled_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of(**changes).bins  # noqa: B018
