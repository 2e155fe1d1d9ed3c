"""Decode of Kimi Delta Attention, one token for each of 64 or 256 sequences, K3's 96 heads split over 8 or 4 devices, and windows
of 4 or 8 drafted tokens after as many of the window before.

    python -m pallas_kernels.kda_decode.bench --chip v5p v6e tpu7x --vs xla

The least that is moved per sequence and head, bytes (K = V = 128, W = 4, bf16 activations and windows):

    state, read and written                 2 x 4 K V          131 072
    conv windows, read and written          2 x 2 x 3 (W-1) K    4 608
    q, k, v, decay, gate in and y out       6 x 2 K              1 536    per token
    q, k, v, decay of the window before     4 x 2 K              1 024    per token

and computed, per number of the state: one token 7 operations (decay 1, two reads 4, write 2); a window of T after R tokens
2 (R + 2 T) + 2 R + 1, all tokens at once. The fp32 weights of a layer add (3 W + 1) 4 K bytes per head, once.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.aot.bench import main
from pallas_kernels.aot.case import Built, Case, array
from pallas_kernels.kda_decode import kda_decode, kda_verify
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.kda_decode.shapes import SHAPES, Shape

IMPLS = ("tpu", "gpu", "xla")
TARGET = {"v5p": 1.15, "v6e": 1.15, "tpu7x": 1.15}


def _half(*sizes: int) -> Any:
    return array(*sizes, dtype=jnp.bfloat16)


def _full(*sizes: int) -> Any:
    return array(*sizes, dtype=jnp.float32)


def _arrays(shape: Shape, *tokens: int) -> tuple[Projected, Weights, Pool]:
    N, H, slots, K, W = shape
    wide = _half(N, *tokens, H * K)
    x = Projected(wide, wide, wide, wide, _half(N, *tokens, H), wide)
    weights = Weights(_full(3, W, H * K), _full(H), _full(H * K), _full(K))
    return x, weights, Pool(_full(slots, H, K, K), _half(slots, 3, W, H * K))


def _bytes(shape: Shape, before: int, tokens: int) -> int:
    N, H, _, K, W = shape
    row = 2 * 4 * K * K + 2 * 2 * 3 * (W - 1) * K + tokens * (6 * 2 * K + 2) + before * (4 * 2 * K + 2)
    return N * H * row + H * (3 * W + 1) * 4 * K


def _decode(shape: Shape) -> Case:
    def build(impl: str) -> Built:
        op = partial(kda_decode, decay_floor=-5.0, eps=1e-5, impl=impl)
        return op, (*_arrays(shape), array(shape.N, dtype=jnp.int32))

    return Case(build, flops=shape.N * shape.H * 7 * shape.K**2, bytes=_bytes(shape, 0, 1), impls=IMPLS, limit=TARGET)


def _verify(shape: Shape, tokens: int) -> Case:
    def build(impl: str) -> Built:
        op = partial(kda_verify, decay_floor=-5.0, eps=1e-5, impl=impl)
        x, weights, pool = _arrays(shape, tokens)
        rows = array(shape.N, dtype=jnp.int32)
        return op, (x, x, rows, weights, pool, rows)

    flops = shape.N * shape.H * shape.K**2 * (8 * tokens + 1)
    return Case(build, flops=flops, bytes=_bytes(shape, tokens, tokens), impls=IMPLS, limit=TARGET)


CASES = {name: _decode(shape) for name, shape in SHAPES.items()} | {
    f"h12_64_window{tokens}": _verify(SHAPES["h12_64"], tokens) for tokens in (4, 8)
}

if __name__ == "__main__":
    main("pallas_kernels.kda_decode.bench", CASES, __doc__ or "")
