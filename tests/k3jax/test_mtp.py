from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import ConfigError, K3Config
from k3jax.model import K3
from k3jax.mtp import MTPLayer
from k3jax.packing import Packing

CHECKPOINT = Path(__file__).parents[1] / "golden" / "k3_text_tiny" / "checkpoint"
CONFIG = replace(K3Config.load(CHECKPOINT).in_dtype(jnp.float32), num_mtp_layers=1, init_std=0.1)
B, T, D = 2, 12, CONFIG.hidden_size


@nnx.jit(static_argnums=0)
def create(config):
    layer = MTPLayer(config, rngs=nnx.Rngs(0))
    norms = (
        layer.enorm,
        layer.hnorm,
        layer.input_layernorm,
        layer.post_attention_layernorm,
        layer.shared_head.norm,
    )
    for norm, key in zip(norms, jax.random.split(jax.random.key(3), len(norms)), strict=True):
        norm.weight[...] = jax.random.uniform(
            key, (D,), minval=0.5, maxval=2
        )  # as created, all norms are alike
    return layer


@pytest.fixture(scope="module")
def layer():
    return create(CONFIG)


@pytest.fixture(scope="module")
def inputs():
    hidden, embeds = jax.random.normal(jax.random.key(1), (2, B, T, D))
    return hidden, embeds


@nnx.jit
def run(layer, hidden, embeds, segments):
    return layer(hidden, embeds, Packing.of(segments))


ONE = jnp.ones((B, T), jnp.int32)


def test_the_result_is_one_layer_on_the_projection_of_both_norms(layer, inputs):
    """The formula of the docstring, written out around the attention and the experts."""

    @nnx.jit
    def formula(layer, hidden, embeds):
        packing = Packing.of(ONE)

        def norm(module, x):
            return module.weight[...] * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_eps)

        both = jnp.concatenate([norm(layer.enorm, embeds), norm(layer.hnorm, hidden)], -1)
        h = jnp.matmul(both, layer.eh_proj.kernel[...], precision="highest")
        h = h + layer.self_attn(norm(layer.input_layernorm, h), packing)[0]
        h = h + layer.block_sparse_moe(norm(layer.post_attention_layernorm, h), packing)[0]
        return norm(layer.shared_head.norm, h)

    y, _, routing = run(layer, *inputs, ONE)
    assert y.shape == (B, T, D) and routing.experts.shape == (B, T, CONFIG.moe.experts_per_token)
    np.testing.assert_allclose(y, formula(layer, *inputs), rtol=0, atol=1e-5)


def test_a_result_depends_on_nothing_later(layer, inputs):
    cut = 5
    later = (jnp.arange(T) >= cut)[None, :, None]
    before = run(layer, *inputs, ONE)[0]
    after = run(layer, *(jnp.where(later, -a, a) for a in inputs), ONE)[0]
    np.testing.assert_array_equal(before[:, :cut], after[:, :cut])
    assert (np.abs(before[:, cut:] - after[:, cut:]).max((0, 2)) > 1e-3).all()


def test_a_packed_sequence_is_the_sequence_alone(layer, inputs):
    """The next embedding of a sequence's last token is a stranger's, and reaches only that token's result."""
    segments = jnp.where(jnp.arange(T) < 5, 1, 2)[None].repeat(B, 0)
    packed = run(layer, *inputs, segments)[0]
    second = [jnp.roll(a, -5, 1) for a in inputs]
    alone = run(layer, *second, jnp.where(jnp.arange(T) < T - 5, 1, 0)[None].repeat(B, 0))[0]
    np.testing.assert_allclose(packed[:, 5:], alone[:, : T - 5], rtol=0, atol=1e-5)


def test_token_by_token_with_a_cache_is_all_at_once(layer, inputs):
    @jax.jit
    def step(layer, hidden, embeds, position, cache):
        return layer(hidden, embeds, Packing.of(jnp.ones((B, 1), jnp.int32), position), cache)

    whole, cache, outputs = run(layer, *inputs, ONE)[0], layer.empty_cache(B, T), []
    for t in range(T):
        y, cache, _ = step(layer, *(a[:, t : t + 1] for a in inputs), jnp.full(B, t), cache)
        outputs.append(y)
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole, rtol=0, atol=2e-5)


def test_gradients_reach_every_weight_and_do_not_depend_on_recomputation(layer, inputs):
    weight = jax.random.normal(jax.random.key(2), (B, T, D))

    @nnx.jit
    def gradients(layer, hidden, embeds):
        def loss(layer, hidden, embeds):
            return (layer(hidden, embeds, Packing.of(ONE))[0] * weight).sum()

        return nnx.grad(loss, argnums=(0, 1, 2))(layer, hidden, embeds)

    recomputed = gradients(layer, *inputs)
    expected = gradients(create(replace(CONFIG, remat="none")), *inputs)
    for (path, a), b in zip(jax.tree.leaves_with_path(recomputed), jax.tree.leaves(expected), strict=True):
        assert np.abs(a).max() > 0, path
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max(), err_msg=str(path))


def test_a_model_has_the_layer_when_its_config_says_so():
    model = nnx.eval_shape(lambda: K3(CONFIG, rngs=nnx.Rngs(0)))
    assert isinstance(model.mtp, MTPLayer)
    assert not hasattr(nnx.eval_shape(lambda: K3(replace(CONFIG, num_mtp_layers=0), rngs=nnx.Rngs(0))), "mtp")
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=2 is not supported, only 0 or 1"):
        MTPLayer(replace(CONFIG, num_mtp_layers=2), rngs=nnx.Rngs(0))
