"""The official config.json as the arguments of K3Config; whatever cannot be honoured is refused by its name.

Two layouts exist: nested (Kimi K3: `text_config` and `vision_config` inside) and flat (Kimi-Linear).
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from k3jax.config.fields import ConfigError, Fields, require
from k3jax.config.parts import AttentionKind, KDAConfig, MLAConfig, MoEConfig, VisionConfig
from k3jax.config.quantization import check_mxfp4

# Fields of text_config that the outer object repeats.
SHARED = ("dtype", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")

# What transformers writes beside the model's own fields and the computation here does not depend on: names of files,
# classes and labels, what a call returns, defaults of its sampler (k3jax.sampling has SamplingParams), switches of other
# frameworks.
_ANNOTATIONS = tuple("""
    transformers_version auto_map use_cache _name_or_path _attn_implementation tokenizer_class unk_token_id sep_token_id
    image_placeholder chunk_size_feed_forward finetuning_task id2label label2id prefix problem_type task_specific_params
    is_decoder output_attentions output_hidden_states output_scores return_dict return_dict_in_generate tf_legacy_loss
    torchscript use_bfloat16
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
    max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values
    repetition_penalty suppress_tokens temperature top_k top_p typical_p
""".split())
# What it also writes, and another value would change the computation.
_OFF = {
    "add_cross_attention": False, "cross_attention_hidden_size": None, "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
}  # fmt: skip
VISION_FIXED = {
    "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear", "norm_type": "rmsnorm",
    "attn_bias": False, "patch_embed_proj_bias": False, "mlp_type": "mlp2", "linear_bias": False,
    "activation_func": "gelu_pytorch_tanh", "merge_type": "sd2_tpool", "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}  # fmt: skip


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of K3Config from a parsed config.json, nested or flat. Raises ConfigError."""
    if not isinstance(raw, Mapping) or "text_config" not in raw:
        return _text(Fields(raw, "config.json"))
    top = Fields(raw, "config.json")
    _kind(top, "kimi_k3", "KimiK3ForConditionalGeneration")
    text = Fields(top.take("text_config"), "text_config")
    vision = top.take("vision_config", None)
    media = top.take("media_placeholder_token_id", None)
    top.expect("ignore_index", -100, None)
    for name in (*SHARED, "torch_dtype", "quantization_config"):
        outer = top.take(name, None)
        inner = text.raw.get(name, outer)
        if outer is not None and inner != outer:
            raise ConfigError(f"{name} is {outer!r} at the top but {inner!r} in text_config")
        if outer is not None:
            text.raw.setdefault(name, outer)
    _annotations(top)
    top.finish()
    if vision is not None:
        vision = _vision(Fields(vision, "vision_config"), text.raw.get("hidden_size"), text.raw.get("dtype"))
    return _text(text) | {"vision": vision, "media_token_id": media}


def _text(f: Fields) -> dict[str, Any]:
    _kind(f, "kimi_linear", "KimiLinearForCausalLM")
    hidden, layers = f.whole("hidden_size"), f.whole("num_hidden_layers")
    linear = Fields(f.take("linear_attn_config"), "linear_attn_config")
    attention = _attention_kinds(layers, linear.wholes("kda_layers"), linear.wholes("full_attn_layers"))
    kda = KDAConfig(
        num_heads=linear.whole("num_heads"),
        head_dim=linear.whole("head_dim"),
        conv_width=linear.whole("short_conv_kernel_size"),
        decay_floor=linear.number("gate_lower_bound", None),
        full_rank_gate=linear.flag("use_full_rank_gate", False),
    )
    linear.finish()
    mla = _mla(f, hidden)
    act = f.expect("hidden_act", "silu", "situ")
    beta, linear_beta = f.number("activation_situ_beta", None), f.number("activation_situ_linear_beta", None)
    require((act == "situ") == (beta is not None),
            f"hidden_act={act!r} {'needs' if act == 'situ' else 'does not use'} activation_situ_beta, got {beta!r}")
    dtype = _dtype(f)
    config = dict(
        vocab_size=f.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=f.whole("intermediate_size"),
        attention=attention,
        kda=kda,
        mla=mla,
        moe=_moe(f),
        attn_res_block=f.whole("attn_res_block_size", None),
        hidden_act=act,
        situ_beta=1.0 if beta is None else beta,
        situ_linear_beta=linear_beta,
        norm_eps=f.number("rms_norm_eps"),
        init_std=f.number("initializer_range", 0.02),
        context_length=_context_length(f),
        num_mtp_layers=f.whole("num_nextn_predict_layers", 0, least=0),
        pad_token_id=f.take("pad_token_id", 0),
        bos_token_id=f.take("bos_token_id", 1),
        eos_token_id=f.take("eos_token_id", 2),
        dtype=dtype,
        param_dtype=dtype,
    )
    f.expect("tie_word_embeddings", False)
    _no_rotation(f)
    _annotations(f)
    f.finish()
    return config


