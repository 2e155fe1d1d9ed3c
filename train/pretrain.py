"""Trains all weights of a new model: per-head Muon, Quantile Balancing, cosine. Saves it as an official checkpoint.

    python -m train.pretrain configs/tiny.py steps=200
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import ConfigError, K3Config
from k3jax.model import K3
from k3jax.weights import abstract, load, save
from train.cli import command_line
from train.config import TrainConfig
from train.data import DataFeed, Jsonl, Transcripts, load_tokenizer
from train.loop import run
from train.loss import loss_named
from train.objective import TokenObjective
from train.optim import heads_of, muon
from train.step import Trainer


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainConfig):
    """Weights are trained in fp32 and saved in model.param_dtype, with the tokenizer, in out/model."""

    model: K3Config
    data: Jsonl | Transcripts
    tokenizer: str  # folder
    checkpoint: str | None = None  # folder of weights to go on from; None: random ones
    cut: bool = False  # cut examples that are longer than a row

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.row_length > self.model.context_length:
            context = self.model.context_length
            raise ConfigError(
                f"row_length={self.row_length} exceeds the model's context of {context} tokens. Use row_length={context} or less."
            )


def pretrain(config: PretrainConfig) -> K3:
    """Runs the whole training and returns the model, which it also saves in out/model."""
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"The tokenizer in {config.tokenizer} has {tokenizer.vocab_size} ids, but model.vocab_size is "
            f"{config.model.vocab_size}. Set model.vocab_size={tokenizer.vocab_size}."
        )
    examples = config.data.examples(tokenizer)
    model_config = replace(config.model, param_dtype=jnp.dtype(jnp.float32), remat=config.remat)
    model = load(config.checkpoint, model_config) if config.checkpoint else new_model(model_config, config.seed)
    balance = config.model.moe is not None
    objective = TokenObjective(loss_named("cross_entropy"), config.logprob_chunk, balance=balance)
    trainer = Trainer(model, nnx.Param, objective, config, partial(muon, heads=heads_of(model)), balance=balance)
    run(trainer, DataFeed(examples, config, config.model.vocab_size, config.cut), config)
    folder = Path(config.out) / "model"
    save(model, folder, dtype=config.model.param_dtype)
    tokenizer.save(folder)
    print(f"Saved {folder}.")
    return model


def new_model(config: K3Config, seed: int) -> K3:
    """A model with random weights, made by one compiled program."""
    model = abstract(config)
    nnx.update(model, jax.jit(lambda: nnx.state(K3(config, rngs=nnx.Rngs(seed))))())
    return model


def main() -> int:
    examples = ("python -m train.pretrain configs/tiny.py", "python -m train.pretrain configs/tiny.py lr=1e-3 steps=100")
    return command_line(PretrainConfig, pretrain, examples)


if __name__ == "__main__":
    from train.pretrain import main  # config files import this module by its name: its classes, not those of __main__

    sys.exit(main())
