"""The configuration of a model, read from and written to the official config.json.

Two layouts exist: nested (Kimi K3: `text_config` and `vision_config` inside) and flat (Kimi-Linear). Both become one
`K3Config`; a field that is unknown, missing or contradicts another is refused by its name in the file.
"""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

AttentionKind = Literal["kda", "mla"]
FeedForwardKind = Literal["dense", "moe"]
REMAT_POLICIES = ("none", "layer", "group")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the field."""


@dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention (arXiv 2510.26692)."""

    num_heads: int
    head_dim: int  # K = V
    conv_width: int = 4  # tokens
    decay_floor: float | None = None  # nats per token; None: unbounded softplus decay
    full_rank_gate: bool = False  # output gate g_proj instead of g_b_proj(g_a_proj(x))


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Gated multi-head latent attention without positions (NoPE)."""

    num_heads: int
    q_lora_rank: int | None  # None: one q_proj
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int  # no rotation is applied to it
    value_dim: int
    output_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Stable LatentMoE, or a plain mixture of experts when latent_size is None."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one routed expert
    num_shared_experts: int = 0  # fused: one MLP of num_shared_experts * intermediate_size
    latent_size: int | None = None
    latent_norm: bool = False
    scaling_factor: float = 1.0
    renormalize: bool = True
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    num_groups: int = 1
    groups_per_token: int = 1
    first_layer: int = 1  # 0-based; earlier layers are dense
    layer_freq: int = 1
    mxfp4: bool = False  # routed experts stay packed in memory


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """MoonViT-V2 and the patch merger in front of the text model."""

    patch_size: int  # pixels
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int  # frames
    num_heads: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    qkv_size: int
    merge: tuple[int, int]  # patches
    projector_eps: float


@dataclass(frozen=True, kw_only=True)
class K3Config:
    """Everything that defines the computation; sizes are those of the checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense layer
    attention: tuple[AttentionKind, ...]  # one per layer
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig | None
    vision: VisionConfig | None = None
    attn_res_block: int | None = None  # layers per Attention Residuals block; None: plain residuals
    hidden_act: Literal["situ", "silu"] = "silu"
    situ_beta: float = 1.0
    situ_linear_beta: float | None = None
    norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6  # q_a_layernorm and kv_a_layernorm
    init_std: float = 0.02
    context_length: int = 4096  # tokens
    num_mtp_layers: int = 0
    pad_token_id: int = 0
    bos_token_id: int = 1
    eos_token_id: int = 2
    media_token_id: int | None = None
    dtype: Any = jnp.bfloat16  # of activations and matrix products
    param_dtype: Any = jnp.bfloat16  # of weights that the release stores in bf16
    state_dtype: Any = jnp.float32  # of KDA states in a cache
    remat: Literal["none", "layer", "group"] = "layer"

    def __post_init__(self):
        H = self.hidden_size
        _require(len(self.attention) > 0, "num_hidden_layers must be at least 1")
        _require(self.hidden_act == "situ" or self.situ_linear_beta is None,
                 f"activation_situ_linear_beta needs hidden_act 'situ', got {self.hidden_act!r}")
        _require(self.remat in REMAT_POLICIES, f"remat must be one of {REMAT_POLICIES}, got {self.remat!r}")
        if self.attn_res_block is not None:
            _require(self.attn_res_block >= 1, f"attn_res_block_size must be at least 1, got {self.attn_res_block}")
        if self.moe is not None:
            m = self.moe
            _require(1 <= m.experts_per_token <= m.num_experts,
                     f"num_experts_per_token={m.experts_per_token} must lie in 1..num_experts={m.num_experts}")
            _require(m.num_experts % m.num_groups == 0,
                     f"num_experts={m.num_experts} does not split into num_expert_group={m.num_groups} groups")
            _require(1 <= m.groups_per_token <= m.num_groups,
                     f"topk_group={m.groups_per_token} must lie in 1..num_expert_group={m.num_groups}")
            _require(m.latent_size is not None or not m.latent_norm,
                     "latent_moe_use_norm needs routed_expert_hidden_size")
            if m.mxfp4:
                width = m.latent_size or H
                _require(width % 32 == 0 and m.intermediate_size % 32 == 0,
                         f"MXFP4 groups of 32 need expert sizes that are multiples of 32, got {width} and "
                         f"{m.intermediate_size}")
        for name in ("vocab_size", "hidden_size", "intermediate_size"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def num_blocks(self) -> int:
        """Attention Residuals snapshots after the last layer."""
        return 0 if self.attn_res_block is None else -(-self.num_layers // self.attn_res_block)

    def feed_forward(self, layer: int) -> FeedForwardKind:
        m = self.moe
        return "moe" if m is not None and layer >= m.first_layer and layer % m.layer_freq == 0 else "dense"

    def in_dtype(self, dtype: Any) -> "K3Config":
        """The same model with weights and computation in `dtype`."""
        return replace(self, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))

    @classmethod
    def load(cls, folder: str | Path) -> "K3Config":
        """Reads `config.json` of a checkpoint folder (or that file itself). Raises ConfigError or FileNotFoundError."""
        path = Path(folder)
        path = path / "config.json" if path.is_dir() or path.suffix != ".json" else path
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: a checkpoint folder needs a config.json.")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        try:
            return cls.from_dict(raw)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "K3Config":
        """Reads the parsed config.json, nested or flat."""
        if not isinstance(raw, Mapping) or "text_config" not in raw:
            return _text_config(_Fields(raw, "config.json"), vision=None, media_token_id=None)
        top = _Fields(raw, "config.json")
        text = _Fields(top.take("text_config"), "text_config")
        vision = top.take("vision_config", None)
        media = top.take("media_placeholder_token_id", None)
        top.take("ignore_index", None)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "dtype", "tie_word_embeddings"):
            outer = top.take(name, None)
            inner = text.raw.get(name, outer)
            if outer is not None and inner != outer:
                raise ConfigError(f"{name} is {outer!r} at the top but {inner!r} in text_config")
            if outer is not None:
                text.raw.setdefault(name, outer)
        top.ignore(_ANNOTATIONS)
        top.finish()
        vision = None if vision is None else _vision_config(_Fields(vision, "vision_config"), text.raw)
        return _text_config(text, vision=vision, media_token_id=media)

    def to_dict(self) -> dict[str, Any]:
        """The official config.json of this model: nested with Attention Residuals or vision, else flat."""
        text = _text_dict(self)
        if self.attn_res_block is None and self.vision is None:
            return text
        shared = {k: text[k] for k in ("dtype", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")}
        return {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "media_placeholder_token_id": self.media_token_id,
            **shared,
            "text_config": text,
            "vision_config": None if self.vision is None else _vision_dict(self.vision, self.hidden_size),
        }

    def save(self, folder: str | Path) -> None:
        (Path(folder) / "config.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


# Fields of config.json that describe the file, or what transformers wrote beside the model's own.
_ANNOTATIONS = tuple("""
    architectures model_type transformers_version auto_map use_cache torch_dtype _name_or_path _attn_implementation
    tokenizer_class unk_token_id sep_token_id decoder_start_token_id image_placeholder rope_parameters
    add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder top_k top_p torchscript typical_p use_bfloat16
""".split())
_MISSING = object()


class _Fields:
    """A JSON object whose fields are taken one by one; what is left over is an error."""

    def __init__(self, raw: Any, where: str):
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where} must be an object, got {type(raw).__name__}")
        self.raw, self.where, self.known = dict(raw), where, set()

    def take(self, name: str, default: Any = _MISSING) -> Any:
        self.known.add(name)
        if name in self.raw:
            return self.raw.pop(name)
        if default is _MISSING:
            near = difflib.get_close_matches(name, self.raw, 1)
            hint = f" (found {near[0]!r} instead)" if near else ""
            raise ConfigError(f"{self.where} lacks {name!r}{hint}")
        return default

    def expect(self, name: str, *allowed: Any) -> Any:
        """Takes a field whose other values are not supported; `allowed[0]` is the default."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise ConfigError(f"{self.where}: {name}={value!r} is not supported, only {' or '.join(map(repr, allowed))}")
        return value

    def whole(self, name: str, default: Any = _MISSING, least: int = 1) -> Any:
        """Takes a whole number; without one, a default that may be None."""
        value = self.take(name, default)
        if value is not default and (type(value) is not int or value < least):
            raise ConfigError(f"{self.where}: {name} must be a whole number of at least {least}, got {value!r}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """Takes a finite number; without one, a default that may be None."""
        value = self.take(name, default)
        if value is not default and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ConfigError(f"{self.where}: {name} must be a finite number, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Takes true or false."""
        value = self.take(name, default)
        if type(value) is not bool:
            raise ConfigError(f"{self.where}: {name} must be true or false, got {value!r}")
        return value

    def wholes(self, name: str) -> list[int]:
        """Takes a list of whole numbers."""
        value = self.take(name)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise ConfigError(f"{self.where}: {name} must be a list of whole numbers, got {value!r}")
        return value

    def ignore(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.take(name, None)

    def finish(self) -> None:
        for name in self.raw:
            near = difflib.get_close_matches(name, self.known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{self.where}: unknown field {name!r}{hint}")


def _text_config(f: _Fields, vision: VisionConfig | None, media_token_id: int | None) -> K3Config:
    layers = f.whole("num_hidden_layers")
    linear = _Fields(f.take("linear_attn_config"), "linear_attn_config")
    kda_layers, mla_layers = linear.wholes("kda_layers"), linear.wholes("full_attn_layers")
    attention = _attention_kinds(layers, kda_layers, mla_layers)
    kda = KDAConfig(
        num_heads=linear.whole("num_heads"),
        head_dim=linear.whole("head_dim"),
        conv_width=linear.whole("short_conv_kernel_size"),
        decay_floor=linear.number("gate_lower_bound", None),
        full_rank_gate=linear.flag("use_full_rank_gate", False),
    )
    _require(kda.decay_floor is None or kda.decay_floor < 0,
             f"gate_lower_bound must be negative (nats per token), got {kda.decay_floor}")
    linear.finish()

    heads = f.whole("num_attention_heads")
    kv_heads = f.whole("num_key_value_heads", heads)
    _require(kv_heads == heads, f"num_key_value_heads={kv_heads} must equal num_attention_heads={heads}")
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
    f.whole("head_dim", None)  # of no use: MLA has its own dims
    qk_head_dim = f.whole("qk_head_dim", qk_dim)
    _require(qk_head_dim == qk_dim, f"qk_head_dim={qk_head_dim} contradicts qk_nope_head_dim + qk_rope_head_dim = {qk_dim}")

    act = f.expect("hidden_act", "silu", "situ")
    beta, linear_beta = f.number("activation_situ_beta", None), f.number("activation_situ_linear_beta", None)
    _require((act == "situ") == (beta is not None),
             f"hidden_act={act!r} {'needs' if act == 'situ' else 'does not use'} activation_situ_beta")
    quantized = f.take("quantization_config", None) is not None
    config = K3Config(
        vocab_size=f.whole("vocab_size"),
        hidden_size=f.whole("hidden_size"),
        intermediate_size=f.whole("intermediate_size"),
        attention=attention,
        kda=kda,
        mla=mla,
        moe=_moe_config(f, quantized),
        vision=vision,
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
        media_token_id=media_token_id,
        dtype=_dtype(f),
        param_dtype=_dtype(f),
    )
    f.expect("tie_word_embeddings", False)
    f.expect("rope_scaling", None)
    f.ignore(("rope_theta", "dtype", *_ANNOTATIONS))
    f.finish()
    return config


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


def _moe_config(f: _Fields, quantized: bool) -> MoEConfig | None:
    num_experts = f.whole("num_experts", None, least=0)
    names = ("num_experts_per_token", "moe_intermediate_size", "num_shared_experts", "routed_expert_hidden_size",
             "latent_moe_use_norm", "routed_scaling_factor", "moe_renormalize", "moe_router_activation_func",
             "num_expert_group", "topk_group", "first_k_dense_replace", "moe_layer_freq")
    if not num_experts:
        f.ignore((*names, "use_grouped_topk", "topk_method"))
        return None
    f.expect("use_grouped_topk", True, False)
    f.expect("topk_method", "noaux_tc")
    return MoEConfig(
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
        mxfp4=quantized,
    )


def _context_length(f: _Fields) -> int:
    lengths = {n: f.whole(n, None) for n in ("max_position_embeddings", "model_max_length")}
    given = {n: v for n, v in lengths.items() if v is not None}
    _require(len(set(given.values())) == 1, f"need one context length, got {given or 'none'}")
    return next(iter(given.values()))


def _dtype(f: _Fields) -> Any:
    name = f.raw.get("dtype", "bfloat16")
    if name not in ("bfloat16", "float32"):
        raise ConfigError(f"{f.where}: dtype={name!r} is not supported, only 'bfloat16' or 'float32'")
    return jnp.dtype(name)


def _vision_config(f: _Fields, text: Mapping[str, Any]) -> VisionConfig:
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
    for name, value in _VISION_FIXED.items():
        f.expect(name, value)
    _require(f.take("mm_hidden_size", hidden) == hidden, "mm_hidden_size must equal vt_hidden_size")
    width = f.take("text_hidden_size", text.get("hidden_size"))
    _require(width == text.get("hidden_size"), f"text_hidden_size={width} contradicts hidden_size={text.get('hidden_size')}")
    f.ignore(_ANNOTATIONS)
    f.finish()
    return config


def _pair(f: _Fields, name: str) -> tuple[int, int]:
    value = f.wholes(name)
    _require(len(value) == 2, f"{name} must be two whole numbers, got {value!r}")
    return value[0], value[1]


_VISION_FIXED = {
    "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear", "norm_type": "rmsnorm",
    "attn_bias": False, "patch_embed_proj_bias": False, "mlp_type": "mlp2", "linear_bias": False,
    "activation_func": "gelu_pytorch_tanh", "merge_type": "sd2_tpool", "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}


def _text_dict(c: K3Config) -> dict[str, Any]:
    linear = {
        "kda_layers": [i + 1 for i, kind in enumerate(c.attention) if kind == "kda"],
        "full_attn_layers": [i + 1 for i, kind in enumerate(c.attention) if kind == "mla"],
        "short_conv_kernel_size": c.kda.conv_width, "head_dim": c.kda.head_dim, "num_heads": c.kda.num_heads,
        "use_full_rank_gate": c.kda.full_rank_gate, "gate_lower_bound": c.kda.decay_floor,
    }
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
    }
    if c.hidden_act == "situ":
        text |= {"activation_situ_beta": c.situ_beta, "activation_situ_linear_beta": c.situ_linear_beta}
    if c.attn_res_block is not None:
        text["attn_res_block_size"] = c.attn_res_block
    if c.moe is not None:
        m = c.moe
        text |= {
            "num_experts": m.num_experts, "num_experts_per_token": m.experts_per_token,
            "moe_intermediate_size": m.intermediate_size, "num_shared_experts": m.num_shared_experts,
            "routed_expert_hidden_size": m.latent_size, "latent_moe_use_norm": m.latent_norm,
            "routed_scaling_factor": m.scaling_factor, "moe_renormalize": m.renormalize,
            "moe_router_activation_func": m.score, "use_grouped_topk": True, "topk_method": "noaux_tc",
            "num_expert_group": m.num_groups, "topk_group": m.groups_per_token,
            "first_k_dense_replace": m.first_layer, "moe_layer_freq": m.layer_freq,
        }
        if m.mxfp4:
            text["quantization_config"] = _MXFP4
    return text


_MXFP4 = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.*", "re:.*gate$",
               "re:.*routed_expert_.*_proj", "re:.*_res_proj"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None,
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
                    "dynamic": False, "scale_dtype": "torch.uint8"},
    }},
}


def _vision_dict(v: VisionConfig, text_hidden_size: int) -> dict[str, Any]:
    return {
        "patch_size": v.patch_size, "init_pos_emb_height": v.pos_emb_height, "init_pos_emb_width": v.pos_emb_width,
        "init_pos_emb_time": v.pos_emb_time, "vt_num_attention_heads": v.num_heads,
        "vt_num_hidden_layers": v.num_layers, "vt_hidden_size": v.hidden_size,
        "vt_intermediate_size": v.intermediate_size, "qkv_hidden_size": v.qkv_size,
        "merge_kernel_size": list(v.merge), "projector_ln_eps": v.projector_eps, "mm_hidden_size": v.hidden_size,
        "text_hidden_size": text_hidden_size, **_VISION_FIXED,
    }
