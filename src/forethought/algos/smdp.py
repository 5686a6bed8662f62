"""Learning over options in finite environments: SMDP and intra-option learning (Sutton, Precup & Singh 1999).

    choose o in s    act    r1, s1    act    r2, s2    the option is over
    SMDP         q(s, o) moves towards rbar + factor max_o' q(s2, o'),      once, when it is over (eq. 11)
    intra-option q(s1, o) moves towards r2 + factor2 u(s2, o), at every step, for every option that would have done the
                 same: u(s2, o) = (1 - beta) q(s2, o) + beta max_o' q(s2, o')  (eq. 20)
    model        R and F of every such option likewise (eqs. 23, 24), for planning with `ops.dynamic`

`run` counts primitive steps, so that options and actions are compared on equal budgets; it is one scan, and the caller
vmaps over seeds. `learn` is plain Q-learning, which takes the decisions of any environment as they come: on an
`OptionEnv` it is SMDP Q-learning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from forethought.levels import Record
from forethought.ops.dynamic import Tables
from forethought.ops.returns import smdp_target
from forethought.options import Limits, OptionSet, TabularOption, Under, advanced, chosen
from forethought.protocols import AbstractEnv
from forethought.tree import select
from forethought.types import Discount, Discrete, PerStep, TimeStep, check_unit


@dataclasses.dataclass(frozen=True)
class Config:
    """How values over options are learned."""

    method: Literal["smdp", "intra"] = "smdp"
    """Once per option when it is over, or at every step for all options that agree with what was done."""
    alpha: float = 0.1
    """Step size."""
    epsilon: float = 0.1
    """Probability of choosing uniformly among the options that may start."""
    interrupt: bool = False
    """A running option gives way where another that may start is worth more."""
    max_steps: int = 1000
    """Primitive steps after which an option is over."""
    model: bool = False
    """Learn the options' multi-time models too."""

    def __post_init__(self):
        for name in ("alpha", "epsilon"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; it must be at least 1")


class State(eqx.Module):
    """Every array needed to go on."""

    q: Float[Array, "S O"]
    reward: Float[Array, "S O"]
    """R, the learned expected reward of an option."""
    arrival: Float[Array, "S O N"]
    """F, the learned discounted arrivals of an option in N = S states; N is 0 unless models are learned."""
    updates: Int[Array, ""]
    """Updates of q so far: the version of the policy that chooses."""


def init(cfg: Config, states: int, options: int) -> State:
    """Values and models of 0."""
    table = jnp.zeros((states, options))
    arrival = jnp.zeros((states, options, states if cfg.model else 0))
    return State(table, table, arrival, jnp.zeros((), jnp.int32))


def choose(
    row: Float[Array, " O"], legal: Bool[Array, " O"], epsilon: float | Array, *, key: PRNGKeyArray
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """An epsilon-greedy choice among what is legal, ties broken at random, and its log-probability."""
    best = legal & (row == jnp.where(legal, row, -jnp.inf).max())
    chance = (1 - epsilon) * best / best.sum() + epsilon * legal / legal.sum()
    index = jax.random.categorical(key, jnp.log(chance)).astype(jnp.int32)
    return index, jnp.log(chance[index])


def best(row: Float[Array, " O"], legal: Bool[Array, " O"] | None) -> Float[Array, ""]:
    """The largest value of what may be chosen; -inf where nothing may."""
    return row.max() if legal is None else jnp.where(legal, row, -jnp.inf).max()


def backup(
    cfg: Config, q: Float[Array, "S O"], state: Array, option: Array, arrived: TimeStep, rule: Discount
) -> Float[Array, "S O"]:
    """Q-learning's update from one decision, however long it took: with `rule` of the environment's unit this is
    rbar + gamma^k (1 - d) max q (eq. 11)."""
    reward, factor = rule(arrived)
    target = smdp_target(reward, factor, best(q[arrived.obs["state"]], arrived.legal))
    return q.at[state, option].add(cfg.alpha * (target - q[state, option]))


def learn(
    cfg: Config, env: AbstractEnv, rule: Discount, decisions: int, *, key: PRNGKeyArray
) -> tuple[State, TimeStep]:
    """Q-learning over the decisions of any environment with the observation 'state', a reset taking one of them.

    Returns the state and the time steps [decisions + 1] as they came. Raises ValueError for a rule in another unit, and
    for an environment whose values are no table.
    """
    check_unit(rule, env.spec)
    states, options = _size(env), int(env.spec.action.n)  # pyright: ignore[reportAttributeAccessIssue]
    begin_key, tick_key = jax.random.split(key)
    env_state, first = env.reset(key=begin_key)

    def tick(held: tuple[Any, TimeStep, State], t: Array) -> tuple[Any, TimeStep]:
        env_state, now, state = held
        act_key, env_key = jax.random.split(jax.random.fold_in(tick_key, t))
        legal = jnp.ones(options, bool) if now.legal is None else now.legal
        at = now.obs["state"]
        option, _ = choose(state.q[at], legal, cfg.epsilon, key=act_key)
        env_state, arrived = jax.lax.cond(
            now.last, lambda: env.reset(key=env_key), lambda: env.step(env_state, option, key=env_key)
        )
        q = jnp.where(now.last, state.q, backup(cfg, state.q, at, option, arrived, rule))
        state = dataclasses.replace(state, q=q, updates=state.updates + ~now.last)
        return (env_state, arrived, state), arrived

    held = (env_state, first, init(cfg, states, options))
    held, seen = jax.lax.scan(tick, held, jnp.arange(decisions))
    return held[2], jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, seen)


class Budgeted(eqx.Module):
    """What is learned where expected time has a budget."""

    values: Float[Array, "2 S O"]
    """The expected reward from here on, and the expected time."""
    multiplier: Float[Array, ""]
    """The price of a unit of time."""


class Start(NamedTuple):
    """What was expected at a tick that started an episode (`first`); at others it is void."""

    first: Bool[Array, "*T"]
    reward: Float[Array, "*T"]
    time: Float[Array, "*T"]
    multiplier: Float[Array, "*T"]


def learn_within(
    cfg: Config, env: AbstractEnv, budget: float, unit: str, decisions: int, *, dual_rate: float, key: PRNGKeyArray
) -> tuple[Budgeted, Start]:
    """Q-learning of the most expected reward within a budget of expected time, undiscounted, with a price m of time:

        o*(s) = argmax_o reward(s, o) - m time(s, o)
        reward(s, o) moves towards r + (1 - d) reward(s', o*),  time(s, o) towards dt + (1 - d) time(s', o*)
        m moves by dual_rate (time(s0, o*) - budget) at each start s0, never below 0

    At the right price two policies are equally good and o* changes between them, so that averages over the starts among
    `Start` [decisions] are near what `ops.dynamic.constrained` says of their mixture, and the last values are not. What
    is expected is too high by the noise that alpha leaves. A reset takes a decision.

    Raises ValueError for a unit other than the environment's, and for one whose values are no table.
    """
    check_unit(PerStep(1.0, unit), env.spec)
    options = int(env.spec.action.n)  # pyright: ignore[reportAttributeAccessIssue]
    begin_key, tick_key = jax.random.split(key)

    def priced(state: Budgeted, at: TimeStep) -> tuple[Float[Array, " O"], Bool[Array, " O"]]:
        reward, time = state.values[:, at.obs["state"]]
        return reward - state.multiplier * time, jnp.ones(options, bool) if at.legal is None else at.legal

    def ahead(state: Budgeted, at: TimeStep) -> Float[Array, "2"]:
        row, legal = priced(state, at)
        return state.values[:, at.obs["state"], jnp.where(legal, row, -jnp.inf).argmax()]

    def tick(held: tuple[Any, TimeStep, Budgeted], t: Array) -> tuple[Any, Start]:
        env_state, now, state = held
        act_key, env_key = jax.random.split(jax.random.fold_in(tick_key, t))
        reward, time = ahead(state, now)
        price = jnp.maximum(0.0, state.multiplier + dual_rate * (time - budget))
        state = Budgeted(state.values, jnp.where(now.first, price, state.multiplier))
        option, _ = choose(*priced(state, now), cfg.epsilon, key=act_key)
        env_state, arrived = jax.lax.cond(
            now.last, lambda: env.reset(key=env_key), lambda: env.step(env_state, option, key=env_key)
        )
        gained, factor = jnp.stack([arrived.reward, arrived.duration]), jnp.full(2, arrived.discount)
        row = state.values[:, now.obs["state"], option]
        error = smdp_target(gained, factor, ahead(state, arrived)) - row
        values = state.values.at[:, now.obs["state"], option].add(jnp.where(now.last, 0.0, cfg.alpha * error))
        return (env_state, arrived, Budgeted(values, state.multiplier)), Start(
            now.first, reward, time, state.multiplier
        )

    held = (*env.reset(key=begin_key), Budgeted(jnp.zeros((2, _size(env), options)), jnp.zeros(())))
    held, starts = jax.lax.scan(tick, held, jnp.arange(decisions))
    return held[2], starts


def _size(env: AbstractEnv) -> int:
    state = env.spec.obs.get("state")
    if not isinstance(state, Discrete):
        raise ValueError(f"{env.spec.name}: its values are no table: it has no discrete observation 'state'")
    return state.n


class Held(NamedTuple):
    """Where a run stands."""

    state: State
    env_state: Any
    now: TimeStep
    under: Under
    origin: Int[Array, ""]
    """The state in which the running option was chosen."""
    log_prob: Float[Array, ""]
    version: Int[Array, ""]


def run(
    cfg: Config, env: AbstractEnv, options: Sequence[TabularOption], rule: Discount, steps: int, *, key: PRNGKeyArray
) -> tuple[State, Record]:
    """Chooses, acts and learns for `steps` ticks of an environment with the observation 'state'; a reset takes one.

    Raises:
        ValueError: a rule in another unit, or an option with a stochastic policy, of whose steps intra-option learning
            and models cannot say which options would have taken them.
    """
    check_unit(rule, env.spec)
    if (cfg.method == "intra" or cfg.model) and any(np.any((o.policy > 0) & (o.policy < 1)) for o in options):
        raise ValueError("intra-option learning needs options that choose one action for sure; one draws it")
    everyone, limits = OptionSet(options), Limits(cfg.max_steps)
    begin_key, tick_key = jax.random.split(key)
    env_state, now = env.reset(key=begin_key)
    over = dataclasses.replace(chosen(everyone, jnp.int32(0)), reason=jnp.int32(1))
    zero = jnp.zeros((), jnp.int32)
    held = Held(init(cfg, _size(env), len(options)), env_state, now, over, zero, jnp.zeros(()), zero)
    return _ticks(cfg, env, everyone, everyone.stacked(), rule, limits, held, steps, tick_key)


def _ticks(
    cfg: Config, env: AbstractEnv, options: OptionSet, tables: Any, rule: Discount, limits: Limits,
    held: Held, steps: int, key: PRNGKeyArray,
) -> tuple[State, Record]:  # fmt: skip
    def tick(held: Held, t: Array) -> tuple[Held, Record]:
        choose_key, act_key, env_key, stop_key = jax.random.split(jax.random.fold_in(key, t), 4)
        held = _started(cfg, options, held, key=choose_key)
        state, now, under = held.state, held.now, held.under
        at = now.obs["state"]
        carry, decision = options.act(under.index, under.carry, now, key=act_key)
        env_state, arrived = jax.lax.cond(
            now.last,
            lambda: env.reset(key=env_key),
            lambda: env.step(held.env_state, decision.action, key=env_key),
        )
        there = arrived.obs["state"]
        top = best(state.q[there], tables.initiation[:, there])
        gives_way = cfg.interrupt & (top > state.q[there, under.index])
        went = advanced(
            options, dataclasses.replace(under, carry=carry), arrived, rule, limits, gives_way, key=stop_key
        )
        under = select(now.last, under, went)
        learned = _learned(cfg, tables, held, under, arrived, decision.action, rule)
        state = select(now.last, state, learned)
        assert decision.log_prob is not None
        row = Record(
            at, decision.action, decision.log_prob, jnp.where(now.last, 0.0, arrived.reward), arrived.last & ~now.last,
            under.index, (under.steps == 1) & ~now.last, held.log_prob, held.version,
            jnp.where(now.last, 0, under.reason), under.reward, under.duration, ~now.last,
        )  # fmt: skip
        return held._replace(state=state, env_state=env_state, now=arrived, under=under), row

    held, record = jax.lax.scan(tick, held, jnp.arange(steps))
    return held.state, record


def _started(cfg: Config, options: OptionSet, held: Held, *, key: PRNGKeyArray) -> Held:
    """Chooses an option where none is running; an ended one is never resumed."""
    at = held.now.obs["state"]
    legal = options.can_start(held.now)
    index, log_prob = choose(held.state.q[at], legal, cfg.epsilon, key=key)
    fresh = held._replace(under=chosen(options, index), origin=at, log_prob=log_prob, version=held.state.updates)
    return select(held.under.over & ~held.now.last, fresh, held)


def _learned(
    cfg: Config, tables: Any, held: Held, under: Under, arrived: TimeStep, action: Array, rule: Discount
) -> State:
    """What one primitive step teaches."""
    state, at, there = held.state, held.now.obs["state"], arrived.obs["state"]
    reward, factor = rule(arrived)
    top = best(state.q[there], tables.initiation[:, there])
    if cfg.method == "smdp":
        target = smdp_target(under.reward, under.factor, top)
        moved = state.q.at[held.origin, under.index].add(cfg.alpha * (target - state.q[held.origin, under.index]))
        q, count = jnp.where(under.over, moved, state.q), under.over
    else:
        stop = tables.stop[:, there]
        ahead = (1 - stop) * state.q[there] + jnp.where(stop > 0, stop * top, 0.0)
        error = jax.vmap(smdp_target, (None, None, 0))(reward, factor, ahead) - state.q[at]
        q, count = state.q.at[at].add(cfg.alpha * jnp.where(_agree(tables, at, action), error, 0.0)), True
    state = dataclasses.replace(state, q=q, updates=state.updates + count)
    return _modelled(cfg, tables, state, at, there, action, reward, factor) if cfg.model else state


def _agree(tables: Any, at: Array, action: Array) -> Bool[Array, " O"]:
    """The options that are at home in a state and would have done the same there."""
    home = tables.initiation[:, at] | (tables.stop[:, at] < 1)
    return home & (tables.policy[:, at, action] == 1)


def _modelled(
    cfg: Config, tables: Any, state: State, at: Array, there: Array, action: Array, reward: Array,
    factor: Array,
) -> State:  # fmt: skip
    """Intra-option learning of R and F; a step that terminated arrives with factor 0."""
    rate = cfg.alpha * _agree(tables, at, action)
    going = factor * (1 - tables.stop[:, there])
    later = reward + going * state.reward[there] - state.reward[at]
    arrive = jnp.zeros(state.arrival.shape[2]).at[there].set(1.0)
    ends = (factor * tables.stop[:, there])[:, None] * arrive
    ahead = going[:, None] * state.arrival[there] + ends - state.arrival[at]
    return dataclasses.replace(
        state, reward=state.reward.at[at].add(rate * later), arrival=state.arrival.at[at].add(rate[:, None] * ahead)
    )


def learned_model(state: State, options: Sequence[TabularOption], terminal: Bool[np.ndarray, " S"]) -> Tables:
    """The learned multi-time models as tables to plan with."""
    legal = np.stack([np.asarray(o.initiation) for o in options], 1)
    goes_on = ~terminal[:, None]
    reward, arrival = np.asarray(state.reward, float) * goes_on, np.asarray(state.arrival, float)
    return Tables(reward, arrival * goes_on[..., None], legal, terminal)


def one_step(states: int, actions: int) -> list[TabularOption]:
    """Every action as an option over tables, of one step, that may start anywhere."""
    everywhere, policy = np.ones(states, bool), np.eye(actions)
    return [TabularOption(everywhere, np.tile(policy[a], (states, 1)), np.ones(states)) for a in range(actions)]
