"""Director: a high level that chooses goals and a low level that reaches them, both learned in a world model's dreams.

Hafner, Lee, Fischer & Abbeel 2022, "Deep Hierarchical Planning from Pixels", on the world model of DreamerV3. What is
learned, and from what:

    real windows      ->  model:  dynamics, representation, obs, reward, discount
    real windows      ->  goals:  an autoencoder of the model's recurrent states, whose codes are the goals
    imagined rollouts ->  low:    actions, paid by how like the goal the next state is
    imagined rollouts ->  high:   goals, paid by the task and by novelty (where the goals' autoencoder errs)

    obs0 --a0--> r1, obs1 --a1--> r2, obs2     a goal chosen at obs0 and over at obs2, reached or late
    high         q(goal) of rbar = r1 + f1 r2, factor f1 f2, and what follows: lambda returns over goals
    low          similarity to the goal, bootstrapped at obs2 with the value of that goal there

`goals=False` is the flat agent of the same file: every step is chosen anew, its action is what is chosen, and task and
novelty pay it. docs/hierarchy.md explains every metric and numbers the details with their sources.
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
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree

from forethought import levels, nets
from forethought.collect import check_legal
from forethought.devices import ALONE, Axis
from forethought.imagine import imagine
from forethought.models.actor_critic import Actor, Critic
from forethought.models.goals import Acted, Goals, Levels, Made, Pursued, Pursuing, Pursuit, similarity, view
from forethought.models.rssm import RSSM, Latent
from forethought.ops import loops
from forethought.ops.laprop import laprop
from forethought.ops.returns import lambda_returns, survival
from forethought.ops.stats import ReturnScale
from forethought.protocols import AbstractPolicy
from forethought.replay import staleness
from forethought.tree import frozen, polyak, select
from forethought.types import Box, Decision, Discount, Discrete, EndReason, PerStep, Spec, Step, TimeStep


@dataclasses.dataclass(frozen=True)
class Config:
    """The defaults are the paper's where it gives them, with dreamer's world model at size 1m."""

    deter: int = 512
    """D, size of the recurrent state and of a goal."""
    hidden: int = 64
    """Units inside the recurrence, the prior and the posterior."""
    stoch: int = 32
    """Number of categorical variables."""
    classes: int = 4
    """Classes of each."""
    units: int = 64
    """Units of encoder, decoder, heads, goals, actors and critics."""
    blocks: int = 8
    """Diagonal blocks of the recurrence."""
    block_scale: float = 1.0
    """Initial weights of the recurrence's block layers, relative to the repository's."""
    layers: int = 3
    """Layers of encoder, decoder, goals, actors and critics."""
    bins: int = 255
    """Bins of the two-hot reward and values; odd."""
    bin_limit: float = 20.0
    """The outer bins are at +-symexp of this."""

    goals: bool = True
    """False: a flat agent, paid by task and novelty."""
    goal_variables: int = 8
    """V, categorical variables of a goal's code."""
    goal_classes: int = 8
    """Classes of each."""
    goal_spread: float = 0.01
    """Weight of the KL from the uniform code, per nat, beside the squared error."""
    span: int = 8
    """Steps after which a goal is over."""
    reach: float = 2.0
    """A goal is over where its similarity is at least this; above 1: never before its span, as in the paper."""
    practice: float = 0.5
    """Share of rollouts that begin on the way to a goal which stands for another row of the batch."""
    low_task: float = 1.0
    """Weight of the task's advantage beside that of its goal for the low level; 0: goals alone pay it, as in the
    paper."""
    novelty: float = 0.1
    """Weight of the novelty's advantage beside the task's."""

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

    horizon: int = 16
    """Imagined steps per rollout."""
    starts: int = 64
    """Rows per window, evenly spaced, from which to imagine; at most `length`."""
    gamma: float = 0.99
    """Discount per unit of the environment's duration."""
    low_reward: Literal["similarity", "progress"] = "similarity"
    """What a goal pays for a step: how like the goal the next state is, as in the paper, or by how much more than the
    state before. Similarity pays for every step, so that what ends the episode costs."""
    low_gamma: float = 0.9
    """The low level's discount of what its goal pays."""
    lam: float = 0.95
    """Of the lambda returns of both levels."""
    entropy: float = 3e-3
    """Weight of the entropy of each level."""
    scale_rate: float = 0.01
    """Rate of the moving averages of the ranges of returns, which advantages are divided by."""
    slow_rate: float = 0.02
    """Polyak rate of the slow critics."""
    slow_weight: float = 1.0
    """Weight of the pull of the critics towards the slow ones."""
    free_nats: float = 1.0
    """Below this, the KL losses have no gradient."""

    dynamics_weight: float = 1.0
    """Weight of the loss that trains the prior."""
    representation_weight: float = 0.1
    """Weight of the loss that trains the posterior towards the prior."""

    learning_rate: float = 1e-4
    """Of all networks."""
    warmup: int = 1000
    """Updates over which the learning rate rises from 0."""
    clip: float = 0.3
    """Largest gradient norm of a tensor, as a share of the tensor's own norm."""

    def __post_init__(self) -> None:
        if not 1 <= self.starts <= self.length:
            raise ValueError(f"starts is {self.starts}; it must be from 1 to length ({self.length})")
        sizes = ("deter", "hidden", "stoch", "classes", "units", "blocks", "layers", "goal_variables", "goal_classes")
        for name in (*sizes, "span", "envs", "ticks", "updates", "action_repeat", "batch", "horizon"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.length < 2:
            raise ValueError(f"length is {self.length}; a window needs at least 2 rows")
        if self.bins < 3 or self.bins % 2 == 0:
            raise ValueError(f"bins is {self.bins}; it must be odd and at least 3")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} is {value}; it must be finite and not negative")
        need = max(self.length, self.ticks, -(-self.prefill // self.envs))
        if self.capacity // self.envs < need:
            raise ValueError(f"capacity is {self.capacity}; {self.envs} environments need at least {need * self.envs}")
        if not self.gamma <= 1 or not self.lam <= 1:
            raise ValueError(f"gamma is {self.gamma} and lam {self.lam}; both must be from 0 to 1")
        if self.deter % self.blocks:
            raise ValueError(f"deter is {self.deter}; it must be a multiple of blocks ({self.blocks})")


PRESETS: dict[str, dict[str, Any]] = {
    "1m": {},
    "cpu": dict(
        deter=64, hidden=64, classes=8, units=64, stoch=8, blocks=4, block_scale=2.0, layers=2, bins=63, batch=16,
        length=16, starts=4, envs=4, ticks=4, updates=4, prefill=1024, capacity=200_000, learning_rate=5e-4, warmup=100,
        goal_variables=3, goal_spread=0.05, low_reward="progress",
    ),
}  # fmt: skip

METRICS: dict[str, tuple[str, str]] = {
    "real/loss/dynamics": ("nats", "KL from the stopped posterior to the prior, at least the free nats"),
    "real/loss/representation": ("nats", "KL from the posterior to the stopped prior, at least the free nats"),
    "real/loss/obs": ("symlog units^2", "squared error of the reconstruction, summed over keys (discrete keys: nats)"),
    "real/loss/reward": ("nats", "cross-entropy of the two-hot reward"),
    "real/loss/discount": ("nats", "cross-entropy of going on against termination"),
    "real/loss/goal": ("", "squared error of the goals' autoencoder on recurrent states, and the spread of its codes"),
    "real/staleness": ("updates", "how many updates ago the replayed actions were chosen, on average"),
    "real/goals_reached": ("", "share of the replayed goals that were over because they were reached; 0 if none was"),
    "imagined/loss/high": ("scaled return", "the high level's loss at rows where it chose; a flat agent's only one"),
    "imagined/loss/low": ("scaled return", "the low level's loss; 0 in a flat agent"),
    "imagined/loss/task": ("nats", "cross-entropy of the task's value, at rows where a goal was chosen"),
    "imagined/loss/novelty": ("nats", "cross-entropy of the novelty's value, at the same rows"),
    "imagined/loss/goal": ("nats", "cross-entropy of the value of reaching the goal; 0 in a flat agent"),
    "imagined/entropy/high": ("nats", "entropy of the choice of goals; of actions in a flat agent"),
    "imagined/entropy/low": ("nats", "entropy of actions; 0 in a flat agent"),
    "imagined/return/task": ("reward", "lambda return over goals of the task's reward"),
    "imagined/return/novelty": ("error^2", "the same of novelty, the mean squared error of the goals' autoencoder"),
    "imagined/return/goal": ("similarity", "lambda return of reaching the goal, cut where it is over"),
    "imagined/similarity": ("", "of imagined states to the goals for which they were gone to, from -1 to 1"),
    "imagined/goals_reached": ("", "share of the imagined goals that were over because they were reached"),
    "imagined/survival": ("", "weight of the last imagined row: discounts and gammas multiplied"),
    "update/grad_norm": ("", "norm of the gradient of all parameters before clipping"),
}
STREAMS = {"task": 0.1, "novelty": 1e-3, "goal": 1e-3}
"""The returns, and the least that each one's advantage is divided by: the unit of the latter two says nothing."""


class Params(eqx.Module):
    """What the optimiser moves."""

    model: RSSM
    levels: Levels
    critics: dict[str, Critic]
    """Of the streams: task and novelty see the model's features, goal also the goal."""


class State(eqx.Module):
    """Every array needed to go on."""

    params: Params
    slow: dict[str, Critic]
    opt_state: PyTree
    scales: dict[str, ReturnScale]
    updates: Int[Array, ""]
    """The policy's version, of both levels."""


class Policy(AbstractPolicy):
    """Filters, chooses goals and acts; the carry is the latent with its goal, the act before, and whether there was
    none. What both levels did is in every decision's extras (`Made`)."""

    pursuing: Pursuing
    levels: Levels
    low_reward: str = eqx.field(static=True)
    greedy: bool = eqx.field(static=True)

    @property
    def model(self) -> RSSM:
        return self.pursuing.model

    def initial(self) -> tuple[Pursued, Acted, Array]:
        latent = self.pursuing.initial()
        return latent, Acted(jnp.asarray(self.levels.low.action.void()), latent.pursuit), jnp.ones((), bool)

    def __call__(
        self, carry: tuple[Pursued, Acted, Array], time_step: TimeStep, *, key: PRNGKeyArray
    ) -> tuple[tuple[Pursued, Acted, Array], Decision]:
        check_legal(time_step)
        model_key, act_key = jax.random.split(key)
        latent, acted, fresh = carry
        latent = self.pursuing.observe(latent, acted, time_step.obs, time_step.first | fresh, key=model_key)
        decision = self.levels.act(latent, greedy=self.greedy, key=act_key)
        carry = latent, decision.action, jnp.zeros((), bool)
        return carry, dataclasses.replace(decision, action=decision.action.action)


def init(cfg: Config, spec: Spec, *, key: PRNGKeyArray) -> State:
    """Draws networks for an environment.

    Raises:
        ValueError: actions without bounds, or an observation that the model cannot take.
    """
    if isinstance(spec.action, Box) and not spec.action.bounded:
        raise ValueError(f"{spec.name}: director needs bounded actions; give the environment an action bound")
    model_key, goal_key, high_key, low_key, critic_key = jax.random.split(key, 5)
    model = RSSM(
        spec, deter=cfg.deter, hidden=cfg.hidden, stoch=cfg.stoch, classes=cfg.classes, units=cfg.units,
        blocks=cfg.blocks, layers=cfg.layers, bins=cfg.bins, bin_limit=cfg.bin_limit, block_scale=cfg.block_scale,
        key=model_key,
    )  # fmt: skip
    features = cfg.deter + cfg.stoch * cfg.classes
    seen = features + _goal_size(cfg)
    outputs = spec.action.n if isinstance(spec.action, Discrete) else 2 * int(np.prod(spec.action.shape))
    net = lambda inputs, out, scale, key: nets.MLP(inputs, cfg.units, cfg.layers, out, scale=scale, key=key)  # noqa: E731
    high = net(features, cfg.goal_variables * cfg.goal_classes, 0.01, high_key) if cfg.goals else None
    both = Levels(
        Goals(cfg.deter, cfg.goal_variables, cfg.goal_classes, cfg.units, cfg.layers, key=goal_key), high,
        Actor(net(seen, outputs, 0.01, low_key), spec.action),
    )  # fmt: skip
    critics = {
        name: Critic(net(seen if name == "goal" else features, cfg.bins, 0.0, key), (cfg.bins, cfg.bin_limit))
        for name, key in zip(_streams(cfg), jax.random.split(critic_key, len(STREAMS)), strict=False)
    }
    params = Params(model, both, critics)
    opt_state = _optimizer(cfg).init(eqx.filter(params, eqx.is_inexact_array))
    scales = {name: ReturnScale.initial() for name in critics}
    return State(params, jax.tree.map(jnp.copy, critics), opt_state, scales, jnp.zeros((), jnp.int32))


def policy(cfg: Config, state: State, *, greedy: bool = False) -> Policy:
    """The acting policy: sampled while training, or the mode of both levels."""
    return Policy(_pursuing(cfg, state.params.model), state.params.levels, cfg.low_reward, greedy)


def codes(policy: Policy) -> Callable[[Any], tuple[Array, Array]] | None:
    """None: both levels read the model's latent."""
    return None


def log_probs(policy: Policy, rows: Step, *, key: PRNGKeyArray) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """What a policy says now of what both levels did in real rows [T] of one stream: the log-probability of the goals
    (of every row's, chosen there or not), and of the actions for them.

    Its model filters the rows, drawing latents anew, so that even the policy that acted differs a little from what is
    recorded. Compare with `levels.same_policy`, where `extras.started` and where the row is not `last`."""
    latents, pursuit = _relived(policy, rows, key=key)
    features, made = latents.features(), rows.extras
    dist = policy.levels.low.dist(view(features, pursuit))
    high = policy.levels.choice(features).log_prob(made.code).sum(-1)
    return high, dist.log_prob(made.raw)


def recorded(
    policy: Policy, rows: Step, rule: Discount, *, key: PRNGKeyArray
) -> tuple[levels.Record, Float[np.ndarray, " T"]]:
    """What both levels did in real rows [T] of one stream, for `levels.runs`, and what the low level was paid for each
    row's step, as the policy's model sees state and goal now.

    Goals are too many to be told apart: every one of them is option 0."""
    latents, pursuit = jax.jit(lambda: _relived(policy, rows, key=key))()
    state = np.asarray(latents.deter).reshape(len(pursuit.target), -1)
    near = np.asarray(similarity(pursuit.target[:-1], jnp.asarray(state[1:])))
    if policy.low_reward == "progress":
        near = near - np.asarray(similarity(pursuit.target[:-1], jnp.asarray(state[:-1])))
    step, made = jax.tree.map(np.asarray, (rows.time_step, rows.extras))
    acted, first = ~step.last, step.first
    later = lambda x: np.append(x[1:], np.zeros_like(x[:1]))  # noqa: E731
    reward, factor = (np.asarray(x, float) for x in rule(rows.time_step))
    ended = later(step.last) & acted
    reason = np.where(ended, EndReason.EPISODE, later(np.where(first, 0, made.ended))) * acted
    rbar, duration, so_far = np.zeros(len(acted)), np.zeros(len(acted)), (0.0, 1.0, 0.0)
    for t in np.flatnonzero(acted[:-1]):
        total, weight, took = (0.0, 1.0, 0.0) if made.started[t] else so_far
        so_far = total + weight * reward[t + 1], weight * factor[t + 1], took + step.duration[t + 1]
        rbar[t], _, duration[t] = so_far
    record = levels.Record(
        np.arange(len(acted)), np.asarray(rows.action), np.asarray(rows.log_prob), later(step.reward) * acted, ended,
        np.zeros(len(acted), int), made.started & acted, made.log_prob, np.asarray(rows.policy_version), reason, rbar,
        duration, acted,
    )  # fmt: skip
    return record, np.append(near, 0.0) * acted


def _relived(policy: Policy, rows: Step, *, key: PRNGKeyArray) -> tuple[Latent, Pursuit]:
    """The latents of real rows [T], filtered anew, and the goals that were pursued in them."""
    before = jnp.concatenate([jnp.zeros_like(rows.action[:1]), rows.action[:-1]])
    first = rows.time_step.first.at[0].set(True)
    latents = policy.model.filter(policy.model.initial(), before, rows.time_step.obs, first, key=key)[0]
    code, none = rows.extras.code, jnp.zeros_like(rows.extras.ended)
    return latents, Pursuit(code, policy.levels.goals.target(code), none, none)


def update(
    cfg: Config, state: State, rows: Step, rule: Discount, *, key: PRNGKeyArray, axis: Axis = ALONE
) -> tuple[State, dict[str, Array]]:
    """One gradient step on real windows [B, T], this device's share of them, and on what is imagined from them."""
    keys = axis.share(jax.random.split(key, rows.time_step.last.shape[0] * axis.size))
    grads, (scales, metrics) = eqx.filter_grad(_objective, has_aux=True)(
        state.params, cfg, state, rows, rule, keys, axis
    )
    grads, metrics = axis.mean((grads, metrics))
    moves, opt_state = _optimizer(cfg).update(grads, state.opt_state, eqx.filter(state.params, eqx.is_inexact_array))
    params = eqx.apply_updates(state.params, moves)
    slow = polyak(state.slow, params.critics, cfg.slow_rate)
    metrics["update/grad_norm"] = optax.tree.norm(grads)
    return State(params, slow, opt_state, scales, state.updates + 1), metrics


def _objective(
    params: Params, cfg: Config, state: State, rows: Step, rule: Discount, keys: Key[Array, " B"], axis: Axis
) -> tuple[Float[Array, ""], tuple[dict[str, ReturnScale], dict[str, Array]]]:
    """The sum of all losses; no gradient passes from one of the four that learn to another."""
    stop = jax.lax.stop_gradient
    rows = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows)  # time leads from here on
    step, (length, _) = rows.time_step, rows.time_step.last.shape
    model_keys, dream_keys, goal_keys = jax.vmap(lambda key: jax.random.split(key, 3), out_axes=1)(keys)

    # The model filters real windows; each begins like an episode, in the middle of one too.
    before = jnp.concatenate([jnp.zeros_like(rows.action[:1]), rows.action[:-1]])
    windows = before, step.obs, step.first.at[0].set(True)
    latents, post = jax.vmap(
        lambda window, key: params.model.filter(params.model.initial(), *window, key=key), (1, 0), 1
    )(windows, model_keys)
    real, real_terms = loops.chunked(
        lambda model, seen, step: _weighted(
            cfg, {f"real/loss/{name}": x for name, x in model.losses(*seen, step, cfg.free_nats).items()}
        ),
        params.model,
        _flat((latents, post)),
        _flat(step),
    )

    # The goals learn to stand for the states it was in.
    states = stop(latents.deter).reshape(*step.last.shape, -1)
    goal = jax.vmap(lambda x, key: params.levels.goals.loss(x, cfg.goal_spread, key=key), (1, 0))(states, goal_keys)
    goals, goal_terms = _weighted(cfg, {"real/loss/goal": goal})

    # Both levels dream, from rows evenly spaced over each window.
    places = (jnp.arange(cfg.starts) + 1) * length // cfg.starts - 1
    dream_keys = jax.vmap(lambda key: jax.random.split(key, cfg.starts), out_axes=1)(dream_keys)
    starts = _flat((*jax.tree.map(lambda x: stop(x)[places], (latents, rows)), dream_keys))
    dream, returns = _dream(frozen(params), cfg, rule, *starts, version=state.updates)
    scales = {name: state.scales[name].add(axis.gather(returns[name], 1), cfg.scale_rate) for name in state.scales}
    choices = axis.mean(dream.started[:-1].mean())
    imagined, imagined_terms = loops.chunked(
        lambda nets, returns, dream: _imagined_losses(cfg, state.slow, scales, choices, nets, returns, dream),
        (params.levels, params.critics),
        _flat(returns),
        _flat(dream),
    )
    metrics = {
        "real/staleness": staleness(axis.gather(rows, 1), state.updates),
        "real/goals_reached": _reached(axis.gather(rows.extras.ended, 1)),
        "imagined/similarity": dream.similarity[1:].mean(),
        "imagined/goals_reached": _reached(axis.gather(dream.ended, 1)),
        "imagined/survival": dream.weight[-1].mean(),
        **{f"imagined/return/{name}": returns[name].mean() if name in scales else 0.0 for name in STREAMS},
    }
    metrics = {**real_terms, **goal_terms, **imagined_terms, **jax.tree.map(jnp.asarray, metrics)}
    assert {name for name in metrics if "/loss/" in name} == _weights(cfg).keys(), sorted(metrics)
    return real + goals + imagined, (scales, metrics)


class Dream(NamedTuple):
    """N rollouts [H + 1, N], and what they are worth to both levels; of what was done, the last row is void."""

    features: Float[Array, "H+1 N F"]
    pursuit: Pursuit
    """The goals acted for."""
    started: Bool[Array, "H+1 N"]
    """A goal was chosen in this row."""
    ended: Int[Array, "H+1 N"]
    """Why the goal before was over here, an `EndReason`."""
    raw: Array
    """The low level's samples, before they are brought into bounds."""
    weight: Float[Array, "H+1 N"]
    similarity: Float[Array, "H+1 N"]
    """To the goal for which the row was gone to."""


def _dream(
    params: Params, cfg: Config, rule: Discount, latents: Latent, starts: Step, keys: Key[Array, " N"], *,
    version: Int[Array, ""],
) -> tuple[Dream, dict[str, Float[Array, "H N"]]]:  # fmt: skip
    """Imagines from N real rows, in each of which a goal is chosen anew; with the returns of each stream."""
    pursuing, critics = _pursuing(cfg, params.model), params.critics
    arrived, rows = imagine(
        pursuing, params.levels.act, Pursued(latents, _begun(cfg, params, latents)), starts.time_step, cfg.horizon,
        depth=starts.depth, policy_version=version, key=keys,
    )  # fmt: skip
    features, states = arrived.model.features(), arrived.model.deter.reshape(*arrived.pursuit.age.shape, -1)
    task, factor = rule(rows.time_step)
    weight = jax.vmap(survival, 1, 1)(factor.at[0].set(rows.time_step.discount[0]))
    over, acted = arrived.pursuit.over, rows.action
    across = jnp.where(over, cfg.lam, 1.0)  # from choice to choice
    streams = {
        "task": (task, factor, features, across),
        "novelty": (params.levels.goals.novelty(states), factor, features, across),
    }
    near = jnp.zeros_like(task)
    if cfg.goals:
        near = similarity(arrived.pursuit.target, states)
        # What the low level is after ends with its goal, from where it would have gone on to it.
        paid = near
        if cfg.low_reward == "progress":
            paid = near.at[1:].add(-similarity(acted.pursuit.target[:-1], states[:-1]))
        low_factor = PerStep(cfg.low_gamma)(rows.time_step)[1]
        streams["goal"] = paid, low_factor, view(features, arrived.pursuit), jnp.where(over, 0.0, cfg.lam)

    def returns(name: str) -> Float[Array, "H N"]:
        reward, factor, seen, lam = streams[name]
        value = loops.in_chunks(critics[name].value, seen)
        return jax.vmap(lambda_returns, 1, 1)(reward, factor, value, rows.time_step.last, lam)

    made: Made = rows.extras
    return Dream(
        features, acted.pursuit, made.started, arrived.pursuit.reason.at[0].set(0), made.raw, weight, near
    ), {name: returns(name) for name in streams}  # fmt: skip


def _begun(cfg: Config, params: Params, latents: Latent) -> Pursuit:
    """With what N rollouts begin: with no goal, so that one is chosen, or with one to practise."""
    count = latents.deter.shape[0]
    idle = jax.tree.map(lambda x: jnp.repeat(x[None], count, 0), _pursuing(cfg, params.model).initial().pursuit)
    if not cfg.goals:
        return idle
    # Every row's goal is the state half the batch away: of another window, or of the same one at another time.
    states = jnp.roll(latents.deter.reshape(count, -1), count // 2, 0)
    code = params.levels.goals.code(states)
    practised = Pursuit(code, params.levels.goals.target(code), idle.age, jnp.zeros_like(idle.reason))
    return select(jnp.arange(count) % 100 < 100 * cfg.practice, practised, idle)


def _imagined_losses(
    cfg: Config, slow: dict[str, Critic], scales: dict[str, ReturnScale], choices: Float[Array, ""],
    nets: tuple[Levels, dict[str, Critic]], returns: dict[str, Float[Array, " N"]], dream: Dream,
) -> tuple[Float[Array, ""], dict[str, Array]]:  # fmt: skip
    """The losses of imagined rows [N] that were acted on, their real starts included.

    `choices` is the share of rows in which the high level chose, over which its losses are means."""
    (both, critics), seen = nets, view(dream.features, dream.pursuit)
    low = both.low.dist(seen)
    high = both.choice(dream.features) if cfg.goals else low
    chosen, weight = dream.weight * dream.started / choices, {"goal": dream.weight}
    advantage, terms = {}, {}
    for name, critic in critics.items():
        see, target = (seen if name == "goal" else dream.features), jax.lax.stop_gradient(returns[name])
        error = target - jax.lax.stop_gradient(critic.value(see))
        advantage[name] = error / scales[name].value(STREAMS[name])
        loss = critic.pulled_loss(see, target, slow[name], cfg.slow_weight)
        terms[f"imagined/loss/{name}"] = weight.get(name, chosen) * loss
    reinforce = lambda dist, did, advantage: -_log_prob(dist, did) * advantage - cfg.entropy * _entropy(dist)  # noqa: E731
    worth = advantage["task"] + cfg.novelty * advantage["novelty"]
    terms["imagined/loss/high"] = chosen * reinforce(high, dream.pursuit.code if cfg.goals else dream.raw, worth)
    entropy = {"high": jnp.mean(_entropy(high) * dream.started / choices), "low": jnp.zeros(())}
    if cfg.goals:
        terms["imagined/loss/low"] = dream.weight * reinforce(
            low, dream.raw, advantage["goal"] + cfg.low_task * advantage["task"]
        )
        entropy["low"] = _entropy(low).mean()
    else:
        terms |= {f"imagined/loss/{name}": jnp.zeros_like(worth) for name in ("low", "goal")}
    total, means = _weighted(cfg, terms)
    return total, means | {f"imagined/entropy/{name}": x for name, x in entropy.items()}


def _log_prob(dist: Any, did: Array) -> Float[Array, " N"]:
    """Summed over the variables of a code, where it is one."""
    found = dist.log_prob(did)
    return found if found.ndim == 1 else found.sum(-1)


def _entropy(dist: Any) -> Float[Array, " N"]:
    found = dist.entropy()
    return found if found.ndim == 1 else found.sum(-1)


def _weighted(cfg: Config, terms: dict[str, Float[Array, " *N"]]) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The weighted sum of the means of losses, and the means."""
    weights, means = _weights(cfg), {name: term.mean() for name, term in terms.items()}
    return jnp.stack([weights[name] * means[name] for name in terms]).sum(), means


def _weights(cfg: Config) -> dict[str, float]:
    """The weight of every loss."""
    weights = {name: 1.0 for name in METRICS if "/loss/" in name}
    return weights | {
        "real/loss/dynamics": cfg.dynamics_weight,
        "real/loss/representation": cfg.representation_weight,
    }


def _reached(ended: Int[Array, "T N"]) -> Float[Array, ""]:
    """Of the goals that were reached or late, the share that were reached."""
    reached, late = (jnp.sum(ended == reason) for reason in (EndReason.GOAL, EndReason.LIMIT))
    return reached / jnp.maximum(reached + late, 1)


def _streams(cfg: Config) -> list[str]:
    return [name for name in STREAMS if cfg.goals or name != "goal"]


def _goal_size(cfg: Config) -> int:
    return cfg.deter if cfg.goals else 0


def _pursuing(cfg: Config, model: RSSM) -> Pursuing:
    variables, span = (cfg.goal_variables, cfg.span) if cfg.goals else (0, 1)
    return Pursuing(model, variables, _goal_size(cfg), span, cfg.reach)


def _flat(tree: PyTree) -> PyTree:
    """Leaves [T, N, ...] as [T * N, ...]."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def _optimizer(cfg: Config) -> optax.GradientTransformation:
    return laprop(cfg.learning_rate, warmup=cfg.warmup, clip=cfg.clip)
