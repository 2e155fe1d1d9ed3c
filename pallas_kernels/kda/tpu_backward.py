"""The backward kernel: chunk after chunk from the last to the first, the gradient of the state in VMEM.

It makes each chunk's factors, pair products and inverse again, and reads the state before the chunk, which the forward saved.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda.tpu_chunk import (
    VMEM,
    Blocks,
    C,
    Masks,
    Steps,
    Tiling,
    Tokens,
    by_rows,
    columns_of,
    decays,
    dot,
    early,
    early_by_rows,
    in_columns,
    in_late_half,
    inverses,
    late,
    late_by_rows,
    masked,
    masks,
    merged,
    products,
    result_of,
    rows_of,
    sibling,
    steps,
    triangles,
)
from pallas_kernels.kda.tpu_forward import applied, tokens_of
from pallas_kernels.target import current, in_hbm

ABREAST = 2  # chunks at a time
PITCH = 24  # rows between tiles in scratch: rows 0, 24, 48, 72 lie in different banks of VMEM, 0, 16, 32 do not


def backward(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    log_decay: Float32[Array, "B H T K"],
    beta: Float32[Array, "B H N 1 C"],
    resets: Int32[Array, "B N 1 C"] | None,
    states: Float32[Array, "B H N K V"],
    do: Float[Array, "B H T V"],
    dstate: Float32[Array, "B H K V"],
    *,
    tiles: Tiling,
) -> list[Array]:
    """Gradients of q, k, v, log_decay, beta and of the first state, from those of o and of the last state."""
    B, H, T, K = q.shape
    V = v.shape[-1]
    step = steps(T, ABREAST)
    n = step.chunks
    end = T // C // n - 1
    blocks = Blocks(n, lambda i: end - i)
    by_token, by_chunk, whole = blocks.by_token, blocks.by_chunk, blocks.whole(K, V)
    given = [(q, by_token(K)), (k, by_token(K)), (v, by_token(V)), (log_decay, by_token(K)), (beta, by_chunk(1, C))]
    inputs = [*given, (states, by_chunk(K, V)), (do, by_token(V)), (dstate, whole)]
    if resets is not None:
        inputs.append((resets, blocks.of_all_heads()))
    outputs = [*given, (dstate, whole)]
    return pl.pallas_call(
        partial(_kernel, tiles=tiles, step=step, has_resets=resets is not None),
        name="kda_backward",
        grid=(B, H, end + 1),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outputs],
        scratch_shapes=[pltpu.VMEM((step.abreast, 2, tiles.number * PITCH, K), jnp.float32), tiles.rows(step.abreast, K)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        interpret=current().interpret,
    )(*in_hbm(*(x for x, _ in inputs)))


def _kernel(*refs: Any, tiles: Tiling, step: Steps, has_resets: bool) -> None:
    q_ref, k_ref, v_ref, log_decay_ref, beta_ref, before_ref, do_ref, dlast_ref, *others = refs
    resets_ref = others.pop(0) if has_resets else None
    dq_ref, dk_ref, dv_ref, dlog_decay_ref, dbeta_ref, dstate_ref, parts_ref, rows_ref = others
    dtype = q_ref.dtype
    each = range(step.abreast)

    @pl.when(pl.program_id(2) == 0)
    def _():
        dstate_ref[...] = dlast_ref[...]

    def some(i: Any) -> None:
        chunks = [step.chunks - 1 - c for c in step.of(i)]
        at = [pl.ds(pl.multiple_of(c * C, C), C) for c in chunks]
        pairs = [masks(tiles, resets_ref[c]) for c in chunks] if resets_ref is not None else [masks(tiles, None)] * step.abreast
        rows = [rows_ref.at[j] for j in each]
        factors = [decays(log_decay_ref[at[j], :], rows[j], tiles) for j in each]
        last = [masked(pairs[j].last_reads, factors[j][2]) for j in each]
        x = [tokens_of(q_ref[at[j], :], k_ref[at[j], :], beta_ref[chunks[j]], *factors[j][:2], rows[j], pairs[j], tiles)
             for j in each]
        A, L = zip(*(products(x[j], pairs[j], tiles, dtype) for j in each), strict=True)
        blocks, parts = zip(*(triangles(L[j], pairs[j], tiles) for j in each), strict=True)
        solve = result_of(inverses(blocks, parts, dtype))
        v = [v_ref[a, :].astype(jnp.float32) for a in at]
        wanted, seen = zip(*(applied(solve[j], v[j], x[j].k_read, dtype) for j in each), strict=True)
        state, do = [before_ref[c] for c in chunks], [do_ref[a, :].astype(jnp.float32) for a in at]
        write = [wanted[j] - dot(seen[j], state[j], dtype) for j in each]

        reads = [rows_of(A[j].T, x[j].q_read.T) for j in each]
        dread = [dot(reads[j], do[j], dtype) for j in each]
        writes = [rows_of(solve[j].T, seen[j].T) for j in each]
        decay = [in_columns(last[j], dstate_ref.shape[1]) for j in each]
        dnexts, derror = [dstate_ref[...]], []
        for j in each:
            dwrite = dread[j][:C] + dot(x[j].w_keep, dnexts[j], dtype)
            dwritten = dot(writes[j], dwrite, dtype)
            derror.append(dwritten[:C])
            dnexts.append(dnexts[j] * decay[j] + dread[j][C:] - dwritten[C:])
        dstate_ref[...] = dnexts.pop()
        dlast = [last[j] * jnp.sum((state[j] * dnexts[j]).T, 0, keepdims=True) for j in each]
        passed = [_Passed(rows_of(do[j], -derror[j]), write[j], state[j], dnexts[j]) for j in each]
        grads = [_token_gradients(x[j], passed[j], rows[j], pairs[j], tiles, dtype) for j in each]
        for j in each:
            q, k = q_ref[at[j], :].astype(jnp.float32), k_ref[at[j], :].astype(jnp.float32)
            beta = in_columns(beta_ref[chunks[j]], k.shape[1])
            reads, writes, _ = factors[j]
            same = jnp.sum(do[j] * write[j], 1, keepdims=True)  # of the pairs t = s, which no decay enters
            dbeta_k = grads[j].w * writes + same * q
            dq_ref[at[j], :] = (grads[j].q * reads + same * (beta * k)).astype(dq_ref.dtype)
            dk_ref[at[j], :] = (grads[j].k * reads + dbeta_k * beta).astype(dk_ref.dtype)
            dv_ref[at[j], :] = derror[j].astype(dv_ref.dtype)
            dbeta_ref[chunks[j]] = jnp.sum((dbeta_k * k).T, 0, keepdims=True)
            for i, part in enumerate((grads[j].later, grads[j].earlier)):
                for g in range(tiles.number):
                    parts_ref[j, i, g * PITCH : g * PITCH + tiles.size] = part[g * tiles.size : (g + 1) * tiles.size]
        for j in each:
            dtile = _tile_gradients(grads[j].rows, dlast[j], tiles)
            _log_decay_gradient(log_decay_ref.at[at[j]], parts_ref.at[j], dtile, tiles, dlog_decay_ref.at[at[j]])

    step.run(some)


class _Passed(NamedTuple):
    dread: Float32[Array, "2C V"]  # the gradient of what q and what k read of the state
    write: Float32[Array, "C V"]
    state: Float32[Array, "K V"]
    dnext: Float32[Array, "K V"]


class _Gradients(NamedTuple):
    """Of the tokens as readers and as writers, without the pairs t = s; of the sum of a tile's log decays up to each token
    (`later`: a log decay gets those of its own and later tokens) and behind it (`earlier`); of the logarithm of each row."""

    q: Float32[Array, "C K"]
    k: Float32[Array, "C K"]
    w: Float32[Array, "C K"]
    later: Float32[Array, "C K"]
    earlier: Float32[Array, "C K"]
    rows: list[Float32[Array, "n K"]]


def _token_gradients(x: Tokens, passed: _Passed, rows: Any, pairs: Masks, tiles: Tiling, dtype: Any) -> _Gradients:
    read, keep = rows.at[tiles.read], rows.at[tiles.keep]
    dq_read, dk_read = jnp.split(dot(passed.dread, passed.state, dtype, across=1), 2)
    dw_keep = dot(passed.write, passed.dnext, dtype, across=1)
    reads, keeps = x.q_read * dq_read + x.k_read * dk_read, x.w_keep * dw_keep
    dA, dL = jnp.split(dot(passed.dread, passed.write, dtype, across=1), 2)
    dA_st, dL_st = jnp.split(dot(passed.write, passed.dread, dtype, across=1), 2, 1)

    dtile = rows_of(masked(pairs.before, dA), masked(pairs.before, dL))
    dq, dk = jnp.split(dot(dtile, x.w, dtype), 2)
    dtile = columns_of(masked(pairs.after, dA_st), masked(pairs.after, dL_st))
    dw = dot(dtile, rows_of(x.q, x.k), dtype)
    later, earlier = x.q * dq + x.k * dk - x.w * dw + reads, keeps
    dq += masked(pairs.reads, by_rows(dq_read, read, tiles))
    dk += masked(pairs.reads, by_rows(dk_read, read, tiles))
    dw += masked(pairs.keeps, by_rows(dw_keep, keep, tiles))
    drows = []
    for i, (half, (q, k, w)) in enumerate(zip(tiles.levels, x.levels, strict=True)):
        none = jnp.zeros_like(w)
        dlevel = rows_of(masked(pairs.levels[i], late(dA, half)), masked(pairs.levels[i], late(dL, half)))
        dq_level, dk_level = jnp.split(dot(dlevel, merged(w, none, half), dtype), 2)
        dlevel = columns_of(masked(pairs.levels_st[i], early(dA_st, half)), masked(pairs.levels_st[i], early(dL_st, half)))
        dw_level = dot(dlevel, rows_of(merged(none, q, half), merged(none, k, half)), dtype)
        read_part, written_part = q * dq_level + k * dk_level, w * dw_level
        drows.append(_tile_sums(merged(written_part, read_part, half), tiles))
        later += merged(none, read_part, half)
        earlier += merged(written_part, none, half)
        dq += merged(none, late_by_rows(dq_level, rows.at[i], tiles, half), half)
        dk += merged(none, late_by_rows(dk_level, rows.at[i], tiles, half), half)
        dw += merged(early_by_rows(dw_level, rows.at[i], tiles, half), none, half)
    drows += [_tile_sums(reads, tiles), _tile_sums(keeps, tiles)]
    return _Gradients(dq, dk, dw, later, earlier, drows)


def _tile_sums(x: Float32[Array, "C K"], tiles: Tiling) -> Float32[Array, "n K"]:
    return jnp.sum(x.reshape(tiles.number, tiles.size, x.shape[1]), 1)


def _tile_gradients(drows: list[Float32[Array, "n K"]], dlast: Float32[Array, "1 K"], tiles: Tiling) -> Float32[Array, "n K"]:
    """Gradient of each tile's sum of log decays by the pairs that have it between them: the chain of products in `decays`,
    backwards."""
    *dlevels, dbegin, dend = drows
    tile = lax.broadcasted_iota(jnp.int32, dbegin.shape, 0)
    dwhole = jnp.where(tile == 0, dlast, 0.0)
    for half, drow in reversed(list(zip(tiles.levels, dlevels, strict=True))):
        is_late = in_late_half(tiles, half)
        dother = jnp.where(is_late, dbegin, dend) + dwhole
        dwhole += sibling(dother, is_late, half // tiles.size)
        dbegin += jnp.where(is_late, drow, 0.0)
        dend += jnp.where(is_late, 0.0, drow)
    return dwhole


def _log_decay_gradient(log_decay: Any, parts: Any, dtile: Float32[Array, "n K"], tiles: Tiling, out: Any) -> None:
    """Writes the gradient of log_decay, from that of its tile and from `later` and `earlier` of `_Gradients` in the ref `parts`.

    Sums of products that do not contain a log decay are left out rather than subtracted, but for pairs of one tile, which cancel.
    """
    size, n = tiles.size, tiles.number
    later, earlier = ([parts.at[i][pl.ds(p, n, stride=PITCH), :] for p in range(size)] for i in (0, 1))
    for p in reversed(range(size - 1)):
        later[p] += later[p + 1]
    before = dtile
    for p in range(size):
        at = pl.ds(p, n, stride=size)
        gradient = later[p] + before
        if not tiles.promised:
            gradient *= jnp.exp(jnp.minimum(log_decay[at, :] - tiles.floor, 0.0))
        out[at, :] = gradient
        before += earlier[p]
