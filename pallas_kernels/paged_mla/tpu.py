"""Attention over paged latents on TPUs: a flat list of blocks, fetched from their pages while the block before is computed.

A block's tokens come in chunks, each by a pipeline of its own, and a chunk without tokens is not fetched. Where a device has
two cores, each takes half of the list, wherever that cuts a sequence: its two partial results are merged.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.paged_mla.items import Items, items
from pallas_kernels.target import current, device_kind, why_not_on

BLOCK = 1024  # tokens per grid step: 1.3 MB, which take about as long to read as a step does to start
LANES = 128
ROWS = 16  # queries x heads are filled up to whole tiles of bf16
MOST_ROWS = 1024
CHUNK = 128  # tokens fetched at once
SMEM = 800_000  # bytes, for the lists
VMEM = 32 * 2**20
LOG2_E = float(np.log2(np.e))


class Form(NamedTuple):
    scale: float
    heads: int
    queries: int
    value_dim: int
    block: int  # tokens
    chunk: int  # tokens
    precision: Any


def why_not(
    q: Array, pool: Array, page_table: Array, lengths: Array, *, value_dim: int, scale: float
) -> str | None:
    if reason := why_not_on("tpu", q, pool, page_table):
        return reason
    (B, T, H, _), (_, page, W), pages = q.shape, pool.shape, page_table.shape[1]
    if W % 64 or value_dim % LANES:
        return f"the pool's rows must have a multiple of 64 and values a multiple of {LANES} numbers, got {W} and {value_dim}"
    if page % 64:
        return f"pages must have a multiple of 64 tokens, got {page}"
    if T * H > MOST_ROWS:
        return f"queries x heads must be {MOST_ROWS} at most to fit into VMEM, got {T} x {H}"
    scalars = 4 * B * -(-pages * page // BLOCK) * (2 + BLOCK // chunk(page))
    if scalars > SMEM:
        return (f"the lists of blocks of {B} sequences of up to {pages * page} tokens must fit into scalar memory: they take "
                f"{scalars} of {SMEM} bytes")
    return None


def paged_latent_attention(
    q: Float[Array, "B T H LR"],
    pool: Float[Array, "P page W"],
    page_table: Int32[Array, "B pages"],
    lengths: Int32[Array, " B"],
    *,
    value_dim: int,
    scale: float,
) -> Float[Array, "B T H L"]:
    (B, T, H, W), page = q.shape, pool.shape[1]
    common = jnp.result_type(q, pool)
    precision = jax.lax.Precision.HIGHEST if common == jnp.float32 else None
    form = Form(scale, H, T, value_dim, BLOCK, chunk(page), precision)
    work = items(lengths, queries=T, block=BLOCK, capacity=page_table.shape[1] * page, cores=_cores())
    rows = jnp.pad(q.reshape(B, T * H, W).astype(common), ((0, 0), (0, -T * H % ROWS), (0, pool.shape[2] - W)))
    # Batched by Pallas, a grid whose size is known at run time only reads pages of other sequences.
    call = jax.custom_batching.sequential_vmap(partial(_call, form))
    return call(work, rows, pool, page_table)[:, : T * H].reshape(B, T, H, value_dim).astype(q.dtype)


def chunk(page: int) -> int:
    """Tokens fetched at once."""
    return CHUNK if page % CHUNK == 0 else 64


def _cores() -> int:
    """Cores that share a device: 2 on v4 and v5p."""
    return 2 if device_kind() in ("TPU v4", "TPU v5") else 1


def _call(form: Form, work: Items, q: Array, pool: Array, page_table: Array) -> Float[Array, "B M L"]:
    (B, M, W), cores = q.shape, work.visited.shape[0]
    n = work.sequence.shape[0] // cores

    def of_sequence(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, M, width), lambda c, i, sequence, *_: (sequence[c * n + i], 0, 0))

    def of_share(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, M, width), lambda c, i, sequence, *_: (c, sequence[c * n + i], 0, 0))

    def of_chunk(k: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, form.chunk, W), lambda c, i, *lists: (lists[2][(c * n + i) * chunks + k], 0, 0))

    chunks = form.block // form.chunk
    dtype = q.dtype if cores == 1 else jnp.float32
    places = _places(form, work, page_table, pool.shape[1])
    out, log_total = pl.pallas_call(
        partial(_kernel, form),
        out_shape=[jax.ShapeDtypeStruct((cores, B, M, form.value_dim), dtype),
                   jax.ShapeDtypeStruct((cores, B, M, LANES), jnp.float32)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores, work.count),
            in_specs=[of_sequence(W), *(of_chunk(k) for k in range(chunks))],
            out_specs=[of_share(form.value_dim), of_share(LANES)],
            scratch_shapes=[pltpu.VMEM((M, width), jnp.float32) for width in (1, 1, form.value_dim)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        interpret=current().interpret,
        name="paged_mla",
    )(jnp.asarray(work.sequence), jnp.asarray(work.short), places, q, *[pool.reshape(-1, form.chunk, W)] * chunks)
    return out[0] if cores == 1 else _merged(out, log_total[..., :1], jnp.asarray(work.visited)[..., None, None])


def _places(form: Form, work: Items, page_table: Int32[Array, "B pages"], page: int) -> Int32[Array, " CN*chunks"]:
    """Where in the pool each chunk of each item lies, counted in chunks.

    One without tokens repeats its place of the item before, so that nothing is fetched.
    """
    first, cores = np.arange(0, form.block, form.chunk), work.visited.shape[0]
    token = work.block[:, None] * form.block + first
    real = first < (form.block + form.queries - 1 - work.short)[:, None]
    pages = page_table[work.sequence[:, None], jnp.minimum(token // page, page_table.shape[1] - 1)]
    places = jnp.where(real, pages * (page // form.chunk) + token % page // form.chunk, 0).reshape(cores, -1, first.size)
    item = jnp.where(real.reshape(places.shape), jnp.arange(places.shape[1])[:, None], 0)
    return jnp.take_along_axis(places, jax.lax.cummax(item, 1), 1).reshape(-1)


def _merged(out: Float32[Array, "C B M L"], log_total: Float32[Array, "C B M 1"], visited: Array) -> Float32[Array, "B M L"]:
    """The softmax over all tokens from those over each share's, which are exactly 0 where a share saw nothing."""
    log_total = jnp.where(visited, log_total, -jnp.inf)
    weight = jnp.exp2(log_total - _finite(jnp.max(log_total, 0)))
    total = jnp.sum(weight, 0)
    return jnp.sum(jnp.where(visited, weight * out, 0), 0) / jnp.where(total > 0, total, 1)


