"""The grouped matmul at K3's sizes, as one device sees its experts.

Training and prefill: 1024 rows for each of 14 or 28 experts. Decode: 64 or 256 tokens choose 16 of 896 experts each, evenly, so
that a device with 14 of them gets 16 or 64 rows.

The least work, for N rows, E experts with rows and K x M = 3584 x 3072 (w1 and w3 of K3):

    product, dx, dw   2 N K M FLOPs each
    bytes             2 N (K + M) for two arrays of rows, and E matrices: 2 K M each in bf16, (1/2 + 1/32) K M in MXFP4
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.aot import rivals
from pallas_kernels.aot.bench import main
from pallas_kernels.aot.case import Built, Case, array
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_mxfp4
from pallas_kernels.mxfp4 import dequantize

K, M = 3584, 3072
IMPLS = ("tpu", "gpu", "xla", "ragged_dot")
RIVALS = {"ragged_dot": jax.lax.ragged_dot, "tokamax": rivals.grouped_matmul}


def product(impl: str) -> Callable[..., Array]:
    return RIVALS[impl] if impl in RIVALS else partial(grouped_matmul, impl=impl)


def product_mxfp4(impl: str) -> Callable[..., Array]:
    if impl != "ragged_dot":
        return partial(grouped_matmul_mxfp4, impl=impl)
    return lambda x, packed, scale, sizes: jax.lax.ragged_dot(x, dequantize(packed, scale).swapaxes(1, 2), sizes)


def build(impl: str, *, rows: int, experts: int, mxfp4: bool, kind: str) -> Built:
    """kind  "forward"; "dx" or "dw" for that gradient"""
    spread = np.bincount(np.arange(rows) % experts, minlength=experts)
    op = (product_mxfp4 if mxfp4 else product)(impl)

    def with_sizes(sizes: Array) -> Array:
        return sizes + jnp.asarray(spread, jnp.int32)  # timed with zeros, compiled with unknown numbers

    def forward(x: Array, weights: tuple[Array, ...], sizes: Array) -> Array:
        return op(x, *weights, with_sizes(sizes))

    def gradient(x: Array, weights: tuple[Array, ...], sizes: Array, g: Array) -> Array:
        if kind == "dx":
            return jax.vjp(lambda x: op(x, *weights, with_sizes(sizes)), x)[1](g)[0]
        return jax.vjp(lambda w: op(x, w, with_sizes(sizes)), *weights)[1](g)[0]

    if mxfp4:
        weights = array(experts, M, K // 2, dtype=jnp.uint8), array(experts, M, K // 32, dtype=jnp.uint8)
    else:
        weights = (array(experts, K, M, dtype=jnp.bfloat16),)
    given: tuple[Any, ...] = array(rows, K, dtype=jnp.bfloat16), weights, array(experts, dtype=jnp.int32)
    return (forward, given) if kind == "forward" else (gradient, (*given, array(rows, M, dtype=jnp.bfloat16)))


def case(rows: int, experts: int, mxfp4: bool, kind: str, limit: float | None) -> Case:
    matrix = (1 / 2 + 1 / 32 if mxfp4 else 2) * K * M
    return Case(
        partial(build, rows=rows, experts=experts, mxfp4=mxfp4, kind=kind),
        flops=2 * rows * K * M,
        bytes=2 * rows * (K + M) + min(rows, experts) * matrix,
        impls=IMPLS if mxfp4 else (*IMPLS, "tokamax"),
        limit={chip: limit for chip in ("v5p", "tpu7x")} if limit else {},
        estimate=not mxfp4,
    )


CASES = {
    f"{name}_{kind}_{experts}_experts": case(1024 * experts, experts, name == "mxfp4", kind, 2.0 if name == "mxfp4" else 1.6)
    for experts in (14, 28)
    for name, kinds in (("bf16", ("forward", "dx", "dw")), ("mxfp4", ("forward", "dx")))
    for kind in kinds
} | {
    f"{name}_decode_{tokens}_{experts}_experts": case(tokens * 16 * experts // 896, experts, name == "mxfp4", "forward", None)
    for name in ("bf16", "mxfp4")
    for experts in (14, 28)
    for tokens in (64, 256)
}

if __name__ == "__main__":
    main("pallas_kernels.grouped_matmul.bench", CASES, __doc__ or "")
