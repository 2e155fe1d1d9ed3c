"""The backward kernel: chunk after chunk from the last to the first, the gradient of the state in VMEM.

It makes each chunk's factors, pair products and inverse again, and reads the state before the chunk, which the forward saved.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda.tpu_chunk import C, Tiling, decays, dot, inverse, masked, masks, products, slots
from pallas_kernels.kda.tpu_forward import heads_per_step
from pallas_kernels.target import current

HEADS = 2  # per grid step


def backward(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    log_decay: Float32[Array, "B H T K"],
    beta: Float32[Array, "B H 1 T"],
    resets: Int32[Array, "B 1 T"] | None,
    states: Float[Array, "B H N V K"],
    do: Float[Array, "B H T V"],
    dstate: Float32[Array, "B H V K"],
    *,
    tiles: Tiling,
) -> list[Array]:
    """Gradients of q, k, v, log_decay, beta and of the first state, from those of o and of the last state."""
    B, H, T, K = q.shape
    V = v.shape[-1]
    N, heads = T // C, heads_per_step(H, HEADS)

    def tokens(width):
        return pl.BlockSpec((None, heads, C, width), lambda b, h, i: (b, h, N - 1 - i, 0))

    row = pl.BlockSpec((None, heads, 1, C), lambda b, h, i: (b, h, 0, N - 1 - i))
    whole = pl.BlockSpec((None, heads, V, K), lambda b, h, i: (b, h, 0, 0))
    chunk = pl.BlockSpec((None, heads, None, V, K), lambda b, h, i: (b, h, N - 1 - i, 0, 0))
    inputs = [(q, tokens(K)), (k, tokens(K)), (v, tokens(V)), (log_decay, tokens(K)), (beta, row), (states, chunk)]
    inputs += [(do, tokens(V)), (dstate, whole)]
    if resets is not None:
        inputs.append((resets, pl.BlockSpec((None, 1, C), lambda b, h, i: (b, 0, N - 1 - i))))
    given = (q, tokens(K)), (k, tokens(K)), (v, tokens(V)), (log_decay, tokens(K)), (beta, row), (dstate, whole)
    return pl.pallas_call(
        partial(_kernel, tiles=tiles, has_resets=resets is not None),
        name="kda_backward",
        grid=(B, H // heads, N),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in given],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in given],
        scratch_shapes=[pltpu.VMEM((heads, slots(tiles).number, C, K), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=current().interpret,
    )(*(x for x, _ in inputs))


def _kernel(*refs: Any, tiles: Tiling, has_resets: bool) -> None:
    q_ref, k_ref, v_ref, log_decay_ref, beta_ref, before_ref, do_ref, dlast_ref, *refs = refs
    resets_ref = refs.pop(0) if has_resets else None
    dq_ref, dk_ref, dv_ref, dlog_decay_ref, dbeta_ref, dstate_ref, factors_ref = refs
    dtype = q_ref.dtype
    slot = slots(tiles)

    @pl.when(pl.program_id(2) == 0)
    def _():
        dstate_ref[...] = dlast_ref[...]

    resets = None if resets_ref is None else resets_ref[...]
    pairs, pairs_st = masks(tiles, resets), masks(tiles, resets, transposed=True)
    for h in range(q_ref.shape[0]):
        factors = factors_ref.at[h]
        last = masked(pairs.last_reads, decays(log_decay_ref.at[h], factors, tiles))
        q, k, v, do = (ref[h].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref, do_ref))
        beta, state, dnext = beta_ref[h], before_ref[h].astype(jnp.float32), dstate_ref[h]
        A, L = products(q, k, factors, pairs, tiles, dtype)
        solve = inverse(L, beta, tiles, dtype)
        read, keep = masked(pairs.reads, factors[slot.read]), masked(pairs.keeps, factors[slot.keep])
        q_read, k_read, k_keep = q * read, k * read, k * keep
        error = v.T - dot(state, k_read, dtype, across=1)
        solved = dot(error, solve, dtype, across=1)
        write = solved * beta

        dwrite = dot(do.T, A, dtype) + dot(dnext, k_keep, dtype, across=1)
        derror = dot(dwrite * beta, solve, dtype)
        dbeta_ref[h] = jnp.sum(solved * (dwrite - dot(derror, sum(L), dtype)), 0, keepdims=True)
        dv = derror.T
        dv_ref[h] = dv.astype(dv_ref.dtype)
        dread = jnp.concatenate([do, -dv], 0)
        dstate_ref[h] = dnext * last + dot(do.T, q_read, dtype) - dot(derror, k_read, dtype)
        dlast = last * jnp.sum(state * dnext, 0, keepdims=True)
        dq_read, dk_read = jnp.split(dot(dread, state, dtype), 2)
        dk_keep = dot(write.T, dnext, dtype)
        factors[slot.read] = q_read * dq_read + k_read * dk_read
        factors[slot.keep] = k_keep * dk_keep

        dA, dL = jnp.split(dot(dread, write, dtype), 2)
        dA_st, dL_st = jnp.split(dot(write.T, dread, dtype, across=1), 2, 1)
        ddiagonal = jnp.sum(do * write.T, 1, keepdims=True)
        dq = dq_read * read + ddiagonal * k
        dk = dk_read * read + dk_keep * keep + ddiagonal * q

        begin, grow = factors[slot.begin], factors[slot.grow]
        q_begin, k_begin, k_grow = q * begin, k * begin, k * grow
        dpairs = jnp.concatenate([masked(pairs.tile, dA), masked(pairs.tile, dL)], 0)
        dq_begin, dk_begin = jnp.split(dot(dpairs, k_grow, dtype), 2)
        dpairs = jnp.concatenate([masked(pairs_st.tile, dA_st), masked(pairs_st.tile, dL_st)], 1)
        dk_grow = dot(dpairs, jnp.concatenate([q_begin, k_begin], 0), dtype)
        factors[slot.begin] = q_begin * dq_begin + k_begin * dk_begin - k_grow * dk_grow
        dq += dq_begin * begin
        dk += dk_begin * begin + dk_grow * grow
        for level, (mask, mask_st) in enumerate(zip(pairs.levels, pairs_st.levels, strict=True)):
            factor = factors[level]
            rows = jnp.concatenate([q * factor, k * factor], 0)
            dpairs = jnp.concatenate([masked(mask, dA), masked(mask, dL)], 0)
            dq_level, dk_level = jnp.split(dot(dpairs, rows[C:], dtype), 2)
            dpairs = jnp.concatenate([masked(mask_st, dA_st), masked(mask_st, dL_st)], 1)
            dk_level += dot(dpairs, rows, dtype)
            factors[level] = rows[:C] * dq_level + rows[C:] * dk_level
            dq += dq_level * factor
            dk += dk_level * factor
        dq_ref[h], dk_ref[h] = dq.astype(dq_ref.dtype), dk.astype(dk_ref.dtype)
        _log_decay_gradient(log_decay_ref.at[h], factors, dlast, tiles, dlog_decay_ref.at[h])


def _log_decay_gradient(log_decay: Any, products: Any, dlast: Float32[Array, "1 K"], tiles: Tiling, out: Any) -> None:
    """Writes the gradient of log_decay [C, K], from each factor times its gradient in the slots of `decays`.

    A log decay gets the products of all factors that contain it. Within its tile those are sums over earlier or later tokens, in
    which the products of a tile's own pairs are the only ones that cancel.
    """
    size, n = tiles.size, C // tiles.size
    slot = slots(tiles)
    tile = lax.broadcasted_iota(jnp.int32, (n, out.shape[-1]), 0)
    totals = [0.0] * (len(tiles.levels) + 2)
    later, earlier = [], []
    for p in range(size):
        at = pl.ds(p, n, stride=size)
        levels = [products.at[level][at, :] for level in range(len(tiles.levels))]
        read, keep = products.at[slot.read][at, :], products.at[slot.keep][at, :]
        totals = [total + x for total, x in zip(totals, [*levels, read, keep], strict=True)]
        late = [tile // (half // size) % 2 == 1 for half in tiles.levels]
        later.append(products.at[slot.begin][at, :] + read + sum(jnp.where(m, x, 0.0) for m, x in zip(late, levels, strict=True)))
        earlier.append(keep + sum(jnp.where(m, 0.0, x) for m, x in zip(late, levels, strict=True)))
    whole_tiles = dot(_tile_sums(tiles), jnp.concatenate(totals, 0), jnp.float32) + dlast
    ahead = [0.0] * size
    for p in reversed(range(size)):
        ahead[p] = later[p] + (ahead[p + 1] if p + 1 < size else 0.0)
    behind = whole_tiles
    for p in range(size):
        at = pl.ds(p, n, stride=size)
        given = log_decay[at, :]
        clamped = jnp.exp(given - jnp.maximum(given, tiles.floor))
        out[at, :] = (ahead[p] + behind) * clamped
        behind += earlier[p]


def _tile_sums(tiles: Tiling) -> Float32[Array, "n sums_n"]:
    """Which tiles' totals of each level, of `read` and of `keep` a tile's log decays take part in."""
    n = C // tiles.size
    i, j = (lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    parts = []
    for half in tiles.levels:
        blocks = half // tiles.size
        late = j // blocks % 2 == 1
        parts.append((i // blocks == j // blocks) & (late & (i < j) | ~late & (i > j)))
    return jnp.concatenate([jnp.where(part, 1.0, 0.0) for part in (*parts, i < j, i > j)], 1)