def _kernel(form: Form, sequences: Any, shorts: Any, places: Any, q_ref: Any, *refs: Any) -> None:
    """o = sum_s 2^(x_s - top) v_s / sum_s 2^(x_s - top), with x = scale log2(e) q.latent and top its running maximum."""
    *chunks, out_ref, log_total_ref, top_ref, total_ref, acc_ref = refs
    step, last = pl.program_id(1), pl.num_programs(1) - 1
    at = pl.program_id(0) * (sequences.shape[0] // pl.num_programs(0)) + step
    short = shorts[at]
    left = form.block + form.queries - 1 - short  # tokens from the block's first to the sequence's last

    @pl.when((step == 0) | (sequences[at] != sequences[jnp.maximum(at - 1, 0)]))
    def _() -> None:
        top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def add_tokens(masked: bool) -> None:
        q = q_ref[0]
        latent = jnp.concatenate([chunk[0] for chunk in chunks]).astype(q.dtype)
        if masked:
            token = jax.lax.broadcasted_iota(jnp.int32, latent.shape, 0)
            latent = jnp.where(token < left, latent, 0)  # 0 * whatever lies there may be NaN
        score = form.scale * LOG2_E * _dot(form, q, latent, 1)
        if masked:
            token, row = (jax.lax.broadcasted_iota(jnp.int32, score.shape, axis) for axis in (1, 0))
            seen = form.block - short
            for t in range(1, form.queries):
                seen += (row >= t * form.heads).astype(jnp.int32)
            score = jnp.where(token < seen, score, -jnp.inf)
        top = top_ref[...]
        new_top = jnp.maximum(top, jnp.max(score, 1, keepdims=True))
        base = _finite(new_top) if masked else new_top
        weight, keep = jnp.exp2(score - base), jnp.exp2(top - base)
        top_ref[...] = new_top
        total_ref[...] = keep * total_ref[...] + jnp.sum(weight, 1, keepdims=True)
        acc_ref[...] = keep * acc_ref[...] + _dot(form, weight.astype(q.dtype), latent[:, : form.value_dim], 0)

    @pl.when(short == 0)
    def _() -> None:
        add_tokens(False)

    @pl.when((short > 0) & (left > 0))
    def _() -> None:
        add_tokens(True)

    @pl.when((step == last) | (sequences[at] != sequences[jnp.minimum(at + 1, sequences.shape[0] - 1)]))
    def _() -> None:
        total = total_ref[...]
        out_ref[0, 0] = (acc_ref[...] / jnp.where(total > 0, total, 1)).astype(out_ref.dtype)
        log_total_ref[0, 0] = jnp.broadcast_to(_finite(top_ref[...]) + jnp.log2(total), log_total_ref.shape[2:])


def _finite(top: Array) -> Array:
    """The maximum, or 0 where nothing was seen."""
    return jnp.where(top == -jnp.inf, 0, top)


def _dot(form: Form, x: Array, latent: Array, axis: int) -> Float32[Array, "M N"]:
    """x times the latents, summed over this axis of them."""
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, latent, dims, precision=form.precision, preferred_element_type=jnp.float32)
