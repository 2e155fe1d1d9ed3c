"""The router: official choices and weights, and the places where others lost precision."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from k3jax.config import MoEConfig
from k3jax.router import HISTOGRAM_BINS, Router, combine_weights, margin_histogram

CASES = ("plain", "groups", "groups_one_kept", "softmax", "no_renorm", "top1")


def router(make_config, moe, hidden_size, weight=None, bias=None, param_dtype=jnp.float32):
    config = make_config(moe=moe, hidden_size=hidden_size, param_dtype=jnp.dtype(param_dtype))
    module = Router(config, rngs=nnx.Rngs(0))
    if weight is not None:
        module.kernel[...] = jnp.asarray(weight, param_dtype)
    if bias is not None:
        module.e_score_correction_bias[...] = jnp.asarray(bias, jnp.float32)
    return module


@pytest.fixture(scope="module")
def k3_router(make_config):
    """896 experts, 16 of them per token, as in the release; hidden size 64."""
    rng = np.random.default_rng(0)
    moe = MoEConfig(num_experts=896, experts_per_token=16, intermediate_size=8)
    return router(make_config, moe, 64, rng.standard_normal((64, 896)), 0.1 * rng.standard_normal(896))


@nnx.jit
def route(module, x):
    return module(x)


@pytest.mark.parametrize("case", CASES)
def test_choices_and_weights_are_the_official_ones(case, golden, make_config):
    tensors = load_file(golden / "component_ops.safetensors")
    x, weight, bias, picks, weights = (
        tensors[f"router/{case}/{key}"] for key in ("x", "weight", "e_score_correction_bias", "topk_idx", "topk_weight")
    )
    s = json.loads((golden / "component_ops.json").read_text())[case]
    moe = MoEConfig(
        num_experts=s["num_experts"], experts_per_token=s["num_experts_per_token"], intermediate_size=8,
        scaling_factor=s["routed_scaling_factor"], renormalize=s["moe_renormalize"], score=s["moe_router_activation_func"],
        num_groups=s["num_expert_group"], groups_per_token=s["topk_group"],
    )
    got, got_weights, _ = route(router(make_config, moe, s["hidden_size"], weight.T, bias), x)
    np.testing.assert_array_equal(got, picks)
    np.testing.assert_allclose(got_weights, weights, rtol=0, atol=1e-5)


def test_choices_of_bf16_inputs_are_those_of_float64(k3_router):
    """4096 tokens; where the 16th and 17th expert are closer than fp32 resolves, either may be picked."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4096, 64)), jnp.bfloat16)
    picks, _, _ = route(k3_router, x)
    logits = np.asarray(x, np.float64) @ np.asarray(k3_router.kernel[...], np.float64)
    biased = 1 / (1 + np.exp(-logits)) + np.asarray(k3_router.e_score_correction_bias[...], np.float64)
    order = np.sort(biased, -1)
    clear = order[:, -16] - order[:, -17] > 1e-6
    assert clear.mean() > 0.99
    expected = np.argsort(biased, -1)[:, -16:]
    np.testing.assert_array_equal(np.sort(picks, -1)[clear], np.sort(expected, -1)[clear])


def test_choices_do_not_depend_on_the_batch(k3_router):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((512, 64)), jnp.bfloat16)
    picks, _, _ = route(k3_router, x)
    one = np.concatenate([route(k3_router, x[i : i + 1])[0] for i in range(0, 512, 32)])
    np.testing.assert_array_equal(np.sort(one), np.sort(picks[::32]))


