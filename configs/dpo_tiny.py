"""A rank-8 LoRA from preferences, on the model that configs/tiny.py trains. A line of the data is
{"messages": [...], "chosen": {"role": "assistant", "content": "..."}, "rejected": {...}}."""

from k3jax.lora import LoRAConfig
from train.data import Pairs
from train.dpo import DPOConfig


def config() -> DPOConfig:
    return DPOConfig(
        out="runs/dpo_tiny",
        checkpoint="runs/tiny/model",
        adapter=LoRAConfig(rank=8, alpha=16),
        data=Pairs(path="pairs.jsonl"),
        steps=50,
        lr=1e-3,
        rows=4,
        row_length=256,
    )
