"""The forward kernel: chunk after chunk, the state in VMEM.

From one state to the next lead two products, for (I + L)^-1 (v - k S) is the difference of what a chunk wants to write and of
what it has seen: the chain. Before it, and for several chunks side by side, the front makes factors and pair products, and the
middle the inverse and what it is applied to. Each of the three mostly waits for something else: for stores, for products of its
own, for the state. So they run beside each other, each on a later group of chunks than the next, and what one leaves to another
lies in VMEM. The pipeline runs on from grid step to grid step: the chain, and with it the output, is whole steps behind. A head
takes as many steps more, in which the chain at the begin and the front at the end work on what counts for nothing.

Operands that share a factor are stacked, loading it into the matrix unit costs too; first the rows that the next product needs.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda.tpu_chunk import (
    HALVES,
    SMALL,
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
    inverses,
    masked,
    masks,
    products,
    rows_of,
    steps,
    tokens,
    triangles,
)
from pallas_kernels.target import current, in_hbm

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
    end = T // C // n
    blocks, late_blocks = Blocks(n, lambda i: jnp.minimum(i, end - 1)), Blocks(n, lambda i: jnp.maximum(i - step.lag, 0))
    by_token, by_chunk, whole = blocks.by_token, blocks.by_chunk, blocks.whole(K, V)
    inputs = [(q, by_token(K)), (k, by_token(K)), (v, by_token(V)), (log_decay, by_token(K)), (beta, by_chunk(1, C))]
    inputs.append((state, whole))
    if resets is not None:
        inputs.append((resets, blocks.of_all_heads()))
    outputs = [(jax.ShapeDtypeStruct(v.shape, v.dtype), late_blocks.by_token(V))]
    outputs.append((jax.ShapeDtypeStruct(state.shape, jnp.float32), whole))
    if save:
        outputs.append((jax.ShapeDtypeStruct((B, H, T // C, K, V), jnp.float32), late_blocks.by_chunk(K, V)))
    return pl.pallas_call(
        partial(_kernel, tiles=tiles, step=step, has_resets=resets is not None, save=save),
        name="kda_forward",
        grid=(B, H, end + step.lag),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        scratch_shapes=[tiles.rows(step.abreast, K), *Kept.scratch(step.abreast, step.lag * step.groups, K, V, q.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        interpret=current().interpret,
    )(*in_hbm(*(x for x, _ in inputs)))


def tokens_of(
    q: Float[Array, "C K"], k: Float[Array, "C K"], beta: Float32[Array, "1 C"], reads: Float32[Array, "C K"],
    writes: Float32[Array, "C K"], rows: Any, pairs: Masks, tiles: Tiling,
) -> Tokens:
    """With the factors that `decays` returns and writes."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    return tokens(q * reads, k * reads, k * in_columns(beta, k.shape[1]) * writes, rows, pairs, tiles)


def applied(
    solve: Float32[Array, "C C"], v: Float[Array, "C V"], k_read: Float[Array, "C K"], dtype: Any
) -> tuple[Float32[Array, "C V"], Float32[Array, "C K"]]:
    """(I + L)^-1 times v and k: what the tokens write if the state before them is zero, and what they have seen of one.
    v and k_read have one dtype."""
    both = dot(solve, columns_of(v, k_read), dtype)
    return both[:, : v.shape[1]], both[:, v.shape[1] :]


