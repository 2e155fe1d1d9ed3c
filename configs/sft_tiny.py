"""A rank-8 LoRA on the model that configs/tiny.py trains: Frozen Lake, which that model has never seen."""

from k3jax.lora import LoRAConfig
from train.data import Transcripts
from train.rl.frozen_lake import FrozenLake
from train.sft import SFTConfig


def config() -> SFTConfig:
    return SFTConfig(
        out="runs/sft_tiny",
        checkpoint="runs/tiny/model",
        adapter=LoRAConfig(rank=8, alpha=16),
        data=Transcripts(tasks=((FrozenLake(max_moves=6), 1.0),), count=10_000),
        steps=100,
        lr=3e-3,
        rows=4,
        row_length=768,
    )
