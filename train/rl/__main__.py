"""python -m train.rl CONFIG [name=value ...]"""

import sys

from train.config import command_line
from train.rl.loop import RLConfig, train_rl

EXAMPLES = (
    "python -m train.rl configs/nano_countdown.py",
    "python -m train.rl configs/nano_countdown.py lr=1e-3 loss=ppo environment.reward=composite",
)

if __name__ == "__main__":
    sys.exit(command_line(RLConfig, train_rl, EXAMPLES))
