"""Log-probabilities of target tokens, from logits or, without ever holding all logits, from hidden states."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

Inputs = TypeVar("Inputs")  # a pytree of arrays [B, T, ...]


def token_logprobs(logits: Float[Array, "*n V"], targets: Int[Array, "*n"]) -> Float32[Array, "*n"]:
    """log softmax(logits)[target] at temperature 1, in fp32. A target outside the vocabulary gives NaN."""
    logits = logits.astype(jnp.float32)
    targets = jnp.where(targets < 0, logits.shape[-1], targets)  # negative indices would count from the end
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill", fill_value=jnp.nan)
    return chosen[..., 0] - jax.nn.logsumexp(logits, axis=-1)


def logprobs_by_chunk(
    logits_of: Callable[[Inputs], Float[Array, "B C V"]],
    inputs: Inputs,
    targets: Int[Array, "B T"],
    chunk: int,
) -> Float32[Array, "B T"]:
    """token_logprobs(logits_of(inputs), targets) that never holds the logits of more than B x chunk tokens.

    inputs     arrays [B, T, ...]: hidden states and whatever else the head needs per token (adapters, say)
    logits_of  may also read weights; their gradients add up over the chunks
    The backward pass computes the logits again. With V = 163 840 the fp32 logits of a token take 0.66 MB.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: at least one token at a time is needed.")
    length = targets.shape[1]
    chunk = min(chunk, length)
    count = -(-length // chunk)

    def split(x: Array) -> Array:
        """[B, T, ...] -> [count, B, chunk, ...]; rows stay whole, so a batch axis keeps its sharding."""
        x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(piece: tuple[Inputs, Int[Array, "B C"]]) -> Float32[Array, "B C"]:
        return token_logprobs(logits_of(piece[0]), piece[1])

    logprobs = jax.lax.map(one, jax.tree.map(split, (inputs, targets)))
    return jnp.moveaxis(logprobs, 0, 1).reshape(targets.shape[0], -1)[:, :length]
