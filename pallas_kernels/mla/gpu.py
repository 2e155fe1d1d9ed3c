"""MLA attention on NVIDIA GPUs: FlashAttention-2 (arXiv 2307.08691) in Triton, with keys wider than values.

A program holds one block of queries of one head and walks over the blocks of keys that any of them may see; in the gradient
of keys and values it holds a block of keys and walks over queries. Triton's tiles are powers of two, so the 192 numbers of a
key are read as 128 and 64. Logarithms are to base 2, the unit of the hardware's exponential.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.target import current, why_not_on

Q_BLOCK = 128  # queries per program, forward
KV_BLOCK = 64  # keys per step
GRADIENT_BLOCK = 64  # queries and keys in the gradients, which hold twice as many tiles
FP32_BLOCK = 16  # instead of all three: no matrix unit multiplies fp32 numbers, and registers hold both operands
LOG2_E = math.log2(math.e)


class Form(NamedTuple):
    scale: float
    parts: tuple[tuple[int, int], ...]  # (offset, size) of the tiles of a key
    value_dim: int
    q_block: int
    kv_block: int
    gradient_block: int


class Places(NamedTuple):
    """Where tokens are; T and S are whole blocks, padded by segment 0."""

    q_segments: Int32[Array, "B T"]
    q_positions: Int32[Array, "B T"]
    kv_segments: Int32[Array, "B S"]
    kv_positions: Int32[Array, "B S"]


def why_not(q: Array, k: Array, v: Array, **kwargs: object) -> str | None:
    if reason := why_not_on("gpu", q, k, v):
        return reason
    if not _parts(q.shape[-1]) or len(_parts(v.shape[-1])) != 1:
        return (f"its tiles are powers of two from 16 on, two at most for a key and one for a value; got keys of {q.shape[-1]} "
                f"and values of {v.shape[-1]}")
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
    """See `pallas_kernels.mla.attention`."""
    q_segments = jnp.ones_like(q_positions) if q_segments is None else q_segments
    kv_segments = jnp.ones_like(kv_positions) if kv_segments is None else kv_segments
    T, common, dtype = q.shape[1], jnp.result_type(q, k, v), v.dtype
    blocks = (FP32_BLOCK,) * 3 if common == jnp.float32 else (Q_BLOCK, KV_BLOCK, GRADIENT_BLOCK)
    places = Places(*(_pad(x, max(blocks)) for x in (q_segments, q_positions, kv_segments, kv_positions)))
    form = Form(scale, _parts(q.shape[-1]), v.shape[-1], *blocks)
    return _flash(form, *(_pad(x.astype(common), max(blocks)) for x in (q, k, v)), places)[:, :T].astype(dtype)


def _parts(size: int) -> tuple[tuple[int, int], ...]:
    """(offset, size) of one or two powers of two of at least 16 that sum to `size`; empty if there are none."""
    first = 1 << (size.bit_length() - 1)
    rest = size - first
    if size < 16 or rest and (rest < 16 or rest & (rest - 1)):
        return ()
    return ((0, first), (first, rest)) if rest else ((0, first),)


def _pad(x: Array, block: int) -> Array:
    return jnp.pad(x, [(0, -x.shape[i] % block if i == 1 else 0) for i in range(x.ndim)])


def _attend(form: Form, q: Array, k: Array, v: Array, places: Places) -> Array:
    return _forward(form, q, k, v, places)[0]


def _forward(form: Form, q: Array, k: Array, v: Array, places: Places) -> tuple[Array, tuple[Any, ...]]:
    B, T, H, _ = q.shape
    out = jax.ShapeDtypeStruct((B, T, H, form.value_dim), v.dtype), jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    call = _call(_forward_kernel, form, (T // form.q_block, B, H), out, "mla_forward")
    o, log_total = call(q, k, v, *places, *_spans(places, form.q_block, form.kv_block))
    return o, (q, k, v, places, o, log_total)


def _backward(form: Form, kept: tuple[Any, ...], g: Float[Array, "B T H V"]) -> tuple[Any, ...]:
    """P = exp2(S - log_total), delta = g.o; dV = P'g, dS = scale P (g V' - delta), dQ = dS K, dK = dS'Q."""
    q, k, v, places, o, log_total = kept
    B, T, H, _ = q.shape
    S, block = k.shape[1], form.gradient_block
    delta = jnp.einsum("bthv,bthv->bht", g.astype(jnp.float32), o.astype(jnp.float32))
    given = q, k, v, g, log_total, delta, *places
    first, last, from_key, to_key = _spans(places, block, block, both=True)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (q, k, v))
    dq = _call(_dq_kernel, form, (T // block, B, H), like[0], "mla_dq")(*given, first, last)
    dk, dv = _call(_dkv_kernel, form, (S // block, B, H), like[1:], "mla_dkv")(*given, from_key, to_key)
    return dq, dk, dv, None


_flash = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_flash.defvjp(_forward, _backward)


def _call(
    kernel: Callable[..., None], form: Form, grid: tuple[int, ...], out: Any, name: str
) -> Callable[..., Any]:
    return pl.pallas_call(
        partial(kernel, form), grid=grid, out_shape=out, interpret=current().interpret, name=name,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
    )  # fmt: skip


def _forward_kernel(form, q, k, v, q_seg, q_pos, k_seg, k_pos, first, last, o, log_total):
    i, b, h = (pl.program_id(axis) for axis in range(3))
    rows = pl.ds(i * form.q_block, form.q_block)
    queries = _tiles(form, q, b, rows, h)
    row_seg, row_pos = q_seg[b, rows][:, None], q_pos[b, rows][:, None]

    def step(j, carry):
        top, total, acc = carry
        keys = pl.ds(j * form.kv_block, form.kv_block)
        seen = _seen(row_seg, row_pos, k_seg[b, keys][None], k_pos[b, keys][None])
        score = jnp.where(seen, _scores(form, queries, _tiles(form, k, b, keys, h)), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(score, 1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight, keep = jnp.exp2(score - base[:, None]), jnp.exp2(top - base)
        values = v[b, keys, h, :]
        return new_top, keep * total + jnp.sum(weight, 1), keep[:, None] * acc + _dot(weight.astype(values.dtype), values)

    start = jnp.full((form.q_block,), -jnp.inf), jnp.zeros((form.q_block,)), jnp.zeros((form.q_block, form.value_dim))
    top, total, acc = jax.lax.fori_loop(first[b, i], last[b, i], step, start)
    divisor = jnp.where(total > 0, total, 1)
    o[b, rows, h, :] = (acc / divisor[:, None]).astype(o.dtype)
    log_total[b, h, rows] = jnp.where(total > 0, top, 0) + jnp.log2(divisor)


def _dq_kernel(form, q, k, v, g, log_total, delta, q_seg, q_pos, k_seg, k_pos, first, last, dq):
    i, b, h = (pl.program_id(axis) for axis in range(3))
    rows = pl.ds(i * form.gradient_block, form.gradient_block)
    queries, g_rows = _tiles(form, q, b, rows, h), g[b, rows, h, :]
    row_seg, row_pos = q_seg[b, rows][:, None], q_pos[b, rows][:, None]
    log_rows, delta_rows = log_total[b, h, rows][:, None], delta[b, h, rows][:, None]

    def step(j, sums):
        keys = pl.ds(j * form.gradient_block, form.gradient_block)
        seen = _seen(row_seg, row_pos, k_seg[b, keys][None], k_pos[b, keys][None])
        tiles = _tiles(form, k, b, keys, h)
        prob = _probabilities(form, queries, tiles, seen, log_rows)
        dprob = _dot(g_rows, v[b, keys, h, :].T)
        dscore = jnp.where(seen, form.scale * prob * (dprob - delta_rows), 0)
        return [total + _dot(dscore.astype(x.dtype), x) for total, x in zip(sums, tiles, strict=True)]

    zeros = [jnp.zeros((form.gradient_block, size)) for _, size in form.parts]
    for (at, size), total in zip(form.parts, jax.lax.fori_loop(first[b, i], last[b, i], step, zeros), strict=True):
        dq[b, rows, h, pl.ds(at, size)] = total.astype(dq.dtype)


def _dkv_kernel(form, q, k, v, g, log_total, delta, q_seg, q_pos, k_seg, k_pos, first, last, dk, dv):
    """Scores are kept as [keys, queries]: both products that sum over queries take them as they are."""
    j, b, h = (pl.program_id(axis) for axis in range(3))
    keys = pl.ds(j * form.gradient_block, form.gradient_block)
    tiles, values = _tiles(form, k, b, keys, h), v[b, keys, h, :]
    key_seg, key_pos = k_seg[b, keys], k_pos[b, keys]

    def step(i, sums):
        dk_sums, dv_sum = sums
        rows = pl.ds(i * form.gradient_block, form.gradient_block)
        queries, g_rows = _tiles(form, q, b, rows, h), g[b, rows, h, :]
        seen = _seen(q_seg[b, rows][None], q_pos[b, rows][None], key_seg[:, None], key_pos[:, None])
        prob = _probabilities(form, tiles, queries, seen, log_total[b, h, rows][None])
        dprob = _dot(values, g_rows.T)
        dscore = jnp.where(seen, form.scale * prob * (dprob - delta[b, h, rows][None]), 0)
        dk_sums = [total + _dot(dscore.astype(x.dtype), x) for total, x in zip(dk_sums, queries, strict=True)]
        return dk_sums, dv_sum + _dot(prob.astype(g_rows.dtype), g_rows)

    zeros = [jnp.zeros((form.gradient_block, size)) for _, size in form.parts], jnp.zeros((form.gradient_block, form.value_dim))
    dk_sums, dv_sum = jax.lax.fori_loop(first[b, j], last[b, j], step, zeros)
    for (at, size), total in zip(form.parts, dk_sums, strict=True):
        dk[b, keys, h, pl.ds(at, size)] = total.astype(dk.dtype)
    dv[b, keys, h, :] = dv_sum.astype(dv.dtype)


def _tiles(form: Form, x: Any, b: Array, tokens: Any, h: Array) -> list[Float[Array, "n size"]]:
    return [x[b, tokens, h, pl.ds(at, size)] for at, size in form.parts]


def _seen(row_seg: Array, row_pos: Array, key_seg: Array, key_pos: Array) -> Bool[Array, "m n"]:
    return (row_seg == key_seg) & (key_seg != 0) & (key_pos <= row_pos)


def _scores(form: Form, a: list[Array], b: list[Array]) -> Float32[Array, "m n"]:
    """Of m queries and n keys, or the reverse; scaled, in units of log 2."""
    total = sum((_dot(x, y.T) for x, y in zip(a, b, strict=True)), jnp.zeros((), jnp.float32))
    return total * (form.scale * LOG2_E)


def _probabilities(form: Form, a: list[Array], b: list[Array], seen: Array, log_total: Array) -> Float32[Array, "m n"]:
    return jnp.where(seen, jnp.exp2(_scores(form, a, b) - log_total), 0)


def _dot(a: Array, b: Array) -> Float32[Array, "m n"]:
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def _spans(places: Places, q_block: int, kv_block: int, *, both: bool = False) -> tuple[Int32[Array, "B n"], ...]:
    """Per block of queries the first, and one past the last, block of keys with anything for it; with `both` also per block
    of keys those of queries. Judged by the ranges of segments and positions: safe for any order, tight for sorted tokens."""
    big = jnp.iinfo(jnp.int32).max

    def ranges(segments: Array, positions: Array, size: int) -> tuple[Array, Array, Array, Array]:
        segments, positions = (x.reshape(x.shape[0], -1, size) for x in (segments, positions))
        real = segments != 0
        return (
            jnp.min(jnp.where(real, segments, big), -1), jnp.max(segments, -1),
            jnp.min(jnp.where(real, positions, big), -1), jnp.max(jnp.where(real, positions, -1), -1),
        )  # fmt: skip

    def ends(near: Bool[Array, "B m n"]) -> tuple[Array, Array]:
        last = jnp.where(jnp.any(near, -1), near.shape[-1] - jnp.argmax(near[..., ::-1], -1), 0)
        return jnp.argmax(near, -1).astype(jnp.int32), last.astype(jnp.int32)

    q_low, q_high, _, q_last = ranges(places.q_segments, places.q_positions, q_block)
    k_low, k_high, k_first, _ = ranges(places.kv_segments, places.kv_positions, kv_block)
    near = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
    near &= k_first[:, None] <= q_last[:, :, None]
    return ends(near) + (ends(near.swapaxes(1, 2)) if both else ())
