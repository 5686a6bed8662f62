"""DreamerV3: a world model learned from replay, and an actor and a critic learned in its imagination.

Hafner, Pasukonis, Ba & Lillicrap 2023, "Mastering Diverse Domains through World Models", in the form of the
authors' repository. Three things are learned, and each loss says from what:

    real windows      ->  model:  dynamics, representation, obs, reward, discount
    imagined rollouts ->  actor, critic
    real windows, with imagined returns as targets  ->  critic, and the model through its latents (replay_critic)

Actor and critic read the model's latents, or (policy_encoder "own") an encoder of their own, which may be aligned with
the model's.

docs/dreamer.md explains every metric and numbers the details with their sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, PyTree

from forethought import nets
from forethought.collect import check_legal
from forethought.devices import ALONE, Axis
from forethought.imagine import imagine
from forethought.models.actor_critic import Actor, Critic
from forethought.models.rssm import RSSM, Latent
from forethought.models.sight import Alignment, Sight, alignment
from forethought.ops import loops
from forethought.ops.laprop import laprop
from forethought.ops.returns import lambda_returns, survival
from forethought.ops.stats import ReturnScale
from forethought.protocols import AbstractPolicy
from forethought.replay import staleness
from forethought.tree import frozen, polyak
from forethought.types import Box, Decision, Discount, Discrete, Spec, Step, TimeStep


@dataclasses.dataclass(frozen=True)
class Config:
    """The defaults are the paper's at size 1m, but for what docs/dreamer.md lists (item 14)."""

    deter: int = 512
    """Size of the recurrent state."""
    hidden: int = 64
    """Units inside the recurrence, the prior and the posterior."""
    stoch: int = 32
    """Number of categorical variables."""
    classes: int = 4
    """Classes of each."""
    units: int = 64
    """Units of encoder, decoder, heads, actor and critic."""
    blocks: int = 8
    """Diagonal blocks of the recurrence."""
    block_scale: float = 1.0
    """Initial weights of the recurrence's block layers, relative to the repository's."""
    layers: int = 3
    """Layers of encoder, decoder, actor and critic."""
    bins: int = 255
    """Bins of the two-hot reward and value; odd."""
    bin_limit: float = 20.0
    """The outer bins are at +-symexp of this."""

    envs: int = 1
    """Environments that are collected from at the same time."""
    ticks: int = 1
    """Rows collected in each of them per iteration."""
    updates: int = 1
    """Updates per iteration."""
    action_repeat: int = 1
    """Simulator steps per decision."""
    prefill: int = 1100
    """Rows collected by the random policy before the first update, over all environments."""
    capacity: int = 1_000_000
    """Rows that replay holds, over all environments."""
    batch: int = 16
    """Windows per update."""
    length: int = 64
    """Rows per window."""

    horizon: int = 15
    """Imagined steps per rollout."""
    starts: int = 64
    """Rows per window, evenly spaced, from which to imagine; at most `length`."""
    gamma: float = 1 - 1 / 333
    """Discount per unit of the environment's duration."""
    lam: float = 0.95
    """Of the lambda returns."""
    actor_gradient: Literal["reinforce", "dynamics", "auto"] = "reinforce"
    """How the actor learns: by the score function, or back through the model; auto: the latter where actions are
    continuous, which it needs."""
    entropy: float = 3e-4
    """Weight of the actor's entropy."""
    scale_returns: bool = True
    """Divide by the percentile range of returns."""
    scale_rate: float = 0.01
    """Rate of that range's moving average."""
    slow_rate: float = 0.02
    """Polyak rate of the slow critic."""
    slow_weight: float = 1.0
    """Weight of the pull of the critic towards the slow critic."""
    free_nats: float = 1.0
    """Below this, the KL losses have no gradient."""

    dynamics_weight: float = 1.0
    """Weight of the loss that trains the prior."""
    representation_weight: float = 0.1
    """Weight of the loss that trains the posterior towards the prior."""
    replay_weight: float = 0.3
    """Weight of the critic's loss on real rows; 0 leaves it out."""

    policy_encoder: Literal["model", "own"] = "model"
    """What actor and critic read: the model's latent, or their own code of the observation, in dreams of the decoded
    one."""
    alignment: Alignment = "none"
    """Of that code with the code of the model's encoder: of its first `shared` dimensions, or by contrast."""
    shared: int = 32
    """Dimensions of the codes that are aligned; `units` for all of them."""
    alignment_weight: float = 0.2
    """Of that loss."""

    learning_rate: float = 4e-5
    """Of all networks."""
    warmup: int = 1000
    """Updates over which the learning rate rises from 0."""
    clip: float = 0.3
    """Largest gradient norm of a tensor, as a share of the tensor's own norm."""

    def __post_init__(self) -> None:
        if not 1 <= self.starts <= self.length:
            raise ValueError(f"starts is {self.starts}; it must be from 1 to length ({self.length})")
        sizes = ("deter", "hidden", "stoch", "classes", "units", "blocks", "layers")
        for name in (*sizes, "envs", "ticks", "updates", "action_repeat", "batch", "horizon"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.length < 2:
            raise ValueError(f"length is {self.length}; a window needs at least 2 rows")
        if self.bins < 3 or self.bins % 2 == 0:
            raise ValueError(f"bins is {self.bins}; it must be odd and at least 3")
        if not 0 < self.bin_limit <= 88:
            raise ValueError(f"bin_limit is {self.bin_limit}; it must be positive and at most 88")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} is {value}; it must be finite and not negative")
        need = max(self.length, self.ticks, -(-self.prefill // self.envs))
        if self.capacity // self.envs < need:
            raise ValueError(f"capacity is {self.capacity}; {self.envs} environments need at least {need * self.envs}")
        if not 0 <= self.gamma <= 1 or not 0 <= self.lam <= 1:
            raise ValueError(f"gamma is {self.gamma} and lam {self.lam}; both must be from 0 to 1")
        if self.alignment != "none" and self.policy_encoder == "model":
            raise ValueError(f"alignment is '{self.alignment}', but policy_encoder 'model' has one code; use 'own'")
        if self.alignment == "partial" and not 1 <= self.shared <= self.units:
            raise ValueError(
                f"shared is {self.shared}; it must be from 1 to the dimensions of a code (units, {self.units})"
            )
        if self.deter % self.blocks:
            raise ValueError(f"deter is {self.deter}; it must be a multiple of blocks ({self.blocks})")


def _size(deter: int, hidden: int, classes: int, units: int) -> dict[str, Any]:
    return dict(deter=deter, hidden=hidden, classes=classes, units=units)


PRESETS: dict[str, dict[str, Any]] = {
    "1m": {},
    "12m": _size(2048, 256, 16, 256),
    "25m": _size(3072, 384, 24, 384),
    "50m": _size(4096, 512, 32, 512),
    "100m": _size(6144, 768, 48, 768),
    "200m": _size(8192, 1024, 64, 1024),
    "400m": _size(12288, 1536, 96, 1536),
    "cpu": dict(
        **_size(64, 64, 8, 64), stoch=8, blocks=4, block_scale=2.0, layers=2, bins=63, batch=16, length=16, starts=1,
        envs=4, ticks=4, updates=16, action_repeat=2, prefill=1024, capacity=200_000, gamma=0.99, entropy=0.01,
        learning_rate=5e-4, warmup=100, actor_gradient="auto",
    ),
}  # fmt: skip

METRICS: dict[str, tuple[str, str]] = {
    "real/loss/dynamics": ("nats", "KL from the stopped posterior to the prior, at least the free nats"),
    "real/loss/representation": ("nats", "KL from the posterior to the stopped prior, at least the free nats"),
    "real/loss/obs": ("symlog units^2", "squared error of the reconstruction, summed over keys (discrete keys: nats)"),
    "real/loss/reward": ("nats", "cross-entropy of the two-hot reward"),
    "real/loss/discount": ("nats", "cross-entropy of going on against termination"),
    "real/loss/replay_critic": ("nats", "cross-entropy of the value of real rows; its targets are imagined returns"),
    "real/loss/alignment": (
        "",
        "squared distance of the directions of both codes' shared parts, or nats by contrast; 0 without alignment",
    ),
    "real/prior_entropy": ("nats", "entropy of the prior over all latent variables"),
    "real/staleness": ("updates", "how many updates ago the replayed actions were chosen, on average"),
    "imagined/loss/actor": ("scaled return", "the actor's loss over rollouts, their real starts included"),
    "imagined/loss/critic": (
        "nats",
        "cross-entropy of the value over rollouts, their real starts included, with the pull to the slow critic",
    ),
    "imagined/entropy": ("nats", "entropy of the actor over rollouts, their real starts included"),
    "imagined/return": ("reward", "lambda return over rollouts, which earn their rewards in imagination alone"),
    "imagined/value": ("reward", "the critic's value of imagined rows"),
    "imagined/return_scale": ("reward", "what returns are divided by: their 5th to 95th percentile range, at least 1"),
    "imagined/survival": ("", "weight of the last imagined row: discounts and gammas multiplied"),
    "update/grad_norm": ("", "norm of the gradient of all parameters before clipping"),
}


class Dreaming(NamedTuple):
    """The actor inside the model, where it sees what the model expects (protocols.Actor)."""

    model: RSSM
    sight: Sight
    actor: Actor
    greedy: bool = False

    def __call__(self, latent: Latent, *, key: PRNGKeyArray) -> Decision:
        features = latent.features()
        dist = self.actor.dist(self.sight(features, lambda: self.model.expected(features)))
        return self.actor.decide(dist.mode() if self.greedy else dist.sample(key=key), dist)


class Params(eqx.Module):
    """What the optimiser moves."""

    model: RSSM
    sight: Sight
    actor: Actor
    critic: Critic


class State(eqx.Module):
    """Every array needed to go on."""

    params: Params
    slow_critic: Critic
    opt_state: PyTree
    return_scale: ReturnScale
    updates: Int[Array, ""]
    """The policy's version."""


class Policy(AbstractPolicy):
    """Filters with the model and acts with the actor; the carry is the latent, the action before, and whether there
    was none: a policy may take over in the middle of an episode."""

    model: RSSM
    sight: Sight
    actor: Actor
    greedy: bool = eqx.field(static=True)

    def initial(self) -> tuple[Latent, Array, Array]:
        return self.model.initial(), jnp.asarray(self.actor.action.void()), jnp.ones((), bool)

    def __call__(
        self, carry: tuple[Latent, Array, Array], time_step: TimeStep, *, key: PRNGKeyArray
    ) -> tuple[tuple[Latent, Array, Array], Decision]:
        check_legal(time_step)
        model_key, actor_key = jax.random.split(key)
        latent, action, fresh = carry
        latent = self.model.observe(latent, action, time_step.obs, time_step.first | fresh, key=model_key)
        dist = self.actor.dist(self.sight(latent.features(), lambda: self.model.observation(time_step.obs)))
        raw = dist.mode() if self.greedy else dist.sample(key=actor_key)
        decision = self.actor.decide(raw, dist)
        carry = latent, decision.action, jnp.zeros((), bool)
        return carry, Decision(decision.action, decision.log_prob)


def init(cfg: Config, spec: Spec, *, key: PRNGKeyArray) -> State:
    """Draws networks for an environment.

    Raises:
        ValueError: actions without bounds, or an observation that the model cannot take.
    """
    if isinstance(spec.action, Box) and not spec.action.bounded:
        raise ValueError(f"{spec.name}: dreamer needs bounded actions; give the environment an action bound")
    if isinstance(spec.action, Discrete) and cfg.actor_gradient == "dynamics":
        raise ValueError(f"{spec.name}: actor_gradient 'dynamics' needs continuous actions; use 'reinforce' or 'auto'")
    model_key, actor_key, critic_key = jax.random.split(key, 3)
    sight_key = jax.random.fold_in(key, 3)
    model = RSSM(
        spec, deter=cfg.deter, hidden=cfg.hidden, stoch=cfg.stoch, classes=cfg.classes, units=cfg.units,
        blocks=cfg.blocks, layers=cfg.layers, bins=cfg.bins, bin_limit=cfg.bin_limit, block_scale=cfg.block_scale,
        key=model_key,
    )  # fmt: skip
    own, features = cfg.policy_encoder == "own", cfg.deter + cfg.stoch * cfg.classes
    size, view = sum(code.size for code in model.codes), cfg.units if own else features
    sight = Sight.own(size, cfg.units, cfg.layers, key=sight_key) if own else Sight(None)
    outputs = spec.action.n if isinstance(spec.action, Discrete) else 2 * int(np.prod(spec.action.shape))
    actor = Actor(nets.MLP(view, cfg.units, cfg.layers, outputs, scale=0.01, key=actor_key), spec.action)
    critic_net = nets.MLP(view, cfg.units, cfg.layers, cfg.bins, scale=0.0, key=critic_key)
    params = Params(model, sight, actor, Critic(critic_net, (cfg.bins, cfg.bin_limit)))
    opt_state = _optimizer(cfg).init(eqx.filter(params, eqx.is_inexact_array))
    slow_critic = jax.tree.map(jnp.copy, params.critic)
    return State(params, slow_critic, opt_state, ReturnScale.initial(), jnp.zeros((), jnp.int32))


def policy(cfg: Config, state: State, *, greedy: bool = False) -> Policy:
    """The acting policy: sampled while training, or the mode of the actor."""
    return Policy(state.params.model, state.params.sight, state.params.actor, greedy)


def codes(policy: Policy) -> Callable[[Any], tuple[Array, Array]] | None:
    """From observations [M] to the codes [M, units] of both encoders; None where the policy reads the model's
    latent."""
    model, sight = policy.model, policy.sight.encoder
    if sight is None:
        return None
    return jax.jit(lambda obs: (model.encoder(model.observation(obs)), sight(model.observation(obs))))


def update(
    cfg: Config, state: State, rows: Step, rule: Discount, *, key: PRNGKeyArray, axis: Axis = ALONE
) -> tuple[State, dict[str, Array]]:
    """One gradient step on real windows [B, T], this device's share of them, and on what is imagined from them."""
    keys = axis.share(jax.random.split(key, rows.time_step.last.shape[0] * axis.size))
    grads, (return_scale, metrics) = eqx.filter_grad(_objective, has_aux=True)(
        state.params, cfg, state, rows, rule, keys, axis
    )
    grads, metrics = axis.mean((grads, metrics))
    moves, opt_state = _optimizer(cfg).update(grads, state.opt_state, eqx.filter(state.params, eqx.is_inexact_array))
    params = eqx.apply_updates(state.params, moves)
    slow_critic = polyak(state.slow_critic, params.critic, cfg.slow_rate)
    metrics["update/grad_norm"] = optax.tree.norm(grads)
    return State(params, slow_critic, opt_state, return_scale, state.updates + 1), metrics


def _objective(
    params: Params, cfg: Config, state: State, rows: Step, rule: Discount, keys: Key[Array, " B"], axis: Axis
) -> tuple[Float[Array, ""], tuple[ReturnScale, dict[str, Array]]]:
    """The sum of all losses; which parameters a term reaches is said by `frozen` and `stop_gradient`."""
    stop = jax.lax.stop_gradient
    rows = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows)  # time leads from here on
    step, (length, batch) = rows.time_step, rows.time_step.last.shape
    model_keys, dream_keys = jax.vmap(jax.random.split, out_axes=1)(keys)

    # The model filters real windows.
    before = jnp.concatenate([jnp.zeros_like(rows.action[:1]), rows.action[:-1]])
    # A window begins like an episode, in the middle of one too: a void discrete action would pass for action 0.
    windows = before, step.obs, step.first.at[0].set(True)
    latents, post = jax.vmap(
        lambda window, key: params.model.filter(params.model.initial(), *window, key=key), (1, 0), 1
    )(windows, model_keys)

    # The actor dreams, from rows evenly spaced over each window.
    places = (jnp.arange(cfg.starts) + 1) * length // cfg.starts - 1
    dream_keys = jax.vmap(lambda key: jax.random.split(key, cfg.starts), out_axes=1)(dream_keys)
    starts = _flat((*jax.tree.map(lambda x: stop(x)[places], (latents, rows)), dream_keys))
    dream = _dream(params, cfg, rule, *starts, version=state.updates)
    return_scale = state.return_scale.add(axis.gather(stop(dream.returns), 1), cfg.scale_rate)
    scale = return_scale.value() if cfg.scale_returns else 1.0

    # The critic also learns on the real rows, from what was imagined there.
    promised = jnp.where(stop(dream.weight)[0] > 0, stop(dream.returns)[0], 0.0).reshape(-1, batch)
    view = params.sight(latents.features(), lambda: params.model.observation(step.obs))
    boot = stop(params.critic.value(view)).at[places].set(promised)
    targets = _returns(*rule(step), boot, step.last, cfg.lam)
    # Rows that ended have no target, and the window's last does not count: the mean is over T - 1 rows.
    counts = (~step.last).at[-1].set(False) * length / (length - 1)

    real, real_terms = loops.chunked(
        lambda nets, seen, data: _real_losses(cfg, state.slow_critic, nets, seen, data),
        (params.model, params.sight, params.critic),
        _flat((latents, post)),
        _flat((step, counts, jnp.concatenate([targets, targets[-1:]]))),
    )
    imagined, imagined_terms = loops.chunked(
        lambda nets, returns, data: _imagined_losses(cfg, state.slow_critic, scale, nets, returns, data),
        (params.sight, params.actor, params.critic),
        _flat(dream.returns),
        _flat(jax.tree.map(stop, (dream.latents, dream.expected, dream.raw, dream.weight, dream.value))),
    )
    tie = jnp.zeros(())
    if cfg.alignment != "none":  # within each window, whose rows are also what contrast tells apart
        codes = params.model.encoder(params.model.observation(step.obs)), view
        tie = jax.vmap(lambda *pair: alignment(cfg.alignment, *pair, shared=cfg.shared), 1)(*codes).mean()
    metrics = {
        "real/loss/alignment": tie,
        "real/staleness": staleness(axis.gather(rows, 1), state.updates),
        "imagined/return": dream.returns.mean(),
        "imagined/value": dream.value[1:].mean(),
        "imagined/return_scale": return_scale.value(),
        "imagined/survival": dream.weight[-1].mean(),
    }
    metrics = {**real_terms, **imagined_terms, **metrics}
    assert {name for name in metrics if "/loss/" in name} == _weights(cfg).keys(), sorted(metrics)
    return real + imagined + cfg.alignment_weight * tie, (return_scale, metrics)


class Dream(NamedTuple):
    """N rollouts [H + 1, N] and what they are worth."""

    latents: Latent
    expected: Float[Array, "H+1 N O"] | None
    """The observations that the model decodes, where anybody looks at them."""
    raw: Array
    """The actor's samples, before they are brought into bounds."""
    weight: Float[Array, "H+1 N"]
    value: Float[Array, "H+1 N"]
    returns: Float[Array, "H N"]


def _dream(
    params: Params,
    cfg: Config,
    rule: Discount,
    latents: Latent,
    starts: Step,
    keys: Key[Array, " N"],
    *,
    version: Int[Array, ""],
) -> Dream:
    """Imagines from N real rows; a gradient reaches actor and sight alone, where they learn through the model."""
    model, sight, critic = frozen((params.model, params.sight, params.critic))
    actor = Dreaming(model, params.sight, params.actor)
    dreams, rows = imagine(
        model, actor if _through_model(cfg, params.actor) else frozen(actor), latents, starts.time_step, cfg.horizon,
        depth=starts.depth, policy_version=version, key=keys,
    )  # fmt: skip
    reward, factor = rule(rows.time_step)
    weight = jax.vmap(survival, 1, 1)(factor.at[0].set(rows.time_step.discount[0]))
    expected = None
    if sight.encoder is not None:
        expected = loops.in_chunks(lambda latents: model.expected(latents.features()), dreams)
    value = loops.in_chunks(lambda seen: critic.value(sight(seen[0].features(), lambda: seen[1])), (dreams, expected))
    return Dream(
        dreams, expected, rows.extras, weight, value, _returns(reward, factor, value, rows.time_step.last, cfg.lam)
    )


def _real_losses(
    cfg: Config,
    slow: Critic,
    nets: tuple[RSSM, Sight, Critic],
    seen: tuple[Latent, Array],
    data: tuple[TimeStep, Array, Array],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The losses of real rows [N], from their latents and posteriors."""
    (model, sight, critic), (latents, post), (step, counts, targets) = nets, seen, data
    view = sight(latents.features(), lambda: model.observation(step.obs))
    terms = {f"real/loss/{name}": x for name, x in model.losses(latents, post, step, cfg.free_nats).items()}
    terms["real/loss/replay_critic"] = counts * critic.pulled_loss(view, targets, slow, cfg.slow_weight)
    total, means = _weighted(cfg, terms, step.last.shape)
    prior = model.prior_probs(latents.deter)
    return total, means | {"real/prior_entropy": -jnp.sum(prior * jnp.log(prior), (-2, -1)).mean()}


def _imagined_losses(
    cfg: Config,
    slow: Critic,
    scale: Float[Array, ""] | float,
    nets: tuple[Sight, Actor, Critic],
    returns: Float[Array, " N"],
    data: tuple[Latent, Array | None, Array, Array, Array],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The losses of imagined rows [N] that were acted on, their real starts included."""
    (sight, actor, critic), (latents, expected, raw, weight, value) = nets, data
    view = sight(latents.features(), lambda: expected)
    actor_loss, entropy = _actor_loss(cfg, actor, view, raw, returns, value, scale)
    critic_loss = critic.pulled_loss(view, jax.lax.stop_gradient(returns), slow, cfg.slow_weight)
    terms = {"imagined/loss/actor": weight * actor_loss, "imagined/loss/critic": weight * critic_loss}
    total, means = _weighted(cfg, terms, weight.shape)
    return total, means | {"imagined/entropy": entropy.mean()}


def _weighted(
    cfg: Config, terms: dict[str, Float[Array, " N"]], shape: tuple[int, ...]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The weighted sum of the means of losses, and the means."""
    assert all(term.shape == shape for term in terms.values()), {k: v.shape for k, v in terms.items()}
    weights, means = _weights(cfg), {name: term.mean() for name, term in terms.items()}
    return jnp.stack([weights[name] * means[name] for name in terms]).sum(), means


def _weights(cfg: Config) -> dict[str, float]:
    """The weight of every loss."""
    return {
        "real/loss/dynamics": cfg.dynamics_weight,
        "real/loss/representation": cfg.representation_weight,
        "real/loss/obs": 1.0,
        "real/loss/reward": 1.0,
        "real/loss/discount": 1.0,
        "real/loss/replay_critic": cfg.replay_weight,
        "real/loss/alignment": cfg.alignment_weight,
        "imagined/loss/actor": 1.0,
        "imagined/loss/critic": 1.0,
    }


def _actor_loss(
    cfg: Config,
    actor: Actor,
    view: Float[Array, "N V"],
    raw: Array,
    returns: Float[Array, " N"],
    value: Float[Array, " N"],
    scale: Float[Array, ""] | float,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """The loss of imagined rows that were acted on with raw samples, and the actor's entropy there."""
    dist = actor.dist(view)
    entropy = dist.entropy()
    if _through_model(cfg, actor):  # the returns carry the gradient, through the model, to the actions
        return -returns / scale - cfg.entropy * entropy, entropy
    advantage = jax.lax.stop_gradient((returns - value) / scale)
    return -dist.log_prob(raw) * advantage - cfg.entropy * entropy, entropy


_returns = jax.vmap(lambda_returns, (1, 1, 1, 1, None), 1)
"""Of rows [T, N]."""


def _flat(tree: PyTree) -> PyTree:
    """Leaves [T, N, ...] as [T * N, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _through_model(cfg: Config, actor: Actor) -> bool:
    """Whether the actor's gradient goes back through the model."""
    return cfg.actor_gradient == "dynamics" or (cfg.actor_gradient == "auto" and isinstance(actor.action, Box))


def _optimizer(cfg: Config) -> optax.GradientTransformation:
    return laprop(cfg.learning_rate, warmup=cfg.warmup, clip=cfg.clip)
