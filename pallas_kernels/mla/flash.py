"""Flash attention on TPUs over listed pairs of blocks (FlashAttention-2, arXiv 2307.08691), forward and backward.

Scores stand as [keys, queries]. Sums over keys then run over sublanes, what is kept per query is a row, and no block of scores
is ever transposed: operands come in the layouts that each product needs, the output leaves as [V, queries].
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.mla.blocks import FIRST, LAST, NOTHING, PARTLY, Steps
from pallas_kernels.target import current, in_hbm

Q_TILE, K_TILE = 256, 256  # of a block, what is computed at once
LANES = 128
VMEM = 32 * 2**20  # bytes a kernel may take: half of what v5p and tpu7x have, the rest is XLA's
LOG2_E = float(np.log2(np.e))


class Block(NamedTuple):
    queries: int
    keys: int


class Form(NamedTuple):
    scale: float
    forward: Block  # of one grid step; whole ones make up the queries and keys, in either direction
    backward: Block
    strip: int  # queries of one of Plan.backward; the last one may have fewer
    counts: tuple[int | None, ...]  # grid steps of the forward and of each strip of the backward, where known


class Plan(NamedTuple):
    queries: Int32[Array, "B 2 T"]  # segments and positions
    keys: Int32[Array, "B 2 S"]
    forward: Steps  # outer blocks are of queries
    backward: tuple[Steps, ...]  # per strip of queries; outer blocks are of keys


def _value(
    form: Form, q: Float[Array, "B H T K"], k: Float[Array, "B H S K"], v: Float[Array, "B H S V"], plan: Plan
) -> Float[Array, "B H T V"]:
    return _forward(form, q, k, v, plan)[0]


def _forward(form: Form, q: Array, k: Array, v: Array, plan: Plan) -> tuple[Array, tuple[Any, ...]]:
    (B, H, T, K), V, block = q.shape, v.shape[-1], form.forward
    queries, keys = _Rows(0, block.queries, plan.forward, B), _Rows(1, block.keys, plan.forward, B)
    out, log_total = _call(
        partial(_forward_kernel, form),
        "mla_forward",
        (B, H, form.counts[0]),
        plan.forward,
        [(plan.queries, queries.places), (_on_all_lanes(plan.keys), keys.key_places), (q.swapaxes(2, 3), queries.transposed(K)),
         (k, keys.of(K)), (v.swapaxes(2, 3), keys.transposed(V))],
        [((B, H, V, T), v.dtype, queries.transposed(V)), ((B, H, 1, T), jnp.float32, queries.transposed(1))],
        [(1, block.queries), (1, block.queries), (V, block.queries), (block.keys, block.queries)],
    )
    out = out.swapaxes(2, 3)
    return out, (q, k, v, plan, out, log_total)


def _forward_kernel(
    form: Form, outer: Any, inner: Any, flags: Any, q_places: Any, k_places: Any, q_ref: Any, k_ref: Any, v_ref: Any,
    out_ref: Any, log_total_ref: Any, top_ref: Any, total_ref: Any, acc_ref: Any, score_ref: Any,
) -> None:
    """o = sum_s 2^(x_s - top) v_s / sum_s 2^(x_s - top), with x = scale log2(e) q.k and top the running maximum of x.

    The scores of a tile of queries with all keys of the block are stored before any is weighed, so that the accumulated
    output is rescaled once. Their products run beside the exponentials of the tile before.
    """
    flag, block = flags[_step(flags)], form.forward

    @pl.when(flag & FIRST != 0)
    def _() -> None:
        top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def score(rows: slice, columns: slice, masked: bool) -> Float32[Array, "1 M"]:
        """Stores the scores; returns the largest of each query."""
        x = form.scale * LOG2_E * _dot(k_ref[0, 0, rows], q_ref[0, 0, :, columns])
        if masked:
            x = jnp.where(_seen(q_places, k_places, rows, columns), x, -jnp.inf)
        score_ref[rows, columns] = x
        return jnp.max(x, 0, keepdims=True)

    def add_keys(masked: bool) -> None:
        tops = {}
        for now, before in zip([*_tiles(block.queries, Q_TILE), None], [None, *_tiles(block.queries, Q_TILE)], strict=True):
            if now:
                tops[now.start] = top_ref[:, now]
            if before:
                top = tops[before.start]
                base = _finite(top) if masked else top
                keep = jnp.exp2(top_ref[:, before] - base)
                top_ref[:, before] = top
                total, acc = keep * total_ref[:, before], keep * acc_ref[:, before]
            for rows in _tiles(block.keys, K_TILE):
                if now:
                    tops[now.start] = jnp.maximum(tops[now.start], score(rows, now, masked))
                if before:
                    weight = jnp.exp2(score_ref[rows, before] - base)
                    total += jnp.sum(weight, 0, keepdims=True)
                    acc += _dot(v_ref[0, 0, :, rows], weight.astype(v_ref.dtype))
            if before:
                total_ref[:, before], acc_ref[:, before] = total, acc

    _by_visibility(flag, add_keys)

    @pl.when(flag & LAST != 0)
    def _() -> None:
        total = total_ref[...]
        out_ref[0, 0] = (acc_ref[...] / jnp.where(total > 0, total, 1)).astype(out_ref.dtype)
        log_total_ref[0, 0] = _finite(top_ref[...]) + jnp.log2(total)


def _backward(form: Form, kept: tuple[Any, ...], g: Float[Array, "B H T V"]) -> tuple[Any, ...]:
    """P = 2^(x - log_total), delta = g.o; dV = P'g, dS = P (g V' - delta), dQ = scale dS K, dK = scale dS'Q.

    Queries go in strips, so that the sums of their gradients stay in VMEM; the gradients of keys add up over strips.
    """
    q, k, v, plan, out, log_total = kept
    delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)[:, :, None]
    dq, dk, dv = [], [], []
    for i, (steps, count) in enumerate(zip(plan.backward, form.counts[1:], strict=True)):
        part = slice(i * form.strip, (i + 1) * form.strip)
        of_strip = q[:, :, part], g[:, :, part], log_total[..., part], delta[..., part], plan.queries[..., part]
        x = _strip_backward(form, steps, count, *of_strip, k, v, plan.keys, jnp.float32 if len(plan.backward) > 1 else k.dtype)
        for total, gradient in zip((dq, dk, dv), x, strict=True):
            total.append(gradient)
    return jnp.concatenate(dq, 2), reduce(add, dk).astype(k.dtype), reduce(add, dv).astype(v.dtype), None


def _strip_backward(
    form: Form, steps: Steps, count: int | None, q: Array, g: Array, log_total: Float32[Array, "B H 1 T"],
    delta: Float32[Array, "B H 1 T"], q_places: Array, k: Array, v: Array, k_places: Array, dtype: Any,
) -> tuple[Array, Array, Array]:
    (B, H, T, K), (S, V), block = q.shape, v.shape[2:], form.backward
    queries, keys = _Rows(1, block.queries, steps, B), _Rows(0, block.keys, steps, B)
    whole = pl.BlockSpec((1, 1, K, T), lambda b, h, *_: (b, h, 0, 0))
    dq, dk, dv = _call(
        partial(_backward_kernel, form),
        "mla_backward",
        (B, H, count),
        steps,
        [(q_places, queries.places), (_on_all_lanes(k_places), keys.key_places), (q, queries.of(K)),
         (q.swapaxes(2, 3), queries.transposed(K)), (k, keys.of(K)), (k.swapaxes(2, 3), keys.transposed(K)), (v, keys.of(V)),
         (g, queries.of(V)), (g.swapaxes(2, 3), queries.transposed(V)), (log_total, queries.transposed(1)),
         (delta, queries.transposed(1))],
        [((B, H, K, T), q.dtype, whole), ((B, H, S, K), dtype, keys.of(K)), ((B, H, S, V), dtype, keys.of(V))],
        [(K, T), (block.keys, K), (block.keys, V)],
    )
    return dq.swapaxes(2, 3), dk, dv


def _backward_kernel(
    form: Form, outer: Any, inner: Any, flags: Any, q_places: Any, k_places: Any, q_ref: Any, q_columns: Any, k_ref: Any,
    k_columns: Any, v_ref: Any, g_ref: Any, g_columns: Any, log_total_ref: Any, delta_ref: Any, dq_ref: Any, dk_ref: Any,
    dv_ref: Any, dq_acc: Any, dk_acc: Any, dv_acc: Any,
) -> None:
    flag, block = flags[_step(flags)], form.backward
    start = inner[_step(inner)] * block.queries

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        dq_acc[...] = jnp.zeros_like(dq_acc)

    @pl.when(flag & FIRST != 0)
    def _() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    q_tile, k_tile = _tile(block.queries), _tile(block.keys)

    def add_queries(masked: bool) -> None:
        def add_tile(i: Array, _: None) -> None:
            rows = _part(i // (block.queries // q_tile), k_tile)
            columns = _part(i % (block.queries // q_tile), q_tile)
            score = form.scale * LOG2_E * _dot(k_ref[0, 0, rows], q_columns[0, 0, :, columns])
            prob = jnp.exp2(score - log_total_ref[0, 0, :, columns])
            dscore = prob * (_dot(v_ref[0, 0, rows], g_columns[0, 0, :, columns]) - delta_ref[0, 0, :, columns])
            if masked:
                seen = _seen(q_places, k_places, rows, columns)
                prob, dscore = jnp.where(seen, prob, 0), jnp.where(seen, dscore, 0)
            dscore = dscore.astype(k_ref.dtype)
            dv_acc[rows] += _dot(prob.astype(g_ref.dtype), g_ref[0, 0, columns])
            dk_acc[rows] += _dot(dscore, q_ref[0, 0, columns])
            of_strip = pl.ds(pl.multiple_of(start + columns.start, min(LANES, q_tile)), q_tile)
            dq_acc[:, of_strip] += _dot(k_columns[0, 0, :, rows], dscore)

        jax.lax.fori_loop(0, block.queries // q_tile * (block.keys // k_tile), add_tile, None)

    _by_visibility(flag, add_queries)

    @pl.when(flag & LAST != 0)
    def _() -> None:
        dk_ref[0, 0] = (form.scale * dk_acc[...]).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_acc[...].astype(dv_ref.dtype)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        dq_ref[0, 0] = (form.scale * dq_acc[...]).astype(dq_ref.dtype)


flash = jax.custom_vjp(_value, nondiff_argnums=(0,))
flash.defvjp(_forward, _backward)


class _Rows(NamedTuple):
    """Specifications of a step's block of queries or keys, for arrays with one row or one column for each."""

    which: int  # 0 for the outer, 1 for the inner block of a pair
    size: int
    steps: Steps
    batch: int

    def _block(self, b: Any, n: Any, *lists: Any) -> Any:
        return lists[self.which][b * (self.steps.outer.shape[0] // self.batch) + n]

    def of(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, self.size, width), lambda b, h, n, *lists: (b, h, self._block(b, n, *lists), 0))

    def transposed(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, width, self.size), lambda b, h, n, *lists: (b, h, 0, self._block(b, n, *lists)))

    @property
    def places(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, 2, self.size), lambda b, h, n, *lists: (b, 0, self._block(b, n, *lists)))

    @property
    def key_places(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, 2, self.size, LANES), lambda b, h, n, *lists: (b, 0, self._block(b, n, *lists), 0))


