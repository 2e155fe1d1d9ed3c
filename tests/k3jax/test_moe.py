"""Stable LatentMoE: its formula, the tokens that count, and experts kept packed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import MoEConfig
from k3jax.mlp import gated_activation
from k3jax.model import K3
from k3jax.moe import Experts, LatentMoE
from k3jax.packing import Packing
from k3jax.sharding import TRAIN, make_mesh, shard_batch, shardings
from k3jax.weights import abstract
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


def test_equal_scores_send_all_tokens_to_the_first_experts_and_drop_none(make_config, x):
    """A router of zeros: every token meets experts 0, 1 and 2, with the same weight."""
    config = make_config(moe=LATENT)
    layer = build(config)
    layer.gate.kernel[...] = jnp.zeros_like(layer.gate.kernel[...])
    y, routing = run(layer, x, ONE)
    np.testing.assert_array_equal(routing.experts, np.tile(np.arange(3), (B, T, 1)))
    np.testing.assert_allclose(y, formula(layer, config, x), **CLOSE)


@nnx.jit
def counts(layer, x, segments):
    return layer(x, Packing.of(segments), None, True)[1].histogram


def test_balancing_counts_each_token_once_and_no_padding(layer, x):
    """A batch half of whose tokens are padding counts what the packed batch counts."""
    padded = np.concatenate([x, np.random.default_rng(9).standard_normal(x.shape).astype(np.float32)], 1)
    segments = np.concatenate([ONE, 0 * ONE], 1)
    packed = counts(layer, x, ONE)
    np.testing.assert_array_equal(packed.sum(-1), B * T)
    np.testing.assert_array_equal(counts(layer, padded, segments), packed)


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"expert": 4, "tensor": 2}], ids=str)
def test_balancing_counts_are_the_same_over_any_mesh(layer, x, sizes):
    """Devices that hold the same tokens do not count them twice, devices that hold others leave none out."""
    mesh = make_mesh(**sizes)
    graphdef, state = nnx.split(layer)
    placed = nnx.merge(graphdef, jax.device_put(state, shardings(state, mesh, TRAIN)))
    tokens, segments = np.concatenate([x, -x]), np.concatenate([ONE, ONE])
    with jax.set_mesh(mesh):
        spread = counts(placed, *shard_batch((tokens, segments), mesh, TRAIN))
    one = counts(layer, tokens, segments)
    np.testing.assert_array_equal(spread.sum(-1), 2 * B * T)
    assert np.abs(np.cumsum(spread, -1) - np.cumsum(one, -1)).max() <= 1  # rounding at a bin's edge


def test_8192_tokens_with_16_experts_each_go_through_in_one_call(make_config):
    """131 072 pairs, more than 16 bits count: spot checks against the token alone."""
    layer = build(make_config(moe=MoEConfig(num_experts=32, experts_per_token=16, intermediate_size=4, latent_size=4)))
    x = np.random.default_rng(2).standard_normal((1, 8192, D)).astype(np.float32)
    y, routing = run(layer, x, np.ones((1, 8192), np.int32))
    some = np.array([0, 2047, 2048, 4095, 4096, 8191])
    alone, picks = run(layer, x[:, some], np.ones((1, len(some)), np.int32))
    np.testing.assert_array_equal(np.asarray(routing.experts)[:, some], picks.experts)
    np.testing.assert_allclose(np.asarray(y)[:, some], alone, **CLOSE)
    assert (np.abs(y).max(-1) > 0).all()


def test_the_program_of_the_experts_needs_less_than_three_times_its_inputs(make_config):
    """Values and gradients of rows and weights; a product of all rows with all experts would take 9 times."""
    moe = MoEConfig(num_experts=64, experts_per_token=2, intermediate_size=64, latent_size=64)
    graphdef, weights = nnx.split(nnx.eval_shape(lambda: Experts(make_config(moe=moe), rngs=nnx.Rngs(0))))
    rows = jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)

    def forward(weights, rows, sizes):
        return nnx.merge(graphdef, weights)(rows, sizes, None)

    def backward(weights, rows, sizes, cotangent):
        return jax.vjp(lambda w, r: forward(w, r, sizes), weights, rows)[1](cotangent)

    inputs = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((weights, rows)))
    for program, more in ((forward, ()), (backward, (rows,))):
        compiled = jax.jit(program).lower(weights, rows, sizes, *more).compile()
        temp = compiled.memory_analysis().temp_size_in_bytes
        assert temp < 3 * inputs, f"{program.__name__}: {temp / inputs:.2f} times its inputs"


def test_only_layers_with_experts_route_and_896_experts_are_no_limit(make_config):
    """Of [dense, experts] layer 0 has no routing; a model of one layer may be all experts, and picks beyond the 512th."""
    moe = MoEConfig(num_experts=896, experts_per_token=16, intermediate_size=4, latent_size=8)
    ids = np.random.default_rng(3).integers(0, 63, (1, 40)).astype(np.int32)
    run = nnx.jit(lambda model, ids: model(ids))
    dense, routed = nnx.eval_shape(run, abstract(make_config(attention=("mla", "mla"), moe=moe)), ids).routing
    assert dense is None and routed.experts.shape == (1, 1, 40, 16)
    one = make_config(attention=("mla",), moe=replace(moe, first_layer=0), attn_res_block=None)
    out = run(nnx.jit(lambda: K3(one, rngs=nnx.Rngs(0)))(), ids)
    picks = np.asarray(out.routing[0].experts)
    assert picks.shape == (1, 1, 40, 16) and picks.max() > 512
    assert np.isfinite(out.hidden).all()
