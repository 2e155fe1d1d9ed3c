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
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, " N"], *, decay_floor: float | None, eps: float
) -> str | None:
    K = pool.states.shape[-1]
    if reason := why_not_on("gpu", x.q):
        return reason
    if pool.states.dtype != jnp.float32:
        return f"states must be float32, got {pool.states.dtype}"
    if not 16 <= K <= 128 or K & (K - 1):
        return f"heads must have 16, 32, 64 or 128 channels, got {K}"
    return None


def kda_decode(
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, " N"], *, decay_floor: float | None, eps: float
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
        (q_now, q_window), (k_now, k_window) = (_convolved(u, conv, windows, n, slot, c, head) for c, u in enumerate((q, k)))
        z = decay[n, head].astype(jnp.float32) + dt_bias[head]
        decayed, k_now, q_now = decay_factor(z, A_log[h], decay_floor)[:, None], unit(k_now)[:, None], unit(q_now)[:, None]
        strength = sigmoid(beta[n, h].astype(jnp.float32))
        step = min(K, COLUMNS)
        blocks = [(pl.ds(at, step), pl.ds(h * K + at, step)) for at in range(0, K, step)]
        reads, moved = [], [(0, head, q_window), (1, head, k_window)]
        for columns, at in blocks:
            v_now, window = _convolved(v, conv, windows, n, slot, 2, at)
            S = states[slot, h, :, columns] * decayed
            S += k_now * (strength * (v_now - jnp.sum(k_now * S, 0)))[None]
            states_out[slot, h, :, columns] = S
            reads.append((K**-0.5 * jnp.sum(q_now * S, 0)).astype(v.dtype).astype(jnp.float32))
            moved.append((2, at, window))
        scale = jax.lax.rsqrt(sum(jnp.sum(o * o) for o in reads) / K + eps)
        for o, (columns, at) in zip(reads, blocks, strict=True):
            y[n, at] = (scale * o * o_norm[columns] * sigmoid(gate[n, at].astype(jnp.float32))).astype(y.dtype)
        # After sums over all threads to which every one has given what it read of the window.
        for channel, at, window in moved:
            for i, value in enumerate(window):
                windows_out[slot, channel, i, at] = value


def _convolved(x, conv, windows, n, slot, channel, at) -> tuple[Float32[Array, " columns"], list[Array]]:
    """silu of the convolution of some columns of q, k or v (channel 0, 1, 2); and their window with the new input."""
    W, taps = conv.shape[1], windows.shape[2]
    new = x[n, at]
    old = [windows[slot, channel, i, at] for i in range(taps)]
    inputs = [u.astype(jnp.float32) for u in (*old[taps - (W - 1) :], new)]
    u = sum((u * conv[channel, i, at] for i, u in enumerate(inputs)), jnp.zeros(new.shape))
    return (u * sigmoid(u)).astype(new.dtype).astype(jnp.float32), [*old[1:], new.astype(windows.dtype)]


def decay_factor(z: Float32[Array, " K"], A_log: Float32[Array, ""], floor: float | None) -> Float32[Array, " K"]:
    """exp(log_decay), of logits that hold their bias."""
    rate = jnp.exp(A_log)
    return jnp.exp(-rate * jax.nn.softplus(z) if floor is None else floor * sigmoid(rate * z))


def unit(x: Float32[Array, " K"]) -> Float32[Array, " K"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x) + 1e-6)


def sigmoid(x: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    return 1 / (1 + jnp.exp(-x))
