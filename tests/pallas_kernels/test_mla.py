"""Laws of MLA attention, expanded and absorbed."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla import IMPLS, LATENT_IMPLS, attention, gpu, latent_attention, tpu, xla
from pallas_kernels.target import target

B, T, H, K, V = 2, 45, 2, 192, 128
SCALE = K**-0.5
every_impl = pytest.mark.parametrize("impl", IMPLS)
every_latent_impl = pytest.mark.parametrize("impl", LATENT_IMPLS)
attend = jax.jit(partial(attention, scale=SCALE), static_argnames="impl")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """45 tokens are three blocks of 16, the last one partly filled."""
    for impl in (xla, tpu, gpu):
        monkeypatch.setattr(impl, "Q_BLOCK", 16)
        monkeypatch.setattr(impl, "KV_BLOCK", 16)
    monkeypatch.setattr(gpu, "GRADIENT_BLOCK", 16)
    monkeypatch.setattr(tpu, "STRIP", 32)


@pytest.fixture(autouse=True)
def interpreted(request):
    """Kernels for other machines run in Pallas's interpreter."""
    impl = request.node.callspec.params.get("impl") if hasattr(request.node, "callspec") else None
    with target(impl, interpret=True) if impl in ("tpu", "gpu") else nullcontext():
        yield


@partial(jax.jit, static_argnames="impl")
def gradients(q, k, v, places, g, *, impl):
    return jax.vjp(lambda *x: attention(*x, scale=SCALE, impl=impl, **places), q, k, v)[1](g)


def draw(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(B, T, H, size)), dtype) for size in (K, K, V)]


def packed():
    """Row 0: lengths 20, 17 and 8 of padding; row 1: 4, 30 and 11 of padding."""
    segments = np.array([[1] * 20 + [2] * 17 + [0] * 8, [1] * 4 + [2] * 30 + [0] * 11], np.int32)
    positions = np.array([[*range(20), *range(17), *range(8)], [*range(4), *range(30), *range(11)]], np.int32)
    places = {"positions": positions, "segments": segments}
    return {f"{who}_{what}": x for who in ("q", "kv") for what, x in places.items()}


def in_order(t=T, s=T):
    q, kv = (np.broadcast_to(np.arange(n, dtype=np.int32), (B, n)) for n in (t, s))
    return {"q_positions": q, "kv_positions": kv}


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def formula(q, k, v, q_positions, kv_positions, q_segments=None, kv_segments=None):
    """Query by query, in float64."""
    q_segments = np.ones_like(q_positions) if q_segments is None else q_segments
    kv_segments = np.ones_like(kv_positions) if kv_segments is None else kv_segments
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = (kv_segments[b] == q_segments[b, t]) & (kv_segments[b] > 0)
        seen &= kv_positions[b] <= q_positions[b, t]
        if seen.any():
            score = SCALE * k[b, seen, h] @ q[b, t, h]
            prob = np.exp(score - score.max())
            out[b, t, h] = prob @ v[b, seen, h] / prob.sum()
    return out


@every_impl
@pytest.mark.parametrize("places", [in_order(), packed()], ids=["one sequence", "packed"])
def test_attention_equals_the_formula(places, impl):
    x = draw()
    assert_close(attend(*x, **places, impl=impl), formula(*x, **places))


@every_impl
def test_keys_and_queries_may_stand_in_any_order(impl):
    x, places = draw(), packed()
    order = np.random.default_rng(1).permutation(T)
    expected = attend(*x, **places, impl=impl)[:, order]
    shuffled = attend(*(t[:, order] for t in x), **{k: p[:, order] for k, p in places.items()}, impl=impl)
    assert_close(shuffled, expected)


@every_impl
def test_queries_at_the_end_of_a_longer_cache_equal_those_of_one_pass(impl):
    q, k, v = draw()
    places = in_order()
    whole = attend(q, k, v, **places, impl=impl)
    unwritten = [jnp.pad(x, ((0, 0), (0, 12), (0, 0), (0, 0)), constant_values=9.0) for x in (k, v)]
    late = in_order(s=T + 12) | {"q_positions": places["q_positions"][:, 38:]}
    assert_close(attend(q[:, 38:], *unwritten, **late, impl=impl), whole[:, 38:])


@every_impl
@pytest.mark.parametrize("first", [1, 15, 16, 33, T - 1])
def test_later_tokens_change_no_bit_of_earlier_outputs(first, impl):
    x, places = draw(), in_order()
    y = [t.at[:, first:].set(1e3) for t in x]
    a, b = (attend(*z, **places, impl=impl)[:, :first] for z in (x, y))
    assert np.array_equal(a, b)


