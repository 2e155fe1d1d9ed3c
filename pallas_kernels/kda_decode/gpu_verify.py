"""KDA decode of drafted windows on NVIDIA GPUs, in Triton: a program takes the state of one head of one row through both windows.

The state [K, K] stays in registers: it takes the accepted tokens of the window before, is written back, and goes on through the
new tokens, whose states are dropped. The short convolutions run before, in XLA: threads hold every number of q, k and v many
times over, and would compute it as often.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.conv1d import conv1d
from pallas_kernels.kda_decode import gpu
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights, windows_after
from pallas_kernels.kda_decode.gpu import decay_factor, sigmoid, unit
from pallas_kernels.target import current, why_not_on


def why_not(
    x: Projected, before: Projected, accepted: Int32[Array, " N"], weights: Weights, pool: Pool, slots: Int32[Array, " N"],
    *, decay_floor: float | None, eps: float,
) -> str | None:  # fmt: skip
    if reason := why_not_on("gpu", before.q):
        return reason
    return gpu.why_not(x, weights, pool, slots, decay_floor=decay_floor, eps=eps)


def kda_verify(
    x: Projected, before: Projected, accepted: Int32[Array, " N"], weights: Weights, pool: Pool, slots: Int32[Array, " N"],
    *, decay_floor: float | None, eps: float,
) -> tuple[Float[Array, "N T HK"], Pool]:  # fmt: skip
    """See `pallas_kernels.kda_decode.kda_verify`."""
    H, W = pool.states.shape[1], weights.conv.shape[1]
    windows = jnp.take(pool.windows, slots, axis=0, mode="clip")
    moved = windows_after(windows, before, accepted)

    def convolved(tokens: Projected, windows: Float[Array, "N 3 I HK"]) -> list[Array]:
        last = windows[:, :, windows.shape[2] - (W - 1) :]
        return [conv1d(u, weights.conv[i].T, last[:, i])[0] for i, u in enumerate((tokens.q, tokens.k, tokens.v))]

    given = (
        *convolved(before, windows), before.decay, before.beta, *convolved(x, moved), x.decay, x.beta, x.gate,
        *weights[1:], moved, accepted, slots, *pool,
    )  # fmt: skip
    out = jax.ShapeDtypeStruct(x.gate.shape, x.gate.dtype), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pool)
    y, states, windows = pl.pallas_call(
        partial(_kernel, decay_floor=decay_floor, eps=eps),
        grid=(H, len(slots)),
        out_shape=out,
        input_output_aliases={len(given) - 2: 1, len(given) - 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=current().interpret,
        name="kda_verify",
    )(*given)
    return y, Pool(states, windows)


def _kernel(
    q_before, k_before, v_before, decay_before, beta_before, q, k, v, decay, beta, gate, A_log, dt_bias, o_norm,
    moved, accepted, slots, states, windows, y, states_out, windows_out, *, decay_floor: float | None, eps: float,
):  # fmt: skip
    h, n = pl.program_id(0), pl.program_id(1)
    K, T, taps = states.shape[-1], q.shape[1], windows.shape[2]
    head, slot = pl.ds(h * K, K), slots[n]

    def after(t: Array, S: Array, k: Any, v: Any, decay: Any, beta: Any) -> Float32[Array, "K K"]:
        """S after token t."""
        k_now = unit(k[n, t, head].astype(jnp.float32))[:, None]
        S *= decay_factor(decay[n, t, head].astype(jnp.float32) + dt_bias[head], A_log[h], decay_floor)[:, None]
        error = v[n, t, head].astype(jnp.float32) - jnp.sum(k_now * S, 0)
        return S + k_now * (sigmoid(beta[n, t, h].astype(jnp.float32)) * error)[None]

    def read(t: Array, S: Array) -> Float32[Array, "K K"]:
        S = after(t, S, k, v, decay, beta)
        q_now = unit(q[n, t, head].astype(jnp.float32))[:, None]
        o = (K**-0.5 * jnp.sum(q_now * S, 0)).astype(v.dtype).astype(jnp.float32)
        o = o * jax.lax.rsqrt(jnp.sum(o * o) / K + eps) * o_norm[...]
        y[n, t, head] = (o * sigmoid(gate[n, t, head].astype(jnp.float32))).astype(y.dtype)
        return S

    @pl.when(slot < 0)
    def _():
        for t in range(T):
            y[n, t, head] = jnp.zeros((K,), y.dtype)

    @pl.when(slot >= 0)
    def _():
        S = jax.lax.fori_loop(
            0, accepted[n], lambda t, S: after(t, S, k_before, v_before, decay_before, beta_before), states[slot, h]
        )
        states_out[slot, h] = S
        for channel in range(3):
            for i in range(taps):
                windows_out[slot, channel, i, head] = moved[n, channel, i, head]
        jax.lax.fori_loop(0, T, read, S)