class Kept(NamedTuple):
    """Refs for what a stage leaves to later ones of the same n chunks, each for as many groups as lie between the stages."""

    block: Any  # [n, 8, C]
    parts: Any  # [n, 4, C / 2, C]
    k_read: Any  # [n, C, K]
    v: Any  # [n, C, V]
    wanted: Any  # [n, C, V]
    seen: Any  # [n, C, K]
    q_read: Any  # [n, C, K]
    writes: Any  # [n, K + C, C]: w_keep'; A
    last: Any  # [n, 1, K]: the decay of the whole chunk

    @staticmethod
    def scratch(n: int, lag: int, K: int, V: int, dtype: Any) -> list[Any]:
        """lag: groups from the front to the chain."""

        def ref(groups: int, *shape: int, dtype: Any = dtype) -> Any:
            return pltpu.VMEM((groups, n, *shape), dtype)

        fp32 = partial(ref, dtype=jnp.float32)
        to_middle = fp32(2, SMALL, C), ref(2, len(HALVES), C // 2, C), ref(2, C, K), ref(2, C, V)
        to_chain = fp32(lag, C, V), ref(lag, C, K), ref(lag + 1, C, K), ref(lag + 1, K + C, C), fp32(lag + 1, 1, K)
        return [*to_middle, *to_chain]

    def of(self, i: Any) -> "Kept":
        """Those of group i >= 0."""
        return Kept(*(ref.at[lax.rem(i, ref.shape[0])] for ref in self))


def by_turns(*parts: Iterator[None]) -> None:
    """Traces the parts a step each in turn, for the compiler follows the order of a program."""
    left = list(parts)
    while left:
        left = [part for part in left if next(part, left) is None]


def _kernel(*refs: Any, tiles: Tiling, step: Steps, has_resets: bool, save: bool) -> None:
    q_ref, k_ref, v_ref, log_decay_ref, beta_ref, first_ref, *others = refs
    resets_ref = others.pop(0) if has_resets else None
    o_ref, state_ref, *saved_ref, rows_ref = others[:-len(Kept._fields)]
    kept = Kept(*others[-len(Kept._fields):])
    dtype = q_ref.dtype
    each = range(step.abreast)
    now = pl.program_id(2)

    def front(i: Any) -> Iterator[None]:
        chunks, own = step.of(lax.rem(i, step.groups)), kept.of(i)
        at = [pl.ds(pl.multiple_of(c * C, C), C) for c in chunks]
        for j in each:
            pairs = masks(tiles, None if resets_ref is None else resets_ref[chunks[j]])
            rows = rows_ref.at[j]
            reads, writes, last = decays(log_decay_ref[at[j], :], rows, tiles)
            own.last[j] = masked(pairs.last_reads, last)
            x = tokens_of(q_ref[at[j], :], k_ref[at[j], :], beta_ref[chunks[j]], reads, writes, rows, pairs, tiles)
            own.q_read[j], own.k_read[j], own.v[j] = x.q_read.astype(dtype), x.k_read.astype(dtype), v_ref[at[j], :]
            yield
            A, L = products(x, pairs, tiles, dtype)
            own.writes[j] = rows_of(x.w_keep.T, A).astype(dtype)
            own.block[j], parts = triangles(L, pairs, tiles)
            for level, part in enumerate(parts):
                own.parts[j, level] = part.astype(dtype)
            yield

    def middle(i: Any) -> Iterator[None]:
        own = kept.of(i)
        parts = [[own.parts.at[j, level] for level in range(len(HALVES))] for j in each]
        solve = yield from inverses([own.block[j] for j in each], parts, dtype)
        for j in each:
            own.wanted[j], seen = applied(solve[j], own.v[j], own.k_read[j], dtype)
            own.seen[j] = seen.astype(dtype)

    def chain(i: Any) -> Iterator[None]:
        own = kept.of(i)
        state = state_ref[...]
        for j, c in enumerate(step.of(lax.rem(i, step.groups))):
            if save:
                saved_ref[0][c] = state
            read = dot(rows_of(own.seen[j], own.q_read[j]), state, dtype)
            yield
            written = dot(own.writes[j], own.wanted[j] - read[:C], dtype)
            o_ref[pl.ds(pl.multiple_of(c * C, C), C), :] = (read[C:] + written[-C:]).astype(o_ref.dtype)
            state = state * in_columns(own.last[j], state.shape[1]) + written[:-C]
            yield
        state_ref[...] = state

    @pl.when(now == step.lag)  # whatever the chain made of it before
    def _():
        state_ref[...] = first_ref[...]

    def stages(g: Any) -> None:
        i = (now + step.lag) * step.groups + g
        by_turns(chain(i - step.lag * step.groups), middle(i - 1), front(i))

    step.run(stages)