@every_impl
def test_sequences_packed_in_a_row_equal_each_alone(impl):
    x, places = draw(), packed()
    out = attend(*x, **places, impl=impl)
    for row, span in [(0, slice(0, 20)), (0, slice(20, 37)), (1, slice(0, 4)), (1, slice(4, 34))]:
        n = span.stop - span.start
        positions = np.arange(n, dtype=np.int32)[None]
        alone = formula(*(t[row : row + 1, span] for t in x), positions, positions)
        assert_close(out[row : row + 1, span], alone)


@every_impl
def test_padding_gives_zeros_and_changes_no_bit_whatever_it_holds(impl):
    x, places = draw(), packed()
    padding = places["q_segments"][..., None, None] == 0
    spoilt = [jnp.where(padding, 3e38, t) for t in x]
    g = draw(1)[2]
    out, out_spoilt = attend(*x, **places, impl=impl), attend(*spoilt, **places, impl=impl)
    assert np.array_equal(out, out_spoilt)
    assert not np.any(np.where(padding, out, 0))
    pairs = zip(gradients(*x, places, g, impl=impl), gradients(*spoilt, places, g, impl=impl), strict=True)
    for a, b in pairs:
        assert np.array_equal(a, b)
        assert not np.any(np.where(padding, a, 0))


@every_impl
@pytest.mark.parametrize("places", [in_order(), packed()], ids=["one sequence", "packed"])
def test_gradients_equal_those_of_the_formula_in_double_precision(places, impl):
    x, g = draw(), np.random.default_rng(1).normal(size=(B, T, H, V))
    rng, step = np.random.default_rng(2), 1e-5
    x64 = [np.asarray(t, np.float64) for t in x]
    for i, gradient in enumerate(gradients(*x, places, jnp.asarray(g, jnp.float32), impl=impl)):
        d = rng.normal(size=x[i].shape)
        plus, minus = (
            np.sum(g * formula(*x64[:i], x64[i] + s * d, *x64[i + 1 :], **places)) for s in (step, -step)
        )
        along = np.sum(np.asarray(gradient, np.float64) * d)
        assert along == pytest.approx((plus - minus) / (2 * step), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("tokens", [65, 96, 130])
def test_gradients_do_not_depend_on_how_queries_are_cut_into_strips(tokens, monkeypatch):
    """Four blocks make a strip; the last one has one, two or one after two whole strips."""
    monkeypatch.setattr(tpu, "STRIP", 64)
    rng, position = np.random.default_rng(3), np.arange(tokens, dtype=np.int32)[None]
    q, k, v, g = (rng.normal(size=(1, tokens, 1, size)).astype(np.float32) for size in (K, K, V, V))
    places = {"q_positions": position, "kv_positions": position}
    with target("tpu", interpret=True):
        found = gradients(q, k, v, places, g, impl="tpu")
    for one, other in zip(found, gradients(q, k, v, places, g, impl="xla"), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_bf16_inputs_are_weighed_and_summed_in_fp32():
    x = draw(dtype=jnp.bfloat16)
    out = attend(*x, **packed())
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), formula(*x, **packed()), rtol=2**-7, atol=2**-7)


def test_one_block_equals_many(monkeypatch):
    x, places = draw(), packed()
    many = attend(*x, **places, impl="xla")
    monkeypatch.setattr(xla, "Q_BLOCK", 64)
    monkeypatch.setattr(xla, "KV_BLOCK", 64)
    one = jax.jit(partial(attention, scale=SCALE, impl="xla"))(*x, **places)
    assert_close(one, many)


L, R = 10, 4
attend_latent = jax.jit(partial(latent_attention, value_dim=L, scale=SCALE), static_argnames="impl")


@every_latent_impl
@pytest.mark.parametrize("window", [1, 7])
def test_absorbed_attention_equals_expanded_attention(window, impl):
    rng = np.random.default_rng(3)
    latent = jnp.asarray(rng.normal(size=(B, T, L + R)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(B, window, H, K + R)), jnp.float32)
    w_k, w_v = (jnp.asarray(rng.normal(size=(L, H, size)), jnp.float32) for size in (K, V))
    c, k_rope = latent[..., :L], jnp.broadcast_to(latent[:, :, None, L:], (B, T, H, R))
    k = jnp.concatenate([jnp.einsum("bsl,lhk->bshk", c, w_k), k_rope], -1)
    last = jnp.asarray([[20], [44]], jnp.int32)
    places = in_order() | {"q_positions": last - window + 1 + jnp.arange(window)}
    v = jnp.einsum("bsl,lhv->bshv", c, w_v)
    expected = attend(q, k, v, **places, impl="reference")
    q_latent = jnp.concatenate([jnp.einsum("bthk,lhk->bthl", q[..., :K], w_k), q[..., K:]], -1)
    out = attend_latent(q_latent, latent, **places, impl=impl)
    np.testing.assert_allclose(jnp.einsum("bthl,lhv->bthv", out, w_v), expected, rtol=2e-4, atol=2e-4)


