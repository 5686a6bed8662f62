"""Goals for a lower level: codes of model states, one of which is pursued for a while (Director, Hafner et al. 2022).

    high level   code ~ pi_H(code | latent)          where no goal is pursued
    low level    action ~ pi_L(action | latent, goal), paid by how like the goal the state is that it arrives in

A goal is an option: it starts anywhere, its policy is the low level's, and it is over when it is reached, after `span`
steps, or with the episode. `Pursuing` is a world model in which that happens, for real and in dreams alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from forethought import nets
from forethought.models.actor_critic import Actor
from forethought.models.rssm import RSSM, Latent
from forethought.ops import dists
from forethought.protocols import HeadedModel
from forethought.tree import select
from forethought.types import Decision, EndReason, Outcome


class Goals(eqx.Module):
    """An autoencoder of the model's recurrent state, whose codes, V variables of C classes, are the goals."""

    encoder: nets.MLP
    decoder: nets.MLP
    variables: int = eqx.field(static=True)
    classes: int = eqx.field(static=True)

    def __init__(self, state: int, variables: int, classes: int, units: int, layers: int, *, key: PRNGKeyArray):
        encoder_key, decoder_key = jax.random.split(key)
        self.encoder = nets.MLP(state, units, layers, variables * classes, key=encoder_key)
        self.decoder = nets.MLP(variables * classes, units, layers, state, key=decoder_key)
        self.variables, self.classes = variables, classes

    def target(self, code: Int[Array, "*batch V"]) -> Float[Array, "*batch D"]:
        """The state that a code stands for."""
        return self._decoded(jax.nn.one_hot(code, self.classes))

    def novelty(self, state: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
        """The mean squared error of what its most likely code stands for: large where few goals lie."""
        return jnp.mean((self.target(self.code(state)) - state) ** 2, -1)

    def code(self, state: Float[Array, "*batch D"]) -> Int[Array, "*batch V"]:
        """The most likely code of a state."""
        return jnp.argmax(self._probs(state), -1).astype(jnp.int32)

    def loss(self, state: Float[Array, "*batch D"], weight: float, *, key: PRNGKeyArray) -> Float[Array, "*batch"]:
        """Squared error of a sampled code's state, and `weight` times its KL from the uniform code, in nats."""
        probs = self._probs(state)
        found = self._decoded(dists.straight_through(probs, key=key))
        spread = jnp.sum(probs * jnp.log(probs * self.classes), (-2, -1))
        return jnp.sum((found - state) ** 2, -1) + weight * spread

    def _probs(self, state: Float[Array, "*batch D"]) -> Float[Array, "*batch V C"]:
        logits = self.encoder(state)
        return dists.unimix(logits.reshape(*logits.shape[:-1], self.variables, self.classes), 0.01)

    def _decoded(self, code: Float[Array, "*batch V C"]) -> Float[Array, "*batch D"]:
        return self.decoder(code.reshape(*code.shape[:-2], -1))


def similarity(goal: Float[Array, "*batch D"], state: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
    """The low level's reward: goal . state / max(|goal|, |state|)^2, which is 1 at the goal alone."""
    longest = jnp.maximum(jnp.sum(goal * goal, -1), jnp.sum(state * state, -1))
    return jnp.sum(goal * state, -1) / jnp.maximum(longest, 1e-8)


class Pursuit(eqx.Module):
    """A goal that is pursued, or that was until `reason`."""

    code: Int[Array, "*batch V"]
    target: Float[Array, "*batch D"]
    age: Int[Array, "*batch"]
    """Steps taken for it."""
    reason: Int[Array, "*batch"]
    """An `EndReason`; 0 while it is pursued."""

    @property
    def over(self) -> Bool[Array, "*batch"]:
        return self.reason != EndReason.RUNNING


class Acted(eqx.Module):
    """What is done in a model where goals are pursued: an action, for a goal."""

    action: Array
    pursuit: Pursuit


class Made(eqx.Module):
    """What the high level did in a row, and the low level's raw sample."""

    code: Int[Array, "*batch V"]
    """The goal that the action is for."""
    started: Bool[Array, "*batch"]
    """It was chosen in this row; elsewhere it goes on."""
    log_prob: Float[Array, "*batch"]
    """Of the high level's choice; 0 where it made none."""
    ended: Int[Array, "*batch"]
    """Why the goal before was over on arriving in this row, an `EndReason`; 0: it was not."""
    raw: Array
    """The low level's sample before it was brought into bounds, which its log_prob is of."""


class Pursued(eqx.Module):
    """A model's latent, and the goal with which it was arrived in."""

    model: Latent
    pursuit: Pursuit


class Pursuing(HeadedModel):
    """A world model in which goals are pursued: its actions (`Acted`) say for which, and its latents
    whether it is over."""

    model: RSSM
    variables: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    """D, of a goal; 0: there are none."""
    span: int = eqx.field(static=True)
    """Steps after which a goal is over."""
    reach: float = eqx.field(static=True)
    """A goal is reached where its similarity is at least this; above 1: never."""

    def initial(self) -> Pursued:
        none = jnp.zeros((), jnp.int32)
        over = jnp.asarray(EndReason.EPISODE, jnp.int32)
        pursuit = Pursuit(jnp.zeros(self.variables, jnp.int32), jnp.zeros(self.size), none, over)
        return Pursued(self.model.initial(), pursuit)

    def observe(self, latent: Pursued, action: Any, obs: PyTree, first: Array, *, key: PRNGKeyArray) -> Pursued:
        seen = self.model.observe(latent.model, action.action, obs, first, key=key)
        return Pursued(seen, select(first, self.initial().pursuit, self._arrived(action.pursuit, seen)))

    def advance(self, latent: Pursued, action: Any, *, key: PRNGKeyArray) -> Pursued:
        later = self.model.advance(latent.model, action.action, key=key)
        return Pursued(later, self._arrived(action.pursuit, later))

    def outcome(self, latent: Pursued) -> Outcome:
        return self.model.outcome(latent.model)

    def _arrived(self, pursuit: Pursuit, latent: Latent) -> Pursuit:
        """The pursuit one step later: reached before it is late."""
        age, reached = pursuit.age + 1, jnp.zeros((), bool)
        if self.size:
            reached = similarity(pursuit.target, latent.deter.ravel()) >= self.reach
        whys = [reached, age >= self.span]
        names = [jnp.int32(name) for name in (EndReason.GOAL, EndReason.LIMIT)]
        return dataclasses.replace(pursuit, age=age, reason=jnp.select(whys, names, jnp.int32(EndReason.RUNNING)))


class Levels(eqx.Module):
    """Both levels: what the goals are, who chooses among them, and who acts for one.

    Without a high level the low one acts alone, for no goal: a flat agent, of one step per choice."""

    goals: Goals
    high: nets.MLP | None
    low: Actor

    def choice(self, features: Float[Array, "*batch F"]) -> dists.Categorical:
        """The high level's distribution over codes; its log-probabilities are of each variable [*batch, V]."""
        assert self.high is not None
        logits = self.high(features).reshape(*features.shape[:-1], self.goals.variables, self.goals.classes)
        return dists.Categorical(jnp.log(dists.unimix(logits, 0.01)))

    def act(self, latent: Pursued, *, greedy: bool = False, key: PRNGKeyArray) -> Decision:
        """Chooses a goal where none is pursued, and acts for it; the decision's action is an `Acted`."""
        high_key, low_key = jax.random.split(key)
        features, before = latent.model.features(), latent.pursuit
        pursuit, log_prob = dataclasses.replace(before, age=jnp.zeros_like(before.age)), jnp.zeros(())
        if self.high is not None:
            dist = self.choice(features)
            code = dist.mode() if greedy else dist.sample(key=high_key)
            fresh = dataclasses.replace(pursuit, code=code.astype(jnp.int32), target=self.goals.target(code))
            pursuit = select(before.over, fresh, before)
            log_prob = jnp.where(before.over, dist.log_prob(code).sum(-1), 0.0)
        pursuit = dataclasses.replace(pursuit, reason=jnp.zeros_like(before.reason))
        dist = self.low.dist(view(features, pursuit))
        raw: Any = dist.mode() if greedy else dist.sample(key=low_key)
        low = self.low.decide(raw, dist)
        made = Made(pursuit.code, before.over, log_prob, before.reason, raw)
        return Decision(Acted(low.action, pursuit), low.log_prob, made)


def view(features: Float[Array, "*batch F"], pursuit: Pursuit) -> Float[Array, "*batch V"]:
    """What the low level sees."""
    return jnp.concatenate([features, pursuit.target], -1)
