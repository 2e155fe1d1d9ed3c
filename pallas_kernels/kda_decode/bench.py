"""Decode of Kimi Delta Attention, one token for each of 64 or 256 sequences, K3's 96 heads split over 8 or 4 devices.

    python -m pallas_kernels.kda_decode.bench --chip v5p v6e tpu7x --vs xla

The least that is moved per sequence and head, bytes (K = V = 128, W = 4, bf16 activations and windows):

    state, read and written                 2 x 4 K V          131 072
    conv windows, read and written          2 x 2 x 3 (W-1) K    4 608
    q, k, v, decay, gate in and y out       6 x 2 K              1 536

and computed: decay 1, two reads 4, write 2 operations per number of the state, 7 K V = 115 k. The fp32 weights of a layer add
(3 W + 1) 4 K bytes per head, once.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.aot.bench import main
from pallas_kernels.aot.case import Built, Case, array
from pallas_kernels.kda_decode import kda_decode
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.kda_decode.shapes import SHAPES, Shape

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


def _decode(shape: Shape) -> Case:
    def build(impl: str) -> Built:
        op = partial(kda_decode, decay_floor=-5.0, eps=1e-5, impl=impl)
        return op, (*_arrays(shape), array(shape.N, dtype=jnp.int32))

    N, H, _, K, W = shape
    moved = N * H * (2 * 4 * K * K + 2 * 2 * 3 * (W - 1) * K + 6 * 2 * K + 2) + H * (3 * W + 1) * 4 * K
    return Case(build, flops=N * H * 7 * K * K, bytes=moved, impls=("tpu", "gpu", "xla"), limit=TARGET)


CASES = {name: _decode(shape) for name, shape in SHAPES.items()}

if __name__ == "__main__":
    main("pallas_kernels.kda_decode.bench", CASES, __doc__ or "")
