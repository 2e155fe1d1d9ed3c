"""Configs: the official files read and write back unchanged, and every mistake is refused by its name."""

import copy
import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from configs import k3, kimi_linear_48b
from k3jax.config import ConfigError, K3Config
from k3jax.weights.inspect import count_parameters

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ["k3_text_tiny", "kimi_linear_tiny", "k3_mxfp4_tiny", "vision_tiny"]


def raw(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "checkpoint" / "config.json").read_text())


def edited(case: str, *edits: tuple[str, Any]) -> dict[str, Any]:
    """The case's config.json with values put in at dotted paths; `...` removes one."""
    config = copy.deepcopy(raw(case))
    for path, value in edits:
        *parents, name = path.split(".")
        at = config
        for parent in parents:
            at = at[parent]
        if value is ...:
            del at[name]
        else:
            at[name] = value
    return config


@pytest.mark.parametrize("case", CASES)
def test_an_official_config_survives_being_written(case: str, tmp_path: Path):
    config = K3Config.load(GOLDEN / case / "checkpoint")
    assert K3Config.from_dict(config.to_dict()) == config
    config.save(tmp_path)
    assert K3Config.load(tmp_path) == K3Config.load(tmp_path / "config.json") == config


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_holds_every_value_of_the_official_file_that_defines_the_model(case: str):
    written, official = K3Config.load(GOLDEN / case / "checkpoint").to_dict(), raw(case)
    left_out = {
        "head_dim",
        "num_key_value_heads",
        "use_cache",
        "model_max_length",
        "rope_theta",
        "rope_scaling",
    }
    for section in ("", "text_config", "vision_config"):
        new, old = (d.get(section) or {} if section else d for d in (written, official))
        differing = {k for k, v in old.items() if k not in new and k not in left_out and k != "ignore_index"}
        differing |= {k for k in old.keys() & new.keys() if not isinstance(old[k], dict) and old[k] != new[k]}
        assert not differing, section


def test_nested_and_flat_files_of_one_text_model_agree():
    nested = raw("k3_text_tiny")
    flat = {**nested["text_config"]}
    assert K3Config.from_dict(flat) == replace(K3Config.from_dict(nested), media_token_id=None)


def test_the_released_files_extra_fields_are_no_part_of_the_model():
    extra = {"auto_map": {"AutoConfig": "a.B"}, "id2label": {"0": "LABEL_0"}, "top_k": 50, "pruned_heads": {}}
    config = edited("vision_tiny", *((f"text_config.{k}", v) for k, v in extra.items()))
    config |= {"image_placeholder": "<|kimi_image_placeholder|>", "auto_map": {}}
    config["vision_config"]["_attn_implementation"] = "flash_attention_2"
    assert K3Config.from_dict(config) == K3Config.from_dict(raw("vision_tiny"))


