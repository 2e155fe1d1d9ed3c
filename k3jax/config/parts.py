"""The parts of a model's configuration. Sizes are those of the checkpoint; errors name fields as its config.json does."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from k3jax.config.fields import require

AttentionKind = Literal["kda", "mla"]
FeedForwardKind = Literal["dense", "moe"]


@dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention (arXiv 2510.26692)."""

    num_heads: int
    head_dim: int  # K = V
    conv_width: int = 4  # tokens
    decay_floor: float | None = None  # nats per token; None: unbounded softplus decay
    full_rank_gate: bool = False  # output gate g_proj instead of g_b_proj(g_a_proj(x))

    def __post_init__(self):
        sizes = {"num_heads": self.num_heads, "head_dim": self.head_dim, "short_conv_kernel_size": self.conv_width}
        require_sizes("linear_attn_config.", sizes)
        floor = self.decay_floor
        require(floor is None or -math.inf < floor < 0, f"gate_lower_bound must be negative (nats per token), got {floor!r}")


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

    def __post_init__(self):
        require_sizes("", {
            "num_attention_heads": self.num_heads, "kv_lora_rank": self.kv_lora_rank, "qk_nope_head_dim": self.nope_dim,
            "v_head_dim": self.value_dim, "q_lora_rank": 1 if self.q_lora_rank is None else self.q_lora_rank,
        })  # fmt: skip
        require(self.rope_dim >= 0, f"qk_rope_head_dim must be at least 0, got {self.rope_dim!r}")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Stable LatentMoE (arXiv 2607.24653), or a plain mixture of experts when latent_size is None."""

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

    def __post_init__(self):
        require_sizes("", {
            "num_experts": self.num_experts, "moe_intermediate_size": self.intermediate_size,
            "routed_expert_hidden_size": 1 if self.latent_size is None else self.latent_size,
            "num_expert_group": self.num_groups, "moe_layer_freq": self.layer_freq,
        })  # fmt: skip
        require(1 <= self.experts_per_token <= self.num_experts,
                f"num_experts_per_token={self.experts_per_token} must lie in 1..num_experts={self.num_experts}")
        require(self.num_experts % self.num_groups == 0,
                f"num_experts={self.num_experts} does not split into num_expert_group={self.num_groups} groups")
        require(1 <= self.groups_per_token <= self.num_groups,
                f"topk_group={self.groups_per_token} must lie in 1..num_expert_group={self.num_groups}")
        require(self.latent_size is not None or not self.latent_norm,
                "latent_moe_use_norm needs routed_expert_hidden_size")
        require(self.num_shared_experts >= 0, f"num_shared_experts must be at least 0, got {self.num_shared_experts!r}")
        require(self.first_layer >= 0, f"first_k_dense_replace must be at least 0, got {self.first_layer!r}")
        require_positive("routed_scaling_factor", self.scaling_factor)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """MoonViT-V2 and the patch merger in front of the text model (arXiv 2607.24653)."""

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

    def __post_init__(self):
        require_positive("projector_ln_eps", self.projector_eps)


def require_sizes(where: str, sizes: dict[str, int]) -> None:
    """Raises ConfigError unless each is at least 1."""
    for name, size in sizes.items():
        require(size >= 1, f"{where}{name} must be at least 1, got {size!r}")


def require_positive(name: str, value: Any) -> None:
    """Raises ConfigError unless the value is a positive, finite number."""
    require(0 < value < math.inf, f"{name} must be a positive, finite number, got {value!r}")
