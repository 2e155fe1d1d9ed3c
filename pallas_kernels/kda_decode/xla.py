"""Decode of Kimi Delta Attention in plain XLA: the slots are gathered, stepped and scattered back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.conv1d import conv1d
from pallas_kernels.kda import kda_step
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


def kda_decode(
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, "N"], *, decay_floor: float | None, eps: float
) -> tuple[Float[Array, "N HK"], Pool]:
    """See `pallas_kernels.kda_decode.kda_decode`."""
    _, H, K, _ = pool.states.shape
    old = Pool(*(jnp.take(a, slots, axis=0, mode="clip") for a in pool))
    heads, windows = [], []
    for i, u in enumerate((x.q, x.k, x.v)):
        u, window = conv1d(u[:, None], weights.conv[i].T, old.windows[:, i])
        heads.append(u.reshape(-1, H, K))
        windows.append(window)
    q, k, v = heads
    z = (x.decay.astype(jnp.float32) + weights.dt_bias).reshape(-1, H, K)
    beta = jax.nn.sigmoid(x.beta.astype(jnp.float32))
    o, state = kda_step(_unit(q) * K**-0.5, _unit(k), v, log_decay(z, weights.A_log, decay_floor), beta, old.states)
    y = _normalize(o, eps) * weights.o_norm * jax.nn.sigmoid(x.gate.astype(jnp.float32)).reshape(-1, H, K)
    y = jnp.where(slots[:, None] < 0, 0, y.reshape(x.gate.shape)).astype(x.gate.dtype)
    where = jnp.where(slots < 0, len(pool.states) + jnp.arange(len(slots)), slots)  # beyond the pool: dropped
    new = Pool(state, jnp.stack(windows, axis=1))
    return y, Pool(*(a.at[where].set(b, mode="drop", unique_indices=True) for a, b in zip(pool, new, strict=True)))


def log_decay(z: Float32[Array, "N H K"], A_log: Float32[Array, "H"], floor: float | None) -> Float32[Array, "N H K"]:
    """Of logits that hold their bias, in nats per token."""
    rate = jnp.exp(A_log)[:, None]
    return -rate * jax.nn.softplus(z) if floor is None else floor * jax.nn.sigmoid(rate * z)


def _unit(x: Float[Array, "N H K"]) -> Float32[Array, "N H K"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _normalize(x: Float[Array, "N H K"], eps: float) -> Float32[Array, "N H K"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
