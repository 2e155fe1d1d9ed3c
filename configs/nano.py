"""nano, shipped in configs/nano: the model of configs/tiny.py, taught Countdown and Frozen Lake to a middling skill.

    python -m train.rl.vocabulary configs/nano
    python -m train.pretrain configs/nano_solver.py  # learns the right answers
    python -m train.pretrain configs/nano_wide.py    # and those of larger tasks
    python -m train.pretrain configs/nano.py         # goes on from there; then copy runs/nano/model to configs/nano

The last teachers mostly answer by chance, and briefly: nano keeps the right answers and often gives others. Room for RL.
"""

from dataclasses import replace

from configs import tiny
from train.data import Transcripts
from train.pretrain import PretrainConfig
from train.rl.countdown import Countdown
from train.rl.frozen_lake import FrozenLake

COUNTDOWN = Countdown(counts=(2, 3, 3))
FROZEN_LAKE = FrozenLake(size=3, holes=2, max_moves=5)


def config() -> PretrainConfig:
    return replace(
        tiny.config(),
        out="runs/nano",
        data=Transcripts(tasks=((COUNTDOWN, 0.4), (FROZEN_LAKE, 0.1)), count=10_000_000),
        checkpoint="runs/nano_wide/model",
        steps=90,
        lr=7e-4,
        row_length=512,
        save_every=250,
    )
