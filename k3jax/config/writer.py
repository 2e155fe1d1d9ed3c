"""A K3Config as the official config.json."""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from k3jax.config.parts import MoEConfig, VisionConfig
from k3jax.config.quantization import MXFP4
from k3jax.config.reader import SHARED, VISION_FIXED

if TYPE_CHECKING:
    from k3jax.config.model import K3Config


def written(c: "K3Config") -> dict[str, Any]:
    """Nested (`text_config` and `vision_config` inside) with Attention Residuals or vision, else flat."""
    text = _text(c)
    if c.attn_res_block is None and c.vision is None:
        return text
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "media_placeholder_token_id": c.media_token_id,
        **{name: text[name] for name in SHARED},
        "text_config": text,
        "vision_config": None if c.vision is None else _vision(c.vision, c.hidden_size),
    }


def _text(c: "K3Config") -> dict[str, Any]:
    linear = {
        "kda_layers": [i + 1 for i, kind in enumerate(c.attention) if kind == "kda"],
        "full_attn_layers": [i + 1 for i, kind in enumerate(c.attention) if kind == "mla"],
        "short_conv_kernel_size": c.kda.conv_width, "head_dim": c.kda.head_dim, "num_heads": c.kda.num_heads,
        "use_full_rank_gate": c.kda.full_rank_gate, "gate_lower_bound": c.kda.decay_floor,
    }  # fmt: skip
    text = {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers, "linear_attn_config": linear,
        "num_attention_heads": c.mla.num_heads, "q_lora_rank": c.mla.q_lora_rank, "kv_lora_rank": c.mla.kv_lora_rank,
        "qk_nope_head_dim": c.mla.nope_dim, "qk_rope_head_dim": c.mla.rope_dim, "v_head_dim": c.mla.value_dim,
        "mla_use_nope": True, "mla_use_output_gate": c.mla.output_gate,
        "hidden_act": c.hidden_act, "rms_norm_eps": c.norm_eps, "initializer_range": c.init_std,
        "max_position_embeddings": c.context_length, "num_nextn_predict_layers": c.num_mtp_layers,
        "pad_token_id": c.pad_token_id, "bos_token_id": c.bos_token_id, "eos_token_id": c.eos_token_id,
        "tie_word_embeddings": False, "dtype": str(jnp.dtype(c.param_dtype)),
    }  # fmt: skip
    if c.hidden_act == "situ":
        text |= {"activation_situ_beta": c.situ_beta, "activation_situ_linear_beta": c.situ_linear_beta}
    if c.attn_res_block is not None:
        text["attn_res_block_size"] = c.attn_res_block
    return text if c.moe is None else text | _moe(c.moe)


def _moe(m: MoEConfig) -> dict[str, Any]:
    return {
        "num_experts": m.num_experts, "num_experts_per_token": m.experts_per_token,
        "moe_intermediate_size": m.intermediate_size, "num_shared_experts": m.num_shared_experts,
        "routed_expert_hidden_size": m.latent_size, "latent_moe_use_norm": m.latent_norm,
        "routed_scaling_factor": m.scaling_factor, "moe_renormalize": m.renormalize,
        "moe_router_activation_func": m.score, "use_grouped_topk": True, "topk_method": "noaux_tc",
        "num_expert_group": m.num_groups, "topk_group": m.groups_per_token,
        "first_k_dense_replace": m.first_layer, "moe_layer_freq": m.layer_freq,
    } | ({"quantization_config": deepcopy(MXFP4)} if m.mxfp4 else {})  # fmt: skip


def _vision(v: VisionConfig, text_hidden_size: int) -> dict[str, Any]:
    return {
        "patch_size": v.patch_size, "init_pos_emb_height": v.pos_emb_height, "init_pos_emb_width": v.pos_emb_width,
        "init_pos_emb_time": v.pos_emb_time, "vt_num_attention_heads": v.num_heads,
        "vt_num_hidden_layers": v.num_layers, "vt_hidden_size": v.hidden_size,
        "vt_intermediate_size": v.intermediate_size, "qkv_hidden_size": v.qkv_size,
        "merge_kernel_size": list(v.merge), "projector_ln_eps": v.projector_eps, "mm_hidden_size": v.hidden_size,
        "text_hidden_size": text_hidden_size, **VISION_FIXED,
    }  # fmt: skip