def test_gradients_of_absorbed_attention_equal_the_reference():
    rng = np.random.default_rng(4)
    q, latent = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((B, T, H, L + R), (B, T, L + R)))
    g = jnp.asarray(rng.normal(size=(B, T, H, L)), jnp.float32)

    @partial(jax.jit, static_argnames="impl")
    def pulled_back(q, latent, g, places, *, impl):
        return jax.vjp(lambda *x: attend_latent(*x, **places, impl=impl), q, latent)[1](g)

    fast, slow = (pulled_back(q, latent, g, packed(), impl=impl) for impl in ("xla", "reference"))
    for a, b in zip(fast, slow, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_key_blocks_that_no_query_sees_are_not_read():
    """They hold NaN, which would spoil the sums of every query that reads them."""
    rng = np.random.default_rng(5)
    latent = jnp.asarray(rng.normal(size=(B, 100, L + R)), jnp.float32).at[:, 32:].set(jnp.nan)
    q = jnp.asarray(rng.normal(size=(B, 1, H, L + R)), jnp.float32)
    places = {"q_positions": jnp.full((B, 1), 31, jnp.int32), "kv_positions": in_order(s=100)["kv_positions"]}
    out = attend_latent(q, latent, **places, impl="xla")
    assert np.all(np.isfinite(out))


def test_a_value_size_past_the_latent_is_refused():
    q, latent = jnp.ones((B, 1, H, 14)), jnp.ones((B, T, 14))
    with pytest.raises(ValueError, match="value_dim=15 must be between 1 and 14, the latent size"):
        latent_attention(q, latent, value_dim=15, scale=1.0, **in_order(t=1))


def test_memory_of_the_gradient_does_not_grow_with_the_square_of_the_length(monkeypatch):
    monkeypatch.setattr(xla, "Q_BLOCK", 256)
    monkeypatch.setattr(xla, "KV_BLOCK", 256)
    tokens, heads = 2048, 4
    q, k, v = (jax.ShapeDtypeStruct((1, tokens, heads, size), jnp.float32) for size in (24, 24, 16))
    positions = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def forward_and_gradient(q, k, v, positions):
        places = {"q_positions": positions, "kv_positions": positions}
        return jax.vjp(lambda *x: attention(*x, scale=0.2, impl="xla", **places), q, k, v)[1](v)

    compiled = jax.jit(forward_and_gradient).lower(q, k, v, positions).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    block, all_inputs = 4 * heads * 256 * 256, 4 * tokens * heads * (24 + 24 + 16)
    assert temp < 8 * block + 6 * all_inputs < 4 * heads * tokens**2 / 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gpu_kernels_lower_for_cuda_at_the_real_sizes(dtype, monkeypatch):
    monkeypatch.undo()  # the real blocks
    tokens = jax.ShapeDtypeStruct((1, 1000, 12, 192), dtype), jax.ShapeDtypeStruct((1, 1000, 12, 128), dtype)
    positions = jax.ShapeDtypeStruct((1, 1000), jnp.int32)

    def pulled_back(q, k, v, g, at):
        return jax.vjp(lambda *x: attention(*x, scale=0.07, q_positions=at, kv_positions=at, impl="gpu"), q, k, v)[1](g)

    q, v = tokens
    card = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")  # without one, newer versions of jax look for a real card
    mesh = jax.sharding.AbstractMesh((1,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=card)
    with target("gpu"), jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(pulled_back).trace(q, q, v, v, positions).lower(lowering_platforms=("cuda",)).as_text()
    assert all(name in text for name in ("mla_forward", "mla_dq", "mla_dkv"))


def test_sizes_that_no_tile_fits_are_refused_before_triton_sees_them():
    q, k, v = draw()
    with target("gpu"), pytest.raises(ValueError, match="powers of two from 16 on.* got keys of 40 and values of 128"):
        attention(q[..., :40], k[..., :40], v, scale=1.0, **in_order(), impl="gpu")
    with pytest.raises(ValueError, match="it is a kernel for gpu, and programs are compiled for cpu here"):
        attention(q, k, v, scale=1.0, **in_order(), impl="gpu")
