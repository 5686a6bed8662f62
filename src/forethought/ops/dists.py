"""The distributions of agents and models: categoricals with a uniform share, and the bounded normal."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray


def unimix(logits: Float[Array, "*shape C"], share: float) -> Float[Array, "*shape C"]:
    """The probabilities (1 - share) softmax(logits) + share / C, none of which is 0."""
    return (1 - share) * jax.nn.softmax(logits) + share / logits.shape[-1]


def straight_through(probs: Float[Array, "*shape C"], *, key: PRNGKeyArray) -> Float[Array, "*shape C"]:
    """Samples one-hot vectors whose gradient is that of the probabilities (Bengio et al. 2013).

    By inversion: it takes one random number a variable, where jax.random.categorical takes one a class."""
    classes = probs.shape[-1]
    below = probs @ np.triu(np.ones((classes, classes - 1), np.float32))  # the distribution function, but for its 1
    place = jnp.sum(jax.random.uniform(key, (*probs.shape[:-1], 1)) >= below, -1)
    return jax.nn.one_hot(place, classes) + (probs - jax.lax.stop_gradient(probs))  # in this order exactly one-hot


class Categorical(eqx.Module):
    """Over integers 0 .. A - 1; `logits` are log-probabilities."""

    logits: Float[Array, "*batch A"]

    def sample(self, *, key: PRNGKeyArray) -> Int[Array, "*batch"]:
        return jax.random.categorical(key, self.logits)

    def mode(self) -> Int[Array, "*batch"]:
        return jnp.argmax(self.logits, -1)

    def log_prob(self, action: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
        """In nats."""
        return jnp.take_along_axis(self.logits, action[..., None], -1)[..., 0]

    def entropy(self) -> Float[Array, "*batch"]:
        """In nats."""
        return -jnp.sum(jnp.exp(self.logits) * self.logits, -1)


class Normal(eqx.Module):
    """A diagonal Gaussian; log-densities and entropies are summed over the A dimensions."""

    mean: Float[Array, "*batch A"]
    scale: Float[Array, "*batch A"]

    def sample(self, *, key: PRNGKeyArray) -> Float[Array, "*batch A"]:
        return self.mean + self.scale * jax.random.normal(key, self.mean.shape)

    def mode(self) -> Float[Array, "*batch A"]:
        return self.mean

    def log_prob(self, x: Float[Array, "*batch A"]) -> Float[Array, "*batch"]:
        """In nats."""
        return jax.scipy.stats.norm.logpdf(x, self.mean, self.scale).sum(-1)

    def entropy(self) -> Float[Array, "*batch"]:
        """In nats."""
        return jnp.sum(0.5 * jnp.log(2 * jnp.pi * jnp.e) + jnp.log(self.scale), -1)


def bounded_normal(mean: Float[Array, "*batch A"], scale: Float[Array, "*batch A"], low: float, high: float) -> Normal:
    """A Gaussian with mean tanh(mean) and a scale between `low` and `high` (dreamerv3's actor)."""
    return Normal(jnp.tanh(mean), low + (high - low) * jax.nn.sigmoid(scale + 2.0))


def into_bounds(action: Float[Array, "*batch A"]) -> Float[Array, "*batch A"]:
    """Brings a raw sample into [-1, 1], dividing by a constant, so that the gradient does not vanish outside."""
    return action / jax.lax.stop_gradient(jnp.maximum(1.0, jnp.abs(action)))
