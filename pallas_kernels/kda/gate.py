"""The decay gate of Kimi Delta Attention (Kimi Linear, arXiv 2510.26692)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def log_decay(z: Float[Array, "*N H K"], A_log: Float32[Array, " H"], floor: float | None) -> Float32[Array, "*N H K"]:
    """Log decay per channel from gate logits (bias included), in nats per token, fp32.

        floor * sigmoid(exp(A_log) z)        bounded (K3)
        -exp(A_log) softplus(z)              floor=None (Kimi-Linear)
    """
    return log_decay_at(jnp.exp(A_log.astype(jnp.float32))[:, None], z.astype(jnp.float32), floor)


def log_decay_at(rate: Float32[Array, "*N"], z: Float32[Array, "*N"], floor: float | None) -> Float32[Array, "*N"]:
    """The same with rate = exp(A_log) at hand."""
    return -rate * jax.nn.softplus(z) if floor is None else floor * jax.nn.sigmoid(rate * z)
