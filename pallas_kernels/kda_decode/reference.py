"""Decode of Kimi Delta Attention as it is defined: one row after the other, one head after the other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


def kda_decode(
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, " N"], *, decay_floor: float | None, eps: float
) -> tuple[Float[Array, "N HK"], Pool]:
    """The formula of `pallas_kernels.kda_decode.kda_decode`."""
    ys = []
    for n in range(slots.shape[0]):
        row = Projected(*(a[n] for a in x))
        slot = jnp.maximum(slots[n], 0)
        old = Pool(pool.states[slot], pool.windows[slot])
        y, new = _token(row, weights, old, decay_floor, eps)
        idle = slots[n] < 0
        ys.append(jnp.where(idle, 0, y))
        pool = Pool(*(a.at[slot].set(jnp.where(idle, o, b)) for a, o, b in zip(pool, old, new, strict=True)))
    return jnp.stack(ys), pool


def kda_verify(
    x: Projected, before: Projected, accepted: Int32[Array, " N"], weights: Weights, pool: Pool, slots: Int32[Array, " N"],
    *, decay_floor: float | None, eps: float,
) -> tuple[Float[Array, "N T HK"], Pool]:
    """`pallas_kernels.kda_decode.kda_verify`, token by token."""
    for t in range(before.q.shape[1]):
        token = Projected(*(a[:, t] for a in before))
        _, pool = kda_decode(token, weights, pool, jnp.where(t < accepted, slots, -1), decay_floor=decay_floor, eps=eps)
    ys, drafted = [], pool
    for t in range(x.q.shape[1]):
        token = Projected(*(a[:, t] for a in x))
        y, drafted = kda_decode(token, weights, drafted, slots, decay_floor=decay_floor, eps=eps)
        ys.append(y)
    return jnp.stack(ys, axis=1), pool


def _token(x: Projected, weights: Weights, pool: Pool, decay_floor: float | None, eps: float) -> tuple[Array, Pool]:
    """One row: y [HK] and its new state and windows."""
    H, K, _ = pool.states.shape
    inputs = jnp.stack([x.q, x.k, x.v])[:, None].astype(jnp.promote_types(x.q.dtype, pool.windows.dtype))
    windows = jnp.concatenate([pool.windows, inputs], axis=1)
    taps = windows[:, -weights.conv.shape[1] :].astype(jnp.float32)
    mixed = jax.nn.silu(jnp.sum(taps * weights.conv, axis=1)).astype(x.q.dtype).astype(jnp.float32)
    z = x.decay.astype(jnp.float32) + weights.dt_bias
    beta = jax.nn.sigmoid(x.beta.astype(jnp.float32))
    gate = jax.nn.sigmoid(x.gate.astype(jnp.float32))
    ys, states = [], []
    for h in range(H):
        head = slice(h * K, (h + 1) * K)
        q, k, v = mixed[:, head]
        q = q / jnp.sqrt(jnp.sum(q * q) + 1e-6) * K**-0.5
        k = k / jnp.sqrt(jnp.sum(k * k) + 1e-6)
        rate = jnp.exp(weights.A_log[h])
        log_decay = -rate * jax.nn.softplus(z[head]) if decay_floor is None else decay_floor * jax.nn.sigmoid(rate * z[head])
        S = jnp.exp(log_decay)[:, None] * pool.states[h]
        S = S + beta[h] * k[:, None] * (v - jnp.sum(k[:, None] * S, axis=0))
        o = jnp.sum(q[:, None] * S, axis=0).astype(x.v.dtype).astype(jnp.float32)
        ys.append(o / jnp.sqrt(jnp.mean(o * o) + eps) * weights.o_norm * gate[head])
        states.append(S)
    return jnp.concatenate(ys).astype(x.gate.dtype), Pool(jnp.stack(states), windows[:, 1:].astype(pool.windows.dtype))
