"""What both TPU kernels of the mix share: how tokens become tiles, loops over a tile, scores, softmax and weighted sum.

A grid step holds `rows` tokens of every source in VMEM. Each slot is an operand of its own, so that the index map of one that
is not in use can stay at one place: it is copied once in all, and no work is done for it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

LANES = 128
GROUP = 16  # tokens that the loops take at once: those of one packed bf16 register
WIDTH = 7 * LANES  # channels that are loaded and stored at once
SPAN = 4 * WIDTH  # channels in the body of a loop
VMEM = 16 * 2**20  # bytes that tiles may take
LIMIT = 20 * 2**20  # bytes that a kernel may take with all that the compiler adds; every generation has 64 MiB or more

Column = Float32[Array, "rows 1"]  # one number per token


def rows_per_step(tokens: int, bytes_per_token: int) -> int:
    """Tokens of a grid step: a divisor of `tokens`, itself a multiple of GROUP, that leaves four steps where it can."""
    rows = GROUP
    while tokens % (2 * rows) == 0 and 2 * rows * bytes_per_token <= VMEM and tokens >= 8 * rows:
        rows *= 2
    return rows


def flat(x: Float[Array, "*N B T D"]) -> Float[Array, "*N R D"]:
    """Tokens of all batch rows in one axis, padded to a multiple of GROUP."""
    x = x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
    more = -x.shape[-2] % GROUP
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, more), (0, 0)]) if more else x


def source_specs(N: int, rows: int, D: int) -> list[pl.BlockSpec]:
    """For `blocks` N times, then the prefix."""

    def slot(n: int) -> pl.BlockSpec:
        def index(i: Array, count: Any) -> tuple[Any, Any, int]:
            used = n < count[0]
            return jnp.where(used, n, 0), jnp.where(used, i, 0), 0

        return pl.BlockSpec((None, rows, D), index)

    return [*map(slot, range(N)), token_spec(rows, D)]


def token_spec(rows: int, D: int) -> pl.BlockSpec:
    return pl.BlockSpec((rows, D), lambda i, count: (i, 0))


def weight_spec(D: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, D), lambda i, count: (0, 0))


def scratch(*shape: int) -> Any:
    return pltpu.VMEM(shape, jnp.float32)


def params() -> Any:
    return pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=LIMIT)


def each_slot(N: int, count: Array, f: Callable[[int], None]) -> None:
    """f(n) for slots in use."""
    for n in range(N):
        pl.when(n < count)(partial(f, n))


def each_source(N: int, count: Array, f: Callable[[int], None]) -> None:
    """f(n) for slots in use, then for the prefix, which is source N."""
    each_slot(N, count, f)
    f(N)


def each_piece(rows: int, D: int, body: Callable[[Any, slice], None], span: int = SPAN) -> None:
    """body(at, j) for GROUP tokens `at` and WIDTH channels `j` at a time.

    Each loop goes over groups of tokens and has `span` channels in its body: addresses are constants from one base, and
    what is under way fits the registers.
    """
    for pieces in _spans(D, span):
        _each_group(rows, lambda at, pieces=pieces: [body(at, j) for j in pieces])


def row_sums(rows: int, D: int, terms: Callable[[Any, slice], Sequence[Array]], *sums: Any) -> None:
    """Writes the sums over D of each term to a ref [rows, 128] of `sums`, as those of every 128th channel."""

    def add(at: Any, pieces: list[slice]) -> None:
        totals = [ref[at] if pieces[0].start else jnp.zeros((GROUP, LANES), jnp.float32) for ref in sums]
        for j in pieces:
            totals = [total + fold(x) for total, x in zip(totals, terms(at, j), strict=True)]
        for ref, total in zip(sums, totals, strict=True):
            ref[at] = total

    for pieces in _spans(D, SPAN // len(sums)):
        _each_group(rows, partial(add, pieces=pieces))


def _spans(D: int, span: int) -> list[list[slice]]:
    """The channels in spans, each in pieces of WIDTH."""
    ends = [(i, min(i + span, D)) for i in range(0, D, span)]
    return [[slice(j, min(j + WIDTH, end)) for j in range(begin, end, WIDTH)] for begin, end in ends]


def _each_group(rows: int, body: Callable[[Any], Any]) -> None:
    def step(i: Array, carry: None) -> None:
        body(pl.ds(pl.multiple_of(i * GROUP, GROUP), GROUP))

    jax.lax.fori_loop(0, rows // GROUP, step, None)


def column(partial_sums: Float32[Array, "rows 128"]) -> Column:
    return jnp.sum(partial_sums, -1, keepdims=True)


def spread(x: Column) -> Float32[Array, "rows 128"]:
    return jnp.broadcast_to(x, (x.shape[0], LANES))


def fold(x: Float32[Array, "rows C"]) -> Float32[Array, "rows 128"]:
    """Sums of every 128th channel."""
    parts = [x[:, j : j + LANES] for j in range(0, x.shape[1], LANES)]
    return sum(parts[1:], parts[0])


def wide(x: Float32[Array, "rows 128"], like: Float32[Array, "rows C"]) -> Float32[Array, "rows C"]:
    """x, equal in all lanes, over the channels of `like`; costs nothing."""
    return jnp.concatenate([x] * (like.shape[1] // LANES), 1)


def rounded(x: Float32[Array, "*S"], dtype: Any) -> Float32[Array, "*S"]:
    return x.astype(dtype).astype(jnp.float32)


def softmax(
    eps: float, count: Array, sources: Sequence[Any], weight: Any, dot: Any, square: Any
) -> tuple[list[Column], list[Column], list[Column]]:
    """Probabilities, scores and r of the sources; 0, -inf and 0 for slots not in use.

    dot, square  [N + 1, rows, 128] to hold partial sums over D of v weight and v**2
    """
    N, (rows, D) = len(sources) - 1, sources[-1].shape

    def sums(n: int) -> None:
        def terms(at: Any, j: slice) -> tuple[Array, Array]:
            v = sources[n][at, j].astype(jnp.float32)
            return v * weight[:, j], v * v

        row_sums(rows, D, terms, dot.at[n], square.at[n])

    each_source(N, count, sums)
    r = [jax.lax.rsqrt(column(square[n]) / D + eps) for n in range(N + 1)]
    score = [column(dot[n]) * r[n] for n in range(N + 1)]
    for n in range(N):
        score[n], r[n] = jnp.where(n < count, score[n], -jnp.inf), jnp.where(n < count, r[n], 0.0)
    top = score[N]
    for s in score[:N]:
        top = jnp.maximum(top, s)
    exponential = [jnp.exp(s - top) for s in score]
    total = sum(exponential[:N], exponential[N])
    return [e / total for e in exponential], score, r


def weighted_sum(count: Array, sources: Sequence[Any], factor: Any, total: Any) -> None:
    """total = sum_n factor_n v_n, with factors spread over lanes."""
    N, (rows, D) = len(sources) - 1, sources[-1].shape

    def add(n: int) -> None:
        def piece(at: Any, j: slice) -> None:
            v = sources[n][at, j].astype(jnp.float32)
            term = wide(factor[n, at], v) * v
            total[at, j] = term if n == N else total[at, j] + term

        each_piece(rows, D, piece)

    add(N)
    each_slot(N, count, add)
