"""A small K3 with every feature, trained from nothing on generated Countdown answers: minutes on two cores."""

import jax.numpy as jnp

from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig
from train.data import Transcripts
from train.pretrain import PretrainConfig
from train.rl.countdown import Countdown
from train.rl.vocabulary import VOCAB_SIZE


def model() -> K3Config:
    """5 layers [K K K M M], hidden size 64, 500 000 parameters."""
    return K3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        attention=("kda", "kda", "kda", "mla", "mla"),
        kda=KDAConfig(num_heads=2, head_dim=32, decay_floor=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=2, q_lora_rank=32, kv_lora_rank=32, nope_dim=24, rope_dim=8, value_dim=32, output_gate=True
        ),
        moe=MoEConfig(
            num_experts=8,
            experts_per_token=2,
            intermediate_size=64,
            num_shared_experts=1,
            latent_size=32,
            latent_norm=True,
            scaling_factor=2.0,
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
        model=model(),
        tokenizer="configs/nano",
        data=Transcripts(tasks=((Countdown(), 1.0),), count=10_000_000),
        steps=300,
        lr=5e-3,
        rows=8,
        row_length=256,
        remat="none",
    )