def _on_all_lanes(places: Int32[Array, "B 2 S"]) -> Int32[Array, "B 2 S 128"]:
    """What keys are compared by, as the columns that a kernel can load without moving numbers between lanes."""
    return jnp.broadcast_to(jnp.asarray(places)[..., None], (*places.shape, LANES))


def _call(
    kernel: Callable[..., None], name: str, grid: tuple[int, int, int | None], steps: Steps, operands: Sequence[Any],
    results: Sequence[Any], scratch: Sequence[tuple[int, int]],
) -> Sequence[Array]:
    B, H, count = grid
    arrays, in_specs = zip(*operands, strict=True)
    shapes, dtypes, out_specs = zip(*results, strict=True)
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, H, steps.count if count is None else count),
            in_specs=in_specs,
            out_specs=list(out_specs),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        interpret=current().interpret,
        name=name,
    )(steps.outer, steps.inner, steps.flags, *in_hbm(*arrays))


def _step(steps: Any) -> Any:
    """Of this grid step, its place in the lists."""
    return pl.program_id(0) * (steps.shape[0] // pl.num_programs(0)) + pl.program_id(2)


def _by_visibility(flag: Any, compute: Callable[[bool], None]) -> None:
    """Calls `compute` with whether it must look which keys a query sees; not at all if no query sees any."""

    @pl.when(flag & (PARTLY | NOTHING) == 0)
    def _() -> None:
        compute(False)

    @pl.when(flag & PARTLY != 0)
    def _() -> None:
        compute(True)


def _seen(q_places: Any, k_places: Any, rows: Any, columns: Any) -> Bool[Array, "N M"]:
    """Which keys each query of a tile sees."""
    segment, position = q_places[0, :1, columns], q_places[0, 1:, columns]
    width = segment.shape[1]
    key_segment, key_position = (
        jnp.tile(k_places[0, i, rows], (1, -(-width // LANES)))[:, :width] for i in (0, 1)
    )
    return (key_segment == segment) & (key_segment != 0) & (key_position <= position)


def _tile(n: int) -> int:
    """Rows of a block of n that the backward takes at once: what divides it, 384 at most."""
    return next((tile for tile in (256, 384) if n % tile == 0), min(n, LANES))


def _part(i: Array, size: int) -> Any:
    return pl.ds(pl.multiple_of(i * size, min(LANES, size)), size)


def _tiles(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _finite(top: Float32[Array, "1 M"]) -> Float32[Array, "1 M"]:
    """The running maximum, or 0 where no key was seen yet."""
    return jnp.where(top == -jnp.inf, 0, top)


def _dot(x: Float[Array, "N C"], y: Float[Array, "C M"]) -> Float32[Array, "N M"]:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
