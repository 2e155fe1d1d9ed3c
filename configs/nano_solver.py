"""The first stage of nano: from random weights to right answers on Countdown and Frozen Lake. See configs/nano.py."""

from dataclasses import replace

from configs import nano
from train.data import Transcripts
from train.pretrain import PretrainConfig


def config() -> PretrainConfig:
    tasks = ((nano.COUNTDOWN, 1.0), (nano.COUNTDOWN, 1.0), (nano.FROZEN_LAKE, 0.9))
    return replace(
        nano.config(),
        out="runs/nano_solver",
        checkpoint=None,
        data=Transcripts(tasks=tasks, count=10_000_000),
        steps=5000,
        lr=5e-3,
    )
