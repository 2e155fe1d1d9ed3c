"""The formula sheet against numbers worked out by hand for K3's layers, its published totals, and the model itself."""

from dataclasses import replace

import pytest

from configs import k3, kimi_linear_48b
from k3jax.formulas import (
    cache_bytes,
    dense_weights,
    forward_flops,
    kda_weights,
    mla_weights,
    model_flops,
    moe_weights,
    parameters,
    state_bytes,
)
from k3jax.weights.inspect import count_parameters

K3 = k3.config()


def test_one_kda_layer_by_hand():
    w = kda_weights(K3)
    assert w["projections"] == 5 * 88_080_384 + 917_504 + 1_572_864 + 688_128  # 7168 x 12288; 7168 x 128, 128 x 12288; 7168 x 96
    assert w["convolutions"] == 147_456 and w["vectors"] == 12_288 + 96 + 128
    assert sum(w.values()) == 443_740_384


def test_one_mla_layer_by_hand():
    w = mla_weights(K3)
    q = 11_010_048 + 28_311_552  # 7168 x 1536, 1536 x 18432
    assert w["projections"] == q + 4_128_768 + 88_080_384 + 88_080_384  # 7168 x 576, gate and output 7168 x 12288
    assert w["keys and values"] == 12_582_912  # 512 x 24576
    assert sum(w.values()) == 232_194_048 + 2048


def test_one_moe_layer_by_hand():
    w = moe_weights(K3)
    assert w["routed"] == 896 * 33_030_144 == 29_595_009_024  # 3 x 3584 x 3072
    assert w["shared"] == 132_120_576 and w["latent"] == 51_380_224 and w["router"] == 6_422_528
    assert w["vectors"] == 896 + 3584
    assert dense_weights(K3) == 726_663_168


def test_totals_of_the_release():
    assert round(parameters(K3) / 1e8) == 27795 and round(parameters(K3, active=True) / 1e8) == 1054
    assert round(2 * parameters(K3, active=True) / 1e9) == 211
    assert state_bytes(K3) == 69 * (96 * 128 * 128 * 4 + 9 * 12288 * 2)
    assert state_bytes(K3, window_size=0) == 434_110_464
    assert cache_bytes(K3) == 27_648
    assert round(state_bytes(K3, window_size=0) / cache_bytes(K3)) == 15_701


@pytest.mark.parametrize("config", [K3, kimi_linear_48b.config()], ids=["k3", "kimi_linear"])
def test_the_sheet_counts_what_the_model_has(config):
    count = count_parameters(config)
    assert parameters(config) == count.total
    assert parameters(config, active=True) == pytest.approx(count.active, abs=100)


def test_products_with_weights_are_two_flops_per_active_parameter():
    flops = forward_flops(K3, keys=0)
    without = {"recurrence", "attention", "attention residuals"}
    products = sum(n for part, n in flops.items() if part not in without)
    vectors = 2 * sum(kda_weights(K3)["vectors"] for _ in range(69)) + 2 * 24 * 2048 + 2 * 92 * 4480
    embedding, residuals = 163_840 * 7168, 7168 * (2 * 93 + 1 + 2 * 187)
    assert products == 2 * (parameters(K3, active=True) - embedding - residuals) - vectors


def test_attention_by_hand():
    """8192 tokens in a row: 4096.5 keys on average, 192 + 128 products for each of 96 heads in 24 layers."""
    assert forward_flops(K3, 4096.5)["attention"] == 24 * 2 * 96 * 320 * 4096.5
    assert forward_flops(K3, 1000, absorbed=True)["attention"] == 24 * 2 * 96 * 1088 * 1000
    assert forward_flops(K3, 0)["recurrence"] == 69 * 96 * 7 * 16384
    assert model_flops(K3, 8192, "lora") == 2 * model_flops(K3, 8192, "forward")
    assert model_flops(replace(K3, attention=("kda",) * 93), 1, "full") == model_flops(
        replace(K3, attention=("kda",) * 93), 10**6, "full"
    )
