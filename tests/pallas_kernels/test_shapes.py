"""Arguments that do not fit each other are refused with what was given and what is needed, for any implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res_norm
from pallas_kernels.conv1d import conv1d
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_mxfp4
from pallas_kernels.kda import kda
from pallas_kernels.kda_decode import kda_decode, kda_verify
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.mla import attention
from pallas_kernels.paged_mla import paged_latent_attention


def of(*sizes, dtype=jnp.float32):
    return jnp.zeros(sizes, dtype)


def ids(*sizes):
    return of(*sizes, dtype=jnp.int32)


def projected(*rows):
    return Projected(*[of(*rows, 256)] * 4, of(*rows, 2), of(*rows, 256))


WEIGHTS = Weights(of(3, 4, 256), of(2), of(256), of(128))
POOL = Pool(of(5, 2, 128, 128), of(5, 3, 3, 256))
ATTENTION = {
    "q": of(1, 5, 2, 192), "k": of(1, 7, 2, 192), "v": of(1, 7, 2, 128), "scale": 1.0, "q_positions": ids(1, 5),
    "kv_positions": ids(1, 7),
}  # fmt: skip
PAGED = {
    "q": of(3, 1, 2, 192), "pool": of(6, 64, 192), "page_table": ids(3, 2), "lengths": ids(3), "value_dim": 128, "scale": 1.0,
}  # fmt: skip
DECODE = {"x": projected(4), "weights": WEIGHTS, "pool": POOL, "slots": ids(4), "decay_floor": -5.0, "eps": 1e-5}
VERIFY = {**DECODE, "x": projected(4, 3), "before": projected(4, 2), "accepted": ids(4)}
HEADS = {name: of(1, 8, 2, 128) for name in ("q", "k", "v", "log_decay")}
KDA = {**HEADS, "beta": of(1, 8, 2), "state": of(1, 2, 128, 128)}
CONV = {"x": of(2, 7, 16), "weight": of(16, 4), "window": of(2, 3, 16)}
MIX = {
    "prefix": of(1, 4, 8), "blocks": of(3, 1, 4, 8), "count": 2, "weight": of(8), "norm_weight": of(8), "eps": 1e-5,
}  # fmt: skip
EXPERTS = {"x": of(5, 8), "w": of(3, 8, 4), "group_sizes": ids(3)}
PACKED = {
    "x": of(5, 64), "packed": of(3, 4, 32, dtype=jnp.uint8), "scale": of(3, 4, 2, dtype=jnp.uint8), "group_sizes": ids(3),
}  # fmt: skip
FITTING = {
    attention: ATTENTION, paged_latent_attention: PAGED, kda_decode: DECODE, kda_verify: VERIFY, kda: KDA, conv1d: CONV,
    attn_res_norm: MIX, grouped_matmul: EXPERTS, grouped_matmul_mxfp4: PACKED,
}  # fmt: skip
REFUSED = {
    "values of more tokens": (attention, {"v": of(1, 9, 2, 128)}, r"v must be \[B, S, H, V\] with B=1 of q, S=7 of k, .*\[1, 9,"),
    "fewer heads of queries": (attention, {"q": of(1, 5, 1, 192)}, r"k must be \[B, S, H, K\] with .*H=1 of q.*\[1, 7, 2,"),
    "positions of keys": (attention, {"q_positions": ids(1, 7)}, r"q_positions must be \[B, T\]"),
    "queries of integers": (attention, {"q": ids(1, 5, 2, 192)}, "q must be of floats, got int32"),
    "a mask of floats": (conv1d, {"reset": of(2, 7)}, "reset must be of bools, got float32"),
    "packed weights as floats": (grouped_matmul_mxfp4, {"packed": of(3, 4, 32)}, "packed must be of ints, got float32"),
    "half of the inputs": (grouped_matmul_mxfp4, {"x": of(5, 32)}, r"32 inputs of x need packed \[3, 4, 16\] .*got \[3, 4, 32\]"),
    "scales of other inputs": (grouped_matmul_mxfp4, {"scale": of(3, 4, 1, dtype=jnp.uint8)}, r"and scale \[3, 4, 2\], got"),
    "matrices of other inputs": (grouped_matmul, {"w": of(3, 9, 4)}, r"w must be \[E, K, M\] with K=8 of x, got \[3, 9, 4\]"),
    "a group less": (grouped_matmul, {"group_sizes": ids(2)}, r"group_sizes must be \[E\] with E=3 of w, got \[2\]"),
    "a row less of pages": (paged_latent_attention, {"page_table": ids(2, 2)}, r"page_table must be .* B=3 of q, got \[2, 2\]"),
    "a length less": (paged_latent_attention, {"lengths": ids(2)}, "lengths must be"),
    "lengths in floats": (paged_latent_attention, {"lengths": of(3)}, "lengths must be of ints, got float32"),
    "more slots than rows": (kda_decode, {"slots": ids(5)}, r"slots must be \[N\] with N=4 of x.q, got \[5\]"),
    "weights of another size": (kda_decode, {"weights": WEIGHTS._replace(o_norm=of(64))}, "pool.states must be"),
    "accepted of fewer rows": (kda_verify, {"accepted": ids(3)}, r"accepted must be \[N\]"),
    "beta per channel": (kda, {"beta": of(1, 8, 2, 128)}, r"beta must be \[B, T, H\]"),
    "a window too long": (conv1d, {"window": of(2, 4, 16)}, r"window must be \[B, W-1, D\] with .*W=4 of weight.* \[2, 4, 16\]"),
    "a weight too long": (attn_res_norm, {"weight": of(9)}, r"weight must be \[D\]"),
}  # fmt: skip


@pytest.mark.parametrize("op", FITTING)
def test_what_fits_is_taken(op):
    jax.eval_shape(lambda: op(**FITTING[op]))


@pytest.mark.parametrize("op", FITTING)
def test_arrays_of_numpy_are_taken(op):
    of_numpy = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, FITTING[op])
    jax.tree.map(np.testing.assert_array_equal, op(**of_numpy), op(**FITTING[op]))


@pytest.mark.parametrize("op, wrong, message", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named(op, wrong, message):
    with pytest.raises(ValueError, match=message):
        op(**{**FITTING[op], **wrong})
