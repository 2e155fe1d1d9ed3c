"""What a model is trained on: losses of train.loss over packed rows, as objectives of train.step."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from train.logprobs import logprobs_by_chunk
from train.loss import Loss
from train.rl.objective import reference_kl
from train.step import MicroBatch, Sums


@dataclass(frozen=True)
class TokenObjective:
    """A loss over packed rows: ids, targets, segments, weights [B, T] and whatever else the loss takes.

    adapter  LoRA adapter of every token; 0: none
    kl       coefficient of the divergence from `reference_logprobs` (train.rl.objective.reference_kl)
    balance  also count what Quantile Balancing needs
    """

    loss: Loss
    chunk: int
    adapter: int = 0
    kl: float = 0.0
    balance: bool = False

    def __call__(self, model: Any, batch: MicroBatch) -> Sums:
        logprobs, routing = target_logprobs(model, batch, self.adapter, self.chunk, histogram=self.balance)
        loss, metrics = self.loss(logprobs, batch)
        if self.kl:
            divergence, extra = reference_kl(logprobs, batch["reference_logprobs"], batch["weights"])
            loss, metrics = loss + self.kl * divergence, metrics | {"kl": extra["kl"]}
        if "raw_logprobs" in batch:  # of the sampler's model at temperature 1, as are ours
            gap = jnp.abs(logprobs - batch["raw_logprobs"])
            metrics = metrics | {"logprob_gap": jnp.sum(jnp.where(batch["advantages"] != 0, gap, 0))}
        return Sums(loss, metrics | {"loss": loss}, margin_counts(model, routing) if self.balance else {})


def target_logprobs(
    model: Any, batch: MicroBatch, adapter: int, chunk: int, histogram: bool = False
) -> tuple[Float32[Array, "B T"], Any]:
    """Log-probabilities of `targets` after `ids`, and the routing of each stack of layers: `picks` where the batch has them
    (experts that a sampler chose), else the router's choice."""
    ids, segments = batch["ids"], batch["segments"]
    adapters = jnp.full_like(segments, adapter) if adapter else None
    packing = model.packing(ids, segments, adapters=adapters)
    out = model(ids, segments, adapters=adapters, picks=batch.get("picks"), histogram=histogram)

    def logits(inputs: Any) -> Float32[Array, "B C V"]:
        hidden, where = inputs
        return model.logits(hidden, replace(where, owners=packing.owners))

    inputs = (out.hidden, replace(packing, owners=None))
    return logprobs_by_chunk(logits, inputs, batch["targets"], chunk), out.routing


def margin_counts(model: Any, routing: Any) -> dict[str, Int32[Array, "n E bins"]]:
    """Margin histograms by the path of the router bias that they set."""
    return {
        f"model/layers/stacks/{stack}/block_sparse_moe/gate/e_score_correction_bias": jax.lax.stop_gradient(r.histogram)
        for stack, r in enumerate(routing)
        if r is not None and r.histogram is not None
    }
