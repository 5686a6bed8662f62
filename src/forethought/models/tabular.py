"""Learned models of finite environments: the last outcome of every state and action, or counts of all outcomes.

The latent is the state's index. Both are learned one real transition at a time, by a pure `learn`:

    state --action--> reward, discount, arrived

`sample` answers what would happen, `tables` what is expected, which is all that `ops.dynamic` needs to compute values
of what was learned. Where nothing was ever tried both models say: nothing happens, the same state for reward 0
(Sutton & Barto 2018, sec. 8.3, footnote 1).
"""

from __future__ import annotations

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from forethought.ops.dynamic import Tables
from forethought.protocols import AbstractWorldModel
from forethought.types import Outcome


def draw(cumulative: Float[Array, " S"], chance: Float[Array, ""]) -> Int[Array, ""]:
    """The index at which a cumulative sum of weights first passes `chance`, uniform in [0, 1), of their total."""
    return jnp.sum(cumulative <= chance * cumulative[-1], dtype=jnp.int32)


class AbstractTabularModel(AbstractWorldModel):
    """A model over states 0 .. S - 1 and actions 0 .. A - 1, whose observation is {'state': index}."""

    tried_at: eqx.AbstractVar[Int[Array, "S A"]]
    """The real step, counted from 1, at which a pair was last tried; 0: never."""

    @property
    def tried(self) -> Bool[Array, "S A"]:
        return self.tried_at > 0

    @abstractmethod
    def learn(
        self, state: Array, action: Array, reward: Array, discount: Array, arrived: Array, step: Array
    ) -> AbstractTabularModel:
        """The model after one real transition, the `step`-th that was taken."""

    @abstractmethod
    def sample(
        self, state: Int[Array, ""], action: Int[Array, ""], chance: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""], Int[Array, ""]]:
        """Reward, discount and the state arrived in; what is random in them is a function of `chance`, uniform in
        [0, 1)."""

    @abstractmethod
    def tables(self, gamma: float) -> Tables:
        """What the model expects of every state and action, with this discount per decision.

        A state is terminal where every arrival that was seen ended the episode."""

    def initial(self) -> Int[Array, ""]:
        return jnp.zeros((), jnp.int32)

    def observe(self, latent: PyTree, action: Array, obs: PyTree, first: Array, *, key: PRNGKeyArray) -> PyTree:
        """The state that is seen, whatever came before."""
        return obs["state"]

    def imagine(self, latent: PyTree, action: Array, *, key: PRNGKeyArray) -> tuple[PyTree, Outcome]:
        reward, discount, arrived = self.sample(latent, action, jax.random.uniform(key))
        return arrived, Outcome({"state": arrived}, reward, discount, jnp.ones(()), jnp.zeros(()))


class Deterministic(AbstractTabularModel):
    """Says that what happened last will happen again (Sutton & Barto 2018, sec. 8.2)."""

    tried_at: Int[Array, "S A"]
    arrived: Int[Array, "S A"]
    reward: Float[Array, "S A"]
    discount: Float[Array, "S A"]

    @classmethod
    def empty(cls, states: int, actions: int) -> Deterministic:
        """The model before anything was tried."""
        shape = (states, actions)
        stay = jnp.broadcast_to(jnp.arange(states, dtype=jnp.int32)[:, None], shape)
        return cls(jnp.zeros(shape, jnp.int32), stay, jnp.zeros(shape), jnp.ones(shape))

    def learn(
        self, state: Array, action: Array, reward: Array, discount: Array, arrived: Array, step: Array
    ) -> Deterministic:
        at = (state, action)
        return Deterministic(
            self.tried_at.at[at].set(step),
            self.arrived.at[at].set(arrived),
            self.reward.at[at].set(reward),
            self.discount.at[at].set(discount),
        )

    def sample(
        self, state: Int[Array, ""], action: Int[Array, ""], chance: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""], Int[Array, ""]]:
        """The last outcome; nothing in it is random."""
        return self.reward[state, action], self.discount[state, action], self.arrived[state, action]

    def tables(self, gamma: float) -> Tables:
        arrived, discount = np.asarray(self.arrived), np.asarray(self.discount, np.float64)
        chance = np.eye(len(arrived))[arrived]
        seen = chance * np.asarray(self.tried)[..., None]
        return _tables(chance, discount[..., None], np.asarray(self.reward, np.float64), seen, gamma)


