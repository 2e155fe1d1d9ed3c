"""Grouped matmul on NVIDIA GPUs with MXFP4 weights, which programs decode block by block on their way to the matrix units.

A byte times 2**9 + 2**21 holds its two numbers at the right bits of two fp16 numbers, except for signs, which lie three bits too
low: four operations for two weights, subnormal codes included. As the bias of exponents is 15 in fp16 and 1 in E2M1, they are
2**14 times too small. They stay so as they are multiplied by their scale in fp32 and rounded to x's dtype, and the sums are
multiplied at the end: every scale fits, and only weights below 2**-112 may be lost.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32, UInt8

from pallas_kernels.grouped_matmul.gpu import Blocks, divisor, dot, span_rows, tile_rows, tiles_of, why_not_sizes
from pallas_kernels.target import current, why_not_on

GROUP = 32  # inputs per scale
E2M1_IN_FP16 = 2.0**14


def why_not(x: Array, packed: Array, scale: Array, group_sizes: Array) -> str | None:
    if reason := why_not_on("gpu", x, packed):
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x must be bf16 or fp32, got {x.dtype}"
    return why_not_sizes(x.shape[1], packed.shape[1], GROUP)


@jax.custom_vjp
def grouped_matmul_mxfp4(
    x: Float[Array, "N K"],
    packed: UInt8[Array, "E M Khalf"],
    scale: UInt8[Array, "E M Kgroup"],
    group_sizes: Int32[Array, " E"],
) -> Float[Array, "N M"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul_mxfp4`."""
    return _product(x, packed, scale, group_sizes, gradient=False)


def _forward(x: Array, packed: Array, scale: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul_mxfp4(x, packed, scale, group_sizes), (packed, scale, group_sizes)


def _backward(inputs: tuple[Array, Array, Array], g: Float[Array, "N M"]) -> tuple[Array, None, None, None]:
    return _product(g, *inputs, gradient=True), None, None, None


grouped_matmul_mxfp4.defvjp(_forward, _backward)


def _blocks(N: int, E: int, inner: int, outer: int, dtype: Any) -> Blocks:
    if dtype == jnp.float32:
        return Blocks(tile_rows(N, E, 32), divisor(outer, 32), divisor(inner, 32), warps=4, stages=2)
    rows = tile_rows(N, E, 256)
    if rows < 64:
        return Blocks(rows, divisor(outer, 64), divisor(inner, 128), warps=4, stages=4)
    return Blocks(rows, divisor(outer, 128), divisor(inner, 64), warps=8, stages=3)


def _product(x: Array, packed: Array, scale: Array, group_sizes: Array, *, gradient: bool) -> Array:
    """x w' of each group, or with `gradient` x w, for matrices w [M, K]."""
    (N, inner), (E, M, half) = x.shape, packed.shape
    outer = 2 * half if gradient else M
    blocks = _blocks(N, E, inner, outer, x.dtype)
    tiles = tiles_of(group_sizes, N, blocks.rows)
    return pl.pallas_call(
        partial(_gradient_kernel if gradient else _product_kernel, blocks),
        grid=(outer // blocks.columns, len(tiles.group)),
        out_shape=jax.ShapeDtypeStruct((N, outer), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=current().interpret,
        name="grouped_matmul_mxfp4_dx" if gradient else "grouped_matmul_mxfp4",
    )(x, packed, scale, *tiles)


def _product_kernel(blocks: Blocks, x, packed, scale, group, begin, end, y):
    """The block of y is summed as [columns, rows]: the weights stay in the registers where they were decoded."""
    i = pl.program_id(1)
    e, columns = group[i], pl.ds(pl.program_id(0) * blocks.columns, blocks.columns)
    rows, real = span_rows(begin[i], end[i], blocks.rows)

    def step(k: Array, total: Array) -> Array:
        x_rows = plgpu.load(x.at[rows, pl.ds(k * blocks.depth, blocks.depth)], mask=real, other=0)
        return total + dot(_weights(packed, scale, e, columns, k, blocks.depth, x.dtype), x_rows.T)

    steps = (e < packed.shape[0]).astype(jnp.int32) * (x.shape[1] // blocks.depth)
    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((blocks.columns, blocks.rows), jnp.float32))
    plgpu.store(y.at[rows, columns], (E2M1_IN_FP16 * total.T).astype(y.dtype), mask=real)


def _gradient_kernel(blocks: Blocks, g, packed, scale, group, begin, end, dx):
    j, i = pl.program_id(0), pl.program_id(1)
    e = group[i]
    rows, real = span_rows(begin[i], end[i], blocks.rows)

    def step(k: Array, total: Array) -> Array:
        depth = pl.ds(k * blocks.depth, blocks.depth)
        return total + dot(
            plgpu.load(g.at[rows, depth], mask=real, other=0), _weights(packed, scale, e, depth, j, blocks.columns, g.dtype)
        )

    steps = (e < packed.shape[0]).astype(jnp.int32) * (g.shape[1] // blocks.depth)
    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    plgpu.store(dx.at[rows, pl.ds(j * blocks.columns, blocks.columns)], (E2M1_IN_FP16 * total).astype(dx.dtype), mask=real)


def _weights(packed: Any, scale: Any, e: Array, outputs: Any, block: Array, size: int, dtype: Any) -> Float[Array, "O size"]:
    """w of group e times 2**-14: inputs `size * block` to `size * (block + 1)`."""
    pairs = packed[e, outputs, pl.ds(block * (size // 2), size // 2)].astype(jnp.int32)
    factor = _repeat(_factors(scale[e, outputs, pl.ds(block * (size // GROUP), size // GROUP)]))
    wide = pairs * (1 << 9 | 1 << 21)
    words = (wide & 0x0E000E00) | ((wide << 3) & -0x7FFF8000)
    halves = (jax.lax.bitcast_convert_type(half.astype(jnp.int16), jnp.float16) for half in (words, words >> 16))
    numbers = [(half.astype(jnp.float32) * factor).astype(dtype) for half in halves]
    return jnp.stack(numbers, axis=-1).reshape(pairs.shape[0], size)


def _factors(scale: UInt8[Array, "O n"]) -> Float32[Array, "O n"]:
    """2**(scale - 127); 0 for byte 0."""
    byte = scale.astype(jnp.int32)
    return jnp.where(byte == 255, jnp.nan, jax.lax.bitcast_convert_type(byte << 23, jnp.float32))


def _repeat(x: Float32[Array, "O n"]) -> Float32[Array, "O pairs"]:
    rows, groups = x.shape
    return jnp.broadcast_to(x[:, :, None], (rows, groups, GROUP // 2)).reshape(rows, -1)
