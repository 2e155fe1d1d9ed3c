"""Kimi K3 as released (arXiv 2607.24653): 2 779.5 B parameters, 105.4 B active, and 0.4 B of vision."""

import jax.numpy as jnp

from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig, VisionConfig


def config() -> K3Config:
    """93 layers: KDA, KDA, KDA, gated MLA, 23 times over, and one more gated MLA."""
    return K3Config(
        vocab_size=163_840,
        hidden_size=7168,
        intermediate_size=33_792,  # layer 0
        attention=("kda", "kda", "kda", "mla") * 23 + ("mla",),
        kda=KDAConfig(num_heads=96, head_dim=128, conv_width=4, decay_floor=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=896,
            experts_per_token=16,
            intermediate_size=3072,
            num_shared_experts=2,
            latent_size=3584,
            latent_norm=True,
            first_layer=1,
            mxfp4=True,
        ),
        vision=VisionConfig(
            patch_size=14,
            pos_emb_height=64,
            pos_emb_width=64,
            pos_emb_time=4,
            num_heads=12,
            num_layers=27,
            hidden_size=1024,
            intermediate_size=4096,
            qkv_size=1536,
            merge=(2, 2),
            projector_eps=1e-5,
        ),
        attn_res_block=12,
        hidden_act="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        norm_eps=1e-5,
        context_length=1_048_576,
        pad_token_id=163_839,
        bos_token_id=163_584,
        eos_token_id=163_586,
        media_token_id=163_605,
        dtype=jnp.dtype(jnp.bfloat16),
        param_dtype=jnp.dtype(jnp.bfloat16),
    )