class Counts(AbstractTabularModel):
    """Counts where every state and action led, on top of a Dirichlet prior, and averages what they paid.

    P(p | s, a) = (count[s, a, p] + prior) / (sum_p count[s, a, p] + S prior), the posterior's mean. The prior is
    about arrivals alone: the expected reward is the mean of those received (0: none), and an arrival that was never
    seen is expected to go on (discount 1). A sample redraws the arrival, not the posterior.
    """

    tried_at: Int[Array, "S A"]
    count: Float[Array, "S A S"]
    goes_on: Float[Array, "S A S"]
    """The sum of the discounts on arrival."""
    paid: Float[Array, "S A"]
    """The sum of the rewards."""
    visits: Int[Array, "S A"]
    prior: float = eqx.field(static=True)
    """Pseudo-counts of every arrival; 0: what was never seen does not happen."""

    @classmethod
    def empty(cls, states: int, actions: int, prior: float = 0.0) -> Counts:
        """The model before anything was tried. Raises ValueError for a negative prior."""
        if not 0 <= prior < float("inf"):
            raise ValueError(f"prior is {prior}; pseudo-counts are at least 0 and finite")
        shape = (states, actions)
        table, none = jnp.zeros((*shape, states)), jnp.zeros(shape, jnp.int32)
        return cls(none, table, table, jnp.zeros(shape), none, prior)

    def learn(self, state: Array, action: Array, reward: Array, discount: Array, arrived: Array, step: Array) -> Counts:
        at = (state, action)
        return Counts(
            self.tried_at.at[at].set(step),
            self.count.at[*at, arrived].add(1.0),
            self.goes_on.at[*at, arrived].add(discount),
            self.paid.at[at].add(reward),
            self.visits.at[at].add(1),
            self.prior,
        )

    def sample(
        self, state: Int[Array, ""], action: Int[Array, ""], chance: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""], Int[Array, ""]]:
        """The expected reward, and an arrival drawn from the posterior's mean."""
        count, visits = self.count[state, action], self.visits[state, action]
        arrived = draw(jnp.cumsum(count + self.prior), chance)
        if self.prior == 0:
            arrived = jnp.where(visits > 0, arrived, state)
        seen = count[arrived]
        discount = jnp.where(seen > 0, self.goes_on[state, action, arrived] / jnp.maximum(seen, 1.0), 1.0)
        return self.paid[state, action] / jnp.maximum(visits, 1), discount, arrived

    def tables(self, gamma: float) -> Tables:
        count, goes_on, paid = (np.asarray(x, np.float64) for x in (self.count, self.goes_on, self.paid))
        visits = np.asarray(self.visits)
        weight = count + self.prior
        if self.prior == 0:
            weight = np.where(visits[..., None] > 0, weight, np.eye(len(count))[:, None])
        chance = weight / weight.sum(-1, keepdims=True)
        discount = np.where(count > 0, goes_on / np.maximum(count, 1), 1.0)
        return _tables(chance, discount, paid / np.maximum(visits, 1), count, gamma)


def _tables(chance: np.ndarray, discount: np.ndarray, reward: np.ndarray, seen: np.ndarray, gamma: float) -> Tables:
    """Tables of probabilities, discounts on arrival, expected rewards and how often each arrival was seen."""
    terminal = (seen.sum((0, 1)) > 0) & ((seen * discount).sum((0, 1)) == 0)
    goes_on = ~terminal[:, None]
    arrival = gamma * chance * discount * goes_on[..., None]
    return Tables(reward * goes_on, arrival, np.ones(reward.shape, bool), terminal)