@pytest.mark.parametrize(
    ("case", "edit", "words"),
    [
        ("k3_text_tiny", ("text_config.hiden_size", 64), ["hiden_size", "hidden_size", "text_config"]),
        ("k3_text_tiny", ("num_expert", 3), ["num_expert", "config.json"]),
        (
            "k3_text_tiny",
            ("text_config.linear_attn_config.gate_lower", -5.0),
            ["gate_lower", "gate_lower_bound"],
        ),
        ("vision_tiny", ("vision_config.patch_sise", 14), ["patch_sise", "patch_size", "vision_config"]),
        ("k3_text_tiny", ("text_config.hidden_size", ...), ["text_config", "hidden_size"]),
        (
            "k3_text_tiny",
            ("text_config.linear_attn_config.num_heads", ...),
            ["linear_attn_config", "num_heads"],
        ),
    ],
)
def test_an_unknown_or_missing_field_is_named_with_its_place(case: str, edit: Any, words: list[str]):
    with pytest.raises(ConfigError) as error:
        K3Config.from_dict(edited(case, edit))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("case", "edit", "word"),
    [
        ("k3_text_tiny", ("eos_token_id", 7), "eos_token_id"),
        ("k3_text_tiny", ("text_config.num_key_value_heads", 2), "num_key_value_heads"),
        ("k3_text_tiny", ("text_config.num_experts_per_token", 17), "num_experts_per_token"),
        ("k3_text_tiny", ("text_config.num_expert_group", 3), "num_expert_group"),
        ("k3_text_tiny", ("text_config.topk_group", 2), "topk_group"),
        ("k3_text_tiny", ("text_config.routed_expert_hidden_size", None), "routed_expert_hidden_size"),
        ("k3_text_tiny", ("text_config.attn_res_block_size", 0), "attn_res_block_size"),
        ("k3_text_tiny", ("text_config.activation_situ_beta", ...), "activation_situ_beta"),
        ("k3_text_tiny", ("text_config.hidden_act", "gelu"), "hidden_act"),
        ("k3_text_tiny", ("text_config.mla_use_nope", False), "mla_use_nope"),
        ("k3_text_tiny", ("text_config.qk_head_dim", 16), "qk_head_dim"),
        ("k3_text_tiny", ("text_config.tie_word_embeddings", True), "tie_word_embeddings"),
        ("k3_text_tiny", ("text_config.dtype", "float16"), "dtype"),
        ("k3_text_tiny", ("text_config.model_max_length", 5), "context length"),
        ("k3_text_tiny", ("text_config.linear_attn_config.gate_lower_bound", 5.0), "gate_lower_bound"),
        ("k3_text_tiny", ("text_config.linear_attn_config.kda_layers", [1, 2, 3]), "missing [5, 6, 7"),
        ("k3_text_tiny", ("text_config.linear_attn_config.full_attn_layers", [1, 4, 8, 12, 13]), "both"),
        ("k3_text_tiny", ("text_config.num_hidden_layers", 12), "[13]"),
        ("k3_text_tiny", ("text_config.vocab_size", 0), "vocab_size"),
        ("k3_mxfp4_tiny", ("text_config.moe_intermediate_size", 24), "MXFP4"),
        ("vision_tiny", ("vision_config.text_hidden_size", 64), "text_hidden_size"),
        ("vision_tiny", ("vision_config.norm_type", "layernorm"), "norm_type"),
        ("kimi_linear_tiny", ("activation_situ_linear_beta", 25.0), "activation_situ_linear_beta"),
    ],
)
def test_a_contradiction_is_refused_by_name(case: str, edit: Any, word: str):
    with pytest.raises(ConfigError) as error:
        K3Config.from_dict(edited(case, edit))
    assert word in str(error.value)


