"""Kimi Delta Attention on TPU: a chunked forward and a backward that recomputes each chunk, in Pallas."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.kda.grid import on_grid
from pallas_kernels.kda.tpu_backward import backward
from pallas_kernels.kda.tpu_chunk import C, Tiling, tiling
from pallas_kernels.kda.tpu_forward import forward
from pallas_kernels.target import why_not_on


def why_not(q: Array, k: Array, v: Array, *args: Array, **kwargs: Any) -> str | None:
    if reason := why_not_on("tpu", q, v):
        return reason
    if q.shape[-1] % 128 or v.shape[-1] % 128:
        return f"head sizes must be multiples of 128, got K={q.shape[-1]}, V={v.shape[-1]}"
    if q.shape[-1] > 128 or v.shape[-1] > 256:
        return ("keys over 128 exceed what the gradient loads with a stride, values over 256 exceed VMEM, "
                f"got K={q.shape[-1]}, V={v.shape[-1]}")
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"q, k and v must all be float32 or all bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}"
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
    """See `pallas_kernels.kda.kda`."""
    tokens = [q, k, v, log_decay, beta]
    if reset is not None:
        state = jnp.where(reset[:, 0, None, None, None], 0, state)
        tokens[3] = jnp.where(reset[:, :, None, None], 0, log_decay)
        tokens.append(reset)
    tokens, off_grid = on_grid(tokens, start, C)
    resets = None
    if reset is not None:
        resets = jnp.cumsum(tokens.pop().reshape(len(q), -1, 1, C), -1, dtype=jnp.int32)
    *by_head, beta = (jnp.moveaxis(x, 2, 1) for x in tokens)
    beta = beta.reshape(*beta.shape[:2], -1, 1, C)
    o, last = _chunks(tiling(decay_floor, q.dtype), *by_head, beta, resets, state)
    return off_grid(jnp.moveaxis(o, 1, 2)), last


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(tiles: Tiling, *inputs: Any) -> tuple[Array, Array]:
    """Whole chunks. inputs: those of `forward`."""
    o, last = forward(*inputs, tiles=tiles, save=False)
    return o, last


def _chunks_forward(tiles: Tiling, *inputs: Any) -> tuple[tuple[Array, Array], tuple[Array | None, ...]]:
    o, last, states = forward(*inputs, tiles=tiles, save=True)
    return (o, last), (*inputs[:-1], states)


def _chunks_backward(
    tiles: Tiling, saved: tuple[Array | None, ...], cotangents: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    inputs: list[Any] = [*saved, *cotangents]
    *grads, dstate = backward(*inputs, tiles=tiles)
    return *grads, None, dstate


_chunks.defvjp(_chunks_forward, _chunks_backward)
