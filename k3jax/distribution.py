"""The distribution a token is drawn from: logits reshaped by temperature, top-k, top-p and min-p, row by row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32


class Shape(NamedTuple):
    """How each row reshapes its logits. Values, not constants: changing them compiles nothing."""

    temperature: Float32[Array, "B"]  # 0: always the most likely token
    top_k: Int32[Array, "B"]  # 0: off
    top_p: Float32[Array, "B"]  # 1: off
    min_p: Float32[Array, "B"]  # 0: off


class Drawn(NamedTuple):
    token: Int32[Array, "B"]
    logprob: Float32[Array, "B"]  # under the distribution that was drawn from, nats
    raw: Float32[Array, "B V"]  # log softmax of the logits as the model gave them


def draw(logits: Float32[Array, "B V"], shape: Shape, keys: Array, positions: Int32[Array, "B"]) -> Drawn:
    """One token per row. What a row gets depends on its logits, shape, key and position, on nothing else in the batch.

    Rows with temperature 0 take the most likely token, whose logprob then is 0.
    """
    logprobs = reshape(logits, shape)
    row_keys = jax.vmap(jax.random.fold_in)(keys, positions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(row_keys)
    token = jnp.argmax(jnp.where(shape.temperature[:, None] > 0, logprobs + noise, logits), -1).astype(jnp.int32)
    logprob = jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0]
    return Drawn(token, jnp.where(shape.temperature > 0, logprob, 0.0), jax.nn.log_softmax(logits))


def reshape(logits: Float32[Array, "B V"], shape: Shape) -> Float32[Array, "B V"]:
    """Log-probabilities of softmax(logits / temperature) cut down to the tokens that stay, -inf for the others.

    A token stays if it is among the top_k most likely, among the fewest of those that together hold top_p of their
    mass, and at least min_p times as likely as the most likely one. Of equals the lower ids stay. Rows with temperature
    0 are treated as if it were 1.
    """
    temperature = jnp.where(shape.temperature > 0, shape.temperature, 1.0)
    logprobs = jax.nn.log_softmax(logits / temperature[:, None])
    cut = (shape.top_k > 0) | (shape.top_p < 1) | (shape.min_p > 0)

    def renormalised(logprobs: Array) -> Array:
        kept = jnp.where(_kept(logprobs, shape), logprobs, -jnp.inf)
        return jnp.where(cut[:, None], jax.nn.log_softmax(kept), logprobs)

    return jax.lax.cond(cut.any(), renormalised, lambda logprobs: logprobs, logprobs)


def _kept(logprobs: Float32[Array, "B V"], shape: Shape) -> Bool[Array, "B V"]:
    """Each filter keeps the first so many of the tokens in order of probability: the strictest decides."""
    V = logprobs.shape[-1]
    falling = jax.lax.sort(logprobs, dimension=1)[:, ::-1]
    top_k = jnp.where(shape.top_k > 0, jnp.minimum(shape.top_k, V), V)
    p = jnp.where(jnp.arange(V) < top_k[:, None], jnp.exp(falling), 0)
    before = jnp.cumsum(p, -1) - p
    top_p = jnp.sum(before < shape.top_p[:, None] * p.sum(-1, keepdims=True), -1)
    top_p = jnp.where(shape.top_p < 1, top_p, V)
    min_p = jnp.sum(falling >= falling[:, :1] + jnp.log(shape.min_p)[:, None], -1)
    count = jnp.maximum(jnp.minimum(jnp.minimum(top_k, top_p), min_p), 1)
    last = jnp.take_along_axis(falling, count[:, None] - 1, 1)
    room = count[:, None] - jnp.sum(logprobs > last, -1, keepdims=True)
    equal = logprobs == last
    return (logprobs > last) | (equal & (jnp.cumsum(equal, -1) <= room))


def row_keys(seeds: UInt32[Array, "B 2"], samples: Int32[Array, "B"]) -> Array:
    """A key per row from the two halves of its request's seed (high, low) and the number of the sample in it."""
    keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, samples)
