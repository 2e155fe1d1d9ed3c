"""What the GPU kernels share: tokens of a chunk, sums of log decays, pair products and the triangular inverse.

A chunk of C tokens is cut into tiles of 16, 8 or 4, small enough that no sum of log decays within one is below -80. With G the
sum of log decays from the begin of a token's tile to the token (inclusive):

    pairs of one tile            e^(G_t) e^(-G_s): each finite in fp32 and bf16, each a function of earlier tokens only
    pairs of different tiles     split at the middle of the smallest aligned block of 2, 4, 8 ... tiles that holds both:
                                 t decays from the middle, s up to the middle; both factors are <= 1

Each exponent is one sum of log decays, all of one sign. A tensor core takes it exactly, as the product of a matrix of zeros and
ones with log decays in parts that bf16 holds. So all work is on tiles of [C, C] and [C, K], and no register is shifted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.kda.tiles import tile

C = 64  # tokens of a chunk
CENTER = 2.0**58  # about e^(RANGE / 2): moves e^G to the middle of the range, and small components stay normal numbers
PARTS = {jnp.dtype(jnp.float32): 3, jnp.dtype(jnp.bfloat16): 2}  # of a summand, 8 bits each
SOLVED = 16  # tokens whose triangle is inverted by substitution

Sum = Callable[[Int32[Array, "C C"], Int32[Array, "C C"]], Bool[Array, "C C"]]


class Tiling(NamedTuple):
    """size: tokens of a tile; floor: log decays below it are taken for it."""

    size: int
    floor: float

    @property
    def levels(self) -> int:
        """Blocks of level n are of two times size << n tokens."""
        return (C // self.size).bit_length() - 1


def tiling(decay_floor: float | None, dtype: Any) -> Tiling:
    """The largest tiles for decays above `decay_floor` (None: unbounded)."""
    size, floor = tile(decay_floor, dtype)
    return Tiling(size, floor)


def dot(a: Float[Array, "I J"], b: Float[Array, "J K"], dtype: Any) -> Float32[Array, "I K"]:
    """Multiplied in `dtype`, fp32 at full precision; summed in fp32."""
    precision = lax.DotAlgorithmPreset.BF16_BF16_F32_X6 if jnp.dtype(dtype) == jnp.float32 else None
    return jnp.dot(a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32)


class Tokens(NamedTuple):
    """The tokens of one chunk of row b and head h. Those outside of the row, before its begin or after its end, read as zeros."""

    b: Int32[Array, ""]
    h: Int32[Array, ""]
    at: Int32[Array, " C"]
    real: Bool[Array, " C"]

    def _index(self, first: Any, width: int) -> tuple[Any, ...]:
        if not width:
            return self.b, self.at, self.h
        return self.b, self.at[:, None], self.h, (first + jnp.arange(width))[None]

    def load(self, ref: Any, width: int = 0, first: Any = 0) -> Array:
        """[C, width] from [B, T, H, ...], or with width 0 [C] from [B, T, H]."""
        mask = jnp.broadcast_to(self.real[:, None], (C, width)) if width else self.real
        return plgpu.load(ref.at[self._index(first, width)], mask=mask, other=0)

    def store(self, ref: Any, x: Float32[Array, "C ..."], first: Any = 0) -> None:
        width = x.shape[1] if x.ndim > 1 else 0
        mask = jnp.broadcast_to(self.real[:, None], x.shape) if width else self.real
        plgpu.store(ref.at[self._index(first, width)], x.astype(ref.dtype), mask=mask)

    def load_resets(self, ref: Any) -> "Resets | None":
        return None if ref is None else resets(plgpu.load(ref.at[self.b, self.at], mask=self.real, other=0) != 0)


def tokens(skip: Any, T: int, b: Any, h: Any, i: Any) -> Tokens:
    """Chunk i. skip: a ref [B], tokens of each row's first chunk that are before its first token."""
    at = i * C - skip[b] + jnp.arange(C)
    real = (at >= 0) & (at < T)
    return Tokens(b, h, jnp.where(real, at, T), real)


def _pairs() -> tuple[Int32[Array, "C C"], Int32[Array, "C C"]]:
    t, s = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    return t, s


def of_tile(tiles: Tiling) -> Sum:
    """From the begin of t's tile to t."""
    return lambda t, s: (s <= t) & (s >= (t & -tiles.size))


def of_level(half: int) -> Sum:
    """Between t and the middle of its block: from the middle to a late t, and from after an early t to the middle."""

    def between(t, s):
        middle = (t & -2 * half) + half
        return (s >= middle) & (s <= t) | (s < middle) & (s > t)

    return between


def of_read(t: Int32[Array, "C C"], s: Int32[Array, "C C"]) -> Bool[Array, "C C"]:
    """From the chunk's begin to t."""
    return s <= t


def of_keep(t: Int32[Array, "C C"], s: Int32[Array, "C C"]) -> Bool[Array, "C C"]:
    """From after t to the chunk's end."""
    return s > t


def parts(x: Float32[Array, "C K"], dtype: Any) -> list[Float[Array, "C K"]]:
    """Summands of x, exact in bf16: with fp32 inputs all of its bits, else the first 16."""
    split = []
    for _ in range(PARTS[jnp.dtype(dtype)]):
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536), jnp.float32)
        split.append(high.astype(jnp.bfloat16))
        x -= high
    return split


