"""The dual-encoder agent of the alignment study: what a model needs to know, and what a policy does, kept in two codes.

    enc_wm(o) -> [z_wm shared, z_wm private]      enc_pi(o) -> [z_pi shared, z_pi private]

    loss = dynamics + reward + value + policy + weight * alignment

The model predicts from its code, the policy acts on its own, and alignment (ops/align.py) ties them. All five losses
are summed and descended together, once per episode, on that episode's rows; what each may move is said where it is
computed. Four ways to learn a policy:

    actor-critic    the score function with a one-step advantage, on real rows (Sutton & Barto 2018, ch. 13.5)
    deterministic   up the critic's slope in the action, on real rows (Silver et al. 2014, eq. 9)
    rollout         back through imagined rollouts, in which the policy encodes what the model decodes
    imagined        actor-critic on imagined latents: the policy reads the shared code that the model predicts, beside
                    its own private code of the last real observation

What a program is made of is a `Config`; the numbers of a condition are `Factors`, arrays, so that conditions run as
one program beside the seeds. docs/alignment.md explains both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from forethought.imagine import imagine
from forethought.models.coded import Encoder, Latent, Model, Net
from forethought.ops import align
from forethought.ops.returns import lambda_returns
from forethought.protocols import AbstractEnv, AbstractPolicy
from forethought.tree import frozen, polyak, select
from forethought.types import Decision, Step, TimeStep

GAMMA, LAMBDA = 0.99, 0.95
LOSSES = ("dynamics", "reward", "value", "policy", "alignment")


@dataclasses.dataclass(frozen=True)
class Config:
    """What a program is made of; conditions that share it run as one."""

    stage: Literal["shared InfoNCE", "dual InfoNCE", "dual"] = "dual"
    """One encoder, its predicted and next codes told apart by contrast; two encoders, told apart by contrast; two,
    their shared parts aligned (none, some or all of the code)."""
    policy_loss: Literal["actor-critic", "deterministic", "rollout", "imagined"] = "deterministic"
    partner: Literal["policy", "random", "self"] = "policy"
    """What the model's code is aligned with: the policy's, a frozen random encoder's, or its own."""
    model_loss: Literal["observation", "value-weighted", "value-equivalent"] = "observation"
    """What a missed observation costs: its squared distance, the same weighted by the value's slope (VaGraM), or the
    squared difference of values (IterVAML)."""
    layer_norm: bool = False
    """Codes are normalised to mean 0 and variance 1."""
    width: int = 32
    """Dimensions of a code."""
    units: int = 64
    """Of the hidden layer that every network has."""
    temperature: float = 0.1
    """Of InfoNCE."""


class Factors(eqx.Module):
    """The numbers of a condition; any of them may have leading axes to be vmapped over."""

    shared: Int[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=16)
    """Dimensions of a code that are aligned and, in 'imagined', predicted for the policy."""
    weight: Float[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=0.2)
    """Of the alignment."""
    learning_rate: Float[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=1e-3)
    bounded: Bool[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=True)
    """Actions are tanh of what the actor says, else that itself."""
    frozen: Bool[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=True)
    """The policy's loss moves neither the value, nor the model, nor the code that they read."""
    bootstrap: Bool[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=False)
    """Past the horizon's end the value goes on, else nothing comes."""
    target_rate: Float[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=0.005)
    """Of the Polyak average that makes the value's targets; 1: there are no target networks."""
    moves_model: Bool[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=True)
    """The alignment moves the model's encoder."""
    moves_policy: Bool[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=True)
    """The alignment moves the policy's encoder."""
    weight_decay: Float[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=0.0)
    """Decoupled, per unit of the learning rate."""
    clip: Float[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=jnp.inf)
    """Largest norm of the gradient of all parameters together; infinite: it is left as it is."""
    noise: Float[Array, "*batch"] = eqx.field(converter=jnp.asarray, default=0.3)
    """Standard deviation of what is added to the actor's output while training."""


class Params(eqx.Module):
    """What the optimiser moves. `encoder` is the policy's, and with one shared encoder the model's too."""

    encoder: Encoder
    actor: Net
    critic: Net
    model_encoder: Encoder
    step: Net
    decoder: Net
    reward: Net

    def model(self, cfg: Config) -> Model:
        own = self.encoder if cfg.stage == "shared InfoNCE" else self.model_encoder
        return Model(own, self.step, self.decoder, self.reward, self.encoder)


class Slow(eqx.Module):
    """What the value's targets come from."""

    encoder: Encoder
    actor: Net
    critic: Net


