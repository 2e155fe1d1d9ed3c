"""A rank-8 LoRA on nano from preferences: right Countdown answers over wrong ones."""

from k3jax.lora import LoRAConfig
from train.data import Pairs
from train.dpo import DPOConfig


def config() -> DPOConfig:
    return DPOConfig(
        out="runs/dpo_tiny",
        checkpoint="configs/nano",
        adapter=LoRAConfig(rank=8, alpha=16),
        data=Pairs(path="configs/samples/pairs.jsonl"),
        steps=40,
        lr=1e-3,
        rows=4,
        row_length=256,
    )
