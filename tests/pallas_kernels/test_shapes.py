"""Arguments that do not fit each other are refused with what was given and what is needed, for any implementation."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attn_res import attn_res_norm
from pallas_kernels.conv1d import conv1d
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
FITTING = {
    attention: ATTENTION, paged_latent_attention: PAGED, kda_decode: DECODE, kda_verify: VERIFY, kda: KDA, conv1d: CONV,
    attn_res_norm: MIX,
}  # fmt: skip
REFUSED = {
    "values of more tokens": (attention, {"v": of(1, 9, 2, 128)}, r"v must be \[B, S, H, V\] with B=1 of q, S=7 of k, .*\[1, 9,"),
    "fewer heads of queries": (attention, {"q": of(1, 5, 1, 192)}, r"k must be \[B, S, H, K\] with .*H=1 of q.*\[1, 7, 2,"),
    "positions of keys": (attention, {"q_positions": ids(1, 7)}, r"q_positions must be \[B, T\]"),
    "a row less of pages": (paged_latent_attention, {"page_table": ids(2, 2)}, r"page_table must be .* B=3 of q, got \[2, 2\]"),
    "a length less": (paged_latent_attention, {"lengths": ids(2)}, "lengths must be"),
    "lengths in floats": (paged_latent_attention, {"lengths": of(3)}, "lengths must be integers, got float32"),
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


@pytest.mark.parametrize("op, wrong, message", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named(op, wrong, message):
    with pytest.raises(ValueError, match=message):
        op(**{**FITTING[op], **wrong})
