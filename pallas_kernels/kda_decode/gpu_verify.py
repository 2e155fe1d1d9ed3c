"""KDA decode of drafted windows on NVIDIA GPUs, in Triton: a program takes one head of one row through both windows.

Its state [K, K] stays in registers: it takes the accepted tokens of the window before, is written back, and goes on through the
new tokens, whose states are dropped. The input of a convolution at a place in the sequence lies in the pool, in the window before
or in the new one; which one it is depends on how many tokens were accepted, so all three are read and one is chosen.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda_decode import gpu
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.kda_decode.gpu import decay_factor, sigmoid, unit
from pallas_kernels.target import current


def why_not(
    x: Projected, before: Projected, accepted: Array, weights: Weights, pool: Pool, slots: Array,
    *, decay_floor: float | None, eps: float,
) -> str | None:  # fmt: skip
    if not before.q.shape[1]:
        return "the window before must hold a token"
    return gpu.why_not(x, weights, pool, slots, decay_floor=decay_floor, eps=eps)


def kda_verify(
    x: Projected, before: Projected, accepted: Int32[Array, "N"], weights: Weights, pool: Pool, slots: Int32[Array, "N"],
    *, decay_floor: float | None, eps: float,
) -> tuple[Float[Array, "N T HK"], Pool]:  # fmt: skip
    """See `pallas_kernels.kda_decode.kda_verify`."""
    H = pool.states.shape[1]
    given = *x, *before, *weights, accepted, slots, *pool
    out = jax.ShapeDtypeStruct(x.gate.shape, x.gate.dtype), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pool)
    y, states, windows = pl.pallas_call(
        partial(_kernel, decay_floor=decay_floor, eps=eps),
        grid=(H, len(slots)),
        out_shape=out,
        input_output_aliases={len(given) - 2: 1, len(given) - 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=current().interpret,
        name="kda_verify",
    )(*given)
    return y, Pool(states, windows)


class Inputs(NamedTuple):
    """Of the convolutions of row n, in the order of the sequence: the pool's, `kept` of those before, the new ones."""

    windows: Any
    before: Any  # refs of q, k, v
    x: Any
    n: Array
    slot: Array
    kept: Array
    at: Any  # columns

    def __getitem__(self, place: tuple[int, Array | int]) -> Array:
        channel, j = place
        R, T, taps = self.before[0].shape[1], self.x[0].shape[1], self.windows.shape[2]
        pooled = self.windows[self.slot, channel, jnp.clip(j, 0, taps - 1), self.at]
        old = self.before[channel][self.n, jnp.clip(j - taps, 0, R - 1), self.at]
        new = self.x[channel][self.n, jnp.clip(j - taps - self.kept, 0, T - 1), self.at]
        return jnp.where(j < taps, pooled.astype(new.dtype), jnp.where(j < taps + self.kept, old, new))


def _kernel(
    q, k, v, decay, beta, gate, q_before, k_before, v_before, decay_before, beta_before, _, conv, A_log, dt_bias, o_norm,
    accepted, slots, states, windows, y, states_out, windows_out, *, decay_floor: float | None, eps: float,
):  # fmt: skip
    h, n = pl.program_id(0), pl.program_id(1)
    K, T, (W, taps) = states.shape[-1], q.shape[1], (conv.shape[1], windows.shape[2])
    head, slot, kept = pl.ds(h * K, K), slots[n], accepted[n]
    inputs = Inputs(windows, (q_before, k_before, v_before), (q, k, v), n, slot, kept, head)

    def convolved(channel: int, s: Array) -> Float32[Array, "K"]:
        """Of token s, counted from the first one before."""
        first = s + taps - (W - 1)
        u = sum(
            (inputs[channel, first + i].astype(jnp.float32) * conv[channel, i, head] for i in range(W)), jnp.zeros(K)
        )
        return (u * sigmoid(u)).astype(q.dtype).astype(jnp.float32)

    def token(s: Array, S: Array, decay: Any, beta: Any, t: Array) -> tuple[Float32[Array, "K"], Float32[Array, "K K"]]:
        """q of token s, which is token t of `decay` and `beta`, and the state after it."""
        q_now, k_now = unit(convolved(0, s)), unit(convolved(1, s))[:, None]
        S *= decay_factor(decay[n, t, head].astype(jnp.float32) + dt_bias[head], A_log[h], decay_floor)[:, None]
        error = convolved(2, s) - jnp.sum(k_now * S, 0)
        return q_now, S + k_now * (sigmoid(beta[n, t, h].astype(jnp.float32)) * error)[None]

    def read(t: Array, S: Array) -> Array:
        q_now, S = token(kept + t, S, decay, beta, t)
        o = (K**-0.5 * jnp.sum(q_now[:, None] * S, 0)).astype(v.dtype).astype(jnp.float32)
        o = o * jax.lax.rsqrt(jnp.sum(o * o) / K + eps) * o_norm[...]
        y[n, t, head] = (o * sigmoid(gate[n, t, head].astype(jnp.float32))).astype(y.dtype)
        return S

    @pl.when(slot < 0)
    def _():
        for t in range(T):
            y[n, t, head] = jnp.zeros((K,), y.dtype)

    @pl.when(slot >= 0)
    def _():
        S = jax.lax.fori_loop(0, kept, lambda s, S: token(s, S, decay_before, beta_before, s)[1], states[slot, h])
        states_out[slot, h] = S
        jax.lax.fori_loop(0, T, read, S)
        # After sums over all threads to which every one has given what it read of the window.
        window = [inputs[channel, kept + i].astype(windows.dtype) for channel in range(3) for i in range(taps)]
        for i, value in enumerate(window):
            windows_out[slot, i // taps, i % taps, head] = value
