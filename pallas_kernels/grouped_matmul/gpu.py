"""Grouped matmul on NVIDIA GPUs, in Triton: a program multiplies one tile of rows of one group by a block of its matrix.

Every group is cut into tiles from its first row on, so no tile holds rows of two groups, and a matrix is read only by programs
whose rows need it. XLA computes where the tiles lie; there are at most N / rows + E of them, and those that do not exist end at
once. Blocks of columns are the fast dimension of the grid: programs that run together share rows and one or two matrices, which
the L2 cache then holds. Rows behind the last group are tiles too, with nothing to sum: their programs write the zeros.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.target import current, why_not_on


class Tiles(NamedTuple):
    """Tile i has the rows begin[i] to end[i], of group[i]; group E stands for none. Where end <= begin there is no tile."""

    group: Int32[Array, " n"]
    begin: Int32[Array, " n"]
    end: Int32[Array, " n"]


class Blocks(NamedTuple):
    rows: int
    columns: int  # of the result
    depth: int  # of the inner dimension, per step
    warps: int
    stages: int  # of the pipeline that loads


def why_not(x: Array, w: Array, group_sizes: Array) -> str | None:
    if reason := why_not_on("gpu", x, w):
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float32) or w.dtype != x.dtype:
        return f"x and w must both be bf16 or both fp32, got {x.dtype} and {w.dtype}"
    return why_not_sizes(w.shape[1], w.shape[2], 16)


def why_not_sizes(K: int, M: int, step: int) -> str | None:
    if K % step or M % step:
        return f"sizes of matrices must be multiples of {step}, got K={K} and M={M}"
    return None


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "N K"], w: Float[Array, "E K M"], group_sizes: Int32[Array, " E"]
) -> Float[Array, "N M"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    return _product(x, w, group_sizes, transposed=False)


def _forward(x: Array, w: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(x, w, group_sizes), (x, w, group_sizes)


def _backward(inputs: tuple[Array, Array, Array], g: Float[Array, "N M"]) -> tuple[Array, Array, None]:
    x, w, group_sizes = inputs
    return _product(g, w, group_sizes, transposed=True), _weight_gradient(x, g, w, group_sizes), None


grouped_matmul.defvjp(_forward, _backward)


def tile_rows(N: int, E: int, most: int) -> int:
    """The power of two from the mean size of a group on, between the 16 rows of a matrix instruction and `most`."""
    mean = min(max(N // E, 16), most)
    return 1 << (mean - 1).bit_length()


def divisor(size: int, most: int) -> int:
    """The largest power of two that divides `size`, up to `most`."""
    return min(size & -size, most)


def tiles_of(group_sizes: Int32[Array, " E"], N: int, rows: int) -> Tiles:
    E = group_sizes.shape[0]
    sizes = jnp.append(group_sizes, N - jnp.sum(group_sizes))
    ends = jnp.cumsum(sizes)
    count = -(-sizes // rows)
    until = jnp.cumsum(count)
    # sum ceil(size / rows) <= sum (size + rows - 1) / rows < N / rows + spans with rows, which are E + 1 or N at most
    i = jnp.arange(pl.cdiv(N, rows) + min(E, N - 1), dtype=jnp.int32)
    span = jnp.minimum(jnp.searchsorted(until, i, side="right", method="compare_all"), E)
    begin = (ends - sizes)[span] + (i - (until - count)[span]) * rows
    return Tiles(*(a.astype(jnp.int32) for a in (span, begin, jnp.minimum(begin + rows, ends[span]))))


def _blocks(N: int, E: int, inner: int, outer: int, dtype: Any) -> Blocks:
    if dtype == jnp.float32:
        return Blocks(tile_rows(N, E, 32), divisor(outer, 32), divisor(inner, 32), warps=4, stages=2)
    rows = tile_rows(N, E, 128)
    if rows < 64:
        return Blocks(rows, divisor(outer, 64), divisor(inner, 128), warps=4, stages=4)
    return Blocks(rows, divisor(outer, 256), divisor(inner, 64), warps=8, stages=3)


def _product(x: Array, w: Array, group_sizes: Array, *, transposed: bool) -> Array:
    """x w of each group, or x w'."""
    (N, inner), E = x.shape, w.shape[0]
    outer = w.shape[1 if transposed else 2]
    blocks = _blocks(N, E, inner, outer, x.dtype)
    tiles = tiles_of(group_sizes, N, blocks.rows)
    return pl.pallas_call(
        partial(_product_kernel, blocks, transposed),
        grid=(outer // blocks.columns, len(tiles.group)),
        out_shape=jax.ShapeDtypeStruct((N, outer), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=current().interpret,
        name="grouped_matmul_dx" if transposed else "grouped_matmul",
    )(x, w, *tiles)


def _product_kernel(blocks: Blocks, transposed: bool, x, w, group, begin, end, y):
    i = pl.program_id(1)
    e, columns = group[i], pl.ds(pl.program_id(0) * blocks.columns, blocks.columns)
    rows, real = span_rows(begin[i], end[i], blocks.rows)

    def step(k: Array, total: Array) -> Array:
        depth = pl.ds(k * blocks.depth, blocks.depth)
        matrix = w[e, columns, depth].T if transposed else w[e, depth, columns]
        return total + dot(plgpu.load(x.at[rows, depth], mask=real, other=0), matrix)

    steps = (e < w.shape[0]).astype(jnp.int32) * (x.shape[1] // blocks.depth)
    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    plgpu.store(y.at[rows, columns], total.astype(y.dtype), mask=real)


def _weight_gradient(x: Array, g: Array, w: Array, group_sizes: Array) -> Float[Array, "E K M"]:
    """x'g of each group; zeros for one without rows."""
    E, K, M = w.shape
    small = x.dtype == jnp.float32
    rows = tile_rows(x.shape[0], E, 32 if small else 64)
    block = divisor(K, 32 if small else 128), divisor(M, 32 if small else 256)
    ends = jnp.cumsum(group_sizes).astype(jnp.int32)
    return pl.pallas_call(
        partial(_weight_gradient_kernel, rows, block),
        grid=(K // block[0], M // block[1], E),
        out_shape=jax.ShapeDtypeStruct(w.shape, w.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4 if small else 8, num_stages=2 if small else 3),
        interpret=current().interpret,
        name="grouped_matmul_dw",
    )(x, g, ends - group_sizes.astype(jnp.int32), ends)


def _weight_gradient_kernel(size: int, block: tuple[int, int], x, g, begin, end, dw):
    i, j, e = (pl.program_id(axis) for axis in range(3))
    inputs, outputs = pl.ds(i * block[0], block[0]), pl.ds(j * block[1], block[1])
    first, last = begin[e], end[e]

    def step(n: Array, total: Array) -> Array:
        rows, real = span_rows(first + n * size, last, size)
        x_rows, g_rows = (plgpu.load(a.at[rows, at], mask=real, other=0) for a, at in ((x, inputs), (g, outputs)))
        return total + dot(x_rows.T, g_rows)

    total = jax.lax.fori_loop(0, pl.cdiv(last - first, size), step, jnp.zeros(block, jnp.float32))
    dw[e, inputs, outputs] = total.astype(dw.dtype)


def span_rows(begin: Array, end: Array, size: int) -> tuple[Any, Bool[Array, "size 1"]]:
    """`size` rows from `begin` on, and which of them lie before `end`."""
    return pl.ds(begin, size), (begin + jnp.arange(size) < end)[:, None]


def dot(a: Array, b: Array) -> Float32[Array, "m n"]:
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)
