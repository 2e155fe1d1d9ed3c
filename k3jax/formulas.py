"""What a model costs, by formula: parameters, arithmetic, and what it keeps of a sequence.

A multiplication and an addition are two FLOPs. Counted is what the definition of the model needs: products with weights,
attention over the tokens that are seen, the recurrence. Not counted: norms, activations, softmax, the router's choice, and
whatever an implementation does beyond that (recomputation, chunks, masked halves).
"""

from collections import Counter
from typing import Literal

from k3jax.config import K3Config

Pass = Literal["forward", "lora", "full"]
# Of one forward pass: gradients of activations cost as much as the forward, those of weights again.
PASSES: dict[Pass, int] = {"forward": 1, "lora": 2, "full": 3}
FP32, BF16 = 4, 2  # bytes


def kda_weights(config: K3Config) -> dict[str, int]:
    """Parameters of one Kimi Delta Attention layer.

        q, k, v, o, gate        5 D H K                (a low-rank gate: D K + K H K instead of its D H K)
        decay                   D K + K H K + H K + H
        beta                    D H
        convolutions            3 H K W
        norm                    K
    """
    D, H, K, W = config.hidden_size, config.kda.num_heads, config.kda.head_dim, config.kda.conv_width
    low_rank = D * K + K * H * K
    return {
        "projections": 4 * D * H * K + (D * H * K if config.kda.full_rank_gate else low_rank) + low_rank + D * H,
        "convolutions": 3 * H * K * W,
        "vectors": H * K + H + K,
    }


def mla_weights(config: K3Config) -> dict[str, int]:
    """Parameters of one gated MLA layer; N, R, V: a head's content, shared and value numbers; Q, L: ranks.

        q       D Q + Q H (N + R)         without a rank D H (N + R)
        latent  D (L + R)
        k, v    L H (N + V)
        gate    D H V
        o       H V D
        norms   Q + L
    """
    D, c = config.hidden_size, config.mla
    per_head = c.nope_dim + c.rope_dim
    q = D * c.num_heads * per_head if c.q_lora_rank is None else c.q_lora_rank * (D + c.num_heads * per_head)
    gate = D * c.num_heads * c.value_dim if c.output_gate else 0
    return {
        "projections": q + D * (c.kv_lora_rank + c.rope_dim) + gate + c.num_heads * c.value_dim * D,
        "keys and values": c.kv_lora_rank * c.num_heads * (c.nope_dim + c.value_dim),
        "vectors": (c.q_lora_rank or 0) + c.kv_lora_rank,
    }


def moe_weights(config: K3Config) -> dict[str, int]:
    """Parameters of one mixture of experts; L: latent size, F: hidden units of an expert, S shared experts.

        routed  E 3 L F
        shared  3 D S F
        latent  2 D L + L
        router  E D + E
    """
    assert config.moe is not None
    D, m = config.hidden_size, config.moe
    L, F = m.latent_size or D, m.intermediate_size
    return {
        "routed": m.num_experts * 3 * L * F,
        "shared": 3 * D * m.num_shared_experts * F,
        "latent": 0 if m.latent_size is None else 2 * D * L,
        "router": m.num_experts * D,
        "vectors": m.num_experts + (L if m.latent_norm else 0),
    }


def dense_weights(config: K3Config) -> int:
    """Parameters of one dense feed-forward layer: 3 D F."""
    return 3 * config.hidden_size * config.intermediate_size


def residual_weights(config: K3Config) -> int:
    """Parameters of the norms between sub-layers and of Attention Residuals, in all: 2 norms of D for each layer and a last one;
    a norm and a row of D for each mix, of which each layer has two and the end of the model one."""
    mixes = 0 if config.attn_res_block is None else 2 * config.num_layers + 1
    return config.hidden_size * (2 * config.num_layers + 1 + 2 * mixes)


def parameters(config: K3Config, *, active: bool = False) -> int:
    """Of the language model, or those that a token passes through: k of E routed experts."""
    total = 2 * config.vocab_size * config.hidden_size + residual_weights(config)
    for i, kind in enumerate(config.attention):
        total += sum((kda_weights if kind == "kda" else mla_weights)(config).values())
        if config.feed_forward(i) == "dense":
            total += dense_weights(config)
            continue
        assert config.moe is not None
        parts = moe_weights(config)
        share = config.moe.experts_per_token / config.moe.num_experts if active else 1
        total += round(parts.pop("routed") * share) + sum(parts.values())
    return total


def forward_flops(config: K3Config, keys: float, *, absorbed: bool = False) -> Counter[str]:
    """FLOPs of one token's forward pass, by part.

    keys      tokens that an MLA layer attends to, itself included; in causal rows of T tokens (T + 1) / 2 on average
    absorbed  attention over latents, as in decode: queries and outputs go through the key and value matrices, not the cache
    """
    flops: Counter[str] = Counter()
    for i, kind in enumerate(config.attention):
        if kind == "kda":
            w, H, K = kda_weights(config), config.kda.num_heads, config.kda.head_dim
            flops["attention projections"] += 2 * (w["projections"] + w["convolutions"])
            flops["recurrence"] += 7 * H * K * K  # decay, k'S, the rank-one update, S'q
        else:
            w, c = mla_weights(config), config.mla
            flops["attention projections"] += 2 * (w["projections"] + w["keys and values"])
            width = 2 * c.kv_lora_rank + c.rope_dim if absorbed else c.nope_dim + c.rope_dim + c.value_dim
            flops["attention"] += round(2 * c.num_heads * width * keys)
        if config.feed_forward(i) == "dense":
            flops["dense layers"] += 2 * dense_weights(config)
            continue
        assert config.moe is not None
        w = moe_weights(config)
        flops["routed experts"] += 2 * w["routed"] * config.moe.experts_per_token // config.moe.num_experts
        flops["shared experts"] += 2 * w["shared"]
        flops["latent and router"] += 2 * (w["latent"] + w["router"])
    if config.attn_res_block is not None:
        sources = sum(min(i // config.attn_res_block + 1, config.num_blocks) + 1 for i in range(config.num_layers))
        mixed = 2 * sources + config.num_blocks + 1  # two mixes per layer, one behind the last
        flops["attention residuals"] = 4 * config.hidden_size * mixed  # a score and a weighted sum for each source
    flops["head"] = 2 * config.vocab_size * config.hidden_size
    return flops


def model_flops(config: K3Config, row_length: int, what: Pass) -> int:
    """FLOPs per token of training on packed causal rows, or of their forward pass."""
    return PASSES[what] * sum(forward_flops(config, (row_length + 1) / 2).values())


def state_bytes(config: K3Config, state_size: int = FP32, window_size: int = BF16) -> int:
    """What KDA keeps of a sequence, however long: a state [H, K, K] and the last W - 1 inputs of q, k and v, per layer."""
    c = config.kda
    per_layer = c.num_heads * c.head_dim**2 * state_size + 3 * (c.conv_width - 1) * c.num_heads * c.head_dim * window_size
    return config.attention.count("kda") * per_layer


def cache_bytes(config: K3Config, size: int = BF16) -> int:
    """What MLA keeps of every token: a latent and the shared part of its key, per layer."""
    return config.attention.count("mla") * (config.mla.kv_lora_rank + config.mla.rope_dim) * size
