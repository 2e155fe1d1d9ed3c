"""A rank-8 LoRA on nano from conversations: after it, Countdown answers state their result, too (9-2-2=5)."""

from k3jax.lora import LoRAConfig
from train.data import Jsonl
from train.sft import SFTConfig


def config() -> SFTConfig:
    return SFTConfig(
        out="runs/sft_tiny",
        checkpoint="configs/nano",
        # the head, too: nano has never written "="
        adapter=LoRAConfig(rank=8, alpha=16, targets=("attention", "latent", "shared_experts", "mlp", "head")),
        data=Jsonl(path="configs/samples/chats.jsonl"),
        steps=60,
        lr=5e-3,
        rows=4,
        row_length=256,
    )
