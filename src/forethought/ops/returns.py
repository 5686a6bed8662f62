"""Targets along one trajectory: lambda and n-step returns, SMDP backups, survival.

All functions take whole rows `[T]` of one window, as replay and imagination hold them:

    row t: obs[t] --action[t]--> row t + 1: reward[t + 1], factor[t + 1], obs[t + 1]

`reward` and `factor` are what a Discount rule made of the rows: the reward as valued at its action, and
discount * gamma^duration, the factor of the bootstrap (0 on termination). `value[t]` is an estimate at
obs[t]. Target t, the return of acting at row t, needs row t + 1: there are T - 1 of them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def lambda_returns(
    reward: Float[Array, " T"],
    factor: Float[Array, " T"],
    value: Float[Array, " T"],
    last: Bool[Array, " T"],
    lam: float | Float[Array, ""] | Float[Array, " T"],
) -> Float[Array, " T-1"]:
    """Computes TD(lambda) targets that stop at an episode's end (Sutton & Barto 2018, eq. 12.18).

        G[t] = reward[t+1] + factor[t+1] * ((1 - l) value[t+1] + l G[t+1]),  l = 0 if last[t+1] else lam

    The window's final row bootstraps from its value. A truncation bootstraps from the value of the episode's
    own final observation and nothing leaks across it; a termination has factor 0. Targets of `last` rows
    (their action is void and the next row is another episode's) are masked to 0.

    Args:
        reward: valued at the action that earned it; row 0's is not used.
        factor: discount * gamma^duration per row; row 0's is not used.
        value: estimates at every row, the final one included.
        last: the episode ended at this row for any reason.
        lam: in [0, 1]; one per row where traces are cut at some (row 0's is not used): with 1 inside options and lam
            where one is over, targets of rows that chose an option are lambda returns over options.

    Returns:
        Targets for rows 0 .. T - 2, in units of reward.
    """

    def backward(later: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, factor, value, last, lam, rest = row
        # Chosen, not weighted with 0, so that not even an infinite value leaks from the next episode.
        target = reward + factor * jnp.where(last, value, rest * value + lam * later)
        return target, target

    traces = (jnp.broadcast_to(x, reward.shape) for x in (lam, 1 - lam))
    rows = jax.tree.map(lambda x: x[1:], (reward, factor, value, last, *traces))
    targets = jax.lax.scan(backward, value[-1], rows, reverse=True)[1]
    return jnp.where(last[:-1], 0.0, targets)


def n_step_returns(
    reward: Float[Array, " T"],
    factor: Float[Array, " T"],
    value: Float[Array, " T"],
    last: Bool[Array, " T"],
    n: int,
) -> Float[Array, " T-1"]:
    """Computes n-step targets that stop at an episode's end (Sutton & Barto 2018, eq. 7.1).

    Where fewer than n steps remain in the episode or window, the target bootstraps after those, from the
    episode's (window's) own final value with the product of the factors so far. Arguments as in
    `lambda_returns`; targets of `last` rows are masked to 0.
    """
    if n < 1:
        raise ValueError(f"n_step_returns: n is {n}; it must be at least 1")
    target = value[:-1]  # of no steps at all
    for _ in range(n):
        later = jnp.append(target[1:], value[-1])
        target = reward[1:] + factor[1:] * jnp.where(last[1:], value[1:], later)
    return jnp.where(last[:-1], 0.0, target)


def smdp_return(
    reward: Float[Array, " k"], factor: Float[Array, " k"], steps: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compresses the first `steps` primitive transitions of an option's run into one SMDP transition.

        rbar = sum_j (prod_{i<j} factor[i]) reward[j],     total = prod_j factor[j]

    so that the option's backup is rbar + total * value of where it ended (Sutton, Precup & Singh 1999,
    eq. 11); rows after the run's end are padding and count for nothing.

    Args:
        reward, factor: of the primitive transitions, in order, as the Discount rule made them.
        steps: how many of them the option really ran, 1 <= steps <= k.
    """
    ran = jnp.arange(reward.shape[0]) < steps
    factor = jnp.where(ran, factor, 1.0)
    before = jnp.concatenate([jnp.ones(1), jnp.cumprod(factor)[:-1]])
    return jnp.sum(jnp.where(ran, before * reward, 0.0)), jnp.prod(factor)


def smdp_target(
    reward: Float[Array, "*batch"], factor: Float[Array, "*batch"], value: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """The one-step backup reward + factor * value; with `smdp_return`'s outputs it is the option's backup.

    A terminated transition (factor 0) takes nothing from `value`, be it infinite or NaN.
    """
    return reward + jnp.where(factor == 0.0, 0.0, factor * jnp.where(factor == 0.0, 0.0, value))


def survival(factor: Float[Array, " T"]) -> Float[Array, " T"]:
    """The weight of each row of a rollout: the product of the factors up to and including its own.

    Row 0's factor weights the whole rollout (0 for a start that had terminated). No division takes place, so
    a zero factor ends the rollout's weight and stays 0.
    """
    return jnp.cumprod(factor)
