"""Countdown by RL on the model that configs/tiny.py trains: a rank-8 LoRA."""

from k3jax.lora import LoRAConfig
from train.rl.countdown import Countdown
from train.rl.loop import RLConfig


def config() -> RLConfig:
    return RLConfig(
        out="runs/rl_tiny",
        checkpoint="runs/tiny/model",
        adapter=LoRAConfig(rank=8, alpha=16),
        environment=Countdown(),
        groups=16,
        group_size=8,
        max_turn_tokens=32,
        steps=40,
        lr=3e-3,
        rows=8,
        row_length=127,
    )
