"""LaProp, the optimiser of the world-model agents, with the gradients of tensors clipped one by one."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array


def laprop(rate: float, *, warmup: int, clip: float) -> optax.GradientTransformation:
    """The gradient is normalised by its running scale, then averaged (Ziyin et al. 2020).

    Args:
        rate: learning rate, to which it rises from 0 over `warmup` updates.
        clip: largest gradient norm of a tensor, as a share of the tensor's own norm (Brock et al. 2021).
    """
    return optax.chain(
        optax.stateless(lambda grads, params: jax.tree.map(lambda g, p: _clip(g, p, clip), grads, params)),
        optax.scale_by_rms(0.999, eps=1e-20, eps_in_sqrt=False, bias_correction=True),
        optax.ema(0.9),
        optax.scale_by_learning_rate(optax.linear_schedule(0.0, rate, warmup) if warmup else rate),
    )


def _clip(grad: Array, param: Array, share: float) -> Array:
    limit = share * jnp.maximum(1e-3, jnp.linalg.norm(param.ravel()))
    return grad * jnp.minimum(1.0, limit / jnp.maximum(jnp.linalg.norm(grad.ravel()), 1e-12))
