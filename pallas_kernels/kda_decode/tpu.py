"""Decode of Kimi Delta Attention on TPU: each active slot's state is read once and written once, all else stays in VMEM.

Three rows are in work at a time: step r of the grid prepares row r, updates the state of row r - 1 and normalizes what row r - 2
has read, so that none waits for another. What belongs to a row is kept as [heads, K], one head in each sublane; the arrays that
come in and go out, with all heads in one sublane, are turned once for all rows.

A state has its key channels in sublanes, so decay, k and q, which lie along lanes, must become columns, repeated in every lane.
For decay and k the matrix unit does it: each is cut into three numbers of bf16 whose sum it is exactly, and a product with zeros
and ones adds them up again in every lane, for two heads at a time. For q lanes are broadcast: so both units share the work.

Rows come in parts, one or more for each core. For an idle row the blocks of the active row before it stay in VMEM (before a
part's first active row, those of its row 0), so that nothing moves; new states are copied out by hand, those of active rows
alone. What is computed for an idle row between active ones goes nowhere.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.kda.gate import log_decay_at
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.kda_decode.tpu_rows import (
    ROWS,
    VMEM,
    cores,
    down,
    gated_norm,
    pieces_of,
    standing_of,
    stride_of,
    unit,
)
from pallas_kernels.target import current, why_not_on

HEADS = 24  # most heads of a block: 1.6 MB of state, in four buffers
MOST_ROWS = 64  # of a part: 14 MB of tokens, turned and unturned, if they are fp32
PIECES = 6  # of decay and k, three each; then v, beta, k'q and q
VECTORS = 16


def why_not(
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, " N"], *, decay_floor: float | None, eps: float
) -> str | None:
    K = pool.states.shape[-1]
    if reason := why_not_on("tpu", x.q):
        return reason
    if pool.states.dtype != jnp.float32:
        return f"states must be float32, got {pool.states.dtype}"
    return None if K == 128 else f"heads must have 128 channels, got {K}"


def kda_decode(
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, " N"], *, decay_floor: float | None, eps: float
) -> tuple[Float[Array, "N HK"], Pool]:
    """See `pallas_kernels.kda_decode.kda_decode`."""
    _, H, K, _ = pool.states.shape
    N, W, taps = len(slots), weights.conv.shape[1], pool.windows.shape[2]
    heads = max(n for n in range(1, HEADS + 1) if H % n == 0)
    groups, lanes = H // heads, heads * K
    parts = cores() * pl.cdiv(N, cores() * MOST_ROWS)
    n = pl.cdiv(N, parts * ROWS) * ROWS  # rows of a part
    x = Projected(*(jnp.pad(a, ((0, parts * n - N), (0, 0))) for a in x))
    slots = jnp.pad(slots, (0, parts * n - N), constant_values=-1)
    stride = stride_of(heads)

    def vmem(*shape: int, dtype=jnp.float32):
        return pltpu.VMEM(shape, dtype)

    def slot(step):
        return lambda p, g, r, standing, slots: jnp.maximum(slots[standing[p, r + step]], 0)

    token = pl.BlockSpec((n, lanes), lambda p, g, *_: (p, g))
    state = pl.BlockSpec((1, heads, K, K), lambda *at: (slot(0)(*at), at[1], 0, 0))
    window = pl.BlockSpec((1, 3, taps, lanes), lambda *at: (slot(1)(*at), 0, 0, at[1]))
    y, states, windows = pl.pallas_call(
        partial(_kernel, decay_floor=decay_floor, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(parts, groups, n + 2),
            in_specs=[
                *[token] * 5, pl.BlockSpec((3, W, lanes), lambda p, g, *_: (0, 0, g)),
                *[pl.BlockSpec(memory_space=pltpu.VMEM)] * 4, state, window,
            ],
            out_specs=[token, *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            scratch_shapes=[
                *[vmem(n * heads, K)] * 6,
                *[vmem(3 * W * stride, K)] * 2,
                *[vmem(heads, K)] * 2,
                vmem(pl.cdiv(parts * n, K), H, K),
                vmem(VECTORS * stride, K),
                vmem(2 * VECTORS, 4 * K, dtype=jnp.bfloat16),
                vmem(heads, K),
                vmem(2, heads, K, K), vmem(2, 3, taps, lanes, dtype=pool.windows.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((parts * n, H * K), x.gate.dtype), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pool)
        ],
        input_output_aliases={12: 1, 13: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM),
        interpret=current().interpret,
        name="kda_decode",
    )(
        standing_of(slots, parts), slots, x.q, x.k, x.v, x.decay, x.gate, weights.conv, x.beta.T,
        weights.A_log[None], weights.dt_bias[None], weights.o_norm[None], *pool,
    )
    return y[:N], Pool(states, windows)


def _kernel(
    standing, slots, q, k, v, decay, gate, conv, beta, A_log, dt_bias, o_norm, states, windows,
    y, states_to, windows_to,
    q_rows, k_rows, v_rows, decay_rows, gate_rows, y_rows, inputs, taps_of, bias, rate, beta_of, vectors, spread, read,
    states_out, windows_out, stored,
    *, decay_floor: float | None, eps: float,
):
    """One step of one block of heads.

    *_rows   [(tile of rows, head, row) K]
    inputs   of the convolutions, [(q k v, W, head) K], and so taps_of
    bias, rate  dt_bias and exp(A_log), [head K]; beta_of [tile of rows, head, row]
    vectors  what the recurrence takes of a row, [(VECTORS, head) K]
    spread   the zeros and ones that make columns of two heads' vectors
    read     o, [head K]
    """
    _, heads, K, _ = states.shape
    W, taps = conv.shape[1], windows.shape[2]
    stride = stride_of(heads)
    part, r, n = pl.program_id(0), pl.program_id(2), q.shape[0]
    head_0 = pl.program_id(1) * heads
    ours, lanes = pl.ds(head_0, heads), pl.ds(pl.multiple_of(head_0 * K, K), heads * K)
    done, now = jnp.maximum(r - 2, 0), jnp.minimum(r, n - 1)
    turned = ((q, q_rows), (k, k_rows), (v, v_rows), (decay, decay_rows), (gate, gate_rows))

    def tile(i, h):
        """Of ROWS rows and one head: where it is in what comes in and goes out, and where in what is turned."""
        turned = pl.ds(pl.multiple_of((i * heads + h) * ROWS, ROWS), ROWS)
        return (pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS), pl.ds(h * K, K)), turned

    def of(row):
        """A row of all heads in what is turned."""
        return pl.ds(row // ROWS * (heads * ROWS) + row % ROWS, heads, stride=ROWS)

    @pl.when(r == 0)
    def _():
        @pl.loop(0, n // ROWS)
        def _(i):
            for h in range(heads):
                outer, inner = tile(i, h)
                for x, x_rows in turned:
                    x_rows[inner] = x[outer].astype(jnp.float32)
                y_rows[inner] = jnp.zeros((ROWS, K), jnp.float32)

        for i in range(beta_of.shape[0]):
            some = jax.nn.sigmoid(beta[:, i * K : (i + 1) * K].astype(jnp.float32))
            beta_of[i, :, : some.shape[1]] = some
        vectors[...] = jnp.zeros_like(vectors)
        row, column = (jax.lax.broadcasted_iota(jnp.int32, spread.shape, axis) for axis in (0, 1))
        piece = row % VECTORS
        ones = (row // VECTORS == column // (2 * K)) & (piece // 3 == column // K % 2) & (piece < PIECES)
        spread[...] = ones.astype(jnp.float32).astype(jnp.bfloat16)
        for h in range(heads):
            for c in range(3):
                taps_of[pl.ds(c * W * stride + h, W, stride=stride)] = conv[c, :, h * K : (h + 1) * K]
            bias[h : h + 1] = dt_bias[:, pl.ds(pl.multiple_of((head_0 + h) * K, K), K)]
        rate[...] = jnp.broadcast_to(jnp.exp(down(A_log[...], head_0, heads)), (heads, K))

    def active(row):
        return (row >= 0) & (row < n) & (slots[part * n + jnp.clip(row, 0, n - 1)] >= 0)

    def to_pool(row, kind):
        """The copy of a row's new state (kind 0) or windows (1)."""
        slot, i = slots[part * n + jnp.clip(row, 0, n - 1)], jax.lax.rem(row + 2, 2)
        to = (states_to.at[slot, ours], windows_to.at[slot, :, :, lanes])[kind]
        return pltpu.make_async_copy((states_out, windows_out)[kind].at[i], to, stored.at[kind])

    @pl.when(active(r) | active(r - 1) | active(r - 2))
    def _():
        state_out, window_out = states_out.at[jax.lax.rem(r + 1, 2)], windows_out.at[jax.lax.rem(r, 2)]
        o = read[...].astype(v.dtype).astype(jnp.float32)
        y_rows[of(done)] = jnp.where(active(r - 2), gated_norm(o, o_norm[...], gate_rows[of(done)], eps), 0)

        queries = vectors[pl.ds((PIECES + 3) * stride, stride)].T
        for first in range(0, heads, 2):
            pair = range(first, min(first + 2, heads))
            x = [vectors[pl.ds(h, VECTORS, stride=stride)] for h in pair]
            columns = jax.lax.dot_general(
                jnp.concatenate(x).astype(jnp.bfloat16), spread[: len(pair) * VECTORS, : len(pair) * 2 * K],
                (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32,
            )
            for i, h in enumerate(pair):
                decay_h, k_h = (columns[:, (2 * i + j) * K :][:, :K] for j in range(2))
                q_h = jnp.broadcast_to(queries[:, h : h + 1], (K, K))
                v_h, beta_h, qk = (x[i][PIECES + j :][:1] for j in range(3))
                S = states[0, h] * decay_h
                w = beta_h * (v_h - jnp.sum(S * k_h, axis=0, keepdims=True))
                state_out[h] = S + k_h * w
                read[pl.ds(h, 1)] = jnp.sum(S * q_h, axis=0, keepdims=True) + qk * w

        mixed = []
        for c, (x, x_rows) in enumerate(((q, q_rows), (k, k_rows), (v, v_rows))):
            at = [pl.ds((c * W + i) * stride, heads) for i in range(W)]
            for h in range(heads):
                old = windows[0, c, :, h * K : (h + 1) * K].astype(jnp.float32)
                inputs[pl.ds(c * W * stride + h, W - 1, stride=stride)] = old[taps - (W - 1) :]
            inputs[at[-1]] = x_rows[of(now)]
            u = sum((inputs[i] * taps_of[i] for i in at[1:]), inputs[at[0]] * taps_of[at[0]])
            mixed.append((u * jax.nn.sigmoid(u)).astype(x.dtype).astype(jnp.float32))
            for h in range(heads):
                new = inputs[pl.ds((c * W + W - taps) * stride + h, taps, stride=stride)]
                window_out[c, :, h * K : (h + 1) * K] = new.astype(windows_out.dtype)
        q_now, k_now, v_now = mixed
        q_now, k_now = unit(q_now) * K**-0.5, unit(k_now)
        decay_now = jnp.exp(log_decay_at(rate[...], decay_rows[of(now)] + bias[...], decay_floor))
        beta_now = beta_of[(part * n + now) // K, ours]
        lane = jax.lax.broadcasted_iota(jnp.int32, beta_now.shape, 1)
        beta_now = jnp.sum(jnp.where(lane == (part * n + now) % K, beta_now, 0), axis=1, keepdims=True)
        qk = jnp.sum(q_now * k_now, axis=1, keepdims=True)
        pieces = [piece for x in (decay_now, k_now) for piece in pieces_of(x)]
        for i, x in enumerate((*pieces, v_now, beta_now, qk, q_now)):
            vectors[pl.ds(i * stride, heads)] = jnp.broadcast_to(x, (heads, K))

    # One copy of each kind is on its way at a time, so that one semaphore tells of it.
    for row, kind in ((r - 1, 0), (r, 1)):

        @pl.when(active(row - 1))
        def _(row=row, kind=kind):
            to_pool(row - 1, kind).wait()

        @pl.when(active(row))
        def _(row=row, kind=kind):
            to_pool(row, kind).start()

    @pl.when(r == n + 1)
    def _():
        @pl.loop(0, n // ROWS)
        def _(i):
            for h in range(heads):
                outer, inner = tile(i, h)
                y[outer] = y_rows[inner].astype(y.dtype)
