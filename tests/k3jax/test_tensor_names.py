"""The name table: every official name has one place, every place one name per spelling, and it is fast."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from configs import k3, kimi_linear_48b
from k3jax.config import K3Config
from k3jax.weights.checkpoint import abstract, official_specs, stored_config
from k3jax.weights.names import Spelling, TensorNames, is_mtp, spelling_of
from k3jax.weights.reader import read_folder
from k3jax.weights.writer import Spec

GOLDEN = Path(__file__).parents[1] / "golden"
OLDER = Spelling(residual=".proj_weight", residual_row=False)


def table_of(config: K3Config) -> TensorNames:
    return TensorNames(abstract(config), config)


@pytest.fixture(scope="module")
def released() -> TensorNames:
    return table_of(k3.config())


@pytest.fixture(scope="module")
def released_specs(released: TensorNames) -> list[Spec]:
    return [spec for _, spec in official_specs(released, Spelling(a_log="padded"))]


@pytest.mark.parametrize("case", ["k3_text_tiny", "kimi_linear_tiny", "k3_mxfp4_tiny", "vision_tiny"])
def test_a_checkpoint_and_its_table_hold_the_same_names_and_shapes(case: str):
    tensors = read_folder(GOLDEN / case / "checkpoint")
    table = table_of(stored_config(K3Config.load(GOLDEN / case / "checkpoint"), tensors))
    specs = {spec.name: spec for _, spec in official_specs(table, spelling_of(tensors, table))}
    assert specs.keys() == tensors.keys()
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: t.shape for name, t in tensors.items()
    }
    assert {name: spec.dtype for name, spec in specs.items()} == {
        name: t.dtype for name, t in tensors.items()
    }


@pytest.mark.parametrize("spelling", [Spelling(), Spelling(prefix=""), OLDER], ids=["k3", "bare", "older"])
def test_names_and_places_are_inverse_in_every_spelling(spelling: Spelling):
    table = table_of(K3Config.load(GOLDEN / "k3_mxfp4_tiny" / "checkpoint"))
    locations = list(table.locations())
    names = [table.name(at, spelling) for at in locations]
    assert len(set(names)) == len(names)
    assert [table.locate(name) for name in names] == locations


def test_the_older_spelling_of_attention_residuals_is_the_documented_one():
    table = table_of(K3Config.load(GOLDEN / "k3_text_tiny" / "checkpoint"))
    names = {table.name(at, OLDER).removeprefix("language_model.model.") for at in table.locations()}
    assert {
        "layers.3.self_attention_res.proj_weight",
        "layers.3.self_attention_res.norm_weight",
        "layers.3.mlp_res.proj_weight",
        "output_attn_res.norm_weight",
    } <= names


def test_the_released_model_has_its_497_220_tensors_in_its_1_56_terabytes(released_specs: list[Spec]):
    assert len(released_specs) == 497_220
    routed = sum(spec.nbytes for spec in released_specs if ".experts." in spec.name)
    assert routed == pytest.approx(1446e9, rel=1e-3)
    assert sum(spec.nbytes for spec in released_specs) - routed == pytest.approx(113.5e9, rel=0.01)


def test_mapping_all_released_names_takes_little_longer_than_splitting_them(
    released: TensorNames, released_specs: list[Spec]
):
    """1.8 times as long, 1.2 s for 497 220 names; a search through the table would take minutes."""
    names = [spec.name for spec in released_specs]

    def seconds(f: Callable[[str], object]) -> float:
        start = time.process_time()
        assert None not in [f(name) for name in names]
        return time.process_time() - start

    split = min(seconds(lambda name: [int(part) if part.isdigit() else part for part in name.split(".")]) for _ in range(3))
    assert min(seconds(released.locate) for _ in range(3)) < 6 * split


def test_layers_of_the_released_model_lie_in_the_stack_of_their_kind(released: TensorNames):
    config = released.config
    for layer in range(config.num_layers):
        inner = "A_log" if config.attention[layer] == "kda" else "kv_a_layernorm.weight"
        at = released.locate(f"language_model.model.layers.{layer}.self_attn.{inner}")
        assert at is not None and at.parameter.layers is not None
        assert at.parameter.layers[at.layer] == layer
        outer = "mlp.up_proj.weight" if layer == 0 else "block_sparse_moe.gate.weight"
        assert released.locate(f"language_model.model.layers.{layer}.{outer}") is not None


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.block_sparse_moe.experts.8.w1.weight_packed",
        "model.layers.1.block_sparse_moe.experts.-1.w1.weight_packed",
        "model.layers.1.block_sparse_moe.experts.01.w1.weight_packed",
        "model.layers.1.block_sparse_moe.experts.w1.weight_packed",
        "model.layers.1.block_sparse_moe.experts.1.w1.weight",
        "model.layers.0.block_sparse_moe.experts.1.w1.weight_packed",
        "model.layers.01.input_layernorm.weight",
        "model.layers.5.input_layernorm.weight",
        "model.layers.{}.input_layernorm.weight",
        "text_model.model.norm.weight",
        "model.norm.bias",
        "",
    ],
)
def test_a_name_that_the_model_has_no_place_for_has_none(name: str):
    table = table_of(K3Config.load(GOLDEN / "k3_mxfp4_tiny" / "checkpoint"))
    assert table.locate(name) is None


def test_tensors_of_a_prediction_layer_are_told_from_others():
    config = K3Config.load(GOLDEN / "k3_mxfp4_tiny" / "checkpoint")
    assert is_mtp("language_model.model.layers.5.eh_proj.weight", config)
    assert is_mtp("model.mtp.layers.0.norm.weight", config)
    assert not is_mtp("language_model.model.layers.4.eh_proj.weight", config)
    assert not is_mtp("language_model.model.layers.5", config)


def test_the_prediction_layer_is_the_layer_after_the_last():
    config = replace(K3Config.load(GOLDEN / "k3_mxfp4_tiny" / "checkpoint"), num_mtp_layers=1)
    table, plain = table_of(config), table_of(replace(config, num_mtp_layers=0))
    names = {spec.name for _, spec in official_specs(table, Spelling())}
    added = names - {spec.name for _, spec in official_specs(plain, Spelling())}
    assert all(name.startswith("language_model.model.layers.5.") for name in added)
    assert {
        f"language_model.model.layers.5.{n}" for n in ("eh_proj.weight", "shared_head.norm.weight")
    } < added
    assert "language_model.model.layers.5.block_sparse_moe.experts.7.w2.weight_packed" in added
    assert all(table.locate(name) is not None and is_mtp(name, config) for name in added)


def test_kimi_linear_has_no_prefix_and_low_rank_gates():
    table = table_of(kimi_linear_48b.config())
    names = {spec.name for _, spec in official_specs(table, Spelling.default(table.config))}
    assert "model.layers.26.block_sparse_moe.experts.255.w2.weight" in names
    assert "model.layers.0.self_attn.g_a_proj.weight" in names
    assert not any(
        "attn_res" in name or "attention_res" in name or name.startswith("language") for name in names
    )
