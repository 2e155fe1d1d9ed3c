"""python -m train.rl CONFIG [name=value ...]"""

import sys

from train.config import command_line
from train.rl.loop import RLConfig, train_rl

EXAMPLES = (
    "python -m train.rl configs/rl_tiny.py",
    "python -m train.rl configs/rl_tiny.py lr=1e-3 loss=ppo environment.reward=composite",
)

if __name__ == "__main__":
    sys.exit(command_line(RLConfig, train_rl, EXAMPLES))
