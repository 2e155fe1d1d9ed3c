"""Causal attention in XLA: blocks of queries one after another, recomputed in the backward pass.

Scores of a whole row would take B H T S fp32; here at most B H QUERY_BLOCK S exist at a time, forward and backward.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.mla.mask import masked_softmax, visible

QUERY_BLOCK = 256  # queries at a time


def why_not(*args: Array, **kwargs: object) -> str | None:
    return None


def attention(
    q: Float[Array, "B T H Dk"], k: Float[Array, "B S H Dk"], v: Float[Array, "B S H Dv"], *, scale: float,
    q_segments: Int[Array, "B T"] | None, kv_segments: Int[Array, "B S"] | None,
    q_positions: Int[Array, "B T"], kv_positions: Int[Array, "B S"],
) -> Float[Array, "B T H Dv"]:
    """See `pallas_kernels.mla.attention`."""
    B, T, H, _ = q.shape
    if q_segments is None:
        q_segments = jnp.ones_like(q_positions)
    if kv_segments is None:
        kv_segments = jnp.ones_like(kv_positions)
    attend = partial(_attend, k, v, kv_segments, kv_positions, scale)
    if T <= QUERY_BLOCK:
        return attend(q, q_segments, q_positions)
    blocks = -(-T // QUERY_BLOCK)

    def split(a: Array) -> Array:
        a = jnp.pad(a, ((0, 0), (0, blocks * QUERY_BLOCK - T)) + ((0, 0),) * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(B, blocks, QUERY_BLOCK, *a.shape[2:]), 1, 0)

    # Each block gets k and v as arguments of the checkpointed function: their gradients add up over the blocks.
    step = jax.checkpoint(lambda x: attend(*x))
    o = jax.lax.map(step, (split(q), split(q_segments), split(q_positions)))
    return jnp.moveaxis(o, 0, 1).reshape(B, blocks * QUERY_BLOCK, H, v.shape[-1])[:, :T]


def _attend(
    k: Array, v: Array, kv_segments: Array, kv_positions: Array, scale: float, q: Array, q_segments: Array, q_positions: Array
) -> Array:
    precision = "highest" if q.dtype == jnp.float32 else None
    see = visible(q_segments, kv_segments, q_positions, kv_positions)[:, None]
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision=precision, preferred_element_type=jnp.float32) * scale
    p = masked_softmax(scores, see).astype(v.dtype)
    o = jnp.einsum("bhts,bshd->bthd", p, v, precision=precision, preferred_element_type=jnp.float32)
    return o.astype(v.dtype)
