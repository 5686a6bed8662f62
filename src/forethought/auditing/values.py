"""What a model promises of a policy, beside what the policy earns: ranking, and policies that were sought in the
model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from forethought import collect
from forethought.auditing.asked import Asked, Episodes, rows
from forethought.auditing.reality import Played
from forethought.auditing.subject import Subject
from forethought.auditing.support import flat
from forethought.protocols import AbstractPolicy
from forethought.types import Decision, Discrete, Spec, TimeStep

SOUGHT = "sought in the model"
"""The name of the policy that the audit itself seeks in the model."""
NOTHING = 1e9
"""The return that stands for one that is not finite."""


class Dream(NamedTuple):
    """What a policy does and gets in a model, [N, H]."""

    obs: dict[str, np.ndarray]
    reward: np.ndarray
    going: np.ndarray

    def returns(self, taken: np.ndarray) -> np.ndarray:
        """Of the steps `taken` [N, H]."""
        return np.sum(np.where(taken, self.reward * self.going, 0.0), 1)


@eqx.filter_jit
def _act(policy: AbstractPolicy, carry: Any, time_step: TimeStep, key: Any) -> Any:
    keys = jax.random.split(key, time_step.reward.shape[0])
    return jax.vmap(lambda c, t, k: policy(c, t, key=k))(carry, time_step, keys)


def dream(
    subject: Subject, latent: PyTree, start: TimeStep, policy: AbstractPolicy, horizon: int, *, seed: int,
    duration: float = 1.0,
) -> Dream:  # fmt: skip
    """Lets a policy act in a model from episodes' first rows [N], on the observations that the model predicts; it is
    told that every decision took `duration`.

    Raises ValueError for a model that does not predict every observation key and the reward."""
    num = len(start.reward)
    carry = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], num, 0), policy.initial())
    time_step, going, rows = jax.tree.map(jnp.asarray, start), np.ones(num), []
    for h in range(horizon):
        carry, decision = _act(policy, carry, time_step, jax.random.fold_in(jax.random.key(seed), h))
        latent, found = subject.imagine(latent, np.asarray(decision.action), seed=seed + 7919 * (h + 1))
        if found.obs is None or start.obs.keys() - found.obs.keys() or found.reward is None:
            raise ValueError("a policy that acts on observations needs a model that predicts them, and rewards")
        rows.append((found.obs, found.reward, going))
        if found.discount is not None:
            going = going * np.clip(found.discount, 0, 1)
        zeros = np.zeros(num, bool)
        time_step = dataclasses.replace(
            time_step, obs=found.obs, reward=np.asarray(found.reward, np.float32), first=zeros, last=zeros,
            duration=np.full(num, duration, np.float32),
        )  # fmt: skip
        time_step = jax.tree.map(jnp.asarray, time_step)
    return Dream(*jax.tree.map(lambda *xs: np.stack(xs, 1), *rows))


def start(played: Played) -> TimeStep:
    """The first rows [E] of what was played."""
    return jax.tree.map(lambda x: x[:, 0], played.rows.time_step)


def real_returns(played: Played, horizon: int) -> Float[np.ndarray, " E"]:
    """What the first `horizon` decisions of each episode brought."""
    reward = played.rows.time_step.reward[:, 1 : horizon + 1].astype(np.float64)
    return np.where(np.arange(1, reward.shape[1] + 1) < played.length[:, None], reward, 0.0).sum(1)


def taken(played: Played, horizon: int) -> np.ndarray:
    """[E, H]: False where an episode had been truncated before; after a termination a step may still be imagined."""
    last = played.length - 1
    cut = played.rows.time_step.discount[np.arange(len(last)), last] != 0
    return (np.arange(horizon) < last[:, None]) | ~cut[:, None]


def ranking(promised: dict[str, np.ndarray], real: dict[str, np.ndarray]) -> dict[str, Any]:
    """Kendall's tau-b of the policies' mean returns, promised and real, and the regret of the model's choice.

    The regret is what the policy that the model ranks first falls short of the best one's real mean, over the range of
    the real means (0: the model chooses the best). None, both, with fewer than two policies and where all earn the
    same. Of the regret and of every policy's promised less real mean the standard error over episodes is told."""
    names = list(promised)
    p, r = (np.array([table[name].mean() for name in names]) for table in (promised, real))
    variance = lambda table: np.array([table[n].var(ddof=1) / len(table[n]) for n in names])  # noqa: E731
    noise, both = variance(real), variance(real) + variance(promised)
    width = np.ptp(r)
    told = zip(names, p, r, np.sqrt(both), strict=True)
    table = {name: {"promised": float(a), "real": float(b), "error": float(e)} for name, a, b, e in told}
    body = {"policies": table, "tau": None, "regret": None, "regret_error": None, "range": float(width)}
    if len(names) < 2 or width == 0:
        return body
    best, chosen = int(r.argmax()), int(p.argmax())
    return body | {
        "tau": _kendall(p, r),
        "regret": float((r[best] - r[chosen]) / width),
        "regret_error": float(np.sqrt(noise[best] + noise[chosen]) / width) if best != chosen else 0.0,
        "chosen": names[chosen],
        "best": names[best],
    }


