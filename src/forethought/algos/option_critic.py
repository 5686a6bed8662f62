"""The option-critic: options and the policy over them, learned by policy gradients (Bacon, Harb & Precup 2017).

    obs0, option o  --a0-->  r1, obs1   stops with beta(obs1, o); if so, the policy over options chooses anew
    u(obs1, o) = (1 - beta) q(obs1, o) + beta v(obs1),   v = (1 - epsilon) max_o q + epsilon mean_o q

    critic       q(obs, o) towards lambda returns of r and u along what was done
    actor        log pi(a | obs, o) times the return's advantage over q(obs, o), and entropy
    termination  beta(obs1, o) falls where o is worth more than v there, less the deliberation cost (Harb et al. 2018)

Updates are on-policy, from T rows of B environments at a time: one program, and the caller vmaps over seeds. With one
option it is an advantage actor-critic, the flat agent to compare with. Without layers, on a discrete observation, every
head is a table. The running option lives in the policy's carry, and both levels stand in every row: the action and its
log-probability as always, the option's in `extras` (`Choice`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from forethought import collect, nets
from forethought.models.rssm import ObsCode
from forethought.ops import returns
from forethought.protocols import AbstractEnv, AbstractPolicy
from forethought.tree import frozen
from forethought.types import Decision, Discount, Discrete, Spec, Step, TimeStep, check_unit


@dataclasses.dataclass(frozen=True)
class Config:
    """How the option-critic learns."""

    options: int = 4
    """1: a flat actor-critic."""
    layers: int = 2
    """Hidden layers of the torso; 0: every head is linear in the observation, a table if it is discrete."""
    units: int = 64
    """Width of hidden layers."""
    envs: int = 16
    """B, environments whose rows make a batch."""
    ticks: int = 16
    """T, rows of each per update."""
    lam: float = 0.95
    """Of the lambda returns."""
    learning_rate: float = 1e-3
    """Of Adam."""
    epsilon: float = 0.1
    """Probability with which the policy over options chooses uniformly."""
    entropy: float = 0.01
    """Weight of the options' entropy."""
    deliberation: float = 0.01
    """Cost of choosing anew, in reward: options that are worth no more than v less this are ended."""
    max_grad_norm: float = 1.0
    """The gradient's norm is clipped to this."""

    def __post_init__(self):
        for name in ("options", "envs", "ticks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("lam", "epsilon"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")


METRICS: dict[str, tuple[str, str]] = {
    "real/loss/critic": ("reward^2", "squared error of q of the running option"),
    "real/loss/actor": ("reward", "policy gradient of the options"),
    "real/loss/termination": ("reward", "stop probability times advantage of going on"),
    "real/entropy": ("nats", "entropy of the running option's policy"),
    "real/stop_prob": ("", "mean probability of stopping where an option has led"),
    "real/reward": ("reward", "mean reward of a decision"),
    "real/return": ("reward", "mean lambda return"),
}


class Choice(eqx.Module):
    """What the level of options did in a row."""

    option: Int[Array, "*batch"]
    started: Bool[Array, "*batch"]
    """It was chosen in this row; elsewhere it goes on."""
    log_prob: Float[Array, "*batch"]
    """Of the level's whole decision: of going on, or of stopping and choosing this option (1st row: of choosing)."""


class Net(eqx.Module):
    """A torso and three heads: q [O], logits of actions [O, A], logits of stopping [O]."""

    torso: nets.Trunk
    q: nets.Dense
    act: nets.Dense
    stop: nets.Dense
    codes: tuple[ObsCode, ...]

    def __call__(self, time_step: TimeStep) -> tuple[Array, Array, Array]:
        """q [*batch, O], log-probabilities of actions [*batch, O, A] and stop probabilities [*batch, O]."""
        seen = [code.encode(time_step.obs[code.key]) for code in self.codes]
        view = self.torso(jnp.concatenate(seen, -1))
        q = self.q(view)
        logits = self.act(view).reshape(*q.shape, -1)
        return q, jax.nn.log_softmax(logits), jax.nn.sigmoid(self.stop(view))


class Policy(AbstractPolicy):
    """Acts by options; the carry is the option that runs."""

    net: Net
    epsilon: Float[Array, ""]
    greedy: bool = eqx.field(static=True, default=False)

    def initial(self) -> Int[Array, ""]:
        return jnp.zeros((), jnp.int32)

    def __call__(
        self, carry: Int[Array, ""], time_step: TimeStep, *, key: PRNGKeyArray
    ) -> tuple[Int[Array, ""], Decision]:
        collect.check_legal(time_step)
        stop_key, choose_key, act_key = jax.random.split(key, 3)
        q, log_probs, stop = self.net(time_step)
        stops = time_step.first | (jax.random.uniform(stop_key) < stop[carry])
        chances = over_options(q, self.epsilon)
        option = jnp.where(stops, jax.random.categorical(choose_key, jnp.log(chances)), carry).astype(jnp.int32)
        own = log_probs[option]
        action = jnp.argmax(own) if self.greedy else jax.random.categorical(act_key, own)
        again = jnp.where(time_step.first, 1.0, stop[carry]) * chances[option]
        chance = jnp.where(stops, again, 1 - stop[carry])
        choice = Choice(option, stops, jnp.log(chance))
        return option, Decision(action.astype(jnp.int32), own[action], choice)


def over_options(q: Float[Array, "*batch O"], epsilon: float | Array) -> Float[Array, "*batch O"]:
    """The policy over options: greedy with probability 1 - epsilon, else uniform; ties go to the first."""
    greedy = jax.nn.one_hot(jnp.argmax(q, -1), q.shape[-1])
    return (1 - epsilon) * greedy + epsilon / q.shape[-1]


