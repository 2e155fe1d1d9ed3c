"""The compiled steps of generation. Their shapes come from a few buckets; every setting of a request is an array."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, UInt32

from k3jax.cache import Cache, KDAState, MLAState
from k3jax.model import Output
from k3jax.sampling.distribution import Shape, draw, row_keys
from k3jax.sampling.params import MAX_TOP_LOGPROBS

BLOCK = 32  # decode steps per call


class Rows(NamedTuple):
    """Sequences under way, one a row: cached state, and the final hidden state of the last token absorbed."""

    cache: Cache
    hidden: Float[Array, "B D"]


class Drawing(NamedTuple):
    """What each row asks of the sampler."""

    shape: Shape
    seeds: UInt32[Array, "B 2"]
    samples: Int32[Array, " B"]
    stop_ids: Int32[Array, "B N"]  # filled with -1
    adapters: Int32[Array, " B"] | None


class Block(NamedTuple):
    """What up to BLOCK steps drew; -1 where a row was done."""

    tokens: Int32[Array, "N B"]
    logprobs: Float32[Array, "N B"]
    raw_logprobs: Float32[Array, "N B"]
    top: tuple[Float32[Array, "N B k"], Int32[Array, "N B k"]] | None
    routes: tuple[Int32[Array, "N n B k"] | None, ...] | None


class Prefilled(NamedTuple):
    """What `prefill` found of the ids given; None unless asked for."""

    logprobs: Float32[Array, "B T"] | None  # of the ids given, each from what comes before it
    routes: tuple[Int32[Array, "n B T k"] | None, ...] | None


@partial(jax.jit, static_argnames=("graphdef", "batch", "capacity"))
def start(graphdef: Any, state: Any, *, batch: int, capacity: int) -> Rows:
    """Sequences of which nothing is known yet."""
    model = nnx.merge(graphdef, state)
    return Rows(model.empty_cache(batch, capacity), jnp.zeros((batch, model.config.hidden_size), model.config.dtype))


@partial(jax.jit, static_argnames=("capacity",))
def extract(rows: Rows, row: Int32[Array, ""], *, capacity: int) -> Rows:
    """A copy of one row, as a batch of 1, with room for `capacity` tokens. Latents past its length are zero."""
    length = rows.cache.length[row][None]

    def cut(entry: KDAState | MLAState) -> KDAState | MLAState:
        one = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, row, 1, axis=1), entry)
        if isinstance(one, MLAState):
            return MLAState(jnp.where(jnp.arange(capacity)[:, None] < length[0], one.latent[:, :, :capacity], 0))
        return one

    return Rows(Cache(tuple(map(cut, rows.cache.layers)), length), rows.hidden[row][None])


@partial(jax.jit, donate_argnames=("rows",))
def insert(rows: Rows, one: Rows, row: Int32[Array, ""]) -> Rows:
    """Writes a batch of 1 into an unused row, in place. `rows` may have room for more tokens."""

    def put(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice(old, new, (0, row, *[0] * (old.ndim - 2)))

    layers = jax.tree.map(put, rows.cache.layers, one.cache.layers)
    length = rows.cache.length.at[row].set(one.cache.length[0])
    return Rows(Cache(layers, length), rows.hidden.at[row].set(one.hidden[0]))


@jax.jit
def fork(rows: Rows, source: Int32[Array, " N"]) -> Rows:
    """Rows that begin as copies of the given ones: n samples from one prefill."""
    return Rows(rows.cache.take(source), rows.hidden[source])


@partial(jax.jit, static_argnames=("graphdef", "logprobs", "routes"), donate_argnames=("rows",))
def prefill(
    graphdef: Any,
    state: Any,
    rows: Rows,
    ids: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    adapters: Int32[Array, " B"] | None,
    *,
    logprobs: bool,
    routes: bool,
) -> tuple[Rows, Prefilled]:
    """Absorbs the first `lengths` of each row's ids; 0 leaves a row as it is."""
    model = nnx.merge(graphdef, state)
    segments = (jnp.arange(ids.shape[1]) < lengths[:, None]).astype(jnp.int32)
    out = model(ids, segments, cache=rows.cache, adapters=adapters)
    last = jnp.take_along_axis(out.hidden, jnp.maximum(lengths - 1, 0)[:, None, None], 1)[:, 0]
    hidden = jnp.where(lengths[:, None] > 0, last, rows.hidden)
    of_ids = None
    if logprobs:
        before = jnp.concatenate([rows.hidden[:, None], out.hidden[:, :-1]], 1)
        raw = jax.nn.log_softmax(model.logits(before, model.packing(ids, segments, adapters=adapters)))
        of_ids = jnp.take_along_axis(raw, ids[..., None], 2)[..., 0]
    return Rows(out.cache, hidden), Prefilled(of_ids, _experts(out) if routes else None)


@partial(jax.jit, static_argnames=("graphdef", "top", "routes"), donate_argnames=("rows",))
def decode(
    graphdef: Any,
    state: Any,
    rows: Rows,
    remaining: Int32[Array, " B"],
    drawing: Drawing,
    steps: Int32[Array, ""],
    *,
    top: bool,
    routes: bool,
) -> tuple[Rows, Int32[Array, " B"], Block]:
    """Draws and absorbs up to `steps` tokens per row, at most BLOCK; fewer once every row is done.

    A row is done, and its state stays as it is, when it has drawn `remaining` tokens or a stop id. That last token is not
    absorbed. Returns the rows, what remains, and the block.
    """
    model = nnx.merge(graphdef, state)
    keys = row_keys(drawing.seeds, drawing.samples)

    def step(rows: Rows, remaining: Array) -> tuple[Rows, Array, Block]:
        alive = remaining > 0
        ids = jnp.zeros((alive.size, 1), jnp.int32)
        packing = model.packing(ids, adapters=drawing.adapters)
        logits = model.logits(rows.hidden[:, None], packing)[:, 0]
        token, logprob, raw = draw(logits, drawing.shape, keys, rows.cache.length)
        stopped = (token[:, None] == drawing.stop_ids).any(1)
        remaining = jnp.where(alive & ~stopped, remaining - 1, 0)
        goes_on = remaining > 0
        out = model(token[:, None], goes_on[:, None].astype(jnp.int32), cache=rows.cache, adapters=drawing.adapters)
        hidden = jnp.where(goes_on[:, None], out.hidden[:, 0], rows.hidden)
        block = Block(
            jnp.where(alive, token, -1), logprob, jnp.take_along_axis(raw, token[:, None], 1)[:, 0],
            jax.lax.top_k(raw, min(MAX_TOP_LOGPROBS, raw.shape[1])) if top else None,
            jax.tree.map(lambda e: e[:, :, 0], _experts(out)) if routes else None,
        )
        return Rows(out.cache, hidden), remaining, block

    def body(carry: Any) -> Any:
        i, rows, remaining, blocks = carry
        rows, remaining, block = step(rows, remaining)
        write = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return i + 1, rows, remaining, jax.tree.map(write, blocks, block)

    shapes = jax.eval_shape(step, rows, remaining)[2]
    blocks = jax.tree.map(lambda a: jnp.zeros((BLOCK, *a.shape), a.dtype), shapes)
    blocks = blocks._replace(tokens=blocks.tokens - 1)
    carry = (jnp.zeros((), jnp.int32), rows, remaining, blocks)
    _, *result = jax.lax.while_loop(lambda c: (c[0] < steps) & (c[2] > 0).any(), body, carry)
    return tuple(result)


def _experts(out: Output) -> tuple[Array | None, ...]:
    return tuple(None if routing is None else routing.experts for routing in out.routing)
