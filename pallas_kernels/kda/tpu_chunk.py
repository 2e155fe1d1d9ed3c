"""What the forward and the backward TPU kernel share: decay factors, pair products and the triangular inverse of one chunk.

Every decay between two tokens is split at a point where both sides are finite. A chunk of C tokens is cut into tiles of 16, 8 or
4, small enough that no sum of log decays within one is below -80. With G_t the sum from the begin of t's tile to t (inclusive)
and c = e^40, which moves the factors to the middle of the range of exponents, a token stands for

    as a reader   q c e^G, k c e^G
    as a writer   beta k e^-G / c

and a pair of one tile is a product of these: a function of earlier tokens only, bit for bit. For pairs of different tiles take
the smallest aligned block of 2, 4, 8 ... tiles that holds both (its `level`): the reader is in its later half and decays from the
middle of the block, the writer is in the earlier half and decays up to there. That is the token's factor times one of its tile: a
row per tile, not a number per token, as are the factors from the chunk's begin to the reader and from the writer to its end.
"""

from collections.abc import Callable, Generator, Sequence
from math import exp
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda.tiles import RANGE, tile

C = 128  # tokens of a chunk: the width of a vector register, so that a [C, C] array fills registers
SHIFT = RANGE / 2  # log c: small components of k and beta remain normal numbers, in fp32 and bf16, times e^40 and e^-40
VMEM = 32 * 2**20  # bytes that XLA leaves to a kernel
ORIGIN = 28  # 32 + ORIGIN + x for x in (-28, 0] has the exponent of 32: the mantissa's bits are ORIGIN + x in units of GRID
GRID = 2.0**-18
SMALL = 8  # tokens whose triangle is inverted by substitution: the rows of one register
HALVES = 8, 16, 32, 64  # tokens, of the levels of the inverse