def _kendall(x: np.ndarray, y: np.ndarray) -> float:
    found: Any = scipy.stats.kendalltau(x, y)
    return float(found.statistic)


class LinearPolicy(AbstractPolicy):
    """tanh of a linear map of the scaled observation, or the action of the largest element of one."""

    weight: Float[Array, "A inputs"]
    mean: Float[Array, " D"]
    scale: Float[Array, " D"]
    spec: Spec = eqx.field(static=True)

    def initial(self) -> None:
        return None

    def __call__(self, carry: None, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[None, Decision]:
        collect.check_legal(time_step)
        seen = flat(self.spec, jax.tree.map(jnp.asarray, time_step.obs))
        out = self.weight @ jnp.append((seen - self.mean) / self.scale, 1.0)
        return None, Decision(_chosen(self.spec, out, jnp), jnp.zeros(()))


def _chosen(spec: Spec, out: Any, np_: Any) -> Any:
    if isinstance(spec.action, Discrete):
        return np_.argmax(out, -1).astype(np_.int32)
    return np_.tanh(out).reshape(*out.shape[:-1], *spec.action.shape).astype(np_.float32)


def sought(
    subject: Subject, spec: Spec, latent: PyTree, obs: dict[str, np.ndarray], scale: tuple[np.ndarray, np.ndarray],
    horizon: int, *, population: int = 32, iterations: int = 10, seed: int,
) -> LinearPolicy:  # fmt: skip
    """The linear policy that earns most in the model, by the cross-entropy method over its weights.

    Args:
        latent, obs: at starts [N].
        scale: mean and standard deviation [D] of flat observations.
    """
    rng = np.random.default_rng(seed)
    starts, inputs = len(next(iter(obs.values()))), len(scale[0]) + 1
    outputs = spec.action.n if isinstance(spec.action, Discrete) else int(np.prod(spec.action.shape))
    mean, spread = np.zeros((outputs, inputs)), np.full((outputs, inputs), 1.0)
    many = jax.tree.map(lambda x: np.concatenate([x] * population), (latent, obs))
    for iteration in range(iterations):
        weights = mean + spread * rng.normal(size=(population, outputs, inputs))
        latents, seen = many
        total, going = np.zeros(population * starts), np.ones(population * starts)
        for h in range(horizon):
            x = (flat(spec, seen) - scale[0]) / scale[1]
            x = np.concatenate([x, np.ones((len(x), 1))], 1).reshape(population, starts, inputs)
            out = np.einsum("pai,psi->psa", weights, x).reshape(population * starts, outputs)
            latents, found = subject.imagine(latents, _chosen(spec, out, np), seed=seed + 104729 * iteration + h)
            assert found.reward is not None and found.obs is not None
            total += going * found.reward
            if found.discount is not None:
                going = going * np.clip(found.discount, 0, 1)
            seen = found.obs
        score = total.reshape(population, starts).mean(1)
        score = np.where(np.isfinite(score), score, -np.inf)
        elite = weights[np.argsort(-score)[: population // 4]]
        mean, spread = elite.mean(0), elite.std(0) + 0.02
    weight, centre, width = (jnp.asarray(x, jnp.float32) for x in (mean, *scale))
    return LinearPolicy(weight, centre, width, spec)


def measure(
    asked: Asked, everyone: Mapping[str, AbstractPolicy], played: Episodes, episodes: int
) -> tuple[dict[str, Any], dict[str, Dream]]:
    """Promised and real returns of every policy over three horizons, one that is sought in the model among them."""
    length = 3 * asked.horizon
    seen = flat(asked.spec, rows([p for p, _ in played.values()]).obs)
    first, latents = next(iter(played.values()))
    beginning = lambda tree: jax.tree.map(lambda x: x[:, 0], tree)  # noqa: E731
    found = sought(
        asked.subject, asked.spec, beginning(latents), start(first).obs, (seen.mean(0), np.maximum(seen.std(0), 1e-3)),
        length, seed=asked.seed + 5,
    )  # fmt: skip
    promised, real, dreams = {}, {}, {}
    for name, policy in {**everyone, SOUGHT: found}.items():
        here, latents = played[name] if name in played else asked.play(policy, episodes)
        dreams[name] = dream(asked.subject, beginning(latents), start(here), policy, length, seed=asked.seed + 6,
                             duration=asked.spec.duration or 1.0)  # fmt: skip
        told = dreams[name].returns(taken(here, length))
        promised[name] = np.nan_to_num(told, nan=-NOTHING, neginf=-NOTHING, posinf=NOTHING)
        real[name] = real_returns(here, length)
    return ranking(promised, real) | {"steps": length}, dreams
