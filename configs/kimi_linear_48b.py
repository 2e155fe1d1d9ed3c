"""Kimi-Linear-48B-A3B as released (arXiv 2510.26692): 49.1 B parameters, 3.5 B active with the embedding."""

import jax.numpy as jnp

from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig


def config() -> K3Config:
    """27 layers: KDA, KDA, KDA, MLA, six times over, then KDA, KDA, MLA."""
    return K3Config(
        vocab_size=163_840,
        hidden_size=2304,
        intermediate_size=9216,  # layer 0
        attention=("kda", "kda", "kda", "mla") * 6 + ("kda", "kda", "mla"),
        kda=KDAConfig(num_heads=32, head_dim=128, conv_width=4),
        mla=MLAConfig(
            num_heads=32, q_lora_rank=None, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128
        ),
        moe=MoEConfig(
            num_experts=256,
            experts_per_token=8,
            intermediate_size=1024,
            num_shared_experts=1,
            scaling_factor=2.446,
            first_layer=1,
        ),
        norm_eps=1e-5,
        context_length=1_048_576,
        pad_token_id=163_839,
        bos_token_id=163_584,
        eos_token_id=163_586,
        dtype=jnp.dtype(jnp.bfloat16),
        param_dtype=jnp.dtype(jnp.bfloat16),
    )
