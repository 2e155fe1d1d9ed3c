"""The backward kernel of the normed mix: sources and gradient of the row in, gradients of the sources out.

The gradients of the slots stay in HBM and are added to in place. Those of a tile are fetched while scores, mix and its
gradient are computed, and each goes back as soon as its slot is done.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attn_res import tpu_tile as tile
from pallas_kernels.target import current


def backward(
    eps: float,
    prefix: Float[Array, "B T D"],
    blocks: Float[Array, "N B T D"],
    count: Int32[Array, ""],
    weight: Float32[Array, " D"],
    norm_weight: Float32[Array, " D"],
    dy: Float[Array, "B T D"],
    dblocks: Float[Array, "N B T D"],
) -> tuple[Float[Array, "B T D"], Float[Array, "N B T D"], Float32[Array, " D"], Float32[Array, " D"]]:
    """Gradients of prefix, of blocks added to `dblocks`, of weight and of norm_weight."""
    N, (B, T, D) = blocks.shape[0], prefix.shape
    x, sources = tile.flat(prefix), tile.flat(blocks)
    rows = tile.rows_per_step(x.shape[0], bytes_per_token(N, D, x.dtype.itemsize))
    steps = x.shape[0] // rows
    slots = [pl.BlockSpec(memory_space=pl.ANY)] * bool(N)
    per_step = pl.BlockSpec((None, 2, D), lambda i, count: (i, 0, 0))
    dprefix, dweights, *dslots = pl.pallas_call(
        partial(_kernel, eps, N),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((steps, 2, D), jnp.float32),
            *[jax.ShapeDtypeStruct(sources.shape, x.dtype)] * bool(N),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[
                *tile.source_specs(N, rows, D), tile.weight_spec(D), tile.weight_spec(D), tile.token_spec(rows, D), *slots
            ],
            out_specs=[tile.token_spec(rows, D), per_step, *slots],
            scratch_shapes=[
                tile.scratch(rows, D),
                *[tile.scratch(N + 1, rows, tile.LANES)] * 3,
                tile.scratch(2, tile.GROUP, D),
                *[pltpu.VMEM((N, rows, D), x.dtype), pltpu.SemaphoreType.DMA((2, N))] * bool(N),
            ],
        ),
        input_output_aliases={N + 5: 2} if N else {},
        compiler_params=tile.params(),
        interpret=current().interpret,
        name="attn_res_norm_backward",
    )(
        count.reshape(1), *[sources] * N, x, weight.reshape(1, D), norm_weight.reshape(1, D), tile.flat(dy),
        *[tile.flat(dblocks)] * bool(N),
    )
    if N:
        dblocks = dslots[0][:, : B * T].reshape(blocks.shape)
    dweight, dnorm_weight = jnp.sum(dweights, 0)
    return dprefix[: B * T].reshape(prefix.shape), dblocks, dweight, dnorm_weight


def bytes_per_token(N: int, D: int, itemsize: int) -> int:
    """VMEM: windows in two buffers, the slots' gradients, the mix in fp32, three numbers per source and lane."""
    return (2 * (N + 3) + N) * D * itemsize + 4 * D + 3 * 4 * tile.LANES * (N + 1)