def test_the_bias_is_fp32_in_a_bf16_model_and_decides_between_equal_scores(make_config):
    """bf16 cannot tell 1 + 2^-12 from 1."""
    moe = MoEConfig(num_experts=4, experts_per_token=1, intermediate_size=8)
    module = router(make_config, moe, 8, np.zeros((8, 4)), [1, 1 + 2**-12, 0, 1], param_dtype=jnp.bfloat16)
    assert module.e_score_correction_bias[...].dtype == jnp.float32
    assert module.kernel[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(module(jnp.ones((3, 8), jnp.bfloat16))[0], [[1]] * 3)


@pytest.mark.parametrize("logit", [-100.0, -20.0, -1000.0])
def test_weights_sum_to_the_scale_when_every_score_underflows(make_config, logit):
    moe = MoEConfig(num_experts=8, experts_per_token=3, intermediate_size=8, scaling_factor=2.5)
    module = router(make_config, moe, 4, np.full((4, 8), logit / 4))

    def total(x):
        return module(x)[1].sum(), module(x)[1]

    (_, weights), grad = jax.value_and_grad(total, has_aux=True)(jnp.ones((2, 4)))
    np.testing.assert_allclose(weights.sum(-1), 2.5, rtol=1e-6)
    assert np.isfinite(grad).all()


def test_equal_logits_pick_the_first_experts_once_each(make_config):
    moe = MoEConfig(num_experts=8, experts_per_token=3, intermediate_size=8)
    picks, weights, _ = router(make_config, moe, 4, np.zeros((4, 8)))(jnp.ones((5, 4)))
    np.testing.assert_array_equal(picks, [[0, 1, 2]] * 5)
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


def test_given_picks_are_kept_and_weighed_by_the_scores(k3_router):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((6, 64)), jnp.float32)
    given = np.random.default_rng(4).permuted(np.tile(np.arange(896), (6, 1)), axis=1)[:, :16].astype(np.int32)
    picks, weights, scores = k3_router(x, jnp.asarray(given))
    np.testing.assert_array_equal(picks, given)
    picked = np.take_along_axis(np.asarray(scores), given, -1)
    np.testing.assert_allclose(weights, picked / picked.sum(-1, keepdims=True), rtol=1e-5)


def test_the_bias_picks_and_never_weighs(k3_router):
    x = jnp.asarray(np.random.default_rng(5).standard_normal((6, 64)), jnp.float32)
    picks, weights, scores = k3_router(x)
    np.testing.assert_allclose(weights, combine_weights(jnp.log(scores), picks, k3_router.config), rtol=1e-5)
    grad = nnx.grad(lambda m: (m(x)[1] * jnp.arange(16)).sum(), argnums=nnx.DiffState(0, nnx.Variable))(k3_router)
    assert not np.asarray(grad["e_score_correction_bias"].get_value()).any()
    assert np.asarray(grad["kernel"].get_value()).any()


def test_the_histogram_counts_each_margin_of_each_valid_token_once():
    rng = np.random.default_rng(6)
    N, E, k = 40, 6, 2
    scores, bias = rng.random((N, E), np.float32), rng.normal(0, 0.1, E).astype(np.float32)
    valid = np.arange(N) < 30
    counts = np.asarray(margin_histogram(*map(jnp.asarray, (scores, bias, valid)), k))
    assert counts.shape == (E, HISTOGRAM_BINS)
    np.testing.assert_array_equal(counts.sum(-1), 30)
    margin = np.sort(scores + bias, -1)[:, -(k + 1)][:, None] - scores
    low, high = bias.min() - 1, bias.max() + 1
    for e in range(E):
        expected, _ = np.histogram(margin[valid, e], HISTOGRAM_BINS, (low, high))
        assert np.abs(np.cumsum(counts[e]) - np.cumsum(expected)).max() <= 1  # rounding at a bin's edge


def test_padding_changes_no_count():
    """A batch half padding counts what the packed one counts."""
    rng = np.random.default_rng(7)
    scores, bias = rng.random((20, 6), np.float32), rng.normal(0, 0.1, 6).astype(np.float32)
    half = np.concatenate([scores, rng.random((20, 6), np.float32)])
    counts = [
        margin_histogram(jnp.asarray(s), jnp.asarray(bias), jnp.arange(len(s)) < 20, 2) for s in (half, scores)
    ]
    np.testing.assert_array_equal(*counts)


def test_groups_that_were_dropped_give_no_expert(make_config):
    """Two groups of two are kept by the sum of their two best; an expert of another group never appears."""
    moe = MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=8, num_groups=4, groups_per_token=1)
    logits = np.array([[9.0, -9, 1, 1, 0, 0, -1, -1]], np.float32)  # group 1 has the best pair, group 0 the best expert
    module = router(make_config, moe, 1, logits)
    np.testing.assert_array_equal(np.sort(module(jnp.ones((1, 1)))[0]), [[2, 3]])
    assert set(np.asarray(router(make_config, replace(moe, num_groups=1), 1, logits)(jnp.ones((1, 1)))[0])[0]) == {0, 2}
