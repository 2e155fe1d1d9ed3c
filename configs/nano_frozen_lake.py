"""nano learns Frozen Lake by RL: a rank-8 LoRA, several turns per episode, rewarded only at the goal. The second half of
`make demo`."""

from configs.nano import FROZEN_LAKE
from k3jax.lora import LoRAConfig
from train.rl.loop import RLConfig


def config() -> RLConfig:
    return RLConfig(
        out="runs/nano_frozen_lake",
        checkpoint="configs/nano",
        # One token in forty decides, and nano knows the right one. On other layers the words that are no move rise, too, and
        # the gradient of the few that get drawn drowns the rest (docs/demo.md).
        adapter=LoRAConfig(rank=8, alpha=16, targets=("head",)),
        environment=FROZEN_LAKE,
        groups=16,
        group_size=8,
        max_turn_tokens=64,
        max_turns=5,
        steps=36,
        lr=1e-2,
        rows=8,
        row_length=511,
        remat="none",
        heldout=32,
        heldout_every=18,
    )
