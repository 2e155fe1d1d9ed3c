"""The distribution a token is drawn from: logits reshaped by temperature, top-k, top-p and min-p, row by row."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

INFINITY_BITS = 0x7F800000
SMALLEST = 1e-30  # share of the mass that top_p asks for at least: less than that may be flushed to 0, and then nothing stays


class Shape(NamedTuple):
    """How each row reshapes its logits. Values, not constants: changing them compiles nothing."""

    temperature: Float32[Array, " B"]  # 0: always the most likely token
    top_k: Int32[Array, " B"]  # 0: off
    top_p: Float32[Array, " B"]  # 1: off
    min_p: Float32[Array, " B"]  # 0: off


class Drawn(NamedTuple):
    """What `draw` drew for each row."""

    token: Int32[Array, " B"]
    logprob: Float32[Array, " B"]  # under the distribution that was drawn from, nats
    raw: Float32[Array, "B V"]  # log softmax of the logits as the model gave them


def draw(logits: Float32[Array, "B V"], shape: Shape, keys: Array, positions: Int32[Array, " B"]) -> Drawn:
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
    top_k, top_p, min_p = shape.top_k > 0, shape.top_p < 1, shape.min_p > 0
    kept = _where_on(top_k, logprobs, lambda: _first(logprobs, jnp.ones_like(logprobs), shape.top_k.astype(jnp.float32)))
    p = jnp.where(kept, jnp.exp(logprobs), 0)
    kept &= _where_on(top_p, logprobs, lambda: _first(logprobs, p, jnp.maximum(shape.top_p * p.sum(-1), SMALLEST)))
    kept &= logprobs >= jnp.max(logprobs, -1, keepdims=True) + jnp.log(shape.min_p)[:, None]
    cut = jax.nn.log_softmax(jnp.where(kept, logprobs, -jnp.inf))
    return jnp.where((top_k | top_p | min_p)[:, None], cut, logprobs)


def _where_on(on: Bool[Array, " B"], like: Float32[Array, "B V"], tokens: Callable[[], Array]) -> Bool[Array, "B V"]:
    """Which tokens stay in the rows that a filter is on for; all in the others. Without any such row nothing is computed."""
    everything = jnp.ones(like.shape, bool)
    return jax.lax.cond(on.any(), lambda: tokens() | ~on[:, None], lambda: everything)


def _first(logprobs: Float32[Array, "B V"], weights: Float32[Array, "B V"], needed: Float32[Array, " B"]) -> Bool[Array, "B V"]:
    """The fewest tokens, by falling probability and then by id, whose weights (>= 0) add up to what is needed.

    Finds the last one's probability by bisection over the bits of a float, which sort like the float if it is positive:
    31 sums over the row are cheaper than sorting it, by far on a CPU.
    """
    order = jax.lax.bitcast_convert_type(jnp.abs(logprobs), jnp.int32)

    def up_to(bits: Int32[Array, " B"]) -> Float32[Array, " B"]:
        return jnp.sum(jnp.where(order <= bits[:, None], weights, 0), -1)

    def halve(_: Array, limits: tuple[Array, Array]) -> tuple[Array, Array]:
        too_few, enough = limits
        middle = too_few + (enough - too_few) // 2
        reached = up_to(middle) >= needed
        return jnp.where(reached, too_few, middle), jnp.where(reached, middle, enough)

    limits = (jnp.full(needed.shape, -1, jnp.int32), jnp.full(needed.shape, INFINITY_BITS, jnp.int32))
    last = jax.lax.fori_loop(0, 31, halve, limits)[1][:, None]
    equal = jnp.where(order == last, weights, 0)
    before = up_to(last[:, 0] - 1)[:, None] + jnp.cumsum(equal, -1) - equal
    return (order < last) | ((order == last) & (before < needed[:, None]))


def row_keys(seeds: UInt32[Array, "B 2"], samples: Int32[Array, " B"]) -> Array:
    """A key per row from the two halves of its request's seed (high, low) and the number of the sample in it."""
    keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, samples)
