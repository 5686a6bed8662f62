"""What a model's error can cost: bounds on values in finite MDPs, each computed from what it assumes.

NumPy; S states, A actions, discount gamma < 1. docs/theory.md has the statements and the proofs.
"""

from __future__ import annotations

import numpy as np
import scipy.optimize
from jaxtyping import Float


def tight_simulation(reward_error: float, transition_error: float, gamma: float) -> float:
    """The largest |V - V^| of one policy in two MDPs with rewards in [0, 1] (Lobel & Parr 2024, theorem 1).

    Args:
        reward_error: the largest |R - R^|.
        transition_error: the largest L1 distance between rows of P and P^, in [0, 2].
    """
    return 1 / (1 - gamma) - (1 - reward_error) / (1 - gamma * (1 - transition_error / 2))


def coupled_distance(
    p: Float[np.ndarray, "*batch S"], q: Float[np.ndarray, "*batch S"], distance: Float[np.ndarray, "S S"]
) -> Float[np.ndarray, "*batch"]:
    """The expected distance between draws of p and q that are equal as often as they can be.

    What p has more of is paired with what q has more of, independently: at least the Wasserstein distance, at most
    half the L1 distance times the largest distance.
    """
    more, less = np.maximum(p - q, 0), np.maximum(q - p, 0)
    moved = more.sum(-1)
    cost = np.einsum("...i,ij,...j->...", more, distance, less)
    return np.where(moved > 0, cost / np.where(moved > 0, moved, 1), 0.0)


def lipschitz_split(
    value: Float[np.ndarray, " S"],
    shared: Float[np.ndarray, "S S"],
    private: Float[np.ndarray, "S S"],
    prices: tuple[float, float],
) -> tuple[float, float]:
    """Constants with |V(s) - V(t)| <= L_shared shared(s, t) + L_private private(s, t), of the least total price.

    There are many such pairs: a value that the shared code explains alone needs no private constant, and the other
    way round. The linear program takes the pair that makes prices[0] L_shared + prices[1] L_private least.

    Raises ValueError where two states of different value have equal codes.
    """
    pairs = np.triu_indices(len(value), 1)
    gaps = np.abs(value[:, None] - value[None])[pairs]
    rows = np.stack([shared[pairs], private[pairs]], 1)
    if np.any((rows.sum(1) == 0) & (gaps > 0)):
        raise ValueError("lipschitz_split: two states of different value have equal codes; no constant holds")
    found = scipy.optimize.linprog(prices, -rows, -gaps)
    if not found.success:
        raise ValueError(f"lipschitz_split: {found.message}")
    return float(found.x[0]), float(found.x[1])


def distances(code: Float[np.ndarray, "S D"]) -> Float[np.ndarray, "S S"]:
    """Euclidean distances between the codes of states."""
    return np.linalg.norm(code[:, None] - code[None], axis=-1)


def length_and_angle(angle_loss: float, longest: float, length_gap: float) -> float:
    """The largest |u - v| of two vectors with | u/|u| - v/|v| |^2 <= angle_loss, neither longer than `longest`, whose
    lengths differ by at most `length_gap`: an alignment of directions says nothing of the second part."""
    return longest * angle_loss**0.5 + length_gap


def aligned_simulation(
    *,
    value: Float[np.ndarray, " S"],
    advantage_span: float,
    transition: Float[np.ndarray, "S A S"],
    model_transition: Float[np.ndarray, "S A S"],
    reward_error: float,
    policy_shared: Float[np.ndarray, "S D"],
    model_shared: Float[np.ndarray, "S D"],
    policy_private: Float[np.ndarray, "S E"],
    policy_slope: float,
    gamma: float,
) -> float:
    """Bounds |V - V^|, a policy's value against what a model promises of it (docs/theory.md, theorem 1).

    For real, the policy acts on its own codes (shared u, private w); in the model, on (u^, w), with the model's shared
    code u^ of the same state. With eps the largest |u - u^|, d the coupled distance, and tau half the L1 distance
    between P and P^,

        |V - V^| <= (reward_error + gamma max_sa [L_u (d_u^ + 2 eps tau) + L_w d_w]
                     + policy_slope eps advantage_span / 2) / (1 - gamma)

    Args:
        value: of the policy, for real; L_u and L_w are its Lipschitz constants in u and w.
        advantage_span: the largest difference between two actions' Q-values at one state, for real.
        transition, model_transition: P and P^.
        policy_slope: a change of the shared code by x changes the policy by at most policy_slope x, in L1.
    """
    eps = float(np.linalg.norm(policy_shared - model_shared, axis=-1).max())
    tau = np.abs(transition - model_transition).sum(-1) / 2
    own = coupled_distance(transition, model_transition, distances(model_shared)) + 2 * eps * tau
    private = coupled_distance(transition, model_transition, distances(policy_private))
    prices = (float(own.max()), float(private.max()))
    l_shared, l_private = lipschitz_split(value, distances(policy_shared), distances(policy_private), prices)
    wrong = gamma * np.max(l_shared * own + l_private * private)
    return float(reward_error + wrong + policy_slope * eps * advantage_span / 2) / (1 - gamma)
