"""Attention over paged latents on NVIDIA GPUs, in Triton: each sequence is split over several programs, their results merged.

A program holds the queries of a sequence, all heads of them, as rows, and walks over its share of the sequence's blocks of
tokens, each of which lies in one page. A latent is read once, as the key and as the value. The softmax over all tokens comes
from those of the shares and their logarithms of sums, which are to base 2.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.target import current, why_not_on

ROWS = 64  # queries x heads of a program at most: their sums are half of a multiprocessor's registers
BLOCK = 32  # tokens per step at most: 36 kB, of which three programs of a multiprocessor have one each on its way
PROGRAMS = 396  # that are wanted: three for each multiprocessor of an H100
SHARE = 256  # tokens of the longest sequence per program at least
LOG2_E = math.log2(math.e)


class Form(NamedTuple):
    scale: float
    heads: int
    queries: int
    value_dim: int
    rows: int
    block: int  # tokens
    shares: int


def why_not(
    q: Array, pool: Array, page_table: Array, lengths: Array, *, value_dim: int, scale: float
) -> str | None:
    if reason := why_not_on("gpu", q, pool, page_table):
        return reason
    for what, size in ("values", value_dim), ("the rest of latents", q.shape[-1] - value_dim):
        if size < 16 or size & (size - 1):
            return f"{what} must have a power of two of numbers, from 16 on, got {size}"
    if pool.shape[1] % 16:
        return f"pages must have a multiple of 16 tokens, got {pool.shape[1]}"
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
    """See `pallas_kernels.paged_mla.paged_latent_attention`."""
    (B, T, H, W), (_, page, _) = q.shape, pool.shape
    common = jnp.result_type(q, pool)
    most_rows, most_tokens = (16, 16) if common == jnp.float32 else (ROWS, BLOCK)
    rows = min(max(16, 1 << (T * H - 1).bit_length()), most_rows)
    padded = jnp.pad(q.reshape(B, T * H, W).astype(common), ((0, 0), (0, -T * H % rows), (0, 0)))
    shares = max(1, min(pl.cdiv(PROGRAMS, B * padded.shape[1] // rows), page_table.shape[1] * page // SHARE))
    form = Form(scale, H, T, value_dim, rows, min(page & -page, most_tokens), shares)
    out = _merged(*_shares(form, padded, pool, page_table, jnp.asarray(lengths, jnp.int32)))
    return out[:, : T * H].reshape(B, T, H, value_dim).astype(q.dtype)


def _shares(form: Form, q: Array, pool: Array, page_table: Array, lengths: Array) -> tuple[Array, Array]:
    """Of each share of a sequence, the outputs [shares B rows L] and the logarithms of the sums of weights [shares B rows]."""
    B, M, _ = q.shape
    return pl.pallas_call(
        partial(_kernel, form),
        grid=(form.shares, M // form.rows, B),
        out_shape=(
            jax.ShapeDtypeStruct((form.shares, B, M, form.value_dim), q.dtype if form.shares == 1 else jnp.float32),
            jax.ShapeDtypeStruct((form.shares, B, M), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4 if form.rows == 16 else 8, num_stages=2),
        interpret=current().interpret,
        name="paged_mla",
    )(q, pool, page_table, lengths)


def _merged(out: Float[Array, "shares B M L"], log_total: Float32[Array, "shares B M"]) -> Float[Array, "B M L"]:
    if out.shape[0] == 1:
        return out[0]
    top = jnp.max(log_total, 0)
    weight = jnp.exp2(log_total - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(weight, 0)
    return jnp.sum(weight[..., None] * out, 0) / jnp.where(total > 0, total, 1)[..., None]


def _kernel(form: Form, q, pool, page_table, lengths, out, log_total):
    share, i, b = (pl.program_id(axis) for axis in range(3))
    page, W = pool.shape[1], q.shape[-1]
    rows, value, rest = pl.ds(i * form.rows, form.rows), pl.ds(0, form.value_dim), pl.ds(form.value_dim, W - form.value_dim)
    q_value, q_rest, length = q[b, rows, value], q[b, rows, rest], lengths[b]
    last_seen = length - form.queries + (i * form.rows + jnp.arange(form.rows)) // form.heads

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        first = j * form.block
        token = first + jnp.arange(form.block)
        at = page_table[b, first // page], pl.ds(first % page, form.block)
        real = (token < length)[:, None]  # the others may hold NaN
        latent, more = (plgpu.load(pool.at[*at, part], mask=real, other=0).astype(q.dtype) for part in (value, rest))
        score = (form.scale * LOG2_E) * (_dot(q_value, latent.T) + _dot(q_rest, more.T))
        score = jnp.where(token[None] <= last_seen[:, None], score, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(score, 1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight, keep = jnp.exp2(score - base[:, None]), jnp.exp2(top - base)
        return new_top, keep * total + jnp.sum(weight, 1), keep[:, None] * acc + _dot(weight.astype(q.dtype), latent)

    start = jnp.full((form.rows,), -jnp.inf), jnp.zeros((form.rows,)), jnp.zeros((form.rows, form.value_dim))
    blocks = (length + form.block - 1) // form.block
    top, total, acc = jax.lax.fori_loop(share * blocks // form.shares, (share + 1) * blocks // form.shares, step, start)
    divisor = jnp.where(total > 0, total, 1)
    out[share, b, rows, :] = (acc / divisor[:, None]).astype(out.dtype)
    log_total[share, b, rows] = top + jnp.log2(divisor)


def _dot(x: Array, y: Array) -> Float32[Array, "m n"]:
    precision = "highest" if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=precision)
