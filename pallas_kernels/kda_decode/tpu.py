"""Decode of Kimi Delta Attention on TPU: each active slot's state is read once and written once, all else stays in VMEM.

Three rows are in work at a time: step r of the grid prepares row r, updates the state of row r - 1 and normalizes what row r - 2
has read, so that none waits for another. What belongs to a row is kept as [heads, K], one head in each sublane; the arrays that
come in and go out, with all heads in one sublane, are turned once for all rows.

A state has its key channels in sublanes, so decay, k and q, which lie along lanes, must become columns, repeated in every lane.
The matrix unit does it: each is cut into three numbers of bf16 whose sum it is exactly, and a product with zeros and ones adds
them up again in every lane, for two heads at a time (768 columns, three widths of the unit of 256).

An idle row stands for the active row before it (or for the first one, if none is before it): its blocks are in VMEM, so nothing
moves, and where a step is not left out it repeats what is there.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.target import current, device_kind, why_not_on

ROWS = 16  # sublanes of a tile of bf16
HEADS = 24  # most heads of a block: 1.6 MB of state, in four buffers
VMEM = 40 * 2**20  # bytes
PIECES = 9  # of decay, k and q, three each; then v, beta and k'q
VECTORS = 16


def why_not(
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, "N"], *, decay_floor: float | None, eps: float
) -> str | None:
    K = pool.states.shape[-1]
    if reason := why_not_on("tpu"):
        return reason
    return None if K == 128 else f"heads must have 128 channels, got {K}"


def kda_decode(
    x: Projected, weights: Weights, pool: Pool, slots: Int32[Array, "N"], *, decay_floor: float | None, eps: float
) -> tuple[Float[Array, "N HK"], Pool]:
    """See `pallas_kernels.kda_decode.kda_decode`."""
    _, H, K, _ = pool.states.shape
    N, W, taps = len(slots), weights.conv.shape[1], pool.windows.shape[2]
    heads = _heads_per_block(H)
    groups, lanes = H // heads, heads * K
    padded = pl.cdiv(N, ROWS) * ROWS
    x = Projected(*(jnp.pad(a, ((0, padded - N), (0, 0))) for a in x))

    stride = _stride(heads)

    def vmem(*shape: int, dtype=jnp.float32):
        return pltpu.VMEM(shape, dtype)

    def slot_of(position):
        return lambda g, r, rank, slots: (jnp.maximum(slots[_row(rank[r + position], N)], 0), g)

    state = pl.BlockSpec((1, heads, K, K), lambda *at: (*slot_of(1)(*at), 0, 0))
    window = pl.BlockSpec((1, 3, taps, lanes), lambda *at: (slot_of(2)(*at)[0], 0, 0, at[0]))
    y, states, windows = pl.pallas_call(
        partial(_kernel, decay_floor=decay_floor, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups, N + 2),
            in_specs=[
                *[pl.BlockSpec(memory_space=pl.ANY)] * 6, *[pl.BlockSpec(memory_space=pltpu.VMEM)] * 4, state, window
            ],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY), state, window],
            scratch_shapes=[
                *[vmem(padded, lanes, dtype=a.dtype) for a in (x.q, x.k, x.v, x.decay, x.gate)],
                vmem(3, W, lanes),
                *[vmem(padded * heads, K)] * 6,
                *[vmem(3 * W * stride, K)] * 2,
                *[vmem(heads, K)] * 2,
                vmem(H, padded),
                vmem(VECTORS * stride, K),
                vmem(2 * VECTORS, 6 * K, dtype=jnp.bfloat16),
                vmem(heads, K),
                pltpu.SemaphoreType.DMA((6,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((padded, H * K), x.gate.dtype), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pool)
        ],
        input_output_aliases={12: 1, 13: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        interpret=current().interpret,
        name="kda_decode",
    )(
        _rank(slots), slots, x.q, x.k, x.v, x.decay, x.gate, weights.conv, x.beta.T,
        weights.A_log[None], weights.dt_bias[None], weights.o_norm[None], *pool,
    )
    return y[:N], Pool(states, windows)


def _heads_per_block(H: int) -> int:
    """The largest divisor of H up to HEADS that leaves a block for each core."""
    cores = 2 if device_kind() in ("TPU v4", "TPU v5") else 1
    return max(n for n in range(1, HEADS + 1) if H % n == 0 and (H // n >= cores or H < cores))


def _stride(heads: int) -> int:
    return pl.cdiv(heads, 8) * 8


def _rank(slots: Int32[Array, "N"]) -> Int32[Array, "N+4"]:
    """For each row which active row stands in its place, as `_row` reads it: itself, else the one before it, else the first.

    The first and the last row stand three times: two rows are still in work when a row begins, or have not begun when it ends.
    """
    N = len(slots)
    row, other = np.clip(np.arange(N + 4) - 2, 0, N - 1)[:, None], np.arange(N)
    return jnp.max(jnp.where(slots < 0, 0, np.where(other <= row, N + other, N - other).astype(np.int32)), axis=1)


def _row(rank: Int32[Array, ""], N: int) -> Int32[Array, ""]:
    """The row of this rank; 0 if none is active."""
    return jnp.where(rank == 0, 0, jnp.abs(rank - N))


def _kernel(
    rank, slots, q, k, v, decay, gate, conv, beta, A_log, dt_bias, o_norm, states, windows,
    y, states_out, windows_out,
    q_in, k_in, v_in, decay_in, gate_in, conv_in,
    q_rows, k_rows, v_rows, decay_rows, gate_rows, y_rows, inputs, taps_of, bias, rate, beta_of, vectors, spread, read, arrived,
    *, decay_floor: float | None, eps: float,
):
    """One step of one block of heads.

    *_rows   [(tile of rows, head, row) K]
    inputs   of the convolutions, [(q k v, W, head) K], and so taps_of
    bias, rate  dt_bias and exp(A_log), [head K]
    vectors  what the recurrence takes of a row, [(VECTORS, head) K]
    spread   the zeros and ones that make columns of two heads' vectors
    read     o, [head K]
    """
    _, heads, K, _ = states.shape
    W, taps = conv.shape[1], windows.shape[2]
    stride = _stride(heads)
    r, N = pl.program_id(1), slots.shape[0]
    head_0 = pl.program_id(0) * heads
    lanes = pl.ds(pl.multiple_of(head_0 * K, K), heads * K)
    done, now = _row(rank[r], N), _row(rank[r + 2], N)
    turned = ((q_in, q_rows), (k_in, k_rows), (v_in, v_rows), (decay_in, decay_rows), (gate_in, gate_rows))

    def tile(i, h):
        """Of ROWS rows and one head: where it is in what comes in and goes out, and where in what is turned."""
        turned = pl.ds(pl.multiple_of((i * heads + h) * ROWS, ROWS), ROWS)
        return (pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS), pl.ds(h * K, K)), turned

    def of(row):
        """A row of all heads in what is turned."""
        return pl.ds(row // ROWS * (heads * ROWS) + row % ROWS, heads, stride=ROWS)

    @pl.when(r == 0)
    def _():
        come = zip((q, k, v, decay, gate), (q_in, k_in, v_in, decay_in, gate_in), strict=True)
        copies = [pltpu.make_async_copy(x.at[:, lanes], x_in, arrived.at[i]) for i, (x, x_in) in enumerate(come)]
        copies.append(pltpu.make_async_copy(conv.at[:, :, lanes], conv_in, arrived.at[5]))
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

        @pl.loop(0, y.shape[0] // ROWS)
        def _(i):
            for h in range(heads):
                outer, inner = tile(i, h)
                for x_in, x_rows in turned:
                    x_rows[inner] = x_in[outer].astype(jnp.float32)
                y_rows[inner] = jnp.zeros((ROWS, K), jnp.float32)

        beta_of[...] = jax.nn.sigmoid(beta[...].astype(jnp.float32))
        vectors[...] = jnp.zeros_like(vectors)
        row, column = (jax.lax.broadcasted_iota(jnp.int32, spread.shape, axis) for axis in (0, 1))
        piece = row % VECTORS
        ones = (row // VECTORS == column // (3 * K)) & (piece // 3 == column // K % 3) & (piece < PIECES)
        spread[...] = ones.astype(jnp.float32).astype(jnp.bfloat16)
        for h in range(heads):
            for c in range(3):
                taps_of[pl.ds(c * W * stride + h, W, stride=stride)] = conv_in[c, :, h * K : (h + 1) * K]
            bias[h : h + 1] = dt_bias[:, pl.ds(pl.multiple_of((head_0 + h) * K, K), K)]
        rate[...] = jnp.broadcast_to(jnp.exp(_down(A_log[...], head_0, heads)), (heads, K))

    @pl.when(slots[now] < 0)  # no row is active: the blocks of slot 0 go back as they came
    def _():
        windows_out[...] = windows[...]

        @pl.loop(0, heads)
        def _(h):
            states_out[0, h] = states[0, h]

    def active(row):
        return slots[jnp.clip(row, 0, N - 1)] >= 0

    @pl.when(active(r) | active(r - 1) | active(r - 2))
    def _():
        o = read[...].astype(v.dtype).astype(jnp.float32)
        o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=1, keepdims=True) + eps)
        o = o * o_norm[...] * jax.nn.sigmoid(gate_rows[of(done)])
        y_rows[of(done)] = o

        for first in range(0, heads, 2):
            pair = range(first, min(first + 2, heads))
            x = [vectors[pl.ds(h, VECTORS, stride=stride)] for h in pair]
            columns = jax.lax.dot_general(
                jnp.concatenate(x).astype(jnp.bfloat16), spread[: len(pair) * VECTORS, : len(pair) * 3 * K],
                (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32,
            )
            for i, h in enumerate(pair):
                decay_h, k_h, q_h = (columns[:, (3 * i + j) * K :][:, :K] for j in range(3))
                v_h, beta_h, qk = (x[i][PIECES + j :][:1] for j in range(3))
                S = states[0, h] * decay_h
                w = beta_h * (v_h - jnp.sum(S * k_h, axis=0, keepdims=True))
                states_out[0, h] = S + k_h * w
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
                windows_out[0, c, :, h * K : (h + 1) * K] = new.astype(windows_out.dtype)
        q_now, k_now, v_now = mixed
        q_now = q_now * (jax.lax.rsqrt(jnp.sum(q_now * q_now, axis=1, keepdims=True) + 1e-6) * K**-0.5)
        k_now = k_now * jax.lax.rsqrt(jnp.sum(k_now * k_now, axis=1, keepdims=True) + 1e-6)
        z = decay_rows[of(now)] + bias[...]
        log_decay = -rate[...] * jax.nn.softplus(z) if decay_floor is None else decay_floor * jax.nn.sigmoid(rate[...] * z)
        beta_now = beta_of[pl.ds(head_0, heads)]
        lane = jax.lax.broadcasted_iota(jnp.int32, beta_now.shape, 1)
        beta_now = jnp.sum(jnp.where(lane == now, beta_now, 0), axis=1, keepdims=True)
        qk = jnp.sum(q_now * k_now, axis=1, keepdims=True)
        pieces = [piece for x in (jnp.exp(log_decay), k_now, q_now) for piece in _pieces(x)]
        for i, x in enumerate((*pieces, v_now, beta_now, qk)):
            vectors[pl.ds(i * stride, heads)] = jnp.broadcast_to(x, (heads, K))

    @pl.when(r == N + 1)
    def _():
        @pl.loop(0, y.shape[0] // ROWS)
        def _(i):
            for h in range(heads):
                outer, inner = tile(i, h)
                gate_in[outer] = y_rows[inner].astype(y.dtype)

        copy = pltpu.make_async_copy(gate_in, y.at[:, lanes], arrived.at[0])
        copy.start()
        copy.wait()


def _pieces(x: Float32[Array, "..."]) -> list[Float32[Array, "..."]]:
    """Three numbers of bf16 that add up to x: 8 of its 24 bits each."""
    pieces = []
    for _ in range(3):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        pieces.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
        x = x - pieces[-1]
    return pieces


def _down(x: Float32[Array, "1 H"], head_0: Int32[Array, ""], heads: int) -> Float32[Array, "heads 1"]:
    """Some heads of a row, one in each sublane."""
    lane, sublane = (jax.lax.broadcasted_iota(jnp.int32, (heads, x.shape[1]), axis) for axis in (1, 0))
    return jnp.sum(jnp.where(lane == head_0 + sublane, x, 0), axis=1, keepdims=True)
