"""Grouped matmul with MXFP4 weights on TPU: `tpu`, with each slice of a group's matrix decoded in VMEM when its rows come.

The packed slice is fetched, decoded once to bf16, which holds MXFP4 numbers exactly, and multiplied with all tiles of rows of its
group. Nothing but packed weights is read from HBM.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.grouped_matmul.decode import LANES, as_bf16, decode
from pallas_kernels.grouped_matmul.tpu import LIMIT, MAX_ROWS, VMEM, dot, over, put_rows, slice_size, tile_rows
from pallas_kernels.grouped_matmul.visits import Visits
from pallas_kernels.target import current, in_hbm, why_not_on


def why_not(x: Array, packed: Array, scale: Array, group_sizes: Array) -> str | None:
    if reason := why_not_on("tpu", x, packed):
        return reason
    _, M, half = packed.shape
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x must be bf16 or fp32, got {x.dtype}"
    if 2 * half % 256 or 2 * half > 4096:
        return f"inputs must be a multiple of 256 up to 4096, got {2 * half}"
    if M % 128:
        return f"outputs must be a multiple of 128, got {M}"
    if (needed := max(_bytes(2 * half, 128, x.dtype), _bytes(M, 256, x.dtype))) > VMEM:
        return over(needed, M, 2 * half)
    return None


@jax.custom_vjp
def grouped_matmul_mxfp4(
    x: Float[Array, "N K"],
    packed: UInt8[Array, "E M Khalf"],
    scale: UInt8[Array, "E M Kgroup"],
    group_sizes: Int32[Array, " E"],
) -> Float[Array, "N M"]:
    return _product(x, packed, scale, group_sizes, transposed=False)


def _forward(
    x: Array, packed: Array, scale: Array, group_sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul_mxfp4(x, packed, scale, group_sizes), (packed, scale, group_sizes)


def _backward(inputs: tuple[Array, Array, Array], g: Float[Array, "N M"]) -> tuple[Array, None, None, None]:
    packed, scale, group_sizes = inputs
    return _product(g, packed, scale, group_sizes, transposed=True), None, None, None


grouped_matmul_mxfp4.defvjp(_forward, _backward)


def _bytes(inner: int, outer: int, dtype: Any) -> int:
    """Of VMEM: rows, results, packed weights and scales, each twice; the decoded slice; the sum in fp32."""
    size, weights = jnp.dtype(dtype).itemsize, inner * outer
    rows = 2 * size * MAX_ROWS * (inner + outer) + 4 * MAX_ROWS * outer
    decoded = (2 if size == 2 else 6) * weights
    return rows + weights + 2 * LANES * max(inner, outer) + decoded


def _product(x: Array, packed: Array, scale: Array, group_sizes: Array, *, transposed: bool) -> Array:
    """x w' of each group, w [M, K] as it is packed, or x w."""
    N, inner = x.shape
    E, M, half = packed.shape
    visits = Visits(N, E, tile_rows(N, x.dtype))
    groups = scale.shape[2]
    if transposed:
        outer, step = 2 * half, 256
        block = slice_size(outer, step, lambda n: _bytes(inner, n, x.dtype) <= VMEM)
        packed_block = pl.BlockSpec((1, M, block // 2), lambda j, i, d: (visits.group(i, d), 0, j))
        scale_block = pl.BlockSpec((1, M, groups), lambda j, i, d: (visits.group(i, d), 0, 0))
        decoded = block, M
    else:
        outer, step = M, 128
        block = slice_size(outer, step, lambda n: _bytes(inner, n, x.dtype) <= VMEM)
        packed_block = pl.BlockSpec((1, block, half), lambda j, i, d: (visits.group(i, d), j, 0))
        scale_block = pl.BlockSpec((1, block, groups), lambda j, i, d: (visits.group(i, d), j, 0))
        decoded = 2 * half, block
    return pl.pallas_call(
        partial(_kernel, visits=visits, transposed=transposed),
        out_shape=jax.ShapeDtypeStruct((N, outer), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(outer // block, visits.steps),
            in_specs=[
                pl.BlockSpec((visits.rows, inner), lambda j, i, d: (visits.tile(i, d), 0)),
                packed_block,
                scale_block,
            ],
            out_specs=pl.BlockSpec((visits.rows, block), lambda j, i, d: (visits.tile(i, d), j)),
            scratch_shapes=[pltpu.VMEM((decoded[0] // LANES, decoded[1] // 2, LANES), jnp.int32), pltpu.SMEM((1,), jnp.int32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=LIMIT),
        name="grouped_matmul_mxfp4_dx" if transposed else "grouped_matmul_mxfp4",
        interpret=current().interpret,
    )(visits.of_tiles(group_sizes), *in_hbm(x, packed, scale))


def _kernel(
    differences: Any, x: Any, packed: Any, scale: Any, y: Any, words: Any, unusual: Any, *, visits: Visits, transposed: bool
) -> None:
    first_input = pl.program_id(0) * words.shape[0] * LANES if transposed else 0

    @pl.when(visits.opens_group(pl.program_id(1), differences))
    def _() -> None:
        decode(packed.at[0], scale.at[0], first_input, words, unusual)

    def product() -> Array:
        return dot(x[...], as_bf16(words).astype(x.dtype), 1, 0 if transposed else 1)

    put_rows(visits, differences, y, product)
