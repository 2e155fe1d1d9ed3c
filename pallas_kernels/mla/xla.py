"""MLA attention block by block with an online softmax (FlashAttention-2, arXiv 2307.08691), in plain XLA.

Both ops are one loop over query rows in G groups with keys of their own: `attention` has a group per head and
a row per token; `latent_attention` one group, a row per token and head, and as values the first numbers of
its keys. A block of queries reads the span of key blocks that its rows may see, and no others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

Q_BLOCK = 512  # query rows
KV_BLOCK = 512  # keys


class Queries(NamedTuple):
    q: Float[Array, "B G M K"]
    segments: Int32[Array, "B 1 M"]
    positions: Int32[Array, "B 1 M"]


class Keys(NamedTuple):
    k: Float[Array, "B G S K"]
    v: Float[Array, "B G S V"] | None  # None: the first numbers of k
    segments: Int32[Array, "B 1 S"]
    positions: Int32[Array, "B 1 S"]


class Form(NamedTuple):
    scale: float
    value_dim: int
    out_dtype: Any


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    *,
    scale: float,
    q_positions: Int32[Array, "B T"],
    kv_positions: Int32[Array, "B S"],
    q_segments: Int32[Array, "B T"] | None = None,
    kv_segments: Int32[Array, "B S"] | None = None,
) -> Float[Array, "B T H V"]:
    if not (q.size and k.size):
        return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype)
    queries = Queries(q.swapaxes(1, 2), *_places(q_segments, q_positions))
    keys = Keys(k.swapaxes(1, 2), v.swapaxes(1, 2), *_places(kv_segments, kv_positions))
    return _flash(Form(scale, v.shape[-1], v.dtype), queries, keys).swapaxes(1, 2)


def latent_attention(
    q: Float[Array, "B T H LR"],
    latent: Float[Array, "B S LR"],
    *,
    value_dim: int,
    scale: float,
    q_positions: Int32[Array, "B T"],
    kv_positions: Int32[Array, "B S"],
    q_segments: Int32[Array, "B T"] | None = None,
    kv_segments: Int32[Array, "B S"] | None = None,
) -> Float[Array, "B T H L"]:
    B, T, H, K = q.shape
    if not (q.size and latent.size):
        return jnp.zeros((B, T, H, value_dim), q.dtype)
    per_row = (jnp.repeat(x, H, axis=-1) for x in _places(q_segments, q_positions))
    queries = Queries(q.reshape(B, 1, T * H, K), *per_row)
    keys = Keys(latent[:, None], None, *_places(kv_segments, kv_positions))
    return _flash(Form(scale, value_dim, q.dtype), queries, keys).reshape(B, T, H, value_dim)


def _places(segments: Array | None, positions: Array) -> tuple[Int32[Array, "B 1 N"], Int32[Array, "B 1 N"]]:
    segments = jnp.ones_like(positions) if segments is None else segments
    return segments[:, None], positions[:, None]


def _attend(form: Form, queries: Queries, keys: Keys) -> Float[Array, "B G M V"]:
    return _forward(form, queries, keys)[0]


def _forward(form: Form, queries: Queries, keys: Keys) -> tuple[Array, tuple[Any, ...]]:
    def of_block(_: None, block: tuple[Queries, Array, Array]) -> tuple[None, tuple[Array, Array]]:
        rows, first, last = block

        def add_keys(j: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, acc = carry
            k, v, seen = _key_block(form, keys, rows, j)
            score = jnp.where(seen, form.scale * _dot("bgmk,bgsk->bgms", rows.q, k), -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(score, -1))
            weight = jnp.exp(score - _finite(new_top)[..., None])
            keep = jnp.exp(top - _finite(new_top))
            acc = keep[..., None] * acc + _dot("bgms,bgsv->bgmv", weight.astype(v.dtype), v)
            return new_top, keep * total + jnp.sum(weight, -1), acc

        shape = rows.q.shape[:-1]
        nothing = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, form.value_dim))
        top, total, acc = _loop(_key_blocks(keys), first, last, add_keys, nothing)
        out = acc / jnp.where(total > 0, total, 1)[..., None]
        return None, (out.astype(form.out_dtype), _finite(top) + jnp.log(total))

    _, joined = _scan(of_block, None, (_cut(queries), *_spans(queries, keys)))
    out, log_total = _join(joined, queries.q.shape[2])
    return out, (queries, keys, out, log_total)


def _backward(form: Form, kept: tuple[Any, ...], g: Array) -> tuple[Queries, Keys]:
    """P = exp(S - log_total), delta = g.out; dV = P'g, dS = P (g V' - delta), dQ = dS K, dK = dS'Q."""
    queries, keys, out, log_total = kept
    delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)

    def of_block(dkv: tuple[Array, Array], block: tuple[Any, ...]) -> tuple[tuple[Array, Array], Array]:
        rows, g, delta, log_total, first, last = block

        def add_keys(j: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = carry
            k, v, seen = _key_block(form, keys, rows, j)
            score = form.scale * _dot("bgmk,bgsk->bgms", rows.q, k)
            prob = jnp.where(seen, jnp.exp(score - log_total[..., None]), 0)
            dprob = _dot("bgmv,bgsv->bgms", g, v)
            dscore = jnp.where(seen, form.scale * prob * (dprob - delta[..., None]), 0).astype(k.dtype)
            dq += _dot("bgms,bgsk->bgmk", dscore, k)
            dk = _add_at(dk, keys, j, _dot("bgms,bgmk->bgsk", dscore, rows.q))
            dv = _add_at(dv, keys, j, _dot("bgms,bgmv->bgsv", prob.astype(v.dtype), g))
            return dq, dk, dv

        start = (jnp.zeros(rows.q.shape), *dkv)
        dq, dk, dv = _loop(_key_blocks(keys), first, last, add_keys, start)
        return (dk, dv), dq.astype(queries.q.dtype)

    start = jnp.zeros(keys.k.shape), jnp.zeros((*keys.k.shape[:3], form.value_dim))
    blocks = (*_cut((queries, g, delta, log_total)), *_spans(queries, keys))
    (dk, dv), dq = _scan(of_block, start, blocks)
    if keys.v is None:
        dk = dk.at[..., : form.value_dim].add(dv)
    dv = None if keys.v is None else dv.astype(keys.v.dtype)
    dq = _join(dq, queries.q.shape[2])
    dk = dk.astype(keys.k.dtype)
    no_gradient: dict[str, Any] = {"segments": None, "positions": None}
    return queries._replace(q=dq, **no_gradient), keys._replace(k=dk, v=dv, **no_gradient)


_flash = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_flash.defvjp(_forward, _backward)


def _key_block(
    form: Form, keys: Keys, rows: Queries, j: Array | int
) -> tuple[Array, Array, Bool[Array, "B 1 M N"]]:
    """Keys and values of block j and which of them each row sees. The last block begins early instead of
    running past the end; what it repeats of the block before is not seen again."""
    start, size = _start(keys, j), _key_size(keys)
    block = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, 2), keys)
    seen = (rows.segments[..., None] == block.segments[..., None, :]) & (block.segments[..., None, :] != 0)
    seen &= block.positions[..., None, :] <= rows.positions[..., None]
    seen &= start + jnp.arange(size) >= j * size
    return block.k, block.k[..., : form.value_dim] if block.v is None else block.v, seen


