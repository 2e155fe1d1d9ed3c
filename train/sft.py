"""Supervised fine-tuning: trains a LoRA adapter on conversations or token ids from a jsonl file.

    python -m train.sft configs/sft_tiny.py lr=1e-4
"""

import sys
from dataclasses import dataclass

from train.adapter import AdapterConfig, Subject, load_subject
from train.cli import command_line
from train.data import DataFeed, Jsonl, Transcripts
from train.loop import run
from train.loss import loss_named
from train.objective import TokenObjective


@dataclass(frozen=True, kw_only=True)
class SFTConfig(AdapterConfig):
    """Cross-entropy of the tokens that `data` says are learned."""

    data: Jsonl | Transcripts
    cut: bool = False  # cut examples that are longer than a row


def sft(config: SFTConfig, subject: Subject | None = None) -> Subject:
    """Runs the whole training. Returns the model with the adapter, which it also saves in out/adapter."""
    subject = subject or load_subject(config)
    feed = DataFeed(config.data.examples(subject.tokenizer), config, subject.model.config.vocab_size, config.cut)
    loss = loss_named("cross_entropy")
    trainer = subject.trainer(lambda id: TokenObjective(loss, config.logprob_chunk, adapter=id), config)
    run(trainer, feed, config)
    print(f"Saved {subject.save(config)}.")
    return subject


def main() -> int:
    examples = (
        "python -m train.sft configs/sft_tiny.py",
        "python -m train.sft configs/sft_tiny.py lr=1e-4 data.path=mine.jsonl adapter.rank=16",
    )
    return command_line(SFTConfig, sft, examples)


if __name__ == "__main__":
    from train.sft import main  # config files import this module by its name: its classes, not those of __main__

    sys.exit(main())
