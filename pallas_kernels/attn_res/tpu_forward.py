"""The forward kernel of the normed mix: sources in, one row out."""

from functools import partial
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attn_res import tpu_tile as tile
from pallas_kernels.target import current


def forward(
    eps: float,
    prefix: Float[Array, "B T D"],
    blocks: Float[Array, "N B T D"],
    count: Int32[Array, ""],
    weight: Float32[Array, " D"],
    norm_weight: Float32[Array, " D"],
) -> Float[Array, "B T D"]:
    N, (B, T, D) = blocks.shape[0], prefix.shape
    x, sources = tile.flat(prefix), tile.flat(blocks)
    rows = tile.rows_per_step(x.shape[0], _bytes_per_token(N, D, x.dtype.itemsize))
    y = pl.pallas_call(
        partial(_kernel, eps, N),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.shape[0] // rows,),
            in_specs=[*tile.source_specs(N, rows, D), tile.weight_spec(D), tile.weight_spec(D)],
            out_specs=tile.token_spec(rows, D),
            scratch_shapes=[tile.scratch(rows, D), *[tile.scratch(N + 1, rows, tile.LANES)] * 2],
        ),
        compiler_params=tile.params(),
        interpret=current().interpret,
        name="attn_res_norm_forward",
    )(count.reshape(1), *[sources] * N, x, weight.reshape(1, D), norm_weight.reshape(1, D))
    return y[: B * T].reshape(B, T, D)


def _bytes_per_token(N: int, D: int, itemsize: int) -> int:
    """VMEM: windows in two buffers, the mix in fp32, two partial sums per source."""
    return 2 * (N + 2) * D * itemsize + 4 * D + 2 * 4 * tile.LANES * (N + 1)


def _kernel(eps: float, N: int, count_ref: Any, *refs: Any) -> None:
    *sources, weight, norm_weight, y, mix, dot, square = refs
    rows, D = y.shape
    count = count_ref[0]
    prob, *_ = tile.softmax(eps, count, sources, weight, dot, square)
    for n in range(N + 1):
        dot[n] = tile.spread(prob[n])
    tile.weighted_sum(count, sources, dot, mix)

    def squares(at: Any, j: slice) -> tuple[Array]:
        h = tile.rounded(mix[at, j], y.dtype)
        return (h * h,)

    tile.row_sums(rows, D, squares, square.at[0])
    square[0] = tile.spread(jax.lax.rsqrt(tile.column(square[0]) / D + eps))

    def norm(at: Any, j: slice) -> None:
        h = tile.rounded(mix[at, j], y.dtype)
        quotient = tile.rounded(h * tile.wide(square[0, at], h), y.dtype)
        y[at, j] = (quotient * norm_weight[:, j]).astype(y.dtype)

    tile.each_piece(rows, D, norm)