class Tiling(NamedTuple):
    """size: tokens of a tile; floor: log decays below it are taken for it; promised: there are none, says the caller."""

    size: int
    floor: float
    promised: bool

    @property
    def number(self) -> int:
        return C // self.size

    @property
    def levels(self) -> tuple[int, ...]:
        """Tokens in half a block of each level."""
        return tuple(self.size << i for i in range((C // self.size).bit_length() - 1))

    @property
    def inner(self) -> tuple[int, ...]:
        """The same within a tile, down to SMALL."""
        return tuple(SMALL << i for i in range((self.size // SMALL).bit_length() - 1)) if self.size > SMALL else ()

    @property
    def read(self) -> int:
        """Where the rows from the chunk's begin lie, behind those of the levels."""
        return len(self.levels)

    @property
    def keep(self) -> int:
        """Where the rows up to the chunk's end lie."""
        return len(self.levels) + 1

    def rows(self, chunks: int, K: int) -> Any:
        """VMEM for the rows."""
        return pltpu.VMEM((chunks, len(self.levels) + 2, self.number, K), jnp.float32)


class Steps(NamedTuple):
    """chunks: of a grid step, enough that fetching those of the next takes no longer; abreast: of them at a time, a group, so
    that products of one run while others wait for theirs."""

    chunks: int
    abreast: int

    @property
    def groups(self) -> int:
        return self.chunks // self.abreast

    @property
    def lag(self) -> int:
        """Grid steps that hold at least two groups."""
        return 1 if self.groups > 1 else 2

    def of(self, i: Any) -> list[Any]:
        """The chunks of the i-th group."""
        return [i * self.abreast + j for j in range(self.abreast)]

    def run(self, body: Callable[[Any], None]) -> None:
        """body(i) for each group."""
        if self.groups == 1:
            body(0)
        else:
            lax.fori_loop(0, self.groups, lambda i, _: body(i), None)


def steps(T: int, abreast: int) -> Steps:
    """For T tokens, a multiple of C."""
    chunks = next(n for n in range(8, 0, -1) if T // C % n == 0)
    return Steps(chunks, next(n for n in range(abreast, 0, -1) if chunks % n == 0))


class Blocks(NamedTuple):
    """What a grid step takes of arrays of B rows and H heads: `chunks` chunks, from block at(i) of its tokens in step i."""

    chunks: int
    at: Callable[[Any], Any]

    def by_token(self, width: int) -> pl.BlockSpec:
        """Of [B, H, T, width]."""
        return pl.BlockSpec((None, None, self.chunks * C, width), lambda b, h, i: (b, h, self.at(i), 0))

    def by_chunk(self, *sizes: int) -> pl.BlockSpec:
        """Of [B, H, N, *sizes], two sizes."""
        return pl.BlockSpec((None, None, self.chunks, *sizes), lambda b, h, i: (b, h, self.at(i), 0, 0))

    def of_all_heads(self) -> pl.BlockSpec:
        """Of [B, N, 1, C]."""
        return pl.BlockSpec((None, self.chunks, 1, C), lambda b, h, i: (b, self.at(i), 0, 0))

    def whole(self, K: int, V: int) -> pl.BlockSpec:
        """The head's own [K, V] in every step, of [B, H, K, V]."""
        return pl.BlockSpec((None, None, K, V), lambda b, h, i: (b, h, 0, 0))


def tiling(decay_floor: float | None, dtype: Any) -> Tiling:
    """The largest tiles for decays above `decay_floor` (None: unbounded)."""
    size, floor = tile(decay_floor, dtype)
    return Tiling(size, floor, floor == decay_floor)


def dot(a: Float[Array, "I J"], b: Float[Array, "J K"], dtype: Any, *, across: int = 0) -> Float32[Array, "I K"]:
    """a b, or with across=1 a b'; multiplied in `dtype`, fp32 at full precision; summed in fp32."""
    precision = lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
    dims = (((1,), (across,)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, precision=precision, preferred_element_type=jnp.float32)


def rows_of(*parts: Float[Array, "I J"]) -> Float[Array, "sum_I J"]:
    return jnp.concatenate(parts, 0)


def columns_of(*parts: Float[Array, "I J"]) -> Float[Array, "I sum_J"]:
    return jnp.concatenate(parts, 1)


def early(x: Float[Array, "C J"], half: int) -> Float[Array, "C/2 J"]:
    """The rows of the earlier halves of all blocks."""
    return rows_of(*(x[i : i + half] for i in range(0, C, 2 * half)))


def late(x: Float[Array, "C J"], half: int) -> Float[Array, "C/2 J"]:
    return rows_of(*(x[i + half : i + 2 * half] for i in range(0, C, 2 * half)))


def merged(earlier: Float[Array, "C/2 J"], later: Float[Array, "C/2 J"], half: int) -> Float[Array, "C J"]:
    """The array whose `early` and `late` these are."""
    return rows_of(*(x[i : i + half] for i in range(0, C // 2, half) for x in (earlier, later)))


def in_late_half(tiles: Tiling, half: int) -> Array:
    """Of each tile, whether it is in the later half of its block."""
    return lax.broadcasted_iota(jnp.int32, (tiles.number, 1), 0) // (half // tiles.size) % 2 == 1


def sibling(x: Float32[Array, "n K"], is_late: Array, by: int) -> Float32[Array, "n K"]:
    """Each tile's row at its place in the other half of the block, which begins `by` tiles before or after."""
    return jnp.where(is_late, pltpu.roll(x, by, 0), pltpu.roll(x, len(x) - by, 0))


def sums_in_tiles(x: Float32[Array, "C K"], tiles: Tiling) -> Float32[Array, "C K"]:
    """SHIFT and the sum over each token's tile up to the token, for x > -28. In fixed point: rounded each by itself, sums of
    neighbours would not differ by the log decay of one."""
    x = lax.bitcast_convert_type(x + float(32 + ORIGIN), jnp.int32) & 0x7FFFFF
    number = lax.broadcasted_iota(jnp.int32, x.shape, 0) % tiles.size + 1
    row = lax.broadcasted_iota(jnp.int32, (1, SMALL, x.shape[1]), 1) % tiles.size
    parts = x.reshape(C // SMALL, SMALL, -1)
    for by in (1, 2, 4)[: tiles.size.bit_length() - 1]:
        parts += jnp.where(row >= by, pltpu.roll(parts, by, 1), 0)
    if tiles.size > SMALL:
        first, second = (parts.reshape(tiles.number, 2, SMALL, -1)[:, i : i + 1] for i in (0, 1))
        parts = jnp.concatenate([first, second + first[:, :, SMALL - 1 :]], 1)
    return (parts.reshape(x.shape) + (int(SHIFT) - ORIGIN * number) * int(1 / GRID)).astype(jnp.float32) * GRID


def sums_of_tiles(x: Float32[Array, "C K"], tiles: Tiling) -> Float32[Array, "n K"]:
    """Of all tokens of each tile, in fp32: what a state decays by, tile after tile, must not be rounded to GRID each time."""
    parts = x.reshape(C // SMALL, SMALL, -1)
    for by in (1, 2, 4)[: tiles.size.bit_length() - 1]:
        parts += pltpu.roll(parts, by, 1)
    sums = parts.reshape(x.shape)  # the last row of a tile, or of each SMALL of its tokens, has their sum
    ends = range(tiles.size - 1, C, tiles.size)
    return rows_of(*(sums[i : i + 1] + sums[i - SMALL : i - SMALL + 1] if tiles.size > SMALL else sums[i : i + 1] for i in ends))


def decays(
    log_decay: Float32[Array, "C K"], rows: Any, tiles: Tiling
) -> tuple[Float32[Array, "C K"], Float32[Array, "C K"], Float32[Array, "1 K"]]:
    """c e^G and e^-G / c of each token, the decay of the whole chunk; writes the factors of the tiles to the ref `rows`."""
    log_decay = jnp.maximum(log_decay, tiles.floor)
    sums = sums_in_tiles(log_decay, tiles)
    total = rows_of(*(sums[i - 1 : i] for i in range(tiles.size, C + 1, tiles.size)))
    begin, end = jnp.full(total.shape, exp(-SHIFT), jnp.float32), jnp.exp(total)
    whole = jnp.exp(sums_of_tiles(log_decay, tiles))
    for level, half in enumerate(tiles.levels):
        is_late = in_late_half(tiles, half)
        rows[level] = jnp.where(is_late, begin, end)
        other = sibling(whole, is_late, half // tiles.size)
        begin *= jnp.where(is_late, other, 1.0)
        end *= jnp.where(is_late, 1.0, other)
        whole *= other
    rows[tiles.read], rows[tiles.keep] = begin, end
    return jnp.exp(sums), jnp.exp(-sums), whole[:1]


def by_rows(x: Float32[Array, "I K"], rows: Any, tiles: Tiling, which: Sequence[int] | None = None) -> Float32[Array, "I K"]:
    """Tokens times the row of their tile; x holds those of the tiles `which`, or all."""
    size = tiles.size
    which = range(tiles.number) if which is None else which
    return rows_of(*(x[i * size : (i + 1) * size] * rows[j : j + 1] for i, j in enumerate(which)))


def late_by_rows(x: Float32[Array, "C/2 K"], rows: Any, tiles: Tiling, half: int) -> Float32[Array, "C/2 K"]:
    return by_rows(x, rows, tiles, [j for j in range(tiles.number) if j * tiles.size // half % 2 == 1])


def early_by_rows(x: Float32[Array, "C/2 K"], rows: Any, tiles: Tiling, half: int) -> Float32[Array, "C/2 K"]:
    return by_rows(x, rows, tiles, [j for j in range(tiles.number) if j * tiles.size // half % 2 == 0])


class Masks(NamedTuple):
    """All bits set where a pair, or with resets a token, counts. (Selected by `and`: a pair that does not may be infinite.)"""

    upto: Int32[Array, "C C"]  # t >= s in one tile
    before: Int32[Array, "C C"]  # t > s in one tile
    after: Int32[Array, "C C"]  # the same pairs, s by row
    inner: tuple[Int32[Array, "C/2 C"], ...]  # pairs of late rows in blocks smaller than a tile
    levels: tuple[Int32[Array, "C/2 C"] | None, ...]  # pairs of late rows t with s
    levels_st: tuple[Int32[Array, "C/2 C"] | None, ...]  # of early rows s with t
    reads: Int32[Array, "C C"] | None  # rows of tokens that read the state before the chunk
    keeps: Int32[Array, "C C"] | None  # rows of tokens that are kept in the state after it
    last_reads: Int32[Array, "1 C"] | None


def masks(tiles: Tiling, resets: Int32[Array, "1 C"] | None) -> Masks:
    """resets: how many there were in the chunk up to each token."""
    t, s = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    one_tile = t // tiles.size == s // tiles.size
    same = None
    reads = keeps = last_reads = None
    if resets is not None:
        count = jnp.broadcast_to(resets.astype(jnp.float32), (C, C))
        column = count.T
        same = bits(count == column)
        reads, keeps = bits(column == 0), bits(column == column[C - 1 :])
        last_reads = reads[C - 1 :]

    row, lane = (lax.broadcasted_iota(jnp.int32, (C // 2, C), axis) for axis in (0, 1))

    def blocks(half, part):
        one_block = None if half == C // 2 else bits(row // half == lane // (2 * half))
        return _both(one_block, None if same is None else part(same, half))

    own = [bits(row // half * 2 == lane // half) for half in tiles.inner]
    inner = tuple(_both(m, None if same is None else late(same, half)) for m, half in zip(own, tiles.inner, strict=True))
    upto, before, after = (_both(bits(one_tile & m), same) for m in (t >= s, t > s, t < s))
    levels, levels_st = (tuple(blocks(half, part) for half in tiles.levels) for part in (late, early))
    return Masks(upto, before, after, inner, levels, levels_st, reads, keeps, last_reads)


def bits(mask: Array) -> Int32[Array, "..."]:
    return jnp.where(mask, -1, 0)


def _both(a: Array | None, b: Array | None) -> Any:
    return b if a is None else a if b is None else a & b


def masked(mask: Int32[Array, "..."] | None, x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    if mask is None:
        return x
    width = x.shape[1] // mask.shape[1]
    mask = mask if width == 1 else columns_of(*[mask] * width)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & mask, jnp.float32)


def in_columns(row: Float32[Array, "1 R"], width: int) -> Float32[Array, "R width"]:
    """A number per row, in all its lanes."""
    return jnp.broadcast_to(row, (width, row.shape[1])).T


class Tokens(NamedTuple):
    """A chunk's tokens as readers and as writers (see above), and each with the factor of the level, of `read` or of `keep`."""

    q: Float32[Array, "C K"]
    k: Float32[Array, "C K"]
    w: Float32[Array, "C K"]
    levels: tuple[tuple[Float32[Array, "C/2 K"], Float32[Array, "C/2 K"], Float32[Array, "C/2 K"]], ...]  # late q and k, early w
    q_read: Float32[Array, "C K"]
    k_read: Float32[Array, "C K"]
    w_keep: Float32[Array, "C K"]


def tokens(
    q: Float32[Array, "C K"], k: Float32[Array, "C K"], w: Float32[Array, "C K"], rows: Any, pairs: Masks, tiles: Tiling
) -> Tokens:
    """Of q and k times c e^G, w = beta k times e^-G / c."""
    levels = tuple(
        (late_by_rows(late(q, half), rows.at[i], tiles, half), late_by_rows(late(k, half), rows.at[i], tiles, half),
         early_by_rows(early(w, half), rows.at[i], tiles, half))
        for i, half in enumerate(tiles.levels)
    )
    read, keep = rows.at[tiles.read], rows.at[tiles.keep]
    q_read, k_read = (masked(pairs.reads, by_rows(x, read, tiles)) for x in (q, k))
    return Tokens(q, k, w, levels, q_read, k_read, masked(pairs.keeps, by_rows(w, keep, tiles)))


def products(x: Tokens, pairs: Masks, tiles: Tiling, dtype: Any) -> tuple[Float32[Array, "C C"], list[Float32[Array, "R C"]]]:
    """A, and L in parts: of the tiles [C, C], then of each level, its late rows [C/2, C]. Both are times beta of the writer."""
    both = dot(rows_of(x.q, x.k), x.w, dtype, across=1)
    A, L = masked(pairs.upto, both[:C]), [masked(pairs.before, both[C:])]
    for half, mask, (q, k, w) in zip(tiles.levels, pairs.levels, x.levels, strict=True):
        both = dot(rows_of(q, k), merged(w, jnp.zeros_like(w), half), dtype, across=1)
        A = merged(early(A, half), late(A, half) + masked(mask, both[: C // 2]), half)
        L.append(masked(mask, both[C // 2 :]))
    return A, L


def result_of(part: Generator[None, None, Any]) -> Any:
    """What a part returns that is traced alone."""
    while True:
        try:
            next(part)
        except StopIteration as end:
            return end.value


def triangles(
    L: list[Float32[Array, "R C"]], pairs: Masks, tiles: Tiling
) -> tuple[Float32[Array, "8 C"], list[Float32[Array, "C/2 C"]]]:
    """L as `inverses` takes it: the triangles of SMALL tokens side by side, and the late rows of each of HALVES."""
    small, *levels = L
    if tiles.size < SMALL:
        small = merged(early(small, tiles.size), late(small, tiles.size) + levels.pop(0), tiles.size)
    block: Any = sum(masked(own, small[i * SMALL : (i + 1) * SMALL]) for i, own in enumerate(_own()))
    inner = [masked(mask, late(small, half)) for half, mask in zip(tiles.inner, pairs.inner, strict=True)]
    return block, [*inner, *levels]


def _own() -> list[Int32[Array, "8 C"]]:
    """Masks of the SMALL columns of each triangle."""
    lane = lax.broadcasted_iota(jnp.int32, (SMALL, C), 1)
    return [bits(lane // SMALL == i) for i in range(C // SMALL)]


def inverses(
    blocks: Sequence[Float32[Array, "8 C"]], parts: Sequence[Sequence[Any]], dtype: Any
) -> Generator[None, None, list[Float32[Array, "C C"]]]:
    """(I + L)^-1 of each chunk: by substitution within SMALL tokens, then by halves. parts: arrays or refs.

    No powers of L, which grow where keys repeat. Step by step for all chunks, since the compiler keeps the order of products.
    """
    lane = lax.broadcasted_iota(jnp.int32, (SMALL, C), 1)
    row = lax.broadcasted_iota(jnp.int32, (SMALL, C), 0)
    solved = [jnp.where(lane % SMALL == row, 1.0, 0.0)] * len(blocks)
    for s in range(SMALL - 1):
        columns = [jnp.take_along_axis(block, lane // SMALL * SMALL + s, axis=1) for block in blocks]
        solved = [x - column * x[s : s + 1] for x, column in zip(solved, columns, strict=True)]
    yield
    whole = [rows_of(*(masked(own, x) for own in _own())) for x in solved]
    for i, half in enumerate(HALVES):
        inside = [dot(part[i][...], x, dtype) for part, x in zip(parts, whole, strict=True)]
        inside = [merged(jnp.zeros_like(x), x, half) for x in inside]
        yield
        later = [late(x, half) for x in whole]
        later = [x - dot(x, y, dtype) for x, y in zip(later, inside, strict=True)]
        whole = [merged(early(x, half), y, half) for x, y in zip(whole, later, strict=True)]
        yield
    return whole