class State(eqx.Module):
    """Every array needed to go on."""

    params: Params
    slow: Slow
    partner: Encoder
    """A random encoder that never moves."""
    opt_state: PyTree
    episodes: Int[Array, ""]
    """Episodes trained on, which are the updates made and the policy's version."""


class Policy(AbstractPolicy):
    """Acts on its own code of what it sees."""

    encoder: Encoder
    actor: Net
    bounded: Bool[Array, ""]
    noise: Float[Array, ""]

    def initial(self) -> None:
        return None

    def __call__(self, carry: None, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[None, Decision]:
        return None, decide(self.actor(self.encoder(time_step.obs["obs"])), self.bounded, self.noise, key)


class Dreamer(NamedTuple):
    """Acts inside the model (protocols.Actor), on the code that `read` makes of a latent."""

    read: Any
    actor: Net
    bounded: Bool[Array, ""]
    noise: Float[Array, ""]

    def __call__(self, latent: Latent, *, key: PRNGKeyArray) -> Decision:
        return decide(self.actor(self.read(latent)), self.bounded, self.noise, key)


def reader(cfg: Config, factors: Factors, params: Params) -> Callable[[Latent], Float[Array, "*batch D"]]:
    """What the policy reads in a dream: the predicted shared code beside its own last private one, or (where it does
    not learn on latents) its code of the decoded observation."""
    if cfg.policy_loss == "imagined":
        return lambda latent: jnp.where(jnp.arange(cfg.width) < factors.shared, latent.code, latent.seen)
    return lambda latent: params.encoder(params.decoder(latent.code))


def squash(out: Float[Array, "*batch A"], bounded: Bool[Array, ""]) -> Float[Array, "*batch A"]:
    """The action that the actor's output stands for."""
    return jnp.where(bounded, jnp.tanh(out), out)


def decide(out: Float[Array, " A"], bounded: Array, noise: Array, key: PRNGKeyArray) -> Decision:
    """Adds noise to the actor's action, then cuts it to the bounds if it has any; extras keep it uncut."""
    mean = squash(out, bounded)
    raw = mean + noise * jax.random.normal(key, mean.shape)
    action = jnp.where(bounded, jnp.clip(raw, -1, 1), raw)
    return Decision(action, log_prob(mean, jax.lax.stop_gradient(raw), noise), raw)


def log_prob(mean: Float[Array, "*batch A"], raw: Float[Array, "*batch A"], noise: Array) -> Float[Array, "*batch"]:
    """The log-density of an uncut action, up to a constant; where there is no noise, 0."""
    return -jnp.sum((raw - mean) ** 2, -1) / jnp.where(noise > 0, 2 * noise**2, jnp.inf)


def init(cfg: Config, env: AbstractEnv, *, key: PRNGKeyArray) -> State:
    """Draws networks for an environment whose only observation is a vector 'obs' and whose actions are a vector."""
    keys = jax.random.split(key, 8)
    (obs_size,), (action_size,) = env.spec.obs["obs"].shape, env.spec.action.shape
    net = lambda inputs, outputs, key: Net(inputs, cfg.units, outputs, key=key)  # noqa: E731
    encoder = lambda key: Encoder(net(obs_size, cfg.width, key), cfg.layer_norm)  # noqa: E731
    judged = cfg.width + (action_size if cfg.policy_loss == "deterministic" else 0)
    params = Params(
        encoder=encoder(keys[0]),
        actor=net(cfg.width, action_size, keys[1]),
        critic=net(judged, 1, keys[2]),
        model_encoder=encoder(keys[3]),
        step=net(cfg.width + action_size, cfg.width, keys[4]),
        decoder=net(cfg.width, obs_size, keys[5]),
        reward=net(cfg.width, 1, keys[6]),
    )
    slow = Slow(params.encoder, params.actor, params.critic)  # never part of `params`: no loss moves it
    opt_state = optax.scale_by_adam().init(eqx.filter(params, eqx.is_inexact_array))
    return State(params, slow, encoder(keys[7]), opt_state, jnp.zeros((), jnp.int32))


def policy(cfg: Config, factors: Factors, state: State, *, greedy: bool = False) -> Policy:
    """The acting policy: with noise while training, or without."""
    noise = jnp.zeros(()) if greedy else factors.noise
    return Policy(state.params.encoder, state.params.actor, factors.bounded, noise)


def update(
    cfg: Config, factors: Factors, state: State, rows: Step, *, key: PRNGKeyArray
) -> tuple[State, dict[str, Array]]:
    """One gradient step on one episode's rows [T + 1] and on what is imagined from them."""

    def objective(params: Params) -> tuple[Array, dict[str, Array]]:
        found = losses(cfg, factors, params, state, rows, key)
        weights = dict.fromkeys(LOSSES, 1.0) | {"alignment": factors.weight}
        assert found.keys() == weights.keys() and all(x.shape == () for x in found.values())
        return sum((weights[name] * x for name, x in found.items()), jnp.zeros(())), found

    grads, found = eqx.filter_grad(objective, has_aux=True)(state.params)
    norm = optax.tree.norm(grads)
    # Without a limit the gradient is left alone: a norm that overflows would turn it to 0 or NaN.
    shrink = jnp.where(norm > factors.clip, factors.clip / norm, 1.0)
    grads = jax.tree.map(lambda g: shrink * g, grads)
    moves, opt_state = optax.scale_by_adam().update(grads, state.opt_state)
    descend = lambda x, move: x - factors.learning_rate * (move + factors.weight_decay * x)  # noqa: E731
    weights, rest = eqx.partition(state.params, eqx.is_inexact_array)
    params = eqx.combine(jax.tree.map(descend, weights, moves), rest)
    slow = polyak(state.slow, Slow(params.encoder, params.actor, params.critic), factors.target_rate)
    metrics = {f"loss/{name}": x for name, x in found.items()} | {"grad_norm": norm}
    return State(params, slow, state.partner, opt_state, state.episodes + 1), metrics


def losses(
    cfg: Config, factors: Factors, params: Params, state: State, rows: Step, key: PRNGKeyArray
) -> dict[str, Float[Array, ""]]:
    """The five losses, means over an episode's transitions.

    row t: o[t] --a[t]--> row t + 1: r[t + 1], o[t + 1]
    """
    model, obs = params.model(cfg), rows.time_step.obs["obs"]
    model_code, policy_code = model.encoder(obs), params.encoder(obs)
    # The model. Its next code is to decode to the next observation, and to be what the encoder makes of that, so
    # that it can be predicted from again.
    predicted = model.predict(model_code[:-1], rows.action[:-1])
    next_obs, next_reward = model.decoder(predicted), model.reward(predicted)[:, 0]
    value = lambda obs: _slow_value(cfg, factors, state.slow, obs)  # noqa: E731
    if cfg.model_loss == "observation":
        missed = jnp.sum((next_obs - obs[1:]) ** 2, -1)
    elif cfg.model_loss == "value-weighted":
        missed = jax.vmap(align.value_weighted)(next_obs, obs[1:], jax.vmap(jax.grad(value))(obs[1:]))
    else:
        missed = jax.vmap(align.value_equivalent, (None, 0, 0))(value, next_obs, obs[1:])
    inconsistent = jnp.mean((predicted - jax.lax.stop_gradient(model_code[1:])) ** 2, -1)
    dynamics = jnp.mean(missed + inconsistent)
    reward = jnp.mean((next_reward - rows.time_step.reward[1:]) ** 2)

    learn = {"actor-critic": _advantage, "deterministic": _deterministic, "rollout": _rollout, "imagined": _imagined}
    critic, act = learn[cfg.policy_loss](cfg, factors, params, state.slow, rows, key)

    if cfg.stage == "shared InfoNCE":
        codes, partner = predicted, policy_code[1:]
    else:
        codes, partner = model_code, policy_code
    if cfg.partner != "policy":
        codes, partner = model_code, model_code if cfg.partner == "self" else state.partner(obs)
    codes, partner = _if(factors.moves_model, codes), _if(factors.moves_policy, partner)
    if cfg.stage == "dual":
        pairs = jax.vmap(align.partial_alignment, (0, 0, None))(codes, partner, factors.shared)
        alignment = jnp.mean(pairs)
    else:
        alignment = align.info_nce(codes, partner, cfg.temperature)
    return {"dynamics": dynamics, "reward": reward, "value": critic, "policy": act, "alignment": alignment}


def _if(moves: Bool[Array, ""], tree: Any) -> Any:
    """The tree, whose gradient passes only where `moves`."""
    return select(moves, tree, frozen(tree))


def _factor(factors: Factors, last: Bool[Array, "*batch"]) -> Float[Array, "*batch"]:
    """What the next value is multiplied by: gamma, and at the horizon's end nothing, unless it is looked past."""
    return GAMMA * jnp.where(last & ~factors.bootstrap, 0.0, 1.0)


def _slow_value(cfg: Config, factors: Factors, slow: Slow, obs: Float[Array, "*batch O"]) -> Float[Array, "*batch"]:
    """What the slow critic says of real observations, and of the slow actor's action there if it judges actions."""
    code = slow.encoder(obs)
    if cfg.policy_loss == "deterministic":
        code = jnp.concatenate([code, squash(slow.actor(code), factors.bounded)], -1)
    return slow.critic(code)[..., 0]


def _advantage(
    cfg: Config, factors: Factors, params: Params, slow: Slow, rows: Step, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """Advantage actor-critic on real rows."""
    obs, time_step = rows.time_step.obs["obs"], rows.time_step
    code = params.encoder(obs[:-1])
    value = params.critic(code)[:, 0]
    target = time_step.reward[1:] + _factor(factors, time_step.last[1:]) * _slow_value(cfg, factors, slow, obs[1:])
    advantage = target - _if(~factors.frozen, value)
    chosen = log_prob(squash(params.actor(code), factors.bounded), rows.extras[:-1], factors.noise)
    return jnp.mean((value - target) ** 2), -jnp.mean(chosen * advantage)


def _deterministic(
    cfg: Config, factors: Factors, params: Params, slow: Slow, rows: Step, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """Deterministic policy gradient on real rows; the critic judges a code and an action."""
    obs, time_step = rows.time_step.obs["obs"], rows.time_step
    code = params.encoder(obs[:-1])
    judge = lambda critic, code, action: critic(jnp.concatenate([code, action], -1))[:, 0]  # noqa: E731
    target = time_step.reward[1:] + _factor(factors, time_step.last[1:]) * _slow_value(cfg, factors, slow, obs[1:])
    value = judge(params.critic, code, rows.action[:-1])
    critic, judged = _if(~factors.frozen, (params.critic, code))
    best = judge(critic, judged, squash(params.actor(code), factors.bounded))
    return jnp.mean((value - target) ** 2), -jnp.mean(best)


def _rollout(
    cfg: Config, factors: Factors, params: Params, slow: Slow, rows: Step, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """Back-propagation through rollouts of the model, as long as an episode, from every real row."""
    value = _advantage(cfg, factors, params, slow, rows, key)[0]
    model, critic, judged = _if(~factors.frozen, (params.model(cfg), params.critic, params.encoder))
    read = lambda latent: params.encoder(model.decoder(latent.code))  # noqa: E731
    latents, dream = _dream(Dreamer(read, params.actor, factors.bounded, factors.noise), model, rows, key)
    values = critic(judged(model.decoder(latents.code)))[..., 0]
    return value, -jnp.mean(_returns(factors, dream, values, lam=1.0)[0])


def _imagined(
    cfg: Config, factors: Factors, params: Params, slow: Slow, rows: Step, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """Advantage actor-critic on imagined latents, which the critic reads as the policy does."""
    model = _if(~factors.frozen, params.model(cfg))
    model = dataclasses.replace(model, policy_encoder=params.encoder)  # the policy's own code learns
    read = reader(cfg, factors, params)
    dreamer = Dreamer(read, frozen(params.actor), factors.bounded, factors.noise)
    latents, dream = _dream(dreamer, model, rows, key)
    code = read(latents)
    value = params.critic(code)[..., 0]
    chosen = log_prob(squash(params.actor(code[:-1]), factors.bounded), dream.extras[:-1], factors.noise)
    target = jax.lax.stop_gradient(_returns(factors, dream, slow.critic(code)[..., 0], lam=LAMBDA))
    advantage = target - _if(~factors.frozen, value[:-1])
    return jnp.mean((value[:-1] - target) ** 2), -jnp.mean(chosen * advantage)


def _dream(actor: Dreamer, model: Model, rows: Step, key: PRNGKeyArray) -> tuple[Latent, Step]:
    """Imagines [H + 1, T] from the T rows of an episode at which an action was taken, as long as the episode was."""
    starts = jax.tree.map(lambda x: x[:-1], rows)
    count = starts.depth.shape[0]
    latent = Latent(model.encoder(starts.time_step.obs["obs"]), model.policy_encoder(starts.time_step.obs["obs"]))
    return imagine(
        model, actor, latent, starts.time_step, count, depth=starts.depth, policy_version=rows.policy_version[0],
        key=jax.random.split(key, count),
    )  # fmt: skip


def _returns(factors: Factors, dream: Step, values: Float[Array, "T N"], *, lam: float) -> Float[Array, "T-1 N"]:
    step = dream.time_step
    each = jax.vmap(lambda_returns, (1, 1, 1, 1, None), 1)
    return each(step.reward, step.discount * _factor(factors, step.last), values, step.last, lam)
