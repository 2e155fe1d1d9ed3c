"""MXFP4 weights decoded inside a TPU kernel, by integer operations that every generation has.

A word holds the bytes of four rows. A gather along lanes gives every input the byte that it shares with its neighbour, and
another one its scale; the rest is arithmetic on four bytes, then on two bf16 numbers per word:

    bits = sign << 15 | (code >= 1 ? (scale - 1) << 7 : 0) + (code >= 2 ? code << 6 : 0)

Code 1 is 0.5, 2**-1; from code 2 on, a code is the exponent and the mantissa of its number up to a constant in the exponent.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

LANES = 128
ROWS = 128  # decoded together: they share the setting of a gather


def decode(packed: Any, scale: Any, first_input: Any, words: Any, unusual: Any) -> None:
    """Writes the bf16 weights of `packed` into `words`, where `as_bf16` finds them.

    packed  uint8 [rows, inputs / 2], rows a multiple of 128, inputs of 256; `first_input` is where they begin in the matrix
    scale   uint8 [rows, all inputs of the matrix / 32], at most 128 per row
    words   int32 [inputs / 128, rows / 2, 128], as strided stores want it
    unusual int32 [1] in SMEM: the compiler's estimate takes what is read from there for zero, and so it leaves rare scales out
    Results are exact, except that subnormal ones (of bytes 0 and 1) are flushed to zero.
    """
    steps = packed.shape[0] // ROWS
    # Bytes 0 and 253 to 255 less 1 are those whose upper six bits are set.
    sixes = ((_bytes(scale[...]) - 0x01010101) >> 2) & 0x3F3F3F3F
    unusual[0] = jnp.max((sixes + 0x01010101) & 0x40404040)

    @pl.loop(0, steps)
    def _(r: Array) -> None:
        _decode_rows(r, packed, _bytes(scale[_slice(r), :]) - 0x01010101, first_input, words)

    @pl.when(unusual[0] > 0)
    def _() -> None:
        @pl.loop(0, steps)
        def _(r: Array) -> None:
            _decode_unusual_rows(r, packed, scale, first_input, words)


def as_bf16(words: Any) -> Float[Array, "R C"]:
    """The weights that `decode` wrote: rows 2 i and 2 i + 1 share the words of row i."""
    return jnp.concatenate([pltpu.bitcast(words[c], jnp.bfloat16) for c in range(words.shape[0])], axis=1)


def _decode_rows(r: Array, packed: Any, exponent: Array, first_input: Any, words: Any) -> None:
    """128 rows, with the scale bytes less 1 in words."""
    exponent = _over_lanes(exponent)
    lane = jax.lax.broadcasted_iota(jnp.int32, exponent.shape, 1)
    nibble = (lane & 1) << 2

    for b in range(packed.shape[1] // LANES):
        pairs = _bytes(packed[_slice(r), b * LANES : (b + 1) * LANES])
        for half in range(2):
            c = 2 * b + half
            code = _gather(pairs, (lane >> 1) + half * LANES // 2) >> nibble
            upper, lower = _numbers(code, _gather(exponent, _scale_lane(lane, first_input, c)))
            words[pl.ds(c, 1), pl.ds(r * (ROWS // 2), ROWS // 4, 2), :] = upper[None]
            words[pl.ds(c, 1), pl.ds(r * (ROWS // 2) + 1, ROWS // 4, 2), :] = lower[None]


def _numbers(code: Array, exponent: Array) -> tuple[Array, Array]:
    """bf16 numbers of the bytes (0, 2) and (1, 3) of each word. Bits 0 to 3 of a byte of `code` count."""
    size = code & 0x07070707
    some = (size + 0x07070707) & 0x08080808
    exponent &= (some << 5) - (some >> 3)  # all bits of each byte
    two_or_more = (size + 0x06060606) & 0x08080808
    size &= two_or_more - (two_or_more >> 3)
    upper = (code & 0x00080008) << 12 | ((exponent & 0x00FF00FF) << 7) + ((size & 0x00070007) << 6)
    lower = (code << 4) & -0x7FFF8000 | ((exponent >> 1) & 0x7F807F80) + ((size >> 2) & 0x01C001C0)
    return upper, lower


def _decode_unusual_rows(r: Array, packed: Any, scale: Any, first_input: Any, words: Any) -> None:
    """`_decode_rows` for all scales: with one in range, then times what is left of it."""
    byte = scale[_slice(r), :].astype(jnp.int32)
    usual = jnp.clip(byte, 1, 252)
    factor = jnp.where(byte == 255, jnp.nan, jnp.exp2((byte - usual).astype(jnp.float32)))
    factor = _over_lanes(factor)
    _decode_rows(r, packed, _words(usual - 1), first_input, words)
    lane = jax.lax.broadcasted_iota(jnp.int32, factor.shape, 1)

    @pl.loop(0, words.shape[0])
    def _(c: Array) -> None:
        here = pl.ds(c, 1), pl.ds(pl.multiple_of(r * (ROWS // 2), ROWS // 2), ROWS // 2)
        left = _gather(factor, _scale_lane(lane, first_input, c))
        weight = pltpu.bitcast(words[here][0], jnp.bfloat16).astype(jnp.float32) * left
        words[here] = pltpu.bitcast(weight.astype(jnp.bfloat16), jnp.int32)[None]


def _over_lanes(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, LANES - x.shape[1])))


def _scale_lane(lane: Array, first_input: Any, c: Any) -> Array:
    """Where the scales of the c-th 128 inputs are."""
    return (lane >> 5) + (first_input // 32 + c * (LANES // 32))


def _slice(r: Array) -> Any:
    return pl.ds(pl.multiple_of(r * ROWS, ROWS), ROWS)


def _bytes(x: Array) -> Array:
    """uint8 [32, n] as int32 [8, n]: byte b of word s is row 4 s + (0, 2, 1, 3)[b], so that bytes 0 and 2 are neighbours."""
    word = pltpu.bitcast(x, jnp.int32)
    return word & -0xFFFF01 | (word >> 8) & 0xFF00 | (word & 0xFF00) << 8


def _words(x: Array) -> Array:
    """`_bytes` of numbers 0 to 255 that are int32 [32, n]."""
    return _bytes(x.astype(jnp.uint8))


def _gather(x: Array, lane: Array) -> Array:
    return jnp.take_along_axis(x, lane, axis=1, mode="promise_in_bounds")