def _kind(f: Fields, model_type: str, architecture: str) -> None:
    f.expect("model_type", model_type, None)
    f.expect("architectures", [architecture], None)


def _annotations(f: Fields) -> None:
    for name, value in _OFF.items():
        f.expect(name, value)
    f.expect("pruned_heads", {}, None)
    f.ignore(*_ANNOTATIONS)


def _attention_kinds(layers: int, kda: list[int], mla: list[int]) -> tuple[AttentionKind, ...]:
    """Kinds of layers 0..layers-1 from the config's two 1-based lists, which must be disjoint and complete."""
    both, listed = sorted(set(kda) & set(mla)), sorted([*kda, *mla])
    if both:
        raise ConfigError(f"linear_attn_config: layers {both} are in both kda_layers and full_attn_layers")
    if listed != list(range(1, layers + 1)):
        missing = sorted(set(range(1, layers + 1)) - set(listed))
        extra = sorted(set(listed) - set(range(1, layers + 1)))
        raise ConfigError(f"linear_attn_config: kda_layers and full_attn_layers must name each of the layers 1..{layers} "
                          f"once; missing {missing}, beyond the model or repeated {extra}")
    return tuple("kda" if i in set(kda) else "mla" for i in range(1, layers + 1))


def _mla(f: Fields, hidden: int) -> MLAConfig:
    heads = f.whole("num_attention_heads")
    kv_heads = f.whole("num_key_value_heads", heads)
    require(kv_heads == heads, f"num_key_value_heads={kv_heads} must equal num_attention_heads={heads}")
    mla = MLAConfig(
        num_heads=heads,
        q_lora_rank=f.whole("q_lora_rank", None),
        kv_lora_rank=f.whole("kv_lora_rank"),
        nope_dim=f.whole("qk_nope_head_dim"),
        rope_dim=f.whole("qk_rope_head_dim", least=0),
        value_dim=f.whole("v_head_dim"),
        output_gate=f.flag("mla_use_output_gate", False),
    )
    f.expect("mla_use_nope", True)
    qk_dim = mla.nope_dim + mla.rope_dim
    qk_head_dim = f.whole("qk_head_dim", qk_dim)
    require(qk_head_dim == qk_dim, f"qk_head_dim={qk_head_dim} contradicts qk_nope_head_dim + qk_rope_head_dim = {qk_dim}")
    # Of no use here, as MLA has its own sizes. The releases hold hidden_size // num_attention_heads, which none of them is.
    known = {hidden // heads, mla.nope_dim, mla.rope_dim, qk_dim, mla.value_dim}
    head_dim = f.whole("head_dim", None)
    require(head_dim is None or head_dim in known, f"head_dim={head_dim} is no size of a head: {sorted(known)} are, from "
            "hidden_size // num_attention_heads, qk_nope_head_dim, qk_rope_head_dim, their sum and v_head_dim")
    return mla


def _moe(f: Fields) -> MoEConfig | None:
    quantization = f.take("quantization_config", None)
    if quantization is not None:
        check_mxfp4(quantization)
    num_experts = f.whole("num_experts", None, least=0)
    if not num_experts:
        require(quantization is None, "quantization_config describes MXFP4 experts, but num_experts is missing or 0")
        f.ignore("num_experts_per_token", "moe_intermediate_size", "num_shared_experts", "routed_expert_hidden_size",
                 "latent_moe_use_norm", "routed_scaling_factor", "moe_renormalize", "moe_router_activation_func",
                 "num_expert_group", "topk_group", "first_k_dense_replace", "moe_layer_freq", "use_grouped_topk",
                 "topk_method")  # fmt: skip
        return None
    f.expect("topk_method", "noaux_tc")
    moe = MoEConfig(
        num_experts=num_experts,
        experts_per_token=f.whole("num_experts_per_token"),
        intermediate_size=f.whole("moe_intermediate_size"),
        num_shared_experts=f.whole("num_shared_experts", None, 0) or 0,
        latent_size=f.whole("routed_expert_hidden_size", None),
        latent_norm=f.flag("latent_moe_use_norm", False),
        scaling_factor=f.number("routed_scaling_factor", 1.0),
        renormalize=f.flag("moe_renormalize", True),
        score=f.expect("moe_router_activation_func", "sigmoid", "softmax"),
        num_groups=f.whole("num_expert_group", None) or 1,
        groups_per_token=f.whole("topk_group", None) or 1,
        first_layer=f.whole("first_k_dense_replace", 0, least=0),
        layer_freq=f.whole("moe_layer_freq", 1),
        mxfp4=quantization is not None,
    )
    require(f.flag("use_grouped_topk", True) or moe.groups_per_token == moe.num_groups,
            f"use_grouped_topk=False contradicts topk_group={moe.groups_per_token} of num_expert_group={moe.num_groups}")
    return moe


def _context_length(f: Fields) -> int:
    lengths = {n: f.whole(n, None) for n in ("max_position_embeddings", "model_max_length")}
    given = {n: v for n, v in lengths.items() if v is not None}
    require(len(set(given.values())) == 1, f"need one context length, got {given or 'none'}")
    return next(iter(given.values()))


def _dtype(f: Fields) -> Any:
    """`dtype`, or by its older name `torch_dtype`."""
    old = f.take("torch_dtype", None)
    name = f.take("dtype", old or "bfloat16")
    require(old is None or old == name, f"{f.where}: torch_dtype={old!r} contradicts dtype={name!r}")
    require(name in ("bfloat16", "float32"), f"{f.where}: dtype={name!r} is not supported, only 'bfloat16' or 'float32'")
    return jnp.dtype(name)


def _no_rotation(f: Fields) -> None:
    """Takes what describes rotary positions: with NoPE none are applied, so only the plain ones can be left out.

    Others, yarn for one, change the scale of the scores too.
    """
    f.number("rope_theta", None)
    for name in ("rope_scaling", "rope_parameters"):
        value = f.take(name, None)
        if value is not None:
            rope = Fields(value, f"{f.where}.{name}")
            for key in ("rope_type", "type"):
                rope.expect(key, "default")
            rope.number("rope_theta", None)
            rope.finish()


def _vision(f: Fields, text_hidden: Any, dtype: Any) -> VisionConfig:
    hidden = f.whole("vt_hidden_size")
    config = VisionConfig(
        patch_size=f.whole("patch_size"),
        pos_emb_height=f.whole("init_pos_emb_height"),
        pos_emb_width=f.whole("init_pos_emb_width"),
        pos_emb_time=f.whole("init_pos_emb_time"),
        num_heads=f.whole("vt_num_attention_heads"),
        num_layers=f.whole("vt_num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=f.whole("vt_intermediate_size"),
        qkv_size=f.whole("qkv_hidden_size", hidden),
        merge=_pair(f, "merge_kernel_size"),
        projector_eps=f.number("projector_ln_eps"),
    )
    for name, value in VISION_FIXED.items():
        f.expect(name, value)
    for name, meaning, size in (("mm_hidden_size", "vt_hidden_size", hidden), ("text_hidden_size", "hidden_size", text_hidden)):
        value = f.take(name, size)
        require(value == size, f"{name}={value!r} contradicts {meaning}={size!r}")
    f.expect("model_type", "", None)
    f.expect("architectures", None, [])
    f.expect("dtype", None, dtype)
    _annotations(f)
    f.finish()
    return config


def _pair(f: Fields, name: str) -> tuple[int, int]:
    value = f.wholes(name)
    require(len(value) == 2, f"{name} must be two whole numbers, got {value!r}")
    return value[0], value[1]
