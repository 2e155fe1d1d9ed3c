"""MLA attention on TPUs."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.mla.blocks import module, steps, visible
from pallas_kernels.mla.flash import LANES, Block, Form, Plan, flash
from pallas_kernels.target import why_not_on

Q_BLOCK = 512  # queries of a block of the backward
KV_BLOCK = 512  # keys
WIDE = 2  # blocks of the forward are so many times wider and higher, for it keeps less
STRIP = 2048  # queries whose dq stays in VMEM during the backward: 1.5 MB in fp32
SMEM_STEPS = 40_000  # pairs of blocks, of three int32 each


def why_not(q: Array, k: Array, v: Array, **kwargs: Any) -> str | None:
    if reason := why_not_on("tpu", q, k, v):
        return reason
    K, V = q.shape[-1], v.shape[-1]
    if K % 64 or V % LANES:
        return f"keys must have a multiple of 64 and values a multiple of {LANES} numbers, got {K} and {V}"
    pairs = q.shape[0] * -(-q.shape[1] // Q_BLOCK) * -(-k.shape[1] // KV_BLOCK)
    if pairs > SMEM_STEPS:
        return f"the list of its {pairs} pairs of blocks must fit into scalar memory: {SMEM_STEPS} at most"
    return None


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    *,
    scale: float,
    q_positions: Int32[Array, "B T"],
    kv_positions: Int32[Array, "B S"],
    q_segments: Int32[Array, "B T"] | None = None,
    kv_segments: Int32[Array, "B S"] | None = None,
) -> Float[Array, "B T H V"]:
    T, dtype = q.shape[1], v.dtype
    block = Block(_size(T, Q_BLOCK), _size(k.shape[1], KV_BLOCK))
    wide = Block(_wide(T, block.queries), _wide(k.shape[1], block.keys))
    queries, keys = _places(q_segments, q_positions, wide.queries), _places(kv_segments, kv_positions, wide.keys)
    some, every = visible(queries, keys, *block)
    per_strip = STRIP // block.queries
    strips = [slice(i, i + per_strip) for i in range(0, some.shape[1], per_strip)]
    backward = tuple(steps(some[:, strip].swapaxes(1, 2), every[:, strip].swapaxes(1, 2)) for strip in strips)
    plan = Plan(queries, keys, steps(*visible(queries, keys, *wide)), backward)
    counts = tuple(x.count if isinstance(x.count, int) else None for x in (plan.forward, *backward))
    common = jnp.result_type(q, k, v)
    by_head = (_pad(x.astype(common).swapaxes(1, 2), size) for x, size in zip((q, k, v), (*wide, wide.keys), strict=True))
    return flash(Form(scale, wide, block, per_strip * block.queries, counts), *by_head, plan).swapaxes(1, 2)[:, :T].astype(dtype)


def _size(n: int, block: int) -> int:
    """Rows of a block: as few blocks as `block` allows, of equal size in whole tiles."""
    blocks = -(-n // block)
    return min(block, -(-n // blocks // LANES) * LANES)


def _wide(n: int, size: int) -> int:
    return min(WIDE, -(-n // size)) * size


def _places(segments: Array | None, positions: Array, size: int) -> Int32[Array, "B 2 N"]:
    """Segments and positions, filled up to a multiple of size with padding."""
    xp = module(positions) if segments is None else module(positions, segments)
    segments = xp.ones_like(positions) if segments is None else segments
    return _pad(xp.stack([segments, positions], 1).astype(xp.int32), size)


def _pad(x: Array, size: int) -> Array:
    """Zeros behind axis 2, that of tokens, up to a multiple of size."""
    return module(x).pad(x, [(0, -x.shape[i] % size if i == 2 else 0) for i in range(x.ndim)])
