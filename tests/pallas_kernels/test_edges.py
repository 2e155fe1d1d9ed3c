"""What lies at the edge of an op's arguments: empty arrays, places that a pool does not have, gradients of ops without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res_norm
from pallas_kernels.conv1d import conv1d
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_mxfp4
from pallas_kernels.kda import kda
from pallas_kernels.kda_decode import kda_decode, kda_verify
from pallas_kernels.kda_decode.shapes import Shape, draw
from pallas_kernels.mla import attention, latent_attention
from pallas_kernels.paged_mla import paged_latent_attention
from pallas_kernels.target import target

K, V, H, W = 32, 16, 2, 4
x, weights, pool = draw(Shape(N=3, H=H, slots=4, K=K))
drafted, _, _ = draw(Shape(N=3, H=H, slots=4, K=K), 2)
slots = np.array([2, 0, 3])
OPTIONS = {"decay_floor": -5.0, "eps": 1e-5}


def of(*sizes, dtype=np.float32):
    return np.zeros(sizes, dtype)


def ids(*sizes):
    return of(*sizes, dtype=np.int32)


def attend(B, T, S):
    places = {"q_positions": ids(B, T), "kv_positions": ids(B, S)}
    return attention(of(B, T, H, K), of(B, S, H, K), of(B, S, H, V), scale=1.0, **places)


def attend_latents(B, T, S):
    places = {"q_positions": ids(B, T), "kv_positions": ids(B, S)}
    return latent_attention(of(B, T, H, K), of(B, S, K), value_dim=V, scale=1.0, **places)


def attend_pages(B, T, pages):
    return paged_latent_attention(of(B, T, H, K), of(3, 8, K), ids(B, pages), ids(B), value_dim=V, scale=1.0)


def recur(B, T):
    return kda(of(B, T, H, K), of(B, T, H, K), of(B, T, H, V), of(B, T, H, K), of(B, T, H), of(B, H, K, V))[0]


def decode(N):
    return kda_decode(jax.tree.map(lambda a: a[:N], x), weights, pool, slots[:N], **OPTIONS)[0]


def verify(N, R, T):
    before, new = (jax.tree.map(lambda a, n=n: a[:N, :n], drafted) for n in (R, T))
    return kda_verify(new, before, ids(N), weights, pool, slots[:N], **OPTIONS)[0]


def convolve(B, T):
    return conv1d(of(B, T, 8), of(8, W), of(B, W - 1, 8))[0]


def mix(N, T):
    return attn_res_norm(of(1, T, 8), of(N, 1, T, 8), N, of(8), of(8), eps=1e-5)[0]


def experts(N, E):
    return grouped_matmul(of(N, 8), of(E, 8, 4), ids(E))


def packed_experts(N, E):
    return grouped_matmul_mxfp4(of(N, 64), of(E, 4, 32, dtype=np.uint8), of(E, 4, 2, dtype=np.uint8), ids(E))


EMPTY = [
    (attend, (0, 2, 3), (0, 2, H, V)), (attend, (1, 0, 3), (1, 0, H, V)), (attend, (1, 2, 0), (1, 2, H, V)),
    (attend_latents, (0, 2, 3), (0, 2, H, V)), (attend_latents, (1, 0, 3), (1, 0, H, V)),
    (attend_latents, (1, 2, 0), (1, 2, H, V)), (attend_pages, (0, 1, 2), (0, 1, H, V)), (attend_pages, (2, 0, 2), (2, 0, H, V)),
    (attend_pages, (2, 1, 0), (2, 1, H, V)), (recur, (0, 5), (0, 5, H, V)), (recur, (2, 0), (2, 0, H, V)),
    (decode, (0,), (0, H * K)), (verify, (0, 2, 2), (0, 2, H * K)),
    (verify, (3, 2, 0), (3, 0, H * K)), (convolve, (0, 5), (0, 5, 8)), (convolve, (2, 0), (2, 0, 8)), (mix, (0, 3), (1, 3, 8)),
    (mix, (2, 0), (1, 0, 8)), (experts, (0, 3), (0, 4)), (experts, (5, 0), (5, 4)), (packed_experts, (0, 3), (0, 4)),
]  # fmt: skip


@pytest.mark.parametrize("op, sizes, shape", EMPTY, ids=[f"{op.__name__}{sizes}" for op, sizes, _ in EMPTY])
def test_nothing_in_nothing_out(op, sizes, shape):
    for platform in ("cpu", "tpu", "gpu"):
        with target(platform):
            assert jax.eval_shape(lambda: op(*sizes)).shape == shape
    np.testing.assert_array_equal(op(*sizes), np.zeros(shape))


def test_nothing_has_a_gradient():
    gradients = jax.grad(lambda x, w: jnp.sum(grouped_matmul(x, w, ids(3))), (0, 1))(of(0, 8), of(3, 8, 4))
    assert [g.shape for g in gradients] == [(0, 8), (3, 8, 4)]


@pytest.mark.parametrize("impl", ["xla", "tpu", "gpu"])
def test_a_slot_that_the_pool_does_not_have_is_idle(impl):
    sizes = Shape(N=2, H=1, slots=2, K=128)
    x, weights, pool = draw(sizes)
    with target("cpu" if impl == "xla" else impl, interpret=True):
        y, new = kda_decode(x, weights, pool, np.array([1, 2]), **OPTIONS, impl=impl)
        idle, same = kda_decode(x, weights, pool, np.array([1, -1]), **OPTIONS, impl=impl)
    for got, expected in zip(jax.tree.leaves((y, new)), jax.tree.leaves((idle, same)), strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(y[1], 0)


def test_more_accepted_tokens_than_were_drafted_are_all_of_them():
    y, new = (kda_verify(drafted, drafted, np.full(3, n), weights, pool, slots, **OPTIONS) for n in (2, 9))
    jax.tree.map(np.testing.assert_array_equal, y, new)


@pytest.mark.parametrize("impl", ["xla", "tpu", "gpu"])
def test_a_sequence_is_not_longer_than_its_pages(impl):
    r = np.random.default_rng(0)
    q, pool = (r.standard_normal(sizes).astype(np.float32) for sizes in ((1, 1, 2, 192), (2, 64, 192)))
    with target("cpu" if impl == "xla" else impl, interpret=True):
        full, over = (
            paged_latent_attention(q, pool, np.array([[1]]), np.array([n]), value_dim=128, scale=1.0, impl=impl) for n in (64, 65)
        )
    np.testing.assert_array_equal(full, over)


@pytest.mark.parametrize("op", ["paged_latent_attention", "kda_decode", "kda_verify"])
def test_a_gradient_that_does_not_exist_is_refused_by_name(op):
    accepted = ids(3)
    calls = {
        "paged_latent_attention": lambda s: paged_latent_attention(
            s * of(1, 1, H, K), of(3, 8, K), ids(1, 1), ids(1), value_dim=V, scale=1.0
        ),
        "kda_decode": lambda s: kda_decode(x._replace(q=s * x.q), weights, pool, slots, **OPTIONS)[0],
        "kda_verify": lambda s: kda_verify(
            drafted._replace(q=s * drafted.q), drafted, accepted, weights, pool, slots, **OPTIONS
        )[0],
    }
    with pytest.raises(TypeError, match=f"{op} has no gradient"):
        jax.jit(jax.grad(lambda s: jnp.sum(calls[op](s))))(1.0)
    jax.grad(lambda s: s * jnp.sum(calls[op](jax.lax.stop_gradient(s))))(1.0)


@pytest.mark.parametrize("impl", ["tpu", "gpu"])
def test_queries_and_keys_of_two_dtypes_are_multiplied_in_the_wider(impl):
    r = np.random.default_rng(0)
    q, k, v = (jnp.asarray(r.standard_normal((1, 128, 1, size)), jnp.bfloat16) for size in (192, 192, 128))
    places = {"q_positions": np.arange(128)[None], "kv_positions": np.arange(128)[None]}
    with target(impl, interpret=True):
        mixed = attention(q.astype(jnp.float32), k, v, scale=0.1, **places, impl=impl)
    expected = attention(*(a.astype(jnp.float32) for a in (q, k, v)), scale=0.1, **places, impl="xla")
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_allclose(mixed.astype(jnp.float32), expected, atol=0.02)