GROUP = "text_config.quantization_config.config_groups.group_0"
UNSUPPORTED = [
    ("k3_mxfp4_tiny", "text_config.quantization_config", {"quant_method": "gptq", "bits": 4}, "quant_method='gptq'"),
    ("k3_mxfp4_tiny", "text_config.quantization_config", {}, "quantization_config lacks 'quant_method'"),
    ("k3_mxfp4_tiny", "text_config.quantization_config.format", "int-quantized", "'int-quantized'.*'mxfp4-pack-quantized'"),
    ("k3_mxfp4_tiny", "text_config.quantization_config.surprise", 1, "quantization_config: unknown field 'surprise'"),
    ("k3_mxfp4_tiny", "text_config.quantization_config.kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme="),
    ("k3_mxfp4_tiny", "text_config.quantization_config.config_groups", {}, "config_groups must hold one group"),
    ("k3_mxfp4_tiny", f"{GROUP}.input_activations", {"num_bits": 8}, "group_0: input_activations="),
    ("k3_mxfp4_tiny", f"{GROUP}.targets", ["Embedding"], "group_0: targets="),
    ("k3_mxfp4_tiny", f"{GROUP}.weights.num_bits", 8, "weights: num_bits=8 is not supported, only 4"),
    ("k3_mxfp4_tiny", f"{GROUP}.weights.type", "int", "type='int' is not supported, only 'float'"),
    ("k3_mxfp4_tiny", f"{GROUP}.weights.group_size", 16, "group_size=16 is not supported, only 32"),
    ("k3_mxfp4_tiny", f"{GROUP}.weights.zp_dtype", "torch.uint8", "zp_dtype='torch.uint8' is not supported, only None"),
    ("k3_mxfp4_tiny", f"{GROUP}.weights.observr", "minmax", "unknown field 'observr'; did you mean 'observer'"),
    ("k3_mxfp4_tiny", "text_config.num_experts", 0, "quantization_config describes MXFP4 experts, but num_experts"),
    ("k3_mxfp4_tiny", "quantization_config", {"quant_method": "gptq"}, "quantization_config is .*gptq.* at the top but"),
    ("k3_text_tiny", "model_type", "llama", "model_type='llama' is not supported, only 'kimi_k3'"),
    ("k3_text_tiny", "text_config.model_type", "llama", "text_config: model_type='llama' is not supported, only 'kimi_linear'"),
    ("kimi_linear_tiny", "model_type", "llama", "model_type='llama' is not supported, only 'kimi_linear'"),
    ("kimi_linear_tiny", "architectures", ["LlamaForCausalLM"], "architectures=.*only .'KimiLinearForCausalLM'"),
    ("vision_tiny", "vision_config.model_type", "siglip", "vision_config: model_type='siglip'"),
    ("vision_tiny", "vision_config.dtype", "float16", "vision_config: dtype='float16' is not supported, only None or 'bfloat16'"),
    ("kimi_linear_tiny", "rope_parameters", {"rope_type": "yarn", "factor": 4}, "rope_parameters: rope_type='yarn'.*'default'"),
    ("kimi_linear_tiny", "rope_scaling", {"type": "yarn"}, "rope_scaling: type='yarn' is not supported, only 'default'"),
    ("kimi_linear_tiny", "rope_scaling", {"factor": 4}, "rope_scaling: unknown field 'factor'"),
    ("kimi_linear_tiny", "rope_theta", "10000", "rope_theta must be a finite number, got '10000'"),
    ("kimi_linear_tiny", "torch_dtype", "float32", "torch_dtype='float32' contradicts dtype='bfloat16'"),
    ("k3_text_tiny", "text_config.rms_norm_eps", -1, "rms_norm_eps must be a positive, finite number, got -1"),
    ("k3_text_tiny", "text_config.rms_norm_eps", "1e-5", "rms_norm_eps must be a finite number, got '1e-5'"),
    ("k3_text_tiny", "text_config.initializer_range", -1, "initializer_range must be a number of at least 0, got -1"),
    ("k3_text_tiny", "text_config.activation_situ_beta", 0, "activation_situ_beta must be a positive, finite number, got 0"),
    ("k3_text_tiny", "text_config.routed_scaling_factor", -1, "routed_scaling_factor must be a positive, finite number, got -1"),
    ("k3_text_tiny", "text_config.first_k_dense_replace", 99, "first_k_dense_replace=99 exceeds num_hidden_layers=13"),
    ("k3_text_tiny", "text_config.head_dim", 7, r"head_dim=7 is no size of a head: \[8, 16, 24\]"),
    ("k3_text_tiny", "media_placeholder_token_id", 320, r"media_placeholder_token_id must be a token id in 0..319 .*got 320"),
    ("kimi_linear_tiny", "pad_token_id", "x", "pad_token_id must be a token id in 0..255 .*got 'x'"),
    ("kimi_linear_tiny", "pad_token_id", None, "pad_token_id must be a token id in 0..255 .*got None"),
    ("kimi_linear_tiny", "bos_token_id", True, "bos_token_id must be a token id in 0..255 .*got True"),
    ("kimi_linear_tiny", "eos_token_id", 10**9, "eos_token_id must be a token id in 0..255 .*got 1000000000"),
    ("kimi_linear_tiny", "is_encoder_decoder", True, "is_encoder_decoder=True is not supported, only False"),
    ("kimi_linear_tiny", "add_cross_attention", True, "add_cross_attention=True is not supported, only False"),
    ("kimi_linear_tiny", "pruned_heads", {"0": [1]}, "pruned_heads="),
    ("vision_tiny", "vision_config.projector_ln_eps", 0, "projector_ln_eps must be a positive, finite number, got 0"),
    ("vision_tiny", "vision_config.merge_kernel_size", [2, 0], r"merge_kernel_size must be .*at least 1, got \[2, 0\]"),
]