def _kernel(eps: float, N: int, count_ref: Any, *refs: Any) -> None:
    sources, (weight, norm_weight, dy, *rest) = refs[: N + 1], refs[N + 1 :]
    dprefix, dweights, *slots = rest[bool(N) : 2 * bool(N) + 2]
    g, dot, square, third, sums, *buffers = rest[2 * bool(N) + 2 :]
    rows, D = dprefix.shape
    count = count_ref[0]
    tokens = pl.ds(pl.program_id(0) * rows, rows)

    def copy(n: int, out: bool) -> Any:
        there, here = slots[0].at[n, tokens], buffers[0].at[n]
        return pltpu.make_async_copy(*((here, there) if out else (there, here)), buffers[1].at[int(out), n])

    tile.each_slot(N, count, lambda n: copy(n, out=False).start())
    sums[...] = jnp.zeros_like(sums)
    prob, score, r = tile.softmax(eps, count, sources, weight, dot, square)
    for n in range(N + 1):
        third[n] = tile.spread(prob[n])
    tile.weighted_sum(count, sources, third, g)
    _norm_gradient(eps, g, dy, norm_weight, sums.at[1], square.at[0], third.at[0])
    _score_gradient(count, sources, g, prob, score, r, dot, square, third)

    def dsource(n: int) -> None:
        out = dprefix if n == N else buffers[0].at[n]

        def piece(at: Any, j: slice) -> None:
            v = sources[n][at, j].astype(jnp.float32)
            along_weight = tile.wide(square[n, at], v)
            dv = tile.wide(dot[n, at], v) * g[at, j] + along_weight * weight[:, j] - tile.wide(third[n, at], v) * v
            sums[0, :, j] += along_weight * v
            out[at, j] = (dv if n == N else dv + out[at, j].astype(jnp.float32)).astype(out.dtype)

        tile.each_piece(rows, D, piece)

    def slot(n: int) -> None:
        copy(n, out=False).wait()
        dsource(n)
        copy(n, out=True).start()

    tile.each_slot(N, count, slot)
    dsource(N)
    dweights[...] = jnp.sum(sums[...], 1)
    tile.each_slot(N, count, lambda n: copy(n, out=True).wait())


def _norm_gradient(eps: float, mix: Any, dy: Any, norm_weight: Any, dnorm_weight: Any, square: Any, along: Any) -> None:
    """Replaces the mix by its gradient, and adds that of norm_weight, in GROUP parts.

    square, along  [rows, 128] to hold partial sums over D of h**2 and dy u h
    """
    rows, D = mix.shape

    def sums(at: Any, j: slice) -> tuple[Array, Array]:
        h = tile.rounded(mix[at, j], dy.dtype)
        return h * h, dy[at, j].astype(jnp.float32) * norm_weight[:, j] * h

    tile.row_sums(rows, D, sums, square, along)
    s = jax.lax.rsqrt(tile.column(square[...]) / D + eps)
    along[...] = tile.spread(tile.column(along[...]) / D * s * s)
    square[...] = tile.spread(s)

    def gradient(at: Any, j: slice) -> None:
        d, h = dy[at, j].astype(jnp.float32), tile.rounded(mix[at, j], dy.dtype)
        s = tile.wide(square[at], h)
        dnorm_weight[:, j] += d * tile.rounded(h * s, dy.dtype)
        mix[at, j] = s * (d * norm_weight[:, j] - h * tile.wide(along[at], h))

    tile.each_piece(rows, D, gradient, tile.SPAN // 2)


def _score_gradient(
    count: Array, sources: Any, g: Any, prob: list[tile.Column], score: list[tile.Column], r: list[tile.Column],
    p: Any, along_weight: Any, along_v: Any,
) -> None:
    """Writes the factors of dv_n = p_n g + along_weight_n weight - along_v_n v_n, spread over lanes."""
    N, (rows, D) = len(sources) - 1, g.shape

    def dprob(n: int) -> None:
        def terms(at: Any, j: slice) -> tuple[Array]:
            return (g[at, j] * sources[n][at, j].astype(jnp.float32),)

        tile.row_sums(rows, D, terms, p.at[n])

    tile.each_source(N, count, dprob)
    dp = [jnp.where(n < count, tile.column(p[n]), 0.0) for n in range(N)] + [tile.column(p[N])]
    mean = sum((q * d for q, d in zip(prob, dp, strict=True)), jnp.zeros((rows, 1), jnp.float32))
    for n in range(N + 1):
        factor = prob[n] * (dp[n] - mean) * r[n]
        p[n], along_weight[n] = tile.spread(prob[n]), tile.spread(factor)
        along_v[n] = tile.spread(factor * score[n] * r[n] / D)
