"""The forward kernel: chunk after chunk, the state in VMEM.

From one state to the next lead two products, for (I + L)^-1 (v - k S) is the difference of what a chunk wants to write and of
what it has seen. All else is done before, for several chunks side by side. Operands that share a factor are stacked: loading a
factor of 128 rows into the matrix unit takes as long as multiplying 128 rows by it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
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
    columns_of,
    decays,
    dot,
    in_columns,
    inverse,
    masked,
    masks,
    products,
    rows_of,
    steps,
    tokens,
)
from pallas_kernels.target import current

ABREAST = 4  # chunks at a time


def forward(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    log_decay: Float32[Array, "B H T K"],
    beta: Float32[Array, "B H N 1 C"],
    resets: Int32[Array, "B N 1 C"] | None,
    state: Float32[Array, "B H K V"],
    *,
    tiles: Tiling,
    save: bool,
) -> list[Array]:
    """o, the last state, and with `save` the state before each chunk, [B, H, N, K, V]. T is a multiple of C."""
    B, H, T, K = q.shape
    V = v.shape[-1]
    step = steps(T, ABREAST)
    n = step.chunks
    blocks = Blocks(n, lambda i: i)
    by_token, by_chunk, whole = blocks.by_token, blocks.by_chunk, blocks.whole(K, V)
    inputs = [(q, by_token(K)), (k, by_token(K)), (v, by_token(V)), (log_decay, by_token(K)), (beta, by_chunk(1, C))]
    inputs.append((state, whole))
    if resets is not None:
        inputs.append((resets, blocks.of_all_heads()))
    outputs = [(jax.ShapeDtypeStruct(v.shape, v.dtype), by_token(V)), (jax.ShapeDtypeStruct(state.shape, jnp.float32), whole)]
    if save:
        outputs.append((jax.ShapeDtypeStruct((B, H, T // C, K, V), jnp.float32), by_chunk(K, V)))
    return pl.pallas_call(
        partial(_kernel, tiles=tiles, step=step, has_resets=resets is not None, save=save),
        name="kda_forward",
        grid=(B, H, T // C // n),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        scratch_shapes=tiles.scratch(step.abreast, K),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        interpret=current().interpret,
    )(*(x for x, _ in inputs))


def tokens_of(
    at: Any, q_ref: Any, k_ref: Any, beta: Float32[Array, "1 C"], powers: Any, rows: Any, pairs: Masks, tiles: Tiling
) -> Tokens:
    """Tokens `at` of the refs, whose factors `decays` has written."""
    q, k = q_ref[at, :].astype(jnp.float32), k_ref[at, :].astype(jnp.float32)
    return tokens(q, k, k * in_columns(beta, k.shape[1]), powers, rows, pairs, tiles)


def applied(
    solve: Float32[Array, "C C"], v: Float[Array, "C V"], k_read: Float32[Array, "C K"], dtype: Any
) -> tuple[Float32[Array, "C V"], Float32[Array, "C K"]]:
    """(I + L)^-1 times v and k: what the tokens write if the state before them is zero, and what they have seen of one."""
    both = dot(solve, columns_of(v.astype(jnp.float32), k_read), dtype)
    return both[:, : v.shape[1]], both[:, v.shape[1] :]


def _kernel(*refs: Any, tiles: Tiling, step: Steps, has_resets: bool, save: bool) -> None:
    q_ref, k_ref, v_ref, log_decay_ref, beta_ref, first_ref, *others = refs
    resets_ref = others.pop(0) if has_resets else None
    o_ref, state_ref, *saved_ref, powers_ref, rows_ref = others
    dtype = q_ref.dtype
    each = range(step.abreast)

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_ref[...] = first_ref[...]

    def some(i: Any) -> None:
        chunks = step.of(i)
        at = [pl.ds(pl.multiple_of(c * C, C), C) for c in chunks]
        pairs = [masks(tiles, resets_ref[c]) for c in chunks] if resets_ref is not None else [masks(tiles, None)] * step.abreast
        powers, rows = ([ref.at[j] for j in each] for ref in (powers_ref, rows_ref))
        last = [masked(pairs[j].last_reads, decays(log_decay_ref.at[at[j]], powers[j], rows[j], tiles)) for j in each]
        x = [tokens_of(at[j], q_ref, k_ref, beta_ref[chunks[j]], powers[j], rows[j], pairs[j], tiles) for j in each]
        A, L = zip(*(products(x[j], pairs[j], tiles, dtype) for j in each), strict=True)
        solve = [inverse(L[j], pairs[j], tiles, dtype) for j in each]
        wanted, seen = zip(*(applied(solve[j], v_ref[at[j], :], x[j].k_read, dtype) for j in each), strict=True)
        reads = [rows_of(x[j].q_read, seen[j]) for j in each]
        writes = [rows_of(A[j], x[j].w_keep.T) for j in each]
        decay = [in_columns(last[j], state_ref.shape[1]) for j in each]
        state = state_ref[...]
        for j in each:
            if save:
                saved_ref[0][chunks[j]] = state
            read = dot(reads[j], state, dtype)
            written = dot(writes[j], wanted[j] - read[C:], dtype)
            o_ref[at[j], :] = (read[:C] + written[:C]).astype(o_ref.dtype)
            state = state * decay[j] + written[C:]
        state_ref[...] = state

    step.run(some)
