"""Direct preference optimisation (arXiv 2305.18290): trains a LoRA adapter on pairs of a better and a worse answer.

    python -m train.dpo configs/dpo_tiny.py data.path=pairs.jsonl

The reference policy is the checkpoint without adapter.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32, Int

from k3jax.config import ConfigError
from train.adapter import AdapterConfig, Subject, load_subject
from train.cli import command_line
from train.config import require_positive, require_whole
from train.data import DataFeed, Pairs
from train.loop import run
from train.loss import loss_named
from train.objective import TokenObjective, target_logprobs
from train.step import MicroBatch


@dataclass(frozen=True, kw_only=True)
class DPOConfig(AdapterConfig):
    """The loss is the mean over pairs. A row holds at most pairs_per_row of them, and never a part of one."""

    data: Pairs
    beta: float = 0.1  # of the loss: how dear it is to leave the reference
    pairs_per_row: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "beta")
        require_whole(self, 1, "pairs_per_row")


class PairFeed(DataFeed):
    """Rows of pairs, with the log-probabilities of all answers under the reference."""

    def __init__(self, subject: Subject, config: DPOConfig):
        if subject.tokenizer is None:
            raise ConfigError(f"{config.checkpoint} has no tokenizer, which conversations need.")
        vocab_size = subject.model.config.vocab_size
        super().__init__(config.data.examples(subject.tokenizer), config, vocab_size, False, config.pairs_per_row)
        self.model = subject.model
        self.reference = jax.jit(
            partial(_reference, config.logprob_chunk, 2 * config.pairs_per_row), static_argnums=0
        )

    def next(self, step: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
        batch, figures = super().next(step)
        graphdef, state = nnx.split(self.model)
        return [micro | {"reference_logprobs": self.reference(graphdef, state, micro)} for micro in batch], figures


def segment_sums(
    logprobs: Float32[Array, "B T"], weights: Float32[Array, "B T"], segments: Int[Array, "B T"], slots: int
) -> Float32[Array, "B S"]:
    """Sum of weights * logprobs over each of the segments 1..slots of a row."""
    member = segments[:, None] == jnp.arange(1, slots + 1)[None, :, None]
    weighted = jnp.where(weights != 0, weights * logprobs, 0)
    return jnp.sum(jnp.where(member, weighted[:, None], 0), -1)


def dpo(config: DPOConfig, subject: Subject | None = None) -> Subject:
    """Runs the whole training. Returns the model with the adapter, which it also saves in out/adapter."""
    subject = subject or load_subject(config)
    loss = loss_named("dpo", {"beta": config.beta})
    trainer = subject.trainer(lambda id: TokenObjective(loss, config.logprob_chunk, adapter=id), config)
    run(trainer, PairFeed(subject, config), config)
    print(f"Saved {subject.save(config)}.")
    return subject


def _reference(chunk: int, slots: int, graphdef: Any, state: nnx.State, batch: MicroBatch) -> Float32[Array, "B S"]:
    batch = {name: jnp.asarray(values) for name, values in batch.items()}
    logprobs, _ = target_logprobs(nnx.merge(graphdef, state), batch, 0, chunk)
    return segment_sums(logprobs, batch["weights"], batch["segments"], slots)


def main() -> int:
    examples = ("python -m train.dpo configs/dpo_tiny.py", "python -m train.dpo configs/dpo_tiny.py data.path=a.jsonl beta=0.2")
    return command_line(DPOConfig, dpo, examples)


if __name__ == "__main__":
    from train.dpo import main  # config files import this module by its name: its classes, not those of __main__

    sys.exit(main())
