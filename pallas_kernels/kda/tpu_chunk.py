"""What the forward and the backward TPU kernel share: decay factors, pair products and the triangular inverse of one chunk.

A chunk of C tokens is cut into tiles of 16, 8 or 4, small enough that no sum of log decays within one is below -80. With G the
sum of log decays from the begin of a token's tile to the token (inclusive) and E that of a whole tile:

    pairs of one tile            e^(G_t) e^(-G_s): each finite in fp32 and bf16, each a function of earlier tokens only
    pairs of different tiles     split at the middle of the smallest aligned block of 2, 4, 8 ... tiles that holds both:
                                 t decays from the middle, s up to the middle; both factors are <= 1

Only the tokens' own e^G and e^-G are exponentials: e^(E - G) is their product, and what lies between a tile and a middle is a
product of whole tiles, one row per tile. A sum over 16 tokens of a tile is a sum of registers once the tokens are read with a
stride of the tile size: register p then holds token p of every tile.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

C = 128  # tokens of a chunk: the width of a vector register, so that a [C, C] array fills registers
RANGE = 80.0  # nats that a tile may decay: e^80 and e^-80 are normal numbers in fp32 and bf16
CENTER = 2.0**58  # about e^(RANGE / 2): moves e^G to the middle of the range, and small components stay normal numbers
LIMIT = {jnp.dtype(jnp.float32): -20.0, jnp.dtype(jnp.bfloat16): -10.0}  # e^limit is below the rounding of a product


class Tiling(NamedTuple):
    """size: tokens of a tile; floor: log decays below it are taken for it."""

    size: int
    floor: float

    @property
    def levels(self) -> tuple[int, ...]:
        """Tokens in half a block of each level."""
        return tuple(self.size << i for i in range((C // self.size).bit_length() - 1))


def tiling(decay_floor: float | None, dtype: Any) -> Tiling:
    """The largest tiles for decays above `decay_floor` (None: unbounded)."""
    limit = LIMIT[jnp.dtype(dtype)]
    floor = limit if decay_floor is None else max(decay_floor, limit)
    size = next(size for size in (16, 8, 4) if -floor * size <= RANGE)
    return Tiling(size, floor)


def dot(a: Float[Array, "I J"], b: Float[Array, "J K"], dtype: Any, *, across: int = 0) -> Float32[Array, "I K"]:
    """a b, or with across=1 a b'; multiplied in `dtype`, fp32 at full precision; summed in fp32."""
    precision = lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
    dims = (((1,), (across,)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, precision=precision, preferred_element_type=jnp.float32)


class Slots(NamedTuple):
    """Where `decays` puts each factor: the levels first."""

    begin: int  # CENTER e^G
    grow: int  # e^-G / CENTER
    read: int  # from the chunk's begin to the token
    keep: int  # from the token to the chunk's end
    number: int


def slots(tiles: Tiling) -> Slots:
    n = len(tiles.levels)
    return Slots(n, n + 1, n + 2, n + 3, n + 4)


def decays(log_decay: Any, factors: Any, tiles: Tiling) -> Float32[Array, "1 K"]:
    """Writes the factors of one head, a [C, K] per slot, to the ref `factors`; returns the decay of the whole chunk.

    log_decay: a ref [C, K].
    """
    size, n = tiles.size, C // tiles.size
    slot = slots(tiles)
    total, begin, grow = 0.0, [], []
    for p in range(size):
        total += jnp.maximum(log_decay[pl.ds(p, n, stride=size), :], tiles.floor)
        begin.append(jnp.exp(total))
        grow.append(jnp.exp(-total))
    whole = begin[-1]
    rest = [x * whole for x in grow]
    before = after = None  # decay between the tile and the middle of its block
    tile = lax.broadcasted_iota(jnp.int32, whole.shape, 0)
    for level, half in enumerate(tiles.levels):
        blocks = half // size
        late = tile // blocks % 2 == 1
        for p in range(size):
            factor = jnp.where(late, begin[p], rest[p])
            if before is not None:
                factor *= jnp.where(late, before, after)
            factors.at[level][pl.ds(p, n, stride=size), :] = factor
        sibling = jnp.where(late, pltpu.roll(whole, blocks, 0), pltpu.roll(whole, n - blocks, 0))
        before = jnp.where(late, sibling, 1.0) * (1.0 if before is None else before)
        after = jnp.where(late, 1.0, sibling) * (1.0 if after is None else after)
        whole *= sibling
    for p in range(size):
        at = pl.ds(p, n, stride=size)
        factors.at[slot.begin][at, :] = begin[p] * CENTER
        factors.at[slot.grow][at, :] = grow[p] * (1 / CENTER)
        factors.at[slot.read][at, :] = begin[p] * before
        factors.at[slot.keep][at, :] = rest[p] * after
    return whole[:1]


class Masks(NamedTuple):
    """Which pairs each product covers, and with resets which tokens read the state before the chunk and are kept after it."""

    tile: Bool[Array, "C C"]  # t > s in one tile
    diagonal: Bool[Array, "C C"]
    levels: tuple[Bool[Array, "C C"], ...]
    reads: Bool[Array, "C 1"] | None
    keeps: Bool[Array, "C 1"] | None
    last_reads: Bool[Array, "1 1"] | None


def masks(tiles: Tiling, resets: Int32[Array, "1 C"] | None, *, transposed: bool = False) -> Masks:
    """resets: how many there were in the chunk up to each token. transposed: pairs as [s, t]."""
    t = lax.broadcasted_iota(jnp.int32, (C, C), int(transposed))
    s = lax.broadcasted_iota(jnp.int32, (C, C), int(not transposed))
    tile = (t // tiles.size == s // tiles.size) & (t > s)
    levels = tuple((t // half == s // half + 1) & (t // half % 2 == 1) for half in tiles.levels)
    if resets is None:
        return Masks(tile, t == s, levels, None, None, None)
    row = jnp.broadcast_to(resets.astype(jnp.float32), (C, C))
    column = row.T
    same = row == column
    last = row[:1, C - 1 :]
    return Masks(
        tile & same, t == s, tuple(level & same for level in levels), column[:, :1] == 0, column[:, :1] == last, last == 0
    )


def masked(mask: Bool[Array, "..."] | None, x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return x if mask is None else jnp.where(mask, x, 0.0)


def products(
    q: Float32[Array, "C K"], k: Float32[Array, "C K"], factors: Any, pairs: Masks, tiles: Tiling, dtype: Any
) -> tuple[Float32[Array, "C C"], list[Float32[Array, "C C"]]]:
    """A, and L in parts: of the tiles, then of each level."""
    slot = slots(tiles)
    begin = factors[slot.begin]
    both = dot(jnp.concatenate([q * begin, k * begin], 0), k * factors[slot.grow], dtype, across=1)
    A = masked(pairs.tile | pairs.diagonal, both[:C])
    L = [masked(pairs.tile, both[C:])]
    for level, mask in enumerate(pairs.levels):
        rows = jnp.concatenate([q * factors[level], k * factors[level]], 0)
        both = dot(rows, rows[C:], dtype, across=1)
        A = jnp.where(mask, both[:C], A)
        L.append(masked(mask, both[C:]))
    return A, L


def inverse(L: list[Float32[Array, "C C"]], beta: Float32[Array, "1 C"], tiles: Tiling, dtype: Any) -> Float32[Array, "C C"]:
    """(I + L diag(beta))^-1: by substitution within 8 or 16 tokens, then by halves.

    No powers of L, which grow where keys repeat.
    """
    L = [x * beta for x in L]
    levels = list(zip(tiles.levels, L[1:], strict=True))
    size, small = tiles.size, L[0]
    while size < 8:
        size, small = 2 * size, small + levels.pop(0)[1]
    lane = lax.broadcasted_iota(jnp.int32, (size, C), 1)
    row = lax.broadcasted_iota(jnp.int32, (size, C), 0)
    block = sum(jnp.where(lane // size == i, small[i * size : (i + 1) * size], 0.0) for i in range(C // size))
    solved = jnp.where(lane % size == row, 1.0, 0.0)
    for s in range(size - 1):
        column = jnp.take_along_axis(block, lane // size * size + s, axis=1)
        solved -= column * solved[s : s + 1]
    whole = jnp.concatenate([jnp.where(lane // size == i, solved, 0.0) for i in range(C // size)], 0)
    for _, between in levels:
        whole -= dot(whole, dot(between, whole, dtype), dtype)
    return whole
