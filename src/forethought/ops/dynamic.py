"""Dynamic programming over tables: what is exact, and the yardstick of what is learned.

A model of S states and A choices is two tables that carry their discount:

    reward [S, A]       the expected reward until the choice is over, discounted to where it began
    arrival [S, A, S]   the expected discount on arriving in each state when it is over

so that one backup serves primitive actions, for which arrival is gamma * P, and options, whose duration is in it
(multi-time models, Sutton, Precup & Singh 1999, eqs. 9-11):

    q(s, a) = reward(s, a) + sum_p arrival(s, a, p) v(p)

Rows of terminal states are 0 and their values stay what they are given as. NumPy and float64 throughout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int


class Tables(NamedTuple):
    """A multi-time model; its primitive model is one with every duration 1."""

    reward: Float[np.ndarray, "S A"]
    arrival: Float[np.ndarray, "S A S"]
    legal: Bool[np.ndarray, "S A"]
    """Where a choice may be made."""
    terminal: Bool[np.ndarray, " S"]

    def beside(self, other: Tables) -> Tables:
        """The choices of both, this model's first."""
        join = lambda name: np.concatenate([getattr(self, name), getattr(other, name)], 1)  # noqa: E731
        return Tables(join("reward"), join("arrival"), join("legal"), self.terminal)