def add_up(which: Sum, split: list[Float[Array, "C K"]], *, transposed: bool = False) -> Float32[Array, "C K"]:
    """For each t the sum over the s that `which` names, or transposed for each s that over t."""
    t, s = _pairs()
    matrix = jnp.where(which(s, t) if transposed else which(t, s), 1.0, 0.0).astype(jnp.bfloat16)
    return sum((dot(matrix, part, jnp.bfloat16) for part in split[1:]), dot(matrix, split[0], jnp.bfloat16))


class Resets(NamedTuple):
    """here: the tokens that reset; passed: how many did up to each token."""

    here: Bool[Array, " C"]
    passed: Int32[Array, " C"]
    count: Int32[Array, ""]


def resets(here: Bool[Array, " C"]) -> Resets:
    t, s = _pairs()
    ones = jnp.where(here, 1, 0)
    return Resets(here, jnp.sum(jnp.where(s <= t, ones[None], 0), 1), jnp.sum(ones))


def tile_pairs(tiles: Tiling) -> Bool[Array, "C C"]:
    """t > s in one tile."""
    t, s = _pairs()
    return (s < t) & (s >= (t & -tiles.size))


def level_pairs(half: int | Int32[Array, ""]) -> Bool[Array, "C C"]:
    """t in the late and s in the early half of one block."""
    t, s = _pairs()
    return ((t & -2 * half) == (s & -2 * half)) & (t & half != 0) & (s & half == 0)


def diagonal() -> Bool[Array, "C C"]:
    t, s = _pairs()
    return t == s


def of_one_sequence(pairs: Float32[Array, "C C"], cuts: Resets | None) -> Float32[Array, "C C"]:
    """Zero for pairs with a reset between them."""
    return pairs if cuts is None else where(cuts.passed[:, None] == cuts.passed[None], pairs)


def where(mask: Bool[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(mask, x, jnp.zeros_like(x))


def bounded(log_decay: Float32[Array, "C k"], cuts: Resets | None, tiles: Tiling) -> Float32[Array, "C k"]:
    """Log decays as they are summed. A reset has none: masks cut what it cuts."""
    log_decay = jnp.maximum(log_decay, tiles.floor)
    return log_decay if cuts is None else where(~cuts.here[:, None], log_decay)


def begin_and_grow(split: list[Float[Array, "C k"]], tiles: Tiling) -> tuple[Float32[Array, "C k"], Float32[Array, "C k"]]:
    """CENTER e^G and e^-G / CENTER."""
    total = add_up(of_tile(tiles), split)
    return jnp.exp(total) * CENTER, jnp.exp(-total) * (1 / CENTER)


def level_factor(half: int, split: list[Float[Array, "C k"]]) -> Float32[Array, "C k"]:
    return jnp.exp(add_up(of_level(half), split))


def read_factor(split: list[Float[Array, "C k"]], cuts: Resets | None) -> Float32[Array, "C k"]:
    """The decay from the chunk's begin to each token; zero after a reset."""
    read = jnp.exp(add_up(of_read, split))
    return read if cuts is None else where((cuts.passed == 0)[:, None], read)


def keep_factor(split: list[Float[Array, "C k"]], cuts: Resets | None) -> Float32[Array, "C k"]:
    """The decay from each token to the chunk's end; zero before a reset."""
    keep = jnp.exp(add_up(of_keep, split))
    return keep if cuts is None else where((cuts.passed == cuts.count)[:, None], keep)


def last_factor(log_decay: Float32[Array, "C k"], cuts: Resets | None) -> Float32[Array, " k"]:
    """The decay of the whole chunk."""
    last = jnp.exp(jnp.sum(log_decay, 0))
    return last if cuts is None else jnp.where(cuts.count == 0, last, 0.0)


def products(
    rows: Float32[Array, "C k"], keys: Float32[Array, "C k"], split: list[Float[Array, "C k"]], tiles: Tiling, dtype: Any
) -> Float32[Array, "C C"]:
    """What some channels add to the products of row t and of key s, with the decay between them: for t > s, and others zero."""
    begin, grow = begin_and_grow(split, tiles)
    tile = where(tile_pairs(tiles), dot(rows * begin, (keys * grow).astype(dtype).T, dtype))

    def level(n, total):
        half = tiles.size << n
        factor = level_factor(half, split)
        return jnp.where(level_pairs(half), dot(rows * factor, (keys * factor).astype(dtype).T, dtype), total)

    return jax.lax.fori_loop(0, tiles.levels, level, tile)


def invert(L: Float32[Array, "C C"], dtype: Any) -> Float32[Array, "C C"]:
    """(I + L)^-1 of a strictly lower triangle: by substitution within 16 tokens, then by halves.

    No powers of L, which grow where keys repeat.
    """
    n = C // SOLVED
    t, s = _pairs()
    near = (t & -SOLVED) == (s & -SOLVED)
    blocks = jnp.sum(where(near, L).reshape(n, SOLVED, n, SOLVED), 2)
    row, lane = (lax.broadcasted_iota(jnp.int32, blocks.shape, axis) for axis in (1, 2))

    def substitute(j, solved):
        column = jnp.sum(where(lane == j, blocks), 2)
        known = jnp.sum(where(row == j, solved), 1)
        return solved - column[:, :, None] * known[:, None]

    solved = jax.lax.fori_loop(0, SOLVED - 1, substitute, jnp.where(row == lane, 1.0, 0.0))
    spread = jnp.broadcast_to(solved[:, :, None], (n, SOLVED, n, SOLVED)).reshape(C, C)
    whole = where(near, spread)
    for half in (SOLVED, 2 * SOLVED):
        whole -= dot(whole, dot(where(level_pairs(half), L), whole, dtype), dtype)
    return whole
