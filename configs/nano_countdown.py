"""nano learns Countdown by RL: a rank-8 LoRA, rewarded by distance to the target. The first half of `make demo`."""

from configs.nano import COUNTDOWN
from k3jax.lora import LoRAConfig
from train.rl.loop import RLConfig


def config() -> RLConfig:
    return RLConfig(
        out="runs/nano_countdown",
        checkpoint="configs/nano",
        adapter=LoRAConfig(rank=8, alpha=16),
        environment=COUNTDOWN,
        groups=80,
        group_size=8,
        max_turn_tokens=24,
        steps=32,
        lr=2e-3,
        rows=32,
        row_length=255,
        remat="none",
        heldout=64,
        heldout_every=16,
    )
