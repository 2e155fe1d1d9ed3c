"""Decode of Kimi Delta Attention in plain XLA: the slots are gathered, stepped and scattered back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.conv1d import conv1d
from pallas_kernels.kda import kda_step, log_decay
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights, windows_after

Token = tuple[Array, Array, Array, Array, Array]  # q, k, v, log decay and beta, as kda_step takes them


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


def kda_decode(
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, " N"], *, decay_floor: float | None, eps: float
) -> tuple[Float[Array, "N HK"], Pool]:
    """See `pallas_kernels.kda_decode.kda_decode`."""
    old = _gather(pool, slots)
    x = Projected(*(a[:, None] for a in x))
    o, state = kda_step(*_tokens(x, weights, old, decay_floor)[0], old.states)
    y = _output(o[:, None], x.gate, weights, slots, eps)[:, 0]
    return y, _scatter(pool, slots, Pool(state, windows_after(old.windows, x, jnp.ones_like(slots))))


def kda_verify(
    x: Projected, before: Projected, accepted: Int32[Array, " N"], weights: Weights, pool: Pool, slots: Int32[Array, " N"],
    *, decay_floor: float | None, eps: float,
) -> tuple[Float[Array, "N T HK"], Pool]:
    """See `pallas_kernels.kda_decode.kda_verify`."""
    old = _gather(pool, slots)
    state = old.states
    for t, token in enumerate(_tokens(before, weights, old, decay_floor)):
        replayed = (t < accepted)[:, None, None, None]
        state = jnp.where(replayed, kda_step(*token, state)[1], state)
    new = Pool(state, windows_after(old.windows, before, accepted))
    if not x.q.size:
        return jnp.zeros_like(x.gate), _scatter(pool, slots, new)
    outputs = []
    for token in _tokens(x, weights, new, decay_floor):
        o, state = kda_step(*token, state)
        outputs.append(o)
    return _output(jnp.stack(outputs, axis=1), x.gate, weights, slots, eps), _scatter(pool, slots, new)


def _gather(pool: Pool, slots: Int32[Array, " N"]) -> Pool:
    """The rows' states, in fp32, and windows."""
    states, windows = (jnp.take(a, slots, axis=0, mode="clip") for a in pool)
    return Pool(states.astype(jnp.float32), windows)


def _scatter(pool: Pool, slots: Int32[Array, " N"], new: Pool) -> Pool:
    where = jnp.where(slots < 0, len(pool.states) + jnp.arange(len(slots)), slots)  # beyond the pool: dropped
    cast = (b.astype(a.dtype) for a, b in zip(pool, new, strict=True))
    return Pool(*(a.at[where].set(b, mode="drop", unique_indices=True) for a, b in zip(pool, cast, strict=True)))


def _tokens(x: Projected, weights: Weights, pool: Pool, decay_floor: float | None) -> list[Token]:
    """What the recurrence takes of each token."""
    N, T, _ = x.q.shape
    _, H, K, _ = pool.states.shape
    windows = pool.windows[:, :, pool.windows.shape[2] - (weights.conv.shape[1] - 1) :]
    q, k, v = (
        conv1d(u, w.T, windows[:, i])[0].reshape(N, T, H, K) for i, (u, w) in enumerate(zip(x[:3], weights.conv, strict=True))
    )
    z = (x.decay.astype(jnp.float32) + weights.dt_bias).reshape(N, T, H, K)
    beta = jax.nn.sigmoid(x.beta.astype(jnp.float32))
    arrays = _unit(q) * K**-0.5, _unit(k), v, log_decay(z, weights.A_log, decay_floor), beta
    return [tuple(a[:, t] for a in arrays) for t in range(T)]  # pyright: ignore[reportReturnType]


def _unit(x: Float[Array, "*N H K"]) -> Float32[Array, "*N H K"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _output(
    o: Float[Array, "N T H K"], gate: Float[Array, "N T HK"], weights: Weights, slots: Int32[Array, " N"], eps: float
) -> Float[Array, "N T HK"]:
    """The gated norm of what was read; zero for idle rows."""
    o = o.astype(jnp.float32)
    o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + eps) * weights.o_norm
    y = o.reshape(gate.shape) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return jnp.where(slots[:, None, None] < 0, 0, y).astype(gate.dtype)
