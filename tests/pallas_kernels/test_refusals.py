"""Sizes that a TPU kernel cannot take are refused by name before Mosaic sees them; XLA takes them where none was asked for."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attn_res import attn_res_norm
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_mxfp4
from pallas_kernels.kda import kda
from pallas_kernels.kda_decode import kda_decode
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.mla import attention
from pallas_kernels.target import target


def of(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


full = partial(of, dtype=jnp.float32)
counts = of(4, dtype=jnp.int32)
codes = partial(of, dtype=jnp.uint8)


def tokens(K, dtype=jnp.bfloat16):
    """Operands of kda, one head."""
    return *(of(1, 256, 1, K, dtype=dtype) for _ in range(3)), full(1, 256, 1, K), full(1, 256, 1), full(1, 1, K, K)


def decode(q, k, v, decay, beta, gate, conv, rate, bias, norm, states, windows, slots, *, impl):
    pool = Pool(states, windows)
    x, weights = Projected(q, k, v, decay, beta, gate), Weights(conv, rate, bias, norm)
    return kda_decode(x, weights, pool, slots, decay_floor=-5.0, eps=1e-5, impl=impl)


def slots(K, states=jnp.float32):
    """Operands of kda_decode: 4 rows of one head."""
    projected = *[of(4, K)] * 4, of(4, 1), of(4, K)
    weights = full(3, 4, K), full(1), full(K), full(K)
    return *projected, *weights, of(4, 1, K, K, dtype=states), of(4, 3, 3, K), counts


def attend(q, k, v, positions, *, impl):
    return attention(q, k, v, scale=1.0, q_positions=positions, kv_positions=positions, impl=impl)


def heads(K, V):
    return of(1, 256, 1, K), of(1, 256, 1, K), of(1, 256, 1, V), of(1, 256, dtype=jnp.int32)


def mix(prefix, blocks, weight, norm, *, impl):
    return attn_res_norm(prefix, blocks, 1, weight, norm, eps=1e-5, impl=impl)


def sources(D):
    return of(1, 16, D), of(8, 1, 16, D), full(D), full(D)


REFUSED = {
    "kda, misaligned": (kda, tokens(96), "multiples of 128, got K=96"),
    "kda, oversized": (kda, tokens(512), "VMEM, got K=512"),
    "kda, wide keys": (kda, tokens(256), "with a stride.* got K=256"),
    "kda, two dtypes": (kda, (of(1, 256, 1, 128, dtype=jnp.float32), *tokens(128)[1:]), "must all be float32"),
    "kda_decode, misaligned": (decode, slots(64), "128 channels, got 64"),
    "kda_decode, states in bf16": (decode, slots(128, jnp.bfloat16), "states must be float32, got bfloat16"),
    "attention, misaligned": (attend, heads(100, 128), "multiple of 64"),
    "grouped_matmul, misaligned": (grouped_matmul, (of(64, 100), of(4, 100, 256), counts), "multiples of 8 below, got .*100"),
    "grouped_matmul, oversized": (grouped_matmul, (of(64, 2**17), of(4, 2**17, 256), counts), "MiB of VMEM"),
    "mxfp4, misaligned": (grouped_matmul_mxfp4, (of(64, 64), codes(4, 128, 32), codes(4, 128, 2), counts), "multiple of 256"),
    "mxfp4, oversized": (grouped_matmul_mxfp4, (of(64, 8192), codes(4, 128, 4096), codes(4, 128, 256), counts), "up to 4096"),
    "attn_res_norm, misaligned": (mix, sources(100), "multiple of 128"),
    "attn_res_norm, oversized": (mix, sources(2**17), "MiB of VMEM"),
}


@pytest.mark.parametrize("op, operands, reason", REFUSED.values(), ids=REFUSED)
def test_a_size_that_the_kernel_cannot_take_is_named(op, operands, reason):
    with target("tpu"):
        with pytest.raises(ValueError, match=reason):
            jax.eval_shape(partial(op, impl="tpu"), *operands)
        jax.eval_shape(partial(op, impl=None), *operands)
