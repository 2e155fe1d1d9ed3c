"""RMS norms. All statistics are fp32 whatever the input is."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.param import ones, param


class RMSNorm(nnx.Module):
    """y = weight * x / sqrt(mean(x^2) + eps); the quotient is cast to x's dtype before the weight multiplies."""

    def __init__(self, size: int, *, eps: float, axis: str | None = None, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.eps = eps
        self.weight = param(rngs, (size,), (axis,), ones, dtype)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.weight[...].astype(x.dtype) * _normalize(x, self.eps).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) * sigmoid(gate), all in fp32 (KDA's o_norm)."""

    def __init__(self, size: int, *, eps: float, rngs: nnx.Rngs):
        self.eps = eps
        self.weight = param(rngs, (size,), (None,), ones, jnp.float32)

    def __call__(self, x: Float[Array, "... V"], gate: Float[Array, "... V"]) -> Float[Array, "... V"]:
        y = _normalize(x, self.eps) * self.weight[...] * jax.nn.sigmoid(gate.astype(jnp.float32))
        return y.astype(gate.dtype)


def l2_normalize(x: Float[Array, "... K"], eps: float = 1e-6) -> Float[Array, "... K"]:
    """x / sqrt(sum(x^2) + eps) in fp32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + eps)


def _normalize(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
