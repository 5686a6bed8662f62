"""The recurrent state-space model of DreamerV3 (Hafner et al. 2023): a block-diagonal GRU with categorical latents.

    observe   deter[t] = gru(deter[t-1], stoch[t-1], action[t-1]),  stoch[t] ~ posterior(deter[t], obs[t])
    imagine   deter[t] = gru(deter[t-1], stoch[t-1], action[t-1]),  stoch[t] ~ prior(deter[t])

Observations, the reward and the discount are read off a latent by heads. Layer counts and initial weights
follow the dreamerv3 repository.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from forethought import nets, protocols
from forethought.ops import dists, losses
from forethought.types import Box, Discrete, Outcome, Space, Spec, TimeStep


class Latent(eqx.Module):
    """The model's state: `deter` from the recurrence, G blocks of K, and one-hot `stoch`, S variables of C classes."""

    deter: Float[Array, "*batch G K"]
    stoch: Float[Array, "*batch S C"]

    def features(self) -> Float[Array, "*batch F"]:
        """What heads, actor and critic read."""
        flat = (x.reshape(*x.shape[:-2], -1) for x in (self.deter, self.stoch))
        return jnp.concatenate(list(flat), -1)


class ObsCode(eqx.Module):
    """How one observation key enters the encoder and leaves the decoder.

    A Box is flattened and compressed by symlog, with a squared error in symlog space; Discrete and
    MultiDiscrete are one-hot, with a cross-entropy.
    """

    key: str = eqx.field(static=True)
    space: Space = eqx.field(static=True)

    @property
    def classes(self) -> tuple[int, ...]:
        if isinstance(self.space, Box):
            return ()
        return (self.space.n,) if isinstance(self.space, Discrete) else self.space.n

    @property
    def size(self) -> int:
        return sum(self.classes) or int(np.prod(self.space.shape))

    def encode(self, x: Array) -> Float[Array, "*batch size"]:
        if isinstance(self.space, Box):
            return losses.symlog(x.reshape(*x.shape[: x.ndim - len(self.space.shape)], -1).astype(jnp.float32))
        digits = x[..., None] if isinstance(self.space, Discrete) else x
        return jnp.concatenate([jax.nn.one_hot(digits[..., i], n) for i, n in enumerate(self.classes)], -1)

    def decode(self, code: Float[Array, "*batch size"]) -> Array:
        if isinstance(self.space, Box):
            return losses.symexp(code).reshape(*code.shape[:-1], *self.space.shape)
        digits = jnp.stack([jnp.argmax(part, -1) for part in self._parts(code)], -1).astype(jnp.int32)
        return digits[..., 0] if isinstance(self.space, Discrete) else digits

    def expected(self, code: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        """What `encode` would give on average: the probabilities of classes in place of one-hot vectors."""
        if isinstance(self.space, Box):
            return code
        return jnp.concatenate([jax.nn.softmax(part) for part in self._parts(code)], -1)

    def loss(self, code: Float[Array, "*batch size"], x: Array) -> Float[Array, "*batch"]:
        """Summed over the key's elements: squared symlog units for a Box, nats otherwise."""
        target = self.encode(x)
        if isinstance(self.space, Box):
            return jnp.sum((code - target) ** 2, -1)
        parts = zip(self._parts(code), self._parts(target), strict=True)
        return -jnp.stack([jnp.sum(t * jax.nn.log_softmax(c), -1) for c, t in parts]).sum(0)

    def _parts(self, code: Array) -> list[Array]:
        return jnp.split(code, np.cumsum(self.classes)[:-1].tolist(), -1)


class Recurrence(eqx.Module):
    """The block-diagonal GRU: each of G blocks of the state sees itself and all of the three embedded inputs."""

    embed_deter: nets.Layer
    embed_stoch: nets.Layer
    embed_action: nets.Layer
    hidden: nets.BlockDense
    norm: nets.RMSNorm
    gates: nets.BlockDense

    def __init__(
        self, deter: int, stoch: int, action: int, hidden: int, blocks: int, block_scale: float, *, key: PRNGKeyArray
    ):
        if deter % blocks:
            raise ValueError(f"rssm: deter {deter} is not a multiple of blocks {blocks}")
        keys = jax.random.split(key, 5)
        block = deter // blocks
        self.embed_deter = nets.Layer(deter, hidden, key=keys[0])
        self.embed_stoch = nets.Layer(stoch, hidden, key=keys[1])
        self.embed_action = nets.Layer(action, hidden, key=keys[2])
        self.hidden = nets.BlockDense(blocks, block + 3 * hidden, block, scale=block_scale, key=keys[3])
        self.norm = nets.RMSNorm(blocks, block)
        self.gates = nets.BlockDense(blocks, block, 3 * block, scale=block_scale, key=keys[4])

    def __call__(self, latent: Latent, action: Float[Array, " A"]) -> Float[Array, "G K"]:
        deter, stoch = latent.deter, latent.stoch
        inputs = (self.embed_deter(deter.ravel()), self.embed_stoch(stoch.ravel()), self.embed_action(action))
        inputs = jnp.broadcast_to(jnp.concatenate(inputs), (len(deter), self.hidden.weight.shape[1] - deter.shape[1]))
        hidden = jax.nn.silu(self.norm(self.hidden(jnp.concatenate([deter, inputs], -1))))
        reset, candidate, update = jnp.split(self.gates(hidden), 3, -1)
        candidate = jnp.tanh(jax.nn.sigmoid(reset) * candidate)
        update = jax.nn.sigmoid(update - 1.0)  # starts by remembering
        return update * candidate + (1 - update) * deter


class RSSM(protocols.HeadedModel):
    """A world model over latents, with heads for every observation key, the reward and the discount."""

    recurrence: Recurrence
    encoder: nets.Trunk
    prior: nets.MLP
    posterior: nets.MLP
    decoder: nets.MLP
    reward: nets.MLP
    discount: nets.MLP
    codes: tuple[ObsCode, ...] = eqx.field(static=True)
    action: Box | Discrete = eqx.field(static=True)
    stoch: int = eqx.field(static=True)
    classes: int = eqx.field(static=True)
    bin_count: int = eqx.field(static=True)
    bin_limit: float = eqx.field(static=True)
    duration: float = eqx.field(static=True)
    unimix: float = eqx.field(static=True)

    def __init__(
        self,
        spec: Spec,
        *,
        deter: int,
        hidden: int,
        stoch: int,
        classes: int,
        units: int,
        blocks: int,
        layers: int = 3,
        bins: int = 255,
        bin_limit: float = 20.0,
        unimix: float = 0.01,
        block_scale: float = 1.0,
        key: PRNGKeyArray,
    ):
        """Draws a model for an environment.

        Args:
            spec: its observation keys and actions; the duration of a decision must be constant.
            deter, hidden, stoch, classes, units, blocks: sizes, named as in the paper's repository.
            layers: of encoder and decoder.
            bins, bin_limit: the reward's two-hot code, symexp of `bins` steps in [-bin_limit, bin_limit].
            unimix: uniform share of every categorical.
            block_scale: of the initial weights of block-diagonal layers, relative to the repository's.

        Raises:
            ValueError: an observation key the encoder cannot take, or a varying duration.
        """
        if spec.duration is None:
            raise ValueError(f"{spec.name}: rssm predicts steps of one duration, but this environment's varies")
        for name, space in spec.obs.items():
            if isinstance(space, Box) and np.prod(space.shape) > 4096:
                raise ValueError(
                    f"{spec.name}: observation key '{name}' has {int(np.prod(space.shape))} elements; the encoder "
                    f"takes vectors of at most 4096 (there is no convolutional encoder yet)"
                )
        self.codes = tuple(ObsCode(name, space) for name, space in spec.obs.items())
        self.action, self.duration = spec.action, spec.duration
        self.stoch, self.classes, self.unimix = stoch, classes, unimix
        self.bin_count, self.bin_limit = bins, bin_limit
        keys = jax.random.split(key, 7)
        flat, tokens = stoch * classes, sum(code.size for code in self.codes)
        features = deter + flat
        act = spec.action.n if isinstance(spec.action, Discrete) else int(np.prod(spec.action.shape))
        self.recurrence = Recurrence(deter, flat, act, hidden, blocks, block_scale, key=keys[0])
        self.encoder = nets.Trunk(tokens, units, layers, key=keys[1])
        self.prior = nets.MLP(deter, hidden, 2, flat, key=keys[2])
        self.posterior = nets.MLP(deter + units, hidden, 1, flat, key=keys[3])
        self.decoder = nets.MLP(features, units, layers, tokens, key=keys[4])
        self.reward = nets.MLP(features, units, 1, bins, scale=0.0, key=keys[5])
        self.discount = nets.MLP(features, units, 1, 1, key=keys[6])

    @property
    def bins(self) -> np.ndarray:
        return losses.symexp_bins(self.bin_count, self.bin_limit)

    def initial(self) -> Latent:
        return Latent(jnp.zeros(self.recurrence.norm.scale.shape), jnp.zeros((self.stoch, self.classes)))

    def observe(self, latent: Latent, action: Array, obs: PyTree, first: Array, *, key: PRNGKeyArray) -> Latent:
        return self._observe(latent, action, self._tokens(obs), first, key)[0]

    def advance(self, latent: Latent, action: Array, *, key: PRNGKeyArray) -> Latent:
        deter = self.recurrence(latent, self._embed(action))
        return Latent(deter, dists.straight_through(self.prior_probs(deter), key=key))

    def outcome(self, latent: Latent) -> Outcome:
        features = latent.features()
        constant = jnp.ones(features.shape[:-1])
        return Outcome(
            obs=self.decode(features),
            reward=losses.two_hot_mean(self.reward(features), self.bins),
            discount=jax.nn.sigmoid(self.discount(features)[..., 0]),
            duration=self.duration * constant,
            reward_delay=0.0 * constant,
        )

    def observation(self, obs: PyTree) -> Float[Array, "*batch O"]:
        """The vector that stands for an observation: every key's code, joined."""
        return jnp.concatenate([code.encode(obs[code.key]) for code in self.codes], -1)

    def expected(self, features: Float[Array, "*batch F"]) -> Float[Array, "*batch O"]:
        """The same of what is decoded; of a discrete key, its classes' probabilities."""
        parts = zip(self.codes, self._split(self.decoder(features)), strict=True)
        return jnp.concatenate([code.expected(part) for code, part in parts], -1)

    def decode(self, features: Float[Array, "*batch F"]) -> dict[str, Array]:
        """The predicted observation of every key, in the environment's units."""
        parts = self._split(self.decoder(features))
        return {code.key: code.decode(part) for code, part in zip(self.codes, parts, strict=True)}

    def filter(
        self, latent: Latent, action: Array, obs: PyTree, first: Bool[Array, " T"], *, key: PRNGKeyArray
    ) -> tuple[Latent, Float[Array, "T S C"]]:
        """Observes a window of T rows at once; returns latents and posteriors [T].

        Args:
            latent: before the window.
            action: [T, ...], entry t is what was done at row t - 1; void at entry 0 unless `latent` is real.
            obs: dict of [T, ...].
            first: [T]; where set, everything before is forgotten and gets no gradient.
        """

        def step(latent: Latent, row: tuple[Array, ...]) -> tuple[Latent, tuple[Latent, Array]]:
            latent, post = self._observe(latent, *row)
            return latent, (latent, post)

        keys = jax.random.split(key, first.shape[0])
        return jax.lax.scan(step, latent, (action, self._tokens(obs), first, keys))[1]

    def prior_probs(self, deter: Float[Array, "*batch G K"]) -> Float[Array, "*batch S C"]:
        """The distribution of `stoch` before anything is observed."""
        return self._probs(self.prior(deter.reshape(*deter.shape[:-2], -1)))

    def obs_loss(self, features: Float[Array, "*batch F"], obs: PyTree) -> dict[str, Float[Array, "*batch"]]:
        """The reconstruction loss of each key (`ObsCode.loss`)."""
        parts = zip(self.codes, self._split(self.decoder(features)), strict=True)
        return {code.key: code.loss(part, obs[code.key]) for code, part in parts}

    def losses(
        self, latents: Latent, post: Float[Array, "N S C"], step: TimeStep, free_nats: float
    ) -> dict[str, Float[Array, " N"]]:
        """The losses of rows [N] that were filtered, by what they train.

        Args:
            latents, post: as `filter` returned them.
            step: what was observed.
            free_nats: below this, the KL losses have no gradient.
        """
        features, prior = latents.features(), self.prior_probs(latents.deter)
        kl = jax.vmap(losses.balanced_kl, (0, 0, None))(jnp.log(post), jnp.log(prior), free_nats)
        reward = jax.vmap(lambda x, y: losses.two_hot_loss(x, y, self.bins))(self.reward(features), step.reward)
        return {
            "dynamics": kl[0],
            "representation": kl[1],
            "obs": jnp.stack([*self.obs_loss(features, step.obs).values()]).sum(0),
            "reward": jnp.where(step.first, 0.0, reward),  # a first row's reward is void
            "discount": optax.sigmoid_binary_cross_entropy(self.discount(features)[:, 0], step.discount),
        }

    def _observe(self, latent: Latent, action: Array, tokens: Array, first: Array, key: PRNGKeyArray):
        latent, action = jax.tree.map(lambda x: jnp.where(first, 0.0, x), (latent, self._embed(action)))
        deter = self.recurrence(latent, action)
        post = self._probs(self.posterior(jnp.concatenate([deter.ravel(), tokens])))
        return Latent(deter, dists.straight_through(post, key=key)), post

    def _tokens(self, obs: PyTree) -> Float[Array, "*batch units"]:
        return self.encoder(self.observation(obs))

    def _embed(self, action: Array) -> Float[Array, " A"]:
        if isinstance(self.action, Discrete):
            return jax.nn.one_hot(action, self.action.n)
        return action.reshape(-1)

    def _split(self, tokens: Array) -> list[Array]:
        return jnp.split(tokens, np.cumsum([code.size for code in self.codes])[:-1].tolist(), -1)

    def _probs(self, x: Float[Array, "*batch F"]) -> Float[Array, "*batch S C"]:
        return dists.unimix(x.reshape(*x.shape[:-1], self.stoch, self.classes), self.unimix)
