"""The second stage of nano: Countdown over larger numbers and with four of them, so that held-out tasks come out right, too."""

from dataclasses import replace

from configs import nano
from train.data import Transcripts
from train.pretrain import PretrainConfig
from train.rl.countdown import Countdown


def config() -> PretrainConfig:
    larger = Countdown(counts=(2, 3, 3), highest=12, highest_target=30)
    longer = Countdown(counts=(3, 4), highest_target=30)
    tasks = ((nano.COUNTDOWN, 1.0), (larger, 1.0), (longer, 1.0), (nano.FROZEN_LAKE, 0.9))
    return replace(
        nano.config(),
        out="runs/nano_wide",
        checkpoint="runs/nano_solver/model",
        data=Transcripts(tasks=tasks, count=10_000_000, seed=1),
        steps=4000,
        lr=4e-3,
    )
