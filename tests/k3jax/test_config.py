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


def test_kimi_linear_has_48_billion_parameters_with_3_active():
    config = kimi_linear_48b.config()
    assert K3Config.from_dict(config.to_dict()) == config
    assert sum(kind == "mla" for kind in config.attention) == 7 and config.num_layers == 27
    count = count_parameters(config)
    assert 48e9 < count.total < 49.5e9
    assert 3e9 < count.active - config.vocab_size * config.hidden_size < 3.2e9
