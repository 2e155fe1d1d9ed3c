"""Stable LatentMoE: its formula, the tokens that count, and experts kept packed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import MoEConfig
from k3jax.mlp import gated_activation
from k3jax.moe import LatentMoE
from k3jax.packing import Packing
from k3jax.weights.quant import pack, unpack

B, T, D = 2, 12, 32
CLOSE = {"rtol": 0, "atol": 1e-5}
LATENT = MoEConfig(
    num_experts=8, experts_per_token=3, intermediate_size=32, num_shared_experts=2, latent_size=32, latent_norm=True,
    scaling_factor=2.5,
)
PLAIN = replace(LATENT, latent_size=None, latent_norm=False)


def build(config):
    return nnx.jit(lambda: LatentMoE(config, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def layer(make_config):
    return build(make_config(moe=LATENT))


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)


@nnx.jit
def run(layer, x, segments, picks=None):
    return layer(x, Packing.of(segments), picks)


@nnx.jit
def gradients(layer, x, segments):
    def loss(layer, x):
        y, _ = layer(x, Packing.of(segments))
        return jnp.sum(jnp.where((segments > 0)[..., None], y, 0) ** 2)

    return nnx.grad(loss, argnums=(0, 1))(layer, x)


ONE = np.ones((B, T), np.int32)


def formula(layer, config, x):
    """up(norm(sum_i p_i E_i(down x))) + shared(x), token by token."""
    kernel = lambda m: np.asarray(m.kernel[...])  # noqa: E731
    rows = x.reshape(-1, D)
    picks, weights, _ = layer.gate(jnp.asarray(rows))
    z = rows @ kernel(layer.routed_expert_down_proj) if config.moe.latent_size else rows
    out = np.zeros_like(z)
    w1, w3, w2 = (kernel(getattr(layer.experts, name)) for name in ("w1", "w3", "w2"))
    for n in range(len(rows)):
        for e, p in zip(np.asarray(picks)[n], np.asarray(weights)[n], strict=True):
            out[n] += p * (np.asarray(gated_activation(config, *jnp.array([z[n] @ w1[e], z[n] @ w3[e]]))) @ w2[e])
    if config.moe.latent_size:
        out = np.asarray(layer.routed_expert_norm(jnp.asarray(out))) @ kernel(layer.routed_expert_up_proj)
    return out.reshape(x.shape) + np.asarray(layer.shared_experts(jnp.asarray(x)))


@pytest.mark.parametrize("moe", [LATENT, PLAIN], ids=["latent", "plain"])
def test_the_module_is_its_formula(make_config, x, moe):
    config = make_config(moe=moe)
    layer = build(config)
    y, routing = run(layer, x, ONE)
    np.testing.assert_allclose(y, formula(layer, config, x), **CLOSE)
    assert routing.experts.shape == (B, T, 3) and routing.histogram is None


def test_padding_goes_to_no_expert(layer, x):
    """Huge padding: the valid tokens' outputs and every gradient are those of zero padding, bit for bit."""
    segments = np.where(np.arange(T) < [[7], [0]], 1, 0).astype(np.int32)
    valid = segments[..., None] > 0
    zeros, huge = np.where(valid, x, 0), np.where(valid, x, 1e15)
    a, b = run(layer, zeros, segments)[0], run(layer, huge, segments)[0]
    np.testing.assert_array_equal(np.where(valid, a, 0), np.where(valid, b, 0))
    for clean, dirty in zip(*(jax.tree.leaves(gradients(layer, v, segments)) for v in (zeros, huge)), strict=True):
        np.testing.assert_array_equal(clean, dirty)


def test_every_token_may_go_to_the_same_experts(layer, x):
    """No capacity: what all tokens pick, all tokens get."""
    picks = np.tile(np.array([6, 1, 4], np.int32), (B, T, 1))
    y, routing = run(layer, x, ONE, picks)
    np.testing.assert_array_equal(routing.experts, picks)
    for b in range(B):
        alone, _ = run(layer, x[b : b + 1, :1].repeat(T, 1).repeat(B, 0), ONE, picks)
        np.testing.assert_allclose(y[b, 0], alone[0, 0], **CLOSE)


def test_replaying_the_chosen_experts_changes_nothing(layer, x):
    y, routing = run(layer, x, ONE)
    replayed, again = run(layer, x, ONE, routing.experts)
    np.testing.assert_array_equal(again.experts, routing.experts)
    np.testing.assert_allclose(replayed, y, **CLOSE)


def test_the_latent_norm_counts(layer, x):
    """Its weight set to zero leaves the shared experts alone."""
    y, _ = run(layer, x, ONE)
    graphdef, state = nnx.split(layer)
    other = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    other.routed_expert_norm.weight[...] = jnp.zeros_like(other.routed_expert_norm.weight[...])
    silent, _ = run(other, x, ONE)
    assert np.abs(y - silent).max() > 1e-2
    np.testing.assert_allclose(silent, layer.shared_experts(jnp.asarray(x)), **CLOSE)


def test_packed_experts_compute_what_the_weights_that_they_stand_for_compute(layer, make_config, x):
    """The packed bytes stay uint8 in the model; input gradients flow through them."""
    packed = build(make_config(moe=replace(LATENT, mxfp4=True)))
    rounded = build(make_config(moe=LATENT))
    nnx.update(packed, nnx.state(layer, lambda path, _: "experts" not in path))
    for name in ("w1", "w3", "w2"):
        codes, scale = pack(getattr(layer.experts, name).kernel[...])
        target = getattr(packed.experts, name)
        target.packed[...], target.scale[...] = codes, scale
        getattr(rounded.experts, name).kernel[...] = unpack(codes, scale, jnp.float32)
        assert target.packed[...].dtype == jnp.uint8 and not hasattr(target, "kernel")
    np.testing.assert_allclose(run(packed, x, ONE)[0], run(rounded, x, ONE)[0], **CLOSE)
    a, b = gradients(packed, x, ONE)[1], gradients(rounded, x, ONE)[1]
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def test_896_experts_with_16_picks_each_run(make_config):
    """The release's counts; experts that nobody picked get a zero gradient."""
    moe = MoEConfig(num_experts=896, experts_per_token=16, intermediate_size=4, latent_size=8)
    layer = build(make_config(moe=moe))
    x = np.random.default_rng(1).standard_normal((1, 20, D)).astype(np.float32)
    segments = np.ones((1, 20), np.int32)
    y, routing = run(layer, x, segments)
    picked = np.unique(routing.experts)
    assert np.isfinite(y).all() and all(len(set(row)) == 16 for row in np.asarray(routing.experts)[0])
    grad = np.asarray(gradients(layer, x, segments)[0]["experts"]["w2"]["kernel"].get_value())
    np.testing.assert_array_equal(np.flatnonzero(np.abs(grad).max((1, 2))), picked)


def test_the_output_of_a_token_does_not_depend_on_the_others(layer, x):
    y, _ = run(layer, x, ONE)
    other = np.where(np.arange(T)[:, None] < 5, x, -x)
    np.testing.assert_array_equal(run(layer, other, ONE)[0][:, :5], y[:, :5])
