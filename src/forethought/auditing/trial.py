"""What an audit compares: from the same real rows and under the same actions, what the model expects and what came.

    N starts x K samples of the model    against    N starts x R futures of the environment, H steps each

Under a policy that answers what it sees, the actions of an episode tell something of the noise that they answered, so
that even an exact model is wrong about the one future that was recorded. Where an environment can be gone back to with
fresh noise, the futures are therefore R replays under the recorded actions; elsewhere the recorded one (R is 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from forethought.auditing.reality import Future, Played, Reality
from forethought.auditing.subject import Prediction, Subject
from forethought.types import Box, Discrete, MultiDiscrete, Space, Spec, TimeStep

WIDE = 32
"""An observation key of more elements than this is judged as a whole, not element by element."""

LEAST, STILL, PAID = 1e-3, 1e-3, 1e-2
"""What hardly changes is judged by LEAST, or by a share of its mean: STILL of an observation, PAID of the reward."""


class Trial(NamedTuple):
    starts: np.ndarray
    """[N, 2] (episode, row)."""
    valid: np.ndarray
    """[N, H]: the recorded episode had an action for this step."""
    limit: np.ndarray
    """[N, H]: the recorded episode was truncated at this step."""
    action: np.ndarray
    """[N, H, ...]"""
    obs: dict[str, np.ndarray]
    """{key: [N, ...]} at the starts."""
    reward: np.ndarray
    """[N], of the step that led to the starts."""
    predicted: Prediction
    """[N, K, H, ...]; K is 1 where the model draws no random numbers."""
    real: Future
    """[N, R, H, ...]"""
    fresh: bool
    """The real futures are replays with fresh noise."""


class Quantity(NamedTuple):
    """One thing that is predicted, in D elements; values weigh nothing after the episode has terminated."""

    name: str
    space: Space | None
    """Of an observation key; None for the reward."""
    model: np.ndarray
    """[N, K, H, D], less `mean`, times the probability that the step is reached."""
    real: np.ndarray
    """[N, R, H, D], likewise."""
    still: np.ndarray
    """[N, R, H, D]: likewise if it had stayed what it was at the start."""
    scale: np.ndarray
    """[D], the standard deviation over real rows, or what stands for it where little changes (LEAST)."""


def starts(length: np.ndarray, horizon: int, count: int) -> np.ndarray:
    """Rows [count, 2] of episodes: half of them evenly spaced where `horizon` steps follow (the first row where none
    do), half of them up to the last step, so that the ends are seen too."""
    each = -(-count // len(length))
    whole, any_ = (each + 1) // 2, each // 2
    places = []
    for e, n in enumerate(length):
        spread = np.linspace(0, max(n - 1 - horizon, 0), whole), np.linspace(max(n - 2, 0), 0, any_)[::-1]
        places.append([(e, int(row)) for row in np.concatenate(spread).round()])
    return np.array([place for turn in zip(*places, strict=True) for place in turn])[:count]


def unrolled(
    subject: Subject, latents: Any, places: np.ndarray, action: np.ndarray, samples: int, seed: int
) -> Prediction:
    """Unrolls from the latents at rows `places` [N, 2] under actions [N, H, ...], `samples` times each: [N, K, H,
    ...]."""
    repeated = np.repeat(places, samples, 0)
    latent = jax.tree.map(lambda x: x[repeated[:, 0], repeated[:, 1]], latents)
    found = subject.unroll(latent, np.repeat(action, samples, 0), seed=seed)
    return jax.tree.map(lambda x: x.reshape(len(places), samples, *x.shape[1:]), found)


def random(subject: Subject, latents: Any, places: np.ndarray, action: np.ndarray) -> bool:
    """Whether the model's predictions depend on its random numbers."""
    once, again = (unrolled(subject, latents, places[:8], action[:8], 1, seed) for seed in (0, 1))
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f")), once, again)
    return not all(jax.tree.leaves(same))


def samples(trial: Trial) -> int:
    """K, the model's samples per start."""
    return jax.tree.leaves(trial.predicted)[0].shape[1]