def primitive(
    transition: Float[np.ndarray, "S A S"],
    reward: Float[np.ndarray, "S A S"],
    terminal: Bool[np.ndarray, " S"],
    gamma: float,
) -> Tables:
    """The model of actions of duration 1, from probabilities and the reward of every transition."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it must be from 0 to 1")
    goes_on = ~terminal[:, None]
    expected = np.einsum("sap,sap->sa", transition, reward) * goes_on
    return Tables(expected, gamma * transition * goes_on[..., None], np.ones(expected.shape, bool), terminal)


def action_values(model: Tables, value: Float[np.ndarray, " S"]) -> Float[np.ndarray, "S A"]:
    """One full backup; -inf where a choice may not be made."""
    return np.where(model.legal, model.reward + model.arrival @ value, -np.inf)


def sweep(model: Tables, value: Float[np.ndarray, " S"]) -> Float[np.ndarray, " S"]:
    """One synchronous sweep of value iteration (Sutton & Barto 2018, eq. 4.10)."""
    return np.where(model.terminal, value, action_values(model, value).max(1))


def value_iteration(
    model: Tables, value: Float[np.ndarray, " S"] | None = None, *, tolerance: float = 1e-12, sweeps: int = 100_000
) -> Float[np.ndarray, " S"]:
    """Sweeps from `value` (0) until none changes by more than `tolerance`.

    Raises ValueError where `sweeps` do not suffice: without discount a policy that never ends has no value."""
    value = np.zeros(len(model.terminal)) if value is None else np.asarray(value, float)
    for _ in range(sweeps):
        new = sweep(model, value)
        if np.abs(new - value).max() <= tolerance:
            return new
        value = new
    raise ValueError(f"value iteration still moves by more than {tolerance} after {sweeps} sweeps")


def policy_evaluation(
    model: Tables, policy: Float[np.ndarray, "S A"], value: Float[np.ndarray, " S"] | None = None
) -> Float[np.ndarray, " S"]:
    """The exact value of a distribution over choices per state: v = r_pi + F_pi v, solved; `value` is kept where
    terminal.

    Raises ValueError for a policy that makes a choice where it may not be made."""
    if (policy[~model.legal & ~model.terminal[:, None]] > 0).any():
        raise ValueError("the policy makes choices where they may not be made")
    fixed = np.where(model.terminal, 0.0 if value is None else value, 0.0)
    reward = np.einsum("sa,sa->s", policy, model.reward)
    follow = np.einsum("sa,sap->sp", policy, model.arrival)
    return np.linalg.solve(np.eye(len(fixed)) - follow, np.where(model.terminal, fixed, reward))


def policy_iteration(
    model: Tables, value: Float[np.ndarray, " S"] | None = None, begin: Int[np.ndarray, " S"] | None = None
) -> tuple[Float[np.ndarray, " S"], Int[np.ndarray, " S"]]:
    """The optimal value and a policy that attains it (Howard 1960).

    Without discount it must `begin` with a policy that ends, and there must be no loop that pays for ever."""
    greedy = model.legal.argmax(1) if begin is None else begin
    while True:
        choices = np.eye(model.reward.shape[1])[greedy]
        solved = policy_evaluation(model, choices, value)
        backed = action_values(model, solved)
        gain = backed.max(1) - np.take_along_axis(backed, greedy[:, None], 1)[:, 0]
        better = (gain > 1e-13 * (1 + np.abs(solved).max())) & ~model.terminal  # ties and rounding must not cycle
        if not better.any():
            return solved, greedy
        greedy = np.where(better, backed.argmax(1), greedy)


def option_model(
    actions: Tables,
    initiation: Bool[np.ndarray, " S"],
    policy: Float[np.ndarray, "S A"],
    stop: Float[np.ndarray, " S"],
) -> Tables:
    """The exact multi-time model of an option over these actions, as tables of one choice (eqs. 10 and 11 of Sutton,
    Precup & Singh 1999, solved). Arriving in a terminal state ends it."""
    stop = np.where(actions.terminal, 1.0, stop)
    reward = np.einsum("sa,sa->s", policy, actions.reward)
    arrival = np.einsum("sa,sap->sp", policy, actions.arrival)
    goes_on = np.eye(len(stop)) - arrival * (1 - stop)
    both = np.linalg.solve(goes_on, np.concatenate([reward[:, None], arrival * stop], 1))
    return Tables(both[:, :1], both[:, None, 1:], initiation[:, None].copy(), actions.terminal)


def interrupted(
    stop: Float[np.ndarray, " S"], own: Float[np.ndarray, " S"], best: Float[np.ndarray, " S"]
) -> Float[np.ndarray, " S"]:
    """An option's stop probabilities when it also gives way wherever going on with it is worth less than choosing anew
    (Sutton, Precup & Singh 1999, theorem 2: the interrupted policy is nowhere worse).

    Args:
        own: the value of going on with it in each state, which is that of choosing it there.
        best: the value of the policy over options.
    """
    return np.where(own < best, 1.0, stop)


def ending(model: Tables) -> Int[np.ndarray, " S"]:
    """A policy under which every episode ends: each choice may bring the end a step nearer.

    Raises ValueError where there is none."""
    ends, policy = model.terminal, np.zeros(len(model.terminal), int)
    while not ends.all():
        nearer = model.legal & (model.arrival[:, :, ends].sum(-1) > 0) & ~ends[:, None]
        if not nearer.any():
            raise ValueError(f"from state {int(ends.argmin())} no choices lead to an end")
        policy = np.where(nearer.any(1), nearer.argmax(1), policy)
        ends = ends | nearer.any(1)
    return policy


class Mixture(NamedTuple):
    """What earns most in expectation within a budget of expected time: one of two policies, drawn at the start.

    Both are best where a unit of time costs `multiplier`, which is also what a little more budget earns per unit.
    """

    value: float
    """The expected reward from the distribution of starts."""
    time: float
    """The expected time from there, at most the budget."""
    multiplier: float
    policies: Int[np.ndarray, "2 S"]
    """The quicker one and the slower one, as choices per state."""
    slow: float
    """The probability with which the slower one is drawn."""


def constrained(
    model: Tables, duration: Float[np.ndarray, "S A"], start: Float[np.ndarray, " S"], budget: float
) -> Mixture:
    """The most expected reward of an episode whose expected time keeps within a budget, undiscounted (Altman 1999).

    Per price m of time, a policy is worth reward - m time, a line in m. From the quickest policy and the one that earns
    most on, the price at which the lines of the two cross is tried. If a third policy is better there, it takes the
    place of that one of the two which is on its side of the budget; if none is, the price is the multiplier. Each
    round finds a new policy, so that the result is exact after finitely many.

    Args:
        model: of actions or options, with discount 1.
        duration: the expected time until each choice is over; for options `option_model` with durations as rewards.
        budget: in the unit of `duration`.

    Raises:
        ValueError: a model that discounts, durations that are not above 0, a state from which no choices lead to an
            end, a budget that not even the quickest policy keeps to, or a loop that pays for ever.
    """
    made = model.legal & ~model.terminal[:, None]
    if not np.allclose(model.arrival.sum(-1)[made], 1, rtol=0, atol=1e-9):
        raise ValueError("the model discounts: its arrivals do not sum to 1; make it with gamma 1")
    if not (duration[made] > 0).all():
        raise ValueError("a choice takes no time; every duration must be above 0")
    times = model._replace(reward=np.where(made, duration, 0.0))
    quick = _best(model, times, start, np.inf, ending(model))
    if quick.time > budget * (1 + 1e-12):
        raise ValueError(f"the quickest policy takes {quick.time:.6g} in expectation; the budget is {budget:g}")
    budget = max(budget, quick.time)  # rounding
    slow, price = _best(model, times, start, 0.0, quick.policy), 0.0
    if slow.time <= budget:
        return Mixture(slow.reward, slow.time, price, np.stack([slow.policy, slow.policy]), 0.0)
    while True:
        price = max(0.0, (slow.reward - quick.reward) / (slow.time - quick.time))
        third, line = _best(model, times, start, price, quick.policy), quick.reward - price * quick.time
        if third.reward - price * third.time <= line + 1e-12 * (1 + abs(line)):
            break
        quick, slow = (third, slow) if third.time <= budget else (quick, third)
    share = 0.0 if price == 0 else min(1.0, max(0.0, (budget - quick.time) / (slow.time - quick.time)))
    value = (1 - share) * quick.reward + share * slow.reward
    time = (1 - share) * quick.time + share * slow.time
    return Mixture(value, time, price, np.stack([quick.policy, slow.policy]), share)


class _Line(NamedTuple):
    """A policy, and what it earns and takes in expectation."""

    policy: Int[np.ndarray, " S"]
    reward: float
    time: float


def _best(
    model: Tables, times: Tables, start: Float[np.ndarray, " S"], price: float, begin: Int[np.ndarray, " S"]
) -> _Line:
    """The best policy where time has this price, from one that ends on; at an infinite price the quickest."""
    paid = -times.reward if np.isinf(price) else model.reward - price * times.reward
    try:
        _, policy = policy_iteration(model._replace(reward=paid), begin=begin)
        chosen = np.eye(paid.shape[1])[policy]
        ending(model._replace(legal=chosen > 0))
    except ValueError as error:  # of a singular matrix too
        raise ValueError("a loop pays for ever, so that no policy that ends is best") from error
    reward, time = (float(start @ policy_evaluation(x, chosen)) for x in (model, times))
    return _Line(policy, reward, time)