@pytest.mark.parametrize(("case", "path", "value", "message"), UNSUPPORTED, ids=[f"{p}={v}"[-60:] for _, p, v, _ in UNSUPPORTED])
def test_what_is_not_implemented_or_cannot_be_is_refused_with_what_was_given_and_what_is_supported(
    case: str, path: str, value: Any, message: str
):
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(edited(case, (path, value)))


def test_groups_of_experts_that_are_used_cannot_be_switched_off():
    groups = ("num_expert_group", 4), ("topk_group", 2)
    assert K3Config.from_dict(edited("kimi_linear_tiny", *groups)).moe.groups_per_token == 2
    with pytest.raises(ConfigError, match="use_grouped_topk=False contradicts topk_group=2 of num_expert_group=4"):
        K3Config.from_dict(edited("kimi_linear_tiny", *groups, ("use_grouped_topk", False)))


def test_a_decay_without_a_bound_is_the_softplus_form_however_it_is_written():
    bound = "text_config.linear_attn_config.gate_lower_bound"
    assert K3Config.from_dict(edited("k3_text_tiny", (bound, ...))).kda.decay_floor is None
    assert K3Config.from_dict(edited("k3_text_tiny", (bound, None))).kda.decay_floor is None
    assert K3Config.from_dict(raw("k3_text_tiny")).kda.decay_floor == -5.0


def test_broken_files_are_refused_with_their_path(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        K3Config.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is not valid JSON"):
        K3Config.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="config.json"):
        K3Config.load(tmp_path)


def test_a_config_cannot_be_changed_only_replaced():
    config = K3Config.load(GOLDEN / "k3_text_tiny" / "checkpoint")
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 3  # type: ignore[misc]
    assert config.in_dtype("float32").param_dtype == jnp.float32
    with pytest.raises(ConfigError, match="remat"):
        replace(config, remat="sometimes")


def test_the_released_k3_has_its_layers_parameters_and_tower():
    config = k3.config()
    assert K3Config.from_dict(config.to_dict()) == config
    kinds = [(config.attention[i], config.feed_forward(i)) for i in range(config.num_layers)]
    assert [i + 1 for i, (a, _) in enumerate(kinds) if a == "mla"] == [*range(4, 93, 4), 93]
    assert kinds.count(("kda", "dense")) == 1 and sum(a == "kda" for a, _ in kinds) == 69 and len(kinds) == 93
    assert config.num_blocks == 8
    count = count_parameters(config)
    assert round(count.total / 1e8) == 27795 and round(count.active / 1e8) == 1054
    assert count.vision == pytest.approx(401e6 + 46e6, rel=0.005)


def test_the_released_k3_reads_alike_with_what_transformers_writes_beside_it():
    """Its own config.json has what compressed-tensors adds; saved again by transformers, also head_dim and rope_parameters."""
    raw = k3.config().to_dict()
    text, vision = raw["text_config"], raw["vision_config"]
    quantization = text["quantization_config"]
    quantization |= {"global_compression_ratio": None, "kv_cache_scheme": None, "ignore": ["re:.*self_attn.*", "re:.*lm_head.*"]}
    unused = {"actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}, "zp_dtype": None}
    quantization["config_groups"]["group_0"]["weights"] |= unused
    raw["quantization_config"] = quantization
    text |= {"head_dim": 74, "num_key_value_heads": 96, "rope_theta": 10000.0, "tie_encoder_decoder": False, "pruned_heads": {}}
    text["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    vision |= {"model_type": "", "architectures": None, "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False}
    assert K3Config.from_dict(raw) == k3.config()


def test_kimi_linear_has_48_billion_parameters_with_3_active():
    config = kimi_linear_48b.config()
    assert K3Config.from_dict(config.to_dict()) == config
    assert sum(kind == "mla" for kind in config.attention) == 7 and config.num_layers == 27
    count = count_parameters(config)
    assert 48e9 < count.total < 49.5e9
    assert 3e9 < count.active - config.vocab_size * config.hidden_size < 3.2e9