def attempt(
    subject: Subject, latents: Any, reality: Reality, played: Played, horizon: int, *,
    count: int, samples: int, seed: int,
) -> Trial:  # fmt: skip
    """Compares the model with reality from `count` rows of what was played, `horizon` steps ahead.

    Args:
        latents: the model's, [E, T, ...], at the rows played.
        samples: K and R, where both are random.
    """
    places, rows = starts(played.length, horizon, count), played.rows
    ahead = places[:, 1:] + np.arange(horizon)
    top = rows.action.shape[1] - 1
    at = lambda x, t: x[places[:, :1], np.minimum(t, top)]  # noqa: E731
    valid = ahead < played.length[places[:, 0], None] - 1
    action = at(rows.action, ahead)
    drawn = samples if random(subject, latents, places, action) else 1
    predicted = unrolled(subject, latents, places, action, drawn, seed)
    real = None
    if reality.fresh:
        real = reality.replay(played, places, action, times=samples, seed=seed + 1)
    if real is None:
        step = jax.tree.map(lambda x: at(x, ahead + 1)[:, None], rows.time_step)
        survived = np.cumprod(np.where(valid[:, None], step.discount, 1.0), -1)
        going = np.concatenate([np.ones_like(survived[..., :1]), survived[..., :-1]], -1)
        real = Future(step.obs, step.reward, going, survived, valid[:, None])
    end = at(rows.time_step.last, ahead + 1) & (at(rows.time_step.discount, ahead + 1) != 0) & valid
    seen = {name: x[places[:, 0], places[:, 1]] for name, x in rows.time_step.obs.items()}
    reward = rows.time_step.reward[places[:, 0], places[:, 1]]
    return Trial(places, valid, end, action, seen, reward, predicted, real, reality.fresh)


def going(predicted: Prediction) -> np.ndarray:
    """[N, K, H], the probability that the model gives to a step's being reached."""
    assert predicted.discount is not None
    reached = np.cumprod(np.clip(predicted.discount[..., :-1], 0, 1), -1)
    return np.concatenate([np.ones_like(predicted.discount[..., :1]), reached], -1)


def reached(trial: Trial) -> np.ndarray:
    """[N, K, H] as `going`; where the model predicts no ends, which is no error, the real share, [N, 1, H]."""
    return trial.real.going.mean(1, keepdims=True) if trial.predicted.discount is None else going(trial.predicted)


def quantities(spec: Spec, trial: Trial, rows: TimeStep) -> list[Quantity]:
    """Everything that the model predicts, as quantities; real rows [M] give them their scale."""
    predicted, real, weight = trial.predicted, trial.real, reached(trial)
    found = []

    def add(name: str, space: Space | None, model: Any, true: Any, now: Any, over: Any) -> None:
        model, true, now, over = (elements(space or Box(()), x) for x in (model, true, now, over))
        mean = over.mean(0)
        scale = np.maximum(over.std(0), np.maximum(LEAST, (STILL if space else PAID) * np.abs(mean)))
        w = real.going[..., None]
        still = np.broadcast_to(w * (now[:, None, None] - mean), true.shape)
        found.append(Quantity(name, space, weight[..., None] * (model - mean), w * (true - mean), still, scale))

    for name, model in (predicted.obs or {}).items():
        add(name, spec.obs[name], model, real.obs[name], trial.obs[name], rows.obs[name])
    if predicted.reward is not None:
        add("reward", None, predicted.reward, real.reward, trial.reward, rows.reward)
    return found


def elements(space: Space, x: Any) -> Any:
    """Values [..., *shape] as numbers [..., D]: discrete ones as one-hot vectors, so that D distances mean
    something."""
    xp = jnp if isinstance(x, jax.Array) else np
    x = xp.asarray(x)
    if isinstance(space, Discrete):
        return (x[..., None] == np.arange(space.n)).astype(float)
    if isinstance(space, MultiDiscrete):
        return xp.concatenate([x[..., i, None] == np.arange(n) for i, n in enumerate(space.n)], -1).astype(float)
    lead = x.ndim - len(space.shape)
    return x.reshape(*x.shape[:lead], -1).astype(float)


def parts(quantity: Quantity) -> list[tuple[str, np.ndarray]]:
    """What of a quantity is judged apart: (name, which elements). A discrete key and a wide one are judged whole."""
    size = len(quantity.scale)
    if size == 1 or size > WIDE or not isinstance(quantity.space, Box):
        return [(quantity.name, np.arange(size))]
    return [(f"{quantity.name}[{i}]", np.array([i])) for i in range(size)]
