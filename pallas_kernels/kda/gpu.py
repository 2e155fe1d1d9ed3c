"""Kimi Delta Attention on NVIDIA GPUs: chunks of 64 tokens in Pallas-Triton, forward and backward.

What a chunk does to a state is computed for all chunks at once, and so are outputs and gradients; only the states, and the
gradients of states, go from chunk to chunk, in kernels that do nothing else.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.kda.gpu_backward import backward
from pallas_kernels.kda.gpu_chunk import C, tiling
from pallas_kernels.kda.gpu_forward import Inputs, Program, forward
from pallas_kernels.target import why_not_on


def why_not(q: Array, k: Array, v: Array, *args: Array, **kwargs: Any) -> str | None:
    if reason := why_not_on("gpu", q, v):
        return reason
    if q.shape[-1] != 128 or v.shape[-1] not in (128, 256):
        return f"its tiles are for keys of 128 and values of 128 or 256, got K={q.shape[-1]} and V={v.shape[-1]}"
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"q, k and v must all be float32 or all bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}"
    B, T, H, K = q.shape
    if B * H * (T // C + 2) * K * v.shape[-1] >= 2**31:
        return f"the states of {B} x {H} x {T // C} chunks are out of reach of 32-bit offsets: split heads"
    return None


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float32[Array, "B T H K"],
    beta: Float32[Array, "B T H"],
    state: Float32[Array, "B H K V"],
    *,
    reset: Bool[Array, "B T"] | None = None,
    start: Int32[Array, " B"] | None = None,
    decay_floor: float | None = None,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """See `pallas_kernels.kda.kda`. Nothing is padded: the first and the last chunk of a row mask what is outside of it."""
    B, T, H, K = q.shape
    if reset is not None:
        state = jnp.where(reset[:, 0, None, None, None], 0, state)
        reset = reset.astype(jnp.int32)
    chunks = -(-T // C) if start is None else (T + 2 * C - 2) // C
    skip = jnp.zeros(B, jnp.int32) if start is None else start % C
    program = Program(B, T, H, K, v.shape[-1], chunks, q.dtype, tiling(decay_floor, q.dtype))
    return _chunks(program, Inputs(q, k, v, log_decay, beta, reset, skip), state)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(program: Program, inputs: Inputs, state: Array) -> tuple[Array, Array]:
    o, last, _ = forward(inputs, state, program)
    return o, last


def _chunks_forward(program: Program, inputs: Inputs, state: Array) -> tuple[tuple[Array, Array], tuple[Inputs, Array]]:
    o, last, states = forward(inputs, state, program)
    return (o, last), (inputs, states)


def _chunks_backward(program: Program, saved: tuple[Inputs, Array], cotangents: tuple[Array, Array]) -> tuple[Inputs, Array]:
    inputs, states = saved
    return backward(inputs, states, *cotangents, program)


_chunks.defvjp(_chunks_forward, _chunks_backward)
