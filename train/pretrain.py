"""Trains all weights of a new model: per-head Muon, Quantile Balancing, cosine. Saves it as an official checkpoint.

    python -m train.pretrain configs/tiny.py steps=200
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.config import K3Config
from k3jax.model import K3
from k3jax.tokenizer import Tokenizer
from k3jax.weights import save
from train.checkpoint import CheckpointError
from train.config import ConfigError, TrainConfig, command_line
from train.data import MAX_SEGMENTS, DataError, Examples, Jsonl, Rows, Transcripts, check_all
from train.loop import run
from train.loss import loss_named
from train.metrics import Figures
from train.objective import TokenObjective
from train.optim import heads_of, muon
from train.step import MicroBatch, Trainer, TrainingError

USER_ERRORS = (DataError, CheckpointError, TrainingError, FileNotFoundError)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainConfig):
    """Weights are trained in fp32 and saved in model.param_dtype, with the tokenizer, in out/model."""

    model: K3Config
    data: Jsonl | Transcripts
    tokenizer: str  # folder
    cut: bool = False  # cut examples that are longer than a row

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.row_length > self.model.context_length:
            raise ConfigError(f"row_length={self.row_length} exceeds the model's context of {self.model.context_length} tokens.")


class DataFeed:
    """Rows of a data set, `accumulate` micro-batches per step."""

    def __init__(self, examples: Examples, config: TrainConfig, vocab_size: int, cut: bool, max_segments: int = MAX_SEGMENTS):
        self.accumulate = config.accumulate
        self.rows = Rows(
            examples, rows=config.rows, row_length=config.row_length, seed=config.seed, vocab_size=vocab_size, cut=cut,
            max_segments=max_segments,
        )

    def next(self, step: int) -> tuple[Sequence[MicroBatch], Figures]:
        batch = self.rows.next(self.accumulate)
        return batch, {"tokens_in": float(sum(np.count_nonzero(micro["segments"]) for micro in batch))}

    def state(self) -> dict[str, Any]:
        return self.rows.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.rows.restore(state)


def pretrain(config: PretrainConfig) -> K3:
    """Runs the whole training and returns the model, which it also saves in out/model."""
    tokenizer = Tokenizer(config.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"The tokenizer in {config.tokenizer} has {tokenizer.vocab_size} ids, but model.vocab_size is "
            f"{config.model.vocab_size}. Set model.vocab_size={tokenizer.vocab_size}."
        )
    examples = config.data.examples(tokenizer)
    if isinstance(config.data, Jsonl):
        check_all(examples, config.row_length, config.model.vocab_size, config.cut)
    model_config = replace(config.model, param_dtype=jnp.dtype(jnp.float32), remat=config.remat)
    model = K3(model_config, rngs=nnx.Rngs(config.seed))
    objective = TokenObjective(loss_named("cross_entropy"), config.logprob_chunk, balance=config.model.moe is not None)
    trainer = Trainer(model, nnx.Param, objective, config, partial(muon, heads=heads_of(model)))
    run(trainer, DataFeed(examples, config, config.model.vocab_size, config.cut), config)
    folder = Path(config.out) / "model"
    save(model, folder, dtype=config.model.param_dtype)
    tokenizer.save(folder)
    return model


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)
    examples = ("python -m train.pretrain configs/tiny.py", "python -m train.pretrain configs/tiny.py lr=1e-3 steps=100")
    return command_line(PretrainConfig, lambda config: print(f"Saved {config.out}/model.") if pretrain(config) else None, examples,
                        USER_ERRORS)


if __name__ == "__main__":
    from train.pretrain import main  # config files import this module by its name: its classes, not those of __main__

    sys.exit(main())