def _add_at(total: Array, keys: Keys, j: Array | int, x: Array) -> Array:
    start = _start(keys, j)
    old = jax.lax.dynamic_slice_in_dim(total, start, x.shape[2], 2)
    return jax.lax.dynamic_update_slice_in_dim(total, old + x, start, 2)


def _spans(queries: Queries, keys: Keys) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
    """Per block of queries, the first and one past the last block of keys with anything for it.

    Judged by the ranges of segments and positions in each block, over all rows of the batch: safe for any
    order, tight for sorted ones.
    """
    big = jnp.iinfo(jnp.int32).max

    def ranges(segments: Array, positions: Array, size: int) -> tuple[Array, Array, Array, Array]:
        segments, positions = (_pad(x, size).reshape(x.shape[0], -1, size) for x in (segments, positions))
        real = segments != 0
        return (
            jnp.min(jnp.where(real, segments, big), -1), jnp.max(segments, -1),
            jnp.min(jnp.where(real, positions, big), -1), jnp.max(jnp.where(real, positions, -1), -1),
        )  # fmt: skip

    q_low, q_high, _, q_last = ranges(queries.segments, queries.positions, _query_size(queries))
    k_low, k_high, k_first, _ = ranges(keys.segments, keys.positions, _key_size(keys))
    near = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
    near = jnp.any(near & (k_first[:, None] <= q_last[:, :, None]), axis=0)
    first, n = jnp.argmax(near, -1), near.shape[-1]
    last = jnp.where(jnp.any(near, -1), n - jnp.argmax(near[:, ::-1], -1), 0)
    return first.astype(jnp.int32), last.astype(jnp.int32)


def _loop(n: int, first: Array, last: Array, step: Callable[..., Any], start: Any) -> Any:
    return step(0, start) if n == 1 else jax.lax.fori_loop(first, last, step, start)


def _scan(step: Callable[..., Any], start: Any, blocks: Any) -> tuple[Any, Any]:
    """lax.scan, without a loop around a single block."""
    if jax.tree.leaves(blocks)[0].shape[0] > 1:
        return jax.lax.scan(step, start, blocks)
    carry, out = step(start, jax.tree.map(lambda x: x[0], blocks))
    return carry, jax.tree.map(lambda x: x[None], out)


def _query_size(queries: Queries) -> int:
    return min(Q_BLOCK, queries.q.shape[2])


def _key_size(keys: Keys) -> int:
    return min(KV_BLOCK, keys.k.shape[2])


def _key_blocks(keys: Keys) -> int:
    return -(-keys.k.shape[2] // _key_size(keys))


def _start(keys: Keys, j: Array | int) -> Array | int:
    return jnp.minimum(j * _key_size(keys), keys.k.shape[2] - _key_size(keys))


def _pad(x: Array, size: int) -> Array:
    """Zeros behind axis 2, up to a multiple of size."""
    return jnp.pad(x, [(0, -x.shape[i] % size if i == 2 else 0) for i in range(x.ndim)])


def _cut(rows: Any) -> Any:
    """Blocks of query rows in front: [B, G, M, ...] -> [n, B, G, m, ...], filled up with padding."""

    def cut(x: Array) -> Array:
        size = min(Q_BLOCK, x.shape[2])
        x = _pad(x, size)
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)

    return jax.tree.map(cut, rows)


def _join(blocks: Any, M: int) -> Any:
    """Inverse of `_cut`."""

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :M]

    return jax.tree.map(join, blocks)


def _finite(top: Array) -> Array:
    """The running maximum, or 0 where no key was seen yet."""
    return jnp.where(top == -jnp.inf, 0, top)


def _dot(spec: str, x: Array, y: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)
