"""Makes the vocabulary of nano: the words of the chat format and of its two tasks, a token each.

    python -m train.rl.vocabulary FOLDER

Boards and expressions are left out of the corpus: each cell and each digit of a sum stays a token of its own.
"""

import argparse
import re
from collections.abc import Iterator

from k3jax.chat import chat_segments
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer_training import train_bpe
from train.rl.countdown import Countdown
from train.rl.frozen_lake import FrozenLake

VOCAB_SIZE = 640
_WORDS = re.compile(r'[a-z_ ="]+')
_OTHER_WORDS = ("system", "think", "json", "number", "object", "name", "true", "false", "null", "thinking", "effort")


def corpus() -> Iterator[str]:
    """The format's pieces in some transcripts, words of the format that these lack, and the numbers to 40."""
    for environment in (Countdown(), FrozenLake()):
        for index in range(20):
            for segment in chat_segments(environment.transcript(0, index, 0.5), thinking=False, add_generation_prompt=False):
                if not segment.allow_special and _WORDS.fullmatch(segment.text):
                    yield segment.text
    yield from ("left", "right", "up", "down")
    yield from _OTHER_WORDS
    yield from map(str, range(10, 41))


def vocabulary() -> Tokenizer:
    """Deterministic."""
    return train_bpe(corpus(), VOCAB_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write nano's tokenizer: tiktoken.model and tokenizer_config.json.",
        epilog="example: python -m train.rl.vocabulary configs/nano",
    )
    parser.add_argument("folder", help="where to; created if missing")
    folder = parser.parse_args().folder
    vocabulary().save(folder)
    print(f"Wrote a vocabulary of {VOCAB_SIZE} ids to {folder}.")


if __name__ == "__main__":
    main()
