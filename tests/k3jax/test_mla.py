"""The MLA module: its formula, written out, and its two ways to read a cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax import mla
from k3jax.cache import MLAState
from k3jax.mla import MultiHeadLatentAttention
from k3jax.packing import Packing

B, T, D, S = 2, 24, 32, 40
CLOSE = {"rtol": 0, "atol": 1e-5}


def build(config):
    module = nnx.jit(lambda: MultiHeadLatentAttention(config, rngs=nnx.Rngs(0)))()
    weight = module.kv_a_layernorm.weight
    weight[...] = 1 + 0.3 * jax.random.normal(jax.random.key(3), weight.shape, weight[...].dtype)
    return module


@pytest.fixture(scope="module")
def layer(make_config):
    return build(make_config())


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)


@partial(nnx.jit, static_argnums=5)
def run(layer, x, segments, cache, start, size=None):
    start = jnp.broadcast_to(start, len(x))
    return layer(x, Packing.of(segments, start), cache)


def empty(layer):
    c = layer.config.mla
    return MLAState(jnp.zeros((B, S, c.kv_lora_rank + c.rope_dim)))


def formula(layer, x):
    """softmax((q_n k_n + q_r k_r) / sqrt(nope + rope)) v, gated, in float64; one row at a time."""
    c, out = layer.config.mla, []
    w = lambda p: np.asarray(p.kernel[...], np.float64)  # noqa: E731

    def norm(v, module):
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6) * np.asarray(module.weight[...])

    for row in x.astype(np.float64):
        if c.q_lora_rank is None:
            q = row @ w(layer.q_proj)
        else:
            q = norm(row @ w(layer.q_a_proj), layer.q_a_layernorm) @ w(layer.q_b_proj)
        q = q.reshape(len(row), c.num_heads, -1)
        low, rope = np.split(row @ w(layer.kv_a_proj_with_mqa), [c.kv_lora_rank], -1)
        kv = (norm(low, layer.kv_a_layernorm) @ w(layer.kv_b_proj)).reshape(len(row), c.num_heads, -1)
        k, v = np.split(kv, [c.nope_dim], -1)
        scores = np.einsum("thn,shn->hts", q[..., : c.nope_dim], k) + np.einsum("thr,sr->hts", q[..., c.nope_dim :], rope)
        scores = np.where(np.tri(len(row), dtype=bool), scores / np.sqrt(c.nope_dim + c.rope_dim), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        o = np.einsum("hts,shv->thv", p / p.sum(-1, keepdims=True), v).reshape(len(row), -1)
        if c.output_gate:
            o = o / (1 + np.exp(-(row @ w(layer.g_proj))))
        out.append(o @ w(layer.o_proj))
    return np.stack(out)


@pytest.mark.parametrize("plain", [False, True], ids=["gated, low-rank queries", "plain"])
def test_the_module_is_its_formula(layer, make_config, x, plain):
    if plain:
        c = make_config().mla
        layer = build(make_config(mla=c.__class__(**{**c.__dict__, "q_lora_rank": None, "output_gate": False})))
    y, state = run(layer, x, jnp.ones((B, T), jnp.int32), None, 0)
    np.testing.assert_allclose(y, formula(layer, x), **CLOSE)
    assert state.latent.shape == (B, T, layer.config.mla.kv_lora_rank + layer.config.mla.rope_dim)


def test_both_ways_to_read_a_cache_give_the_same(layer, x, monkeypatch):
    """Tokens 8.. after 8 cached ones: attending to the latents themselves, and to keys and values expanded from them."""
    whole, _ = run(layer, x, jnp.ones((B, T), jnp.int32), None, 0)
    ones = jnp.ones((B, T), jnp.int32)
    _, cache = run(layer, x[:, :8], ones[:, :8], empty(layer), 0)
    results = []
    for limit in (0, T):
        monkeypatch.setattr(mla, "ABSORBED_TOKENS", limit)
        y, after = run(layer, x[:, 8:], ones[:, 8:], cache, 8, limit)
        np.testing.assert_allclose(y, whole[:, 8:], **CLOSE)
        results.append(after)
    np.testing.assert_array_equal(results[0].latent, results[1].latent)


def test_padding_is_not_cached_and_what_does_not_fit_is_dropped(layer, x):
    segments = (jnp.arange(T) < jnp.array([[5], [T]])).astype(jnp.int32)
    _, after = run(layer, x, segments, empty(layer), jnp.array([0, S - 4]))
    assert not np.asarray(after.latent[0, 5:]).any() and np.asarray(after.latent[0, :5]).all()
    assert not np.asarray(after.latent[1, : S - 4]).any() and np.asarray(after.latent[1, S - 4 :]).any()


def test_a_cache_without_a_packing_is_refused_since_it_does_not_tell_how_many_tokens_it_holds(layer, x):
    _, state = run(layer, x, jnp.ones((B, T), jnp.int32), None, 0)
    message = r"Make it with MLAState.empty\(config, batch, capacity\) and pass packing=Packing.of\(segments, start="
    with pytest.raises(ValueError, match=message):
        layer(x, cache=state)


def test_tokens_beyond_the_capacity_are_refused_as_far_as_they_show(layer, x):
    """More tokens in one call than fit: always. After others: outside jit, where positions have values."""
    ones = jnp.ones((B, T), jnp.int32)
    with pytest.raises(ValueError, match="24 tokens per row do not fit a cache of 20"):
        nnx.eval_shape(lambda: layer(x, Packing.of(ones), MLAState.empty(layer.config, B, 20)))
    latents, room = jnp.zeros((B, T, 24)), MLAState.empty(layer.config, B, S)
    room.append(latents, Packing.of(ones, start=S - T))
    with pytest.raises(ValueError, match=f"A row goes on to {S + 1} tokens, but its cache holds {S}"):
        room.append(latents, Packing.of(ones, start=jnp.array([S - T + 1, 0])))
    padded = ones.at[0, -1].set(0)
    room.append(latents, Packing.of(padded, start=jnp.array([S - T + 1, 0])))
    with pytest.raises(ValueError, match="the state of a call without a cache has room for no further token"):
        MLAState(latents).append(latents[:, :1], Packing.of(ones[:, :1], start=T))


def test_a_row_of_padding_only_is_finite(layer, x):
    segments = jnp.zeros((B, T), jnp.int32)
    for cache in (None, empty(layer)):
        y, _ = run(layer, x, segments, cache, 0)
        assert np.isfinite(y).all()


def test_softmax_runs_in_fp32_in_a_bf16_model(layer, make_config, x):
    """Weights that make scores of some tens, which bf16 would round by tenths: the error stays that of rounded factors."""
    narrow = build(make_config(dtype=jnp.dtype("bfloat16"), param_dtype=jnp.dtype("bfloat16")))
    for projection in (narrow.q_b_proj, narrow.kv_b_proj):
        projection.kernel[...] = projection.kernel[...] * 4
    y, _ = run(narrow, jnp.asarray(x, jnp.bfloat16), jnp.ones((B, T), jnp.int32), None, 0)
    expected = formula(narrow, np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32))
    assert y.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(y, np.float64) - expected) < 4e-2 * np.linalg.norm(expected)