class State(eqx.Module):
    """Every array needed to go on."""

    net: Net
    optimiser: PyTree
    updates: Int[Array, ""]


def init(cfg: Config, spec: Spec, *, key: PRNGKeyArray) -> State:
    """Raises ValueError for actions that are not discrete."""
    if not isinstance(spec.action, Discrete):
        raise ValueError(f"{spec.name}: the option-critic acts in discrete actions; its are continuous")
    torso_key, q_key, act_key, stop_key = jax.random.split(key, 4)
    codes = tuple(ObsCode(name, space) for name, space in spec.obs.items())
    inputs = sum(code.size for code in codes)
    torso = nets.Trunk(inputs, cfg.units, cfg.layers, key=torso_key)
    width = cfg.units if cfg.layers else inputs
    q, act, stop = (
        nets.Dense(width, size, scale=scale, key=k)
        for size, scale, k in (
            (cfg.options, 0.0, q_key),
            (cfg.options * spec.action.n, 0.01, act_key),
            (cfg.options, 0.01, stop_key),
        )
    )
    net = Net(torso, q, act, stop, codes)
    return State(net, _optimiser(cfg).init(eqx.filter(net, eqx.is_inexact_array)), jnp.zeros((), jnp.int32))


def _optimiser(cfg: Config) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), optax.adam(cfg.learning_rate))


def policy(cfg: Config, state: State, *, greedy: bool = False) -> Policy:
    """The acting policy, or the one whose options take their likeliest action and are chosen without chance."""
    return Policy(state.net, jnp.asarray(0.0 if greedy else cfg.epsilon), greedy)


def losses(cfg: Config, net: Net, rows: Step, pending: TimeStep, rule: Discount) -> tuple[Array, dict[str, Array]]:
    """The losses of one environment's rows [T] and the time step after them."""
    steps = jax.tree.map(lambda x, end: jnp.concatenate([x, end[None]]), rows.time_step, pending)
    q, log_probs, stop = net(steps)
    option, last = rows.extras.option, steps.last
    running = jnp.take_along_axis(q[:-1], option[:, None], -1)[:, 0]
    ahead, stops = (jnp.take_along_axis(x[1:], option[:, None], -1)[:, 0] for x in (q, stop))
    value = jnp.sum(over_options(q, cfg.epsilon) * q, -1)[1:]
    arriving = jax.lax.stop_gradient((1 - stops) * ahead + stops * value)
    reward, factor = jax.vmap(rule)(steps)
    arriving = jnp.concatenate([jnp.zeros(1), arriving])
    target = returns.lambda_returns(reward, factor, arriving, last, cfg.lam)
    lived = ~last[:-1]
    advantage = jax.lax.stop_gradient(target - running)
    own = jnp.take_along_axis(log_probs[:-1], option[:, None, None], 1)[:, 0]
    chosen = jnp.take_along_axis(own, rows.action[:, None], -1)[:, 0]
    entropy = -jnp.sum(jnp.exp(own) * own, -1)
    goes_on = lived & (steps.discount[1:] != 0)
    worth = jax.lax.stop_gradient(ahead - value + cfg.deliberation)
    mean = lambda x, where: jnp.sum(jnp.where(where, x, 0.0)) / cfg.ticks  # noqa: E731
    named = {
        "critic": mean(jnp.square(running - target), lived),
        "actor": mean(-chosen * advantage - cfg.entropy * entropy, lived),
        "termination": mean(stops * worth, goes_on),
    }
    metrics = {f"real/loss/{name}": x for name, x in named.items()}
    metrics |= {"real/entropy": mean(entropy, lived), "real/stop_prob": mean(stops, goes_on)}
    metrics |= {"real/reward": mean(steps.reward[1:], lived), "real/return": mean(target, lived)}
    return sum(named.values(), jnp.zeros(())), metrics


def update(cfg: Config, state: State, rows: Step, pending: TimeStep, rule: Discount) -> tuple[State, dict[str, Array]]:
    """One step of the gradient on rows [B, T] and the time steps [B] after them."""

    def loss(net: Net) -> tuple[Array, dict[str, Array]]:
        total, metrics = jax.vmap(lambda r, p: losses(cfg, net, r, p, rule))(rows, pending)
        return total.mean(), jax.tree.map(jnp.mean, metrics)

    grads, metrics = eqx.filter_grad(loss, has_aux=True)(state.net)
    updates, optimiser = _optimiser(cfg).update(grads, state.optimiser)
    net = eqx.apply_updates(state.net, updates)
    return State(net, optimiser, state.updates + 1), metrics


def run(
    cfg: Config, env: AbstractEnv, rule: Discount, updates: int, *, key: PRNGKeyArray
) -> tuple[State, dict[str, Array]]:
    """Collects and updates, `updates` times: envs x ticks rows each. Metrics are [updates].

    Raises ValueError for a rule in another unit, and as `init` does."""
    check_unit(rule, env.spec)
    init_key, stream_key = jax.random.split(key)
    state = init(cfg, env.spec, key=init_key)
    begin = lambda i: collect.begin(env, policy(cfg, state), i, key=stream_key)  # noqa: E731
    streams = jax.vmap(begin)(jnp.arange(cfg.envs))

    def once(held: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], dict[str, Array]]:
        state, streams = held
        acting = frozen(policy(cfg, state))
        gather = lambda s: collect.collect(env, acting, s, cfg.ticks, policy_version=state.updates)  # noqa: E731
        streams, rows = jax.vmap(gather)(streams)
        state, metrics = update(cfg, state, rows, streams.time_step, rule)
        return (state, streams), metrics

    (state, _), metrics = jax.lax.scan(once, (state, streams), None, updates)
    return state, metrics
