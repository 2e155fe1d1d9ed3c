"""python -m train.rl CONFIG [name=value ...]"""

import sys

from train.cli import command_line
from train.rl.countdown import Countdown
from train.rl.frozen_lake import FrozenLake
from train.rl.loop import RLConfig, train_rl

EXAMPLES = (
    "python -m train.rl configs/nano_countdown.py",
    "python -m train.rl configs/nano_countdown.py lr=1e-3 loss=ppo environment.reward=composite",
)

if __name__ == "__main__":
    sys.exit(command_line(RLConfig, train_rl, EXAMPLES, {"environment": (Countdown, FrozenLake)}))
