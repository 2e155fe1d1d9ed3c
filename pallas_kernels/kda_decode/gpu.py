"""Decode of Kimi Delta Attention on NVIDIA GPUs, in Triton: a program takes one head of one row from its projections to y.

Its state [K, K] is read from the slot into registers once, decayed, corrected and read out there, and written back in place.
Programs of idle rows write zeros to y and touch no slot.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.target import current, why_not_on

COLUMNS = 32  # of the state that are in work at once


def why_not(
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, "N"], *, decay_floor: float | None, eps: float
) -> str | None:
    K = pool.states.shape[-1]
    if reason := why_not_on("gpu"):
        return reason
    if not 16 <= K <= 128 or K & (K - 1):
        return f"heads must have 16, 32, 64 or 128 channels, got {K}"
    return None


def kda_decode(
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, "N"], *, decay_floor: float | None, eps: float
) -> tuple[Float[Array, "N HK"], Pool]:
    """See `pallas_kernels.kda_decode.kda_decode`."""
    H = pool.states.shape[1]
    given = *x, *weights, slots, *pool
    out = jax.ShapeDtypeStruct(x.gate.shape, x.gate.dtype), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pool)
    y, states, windows = pl.pallas_call(
        partial(_kernel, decay_floor=decay_floor, eps=eps),
        grid=(H, len(slots)),
        out_shape=out,
        input_output_aliases={len(given) - 2: 1, len(given) - 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=current().interpret,
        name="kda_decode",
    )(*given)
    return y, Pool(states, windows)


def _kernel(
    q, k, v, decay, beta, gate, conv, A_log, dt_bias, o_norm, slots, states, windows,
    y, states_out, windows_out, *, decay_floor: float | None, eps: float,
):  # fmt: skip
    h, n = pl.program_id(0), pl.program_id(1)
    K = states.shape[-1]
    head, slot = pl.ds(h * K, K), slots[n]

    @pl.when(slot < 0)
    def _():
        y[n, head] = jnp.zeros((K,), y.dtype)

    @pl.when(slot >= 0)
    def _():
        q_now, k_now = (_convolved(u, conv, windows, windows_out, n, slot, c, h * K, pl.ds(0, K)) for c, u in enumerate((q, k)))
        q_now, k_now = _unit(q_now) * K**-0.5, _unit(k_now)
        z, rate = decay[n, head].astype(jnp.float32) + dt_bias[head], jnp.exp(A_log[h])
        log_decay = -rate * jax.nn.softplus(z) if decay_floor is None else decay_floor * _sigmoid(rate * z)
        decayed, k_column, q_column = (a[:, None] for a in (jnp.exp(log_decay), k_now, q_now))
        strength = _sigmoid(beta[n, h].astype(jnp.float32))
        step = min(K, COLUMNS)
        blocks = [pl.ds(at, step) for at in range(0, K, step)]
        reads = []
        for columns in blocks:
            S = states[slot, h, :, columns] * decayed
            error = _convolved(v, conv, windows, windows_out, n, slot, 2, h * K, columns) - jnp.sum(k_column * S, 0)
            S += k_column * (strength * error)[None]
            states_out[slot, h, :, columns] = S
            reads.append(jnp.sum(q_column * S, 0).astype(v.dtype).astype(jnp.float32))
        scale = jax.lax.rsqrt(sum(jnp.sum(o * o) for o in reads) / K + eps)
        for o, columns in zip(reads, blocks, strict=True):
            at = pl.ds(h * K + columns.start, step)
            y[n, at] = (scale * o * o_norm[columns] * _sigmoid(gate[n, at].astype(jnp.float32))).astype(y.dtype)


def _convolved(x, conv, windows, windows_out, n, slot, channel, start, columns) -> Float32[Array, "columns"]:
    """silu of the convolution of some columns of q, k or v (channel 0, 1, 2), whose window moves on by the new input."""
    W, taps = conv.shape[1], windows.shape[2]
    at = pl.ds(start + columns.start, columns.size)
    new = x[n, at]
    old = [windows[slot, channel, i, at] for i in range(taps)]
    for i, value in enumerate([*old[1:], new.astype(windows.dtype)]):
        windows_out[slot, channel, i, at] = value
    inputs = [u.astype(jnp.float32) for u in (*old[taps - (W - 1) :], new)]
    u = sum((u * conv[channel, i, at] for i, u in enumerate(inputs)), jnp.zeros(columns.size))
    return (u * _sigmoid(u)).astype(new.dtype).astype(jnp.float32)


def _unit(x: Float32[Array, "K"]) -> Float32[Array, "K"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x) + 1e-6)


def _sigmoid(x: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    return 1 / (1 + jnp.exp(-x))
