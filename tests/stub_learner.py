"""A learner that compiles in a second, for tests of what is around learners: loops, runs, checkpoints, commands.

A linear world model is regressed on real windows; the policy is linear in an average of past observations, which it
carries, and drifts at random, so that a lost carry, key, moment of the optimiser or row of replay changes every number.
"""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from forethought.devices import ALONE
from forethought.protocols import AbstractPolicy, AbstractWorldModel
from forethought.types import Decision, Discrete, Outcome


@dataclasses.dataclass(frozen=True)
class Config:
    envs: int = 2
    """Environments."""
    ticks: int = 4
    """Rows per environment and iteration."""
    updates: int = 1
    """Updates per iteration."""
    action_repeat: int = 1
    """Simulator steps per decision."""
    prefill: int = 32
    """Random rows."""
    capacity: int = 4096
    """Rows of replay."""
    batch: int = 2
    """Windows."""
    length: int = 8
    """Rows per window."""
    starts: int = 1
    """As dreamer has it."""
    horizon: int = 3
    """As dreamer has it."""
    width: int = 3
    """Size of an array that does nothing, so that a checkpoint may not fit."""
    gamma: float = 0.9
    """Discount."""
    rate: float = 0.01
    """Learning rate."""
    flavour: Literal["plain", "sour"] = "plain"
    """Has choices."""
    loud: bool = False
    """Is true or false."""


PRESETS: dict[str, dict[str, Any]] = {"cpu": {}, "wide": {"width": 5}}
METRICS = {"real/loss/obs": ("units^2", "squared error of the next observation"), "imagined/drift": ("1", "random")}


def flat(obs):
    return jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in obs.values()])


class Model(AbstractWorldModel):
    """obs' = obs + W [obs, action], reward and discount constant."""

    weight: jax.Array
    spec: Any = eqx.field(static=True)

    def initial(self):
        return jnp.zeros(self.weight.shape[0])

    def observe(self, latent, action, obs, first, *, key):
        return flat(obs)

    def imagine(self, latent, action, *, key):
        latent = latent + self.weight @ jnp.concatenate([latent, jnp.ravel(action).astype(jnp.float32)])
        sizes = np.cumsum([int(np.prod(space.shape)) for space in self.spec.obs.values()])[:-1]
        parts = jnp.split(latent, sizes)
        obs = {
            key: part.reshape(space.shape).astype(space.dtype)
            for (key, space), part in zip(self.spec.obs.items(), parts, strict=True)
        }
        one = jnp.ones(())
        return latent, Outcome(obs, 0.5 * one, one, one, 0 * one)


class Policy(AbstractPolicy):
    weight: jax.Array
    action: Any = eqx.field(static=True)
    greedy: bool = eqx.field(static=True)

    def initial(self):
        return jnp.zeros(self.weight.shape[1])

    def __call__(self, carry, time_step, *, key):
        carry = jnp.where(time_step.first, 0.0, 0.7 * carry) + jnp.tanh(flat(time_step.obs))
        mean = self.weight @ carry
        if isinstance(self.action, Discrete):
            choice = jnp.argmax(mean) if self.greedy else jax.random.categorical(key, mean)
            return carry, Decision(choice.astype(jnp.int32), jax.nn.log_softmax(mean)[choice])
        noise = 0.0 if self.greedy else jax.random.normal(key, mean.shape)
        return carry, Decision(
            jnp.tanh(mean + noise).reshape(self.action.shape), -0.5 * jnp.sum(noise**2) * jnp.ones(())
        )


class Params(eqx.Module):
    model: Model
    actor: jax.Array
    idle: jax.Array


class State(eqx.Module):
    params: Params
    opt_state: Any
    updates: jax.Array
    action: Any = eqx.field(static=True)


def init(cfg, spec, *, key):
    model_key, actor_key = jax.random.split(key)
    obs = sum(int(np.prod(space.shape)) for space in spec.obs.values())
    outputs = spec.action.n if isinstance(spec.action, Discrete) else int(np.prod(spec.action.shape))
    actions = 1 if isinstance(spec.action, Discrete) else outputs
    model = Model(0.1 * jax.random.normal(model_key, (obs, obs + actions)), spec)
    params = Params(model, 0.3 * jax.random.normal(actor_key, (outputs, obs)), jnp.zeros(cfg.width))
    opt_state = optax.adam(cfg.rate).init(eqx.filter(params, eqx.is_array))
    return State(params, opt_state, jnp.zeros((), jnp.int32), spec.action)


def policy(cfg, state, *, greedy=False):
    return Policy(state.params.actor, state.action, greedy)


def update(cfg, state, rows, rule, *, key, axis=ALONE):
    flatten = jax.vmap(jax.vmap(flat))

    def loss(params):
        obs = flatten(rows.time_step.obs)
        action = rows.action.reshape(*obs.shape[:2], -1).astype(jnp.float32)
        ahead = obs + jnp.concatenate([obs, action], -1) @ params.model.weight.T
        error = jnp.where(rows.time_step.last[:, :-1], 0.0, jnp.square(ahead[:, :-1] - obs[:, 1:]).mean(-1)).mean()
        drift = jnp.sum(params.actor * jax.random.normal(key, params.actor.shape))
        return error + 0.1 * drift, {"real/loss/obs": error, "imagined/drift": drift}

    grads, metrics = axis.mean(jax.grad(loss, has_aux=True)(state.params))
    moves, opt_state = optax.adam(cfg.rate).update(grads, state.opt_state)
    return State(eqx.apply_updates(state.params, moves), opt_state, state.updates + 1, state.action), metrics


def codes(policy):
    return None
