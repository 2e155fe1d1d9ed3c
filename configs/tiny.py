"""The smallest model with every K3 feature, trained from nothing on generated Countdown answers: minutes on two cores."""

import jax.numpy as jnp

from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig
from train.data import Transcripts
from train.pretrain import PretrainConfig
from train.rl.countdown import Countdown


def model(vocab_size: int) -> K3Config:
    """5 layers [K K K M M], hidden size 64."""
    return K3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        attention=("kda", "kda", "kda", "mla", "mla"),
        kda=KDAConfig(num_heads=4, head_dim=16, decay_floor=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=4, q_lora_rank=32, kv_lora_rank=32, nope_dim=16, rope_dim=8, value_dim=16, output_gate=True
        ),
        moe=MoEConfig(
            num_experts=8,
            experts_per_token=2,
            intermediate_size=32,
            num_shared_experts=1,
            latent_size=32,
            latent_norm=True,
        ),
        attn_res_block=2,
        hidden_act="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        context_length=4096,
        dtype=jnp.dtype(jnp.float32),
        param_dtype=jnp.dtype(jnp.bfloat16),
    )


def config() -> PretrainConfig:
    return PretrainConfig(
        out="runs/tiny",
        model=model(vocab_size=932),
        tokenizer="tests/golden/chat_encoding/tokenizer",
        data=Transcripts(tasks=((Countdown(), 1.0),), count=100_000),
        steps=300,
        lr=5e-3,
        rows=8,
        row_length=256,
        remat="none",
    )
