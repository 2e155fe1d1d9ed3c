"""Decode of Kimi Delta Attention on TPU: each active slot's state is read once and written once, all else stays in VMEM.

Step r of the grid updates the state of row r - 1 and prepares row r, so that neither waits for the other. What belongs to a row
is kept as [heads, K], one head in each sublane: the arrays that come in and go out have all heads in one sublane, and scratch
that is written in one order and read in the other turns them.

A state has its key channels in sublanes, so decay, k and q, which lie along lanes, must become columns, repeated in every lane.
The matrix unit does it: each is cut into three numbers of bf16 whose sum it is exactly, and [pieces, K]' [pieces, 3 K], a
product with zeros and ones, adds them up again in every lane. The vector units could not: it would take them longer than the
state takes to arrive.

An idle row stands for the active row before it (or for the first one, if none is before it): its blocks are in VMEM, so nothing
moves, and where a step is not left out it repeats what is there.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.target import current, device_kind, why_not_on

ROWS = 8  # sublanes
HEADS = 24  # most heads of a block: 1.6 MB of state, in four buffers
PIECES = 9  # of decay, k and q, three each; then v, beta and k'q
VECTORS = PIECES + 3


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
    rows = _standing_for(slots)

    token = pl.BlockSpec((padded, lanes), lambda g, r, *_: (0, g))
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    state = pl.BlockSpec((1, heads, K, K), lambda g, r, rows, slots: (jnp.maximum(slots[rows[r]], 0), g, 0, 0))
    window = pl.BlockSpec((1, 3, taps, lanes), lambda g, r, rows, slots: (jnp.maximum(slots[rows[r + 1]], 0), 0, 0, g))
    turned = pltpu.VMEM((heads * ROWS, K), jnp.float32)
    stride = _stride(heads)
    y, states, windows = pl.pallas_call(
        partial(_kernel, decay_floor=decay_floor, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups, N + 1),
            in_specs=[
                token, token, token, token, whole, token,
                pl.BlockSpec((3, W, 1, heads, K), lambda g, r, *_: (0, 0, g, 0, 0)),
                whole,
                pl.BlockSpec((1, heads, K), lambda g, r, *_: (g, 0, 0)),
                whole,
                state, window,
            ],
            out_specs=[token, state, window],
            scratch_shapes=[
                turned, turned, turned, turned, turned,
                pltpu.VMEM((3 * W * stride, K), jnp.float32),
                pltpu.VMEM((VECTORS * stride, K), jnp.float32),
                pltpu.VMEM((heads, K), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((padded, H * K), x.gate.dtype), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pool)
        ],
        input_output_aliases={12: 1, 13: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=48 * 2**20),
        interpret=current().interpret,
        name="kda_decode",
    )(
        rows, slots, x.q, x.k, x.v, x.decay, x.beta, x.gate,
        weights.conv.reshape(3, W, groups, heads, K), weights.A_log[None], weights.dt_bias.reshape(groups, heads, K),
        weights.o_norm[None], *pool,
    )
    return y[:N], Pool(states, windows)


def _heads_per_block(H: int) -> int:
    """The largest divisor of H up to HEADS that leaves a block for each core."""
    cores = 2 if device_kind() in ("TPU v4", "TPU v5") else 1
    return max(n for n in range(1, HEADS + 1) if H % n == 0 and (H // n >= cores or H < cores))


def _stride(heads: int) -> int:
    return pl.cdiv(heads, ROWS) * ROWS


def _standing_for(slots: Int32[Array, "N"]) -> Int32[Array, "N+2"]:
    """For each row the active row in its place: itself, else the one before it, else the first one; 0 if none is active.

    The first and the last row stand twice: the first step has no row before it, the last no row of its own.
    """
    row = jnp.arange(len(slots))
    active = slots >= 0
    before = jnp.max(jnp.where(active & (row <= row[:, None]), row, -1), axis=1)
    rows = jnp.where(before < 0, jnp.argmax(active), before)
    return jnp.concatenate([rows[:1], rows, rows[-1:]])


def _kernel(
    rows, slots, q, k, v, decay, beta, gate, conv, A_log, dt_bias, o_norm, states, windows,
    y, states_out, windows_out,
    q_rows, k_rows, v_rows, decay_rows, gate_rows, inputs, vectors, read,
    *, decay_floor: float | None, eps: float,
):
    """The state of the row before and the window of this one, of one block of heads.

    *_rows   tiles of 8 rows, [(head, row) K]
    inputs   of the convolutions, [(q k v, W, head) K]
    vectors  what the recurrence takes of a row, [(VECTORS, head) K]
    read     o, [head K]
    """
    _, heads, K, _ = states.shape
    W, taps = conv.shape[1], windows.shape[2]
    stride = _stride(heads)
    r, last = pl.program_id(1), pl.num_programs(1) - 1
    head_0 = pl.program_id(0) * heads
    before, now = rows[r], rows[r + 1]

    def turn(ref, row, tiles):
        """[heads, K] of a row of [rows, (head K)]."""
        block = pl.multiple_of(row // ROWS * ROWS, ROWS)
        for h in range(heads):
            tiles[h * ROWS : (h + 1) * ROWS] = ref[pl.ds(block, ROWS), h * K : (h + 1) * K].astype(jnp.float32)
        return tiles[pl.ds(row % ROWS, heads, stride=ROWS)]

    @pl.loop(0, jnp.where(r == 0, y.shape[0] // ROWS, 0))
    def _(block):
        y[pl.ds(pl.multiple_of(block * ROWS, ROWS), ROWS)] = jnp.zeros((ROWS, heads * K), y.dtype)

    @pl.loop(0, jnp.where(slots[now] < 0, heads, 0))
    def _(h):  # no row is active: the blocks of slot 0 go back as they came
        states_out[0, h] = states[0, h]
        windows_out[...] = windows[...]

    @pl.when((r > 0) & (slots[jnp.maximum(r - 1, 0)] >= 0) | (r < last) & (slots[jnp.minimum(r, last - 1)] >= 0))
    def _():
        piece, column = (jax.lax.broadcasted_iota(jnp.int32, (PIECES, 3 * K), axis) for axis in (0, 1))
        spread = (piece // 3 == column // K).astype(jnp.bfloat16)
        for h in range(heads):
            x = vectors[pl.ds(h, VECTORS, stride=stride)]
            columns = jax.lax.dot_general(
                x[:PIECES].astype(jnp.bfloat16), spread, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            decay_h, k_h, q_h = (columns[:, i * K : (i + 1) * K] for i in range(3))
            v_h, beta_h, qk = (x[PIECES + i :][:1] for i in range(3))
            S = states[0, h] * decay_h
            w = beta_h * (v_h - jnp.sum(S * k_h, axis=0, keepdims=True))
            states_out[0, h] = S + k_h * w
            read[pl.ds(h, 1)] = jnp.sum(S * q_h, axis=0, keepdims=True) + qk * w

        o = read[...].astype(v.dtype).astype(jnp.float32)
        o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=1, keepdims=True) + eps)
        read[...] = o * o_norm[...] * jax.nn.sigmoid(turn(gate, before, gate_rows))
        block = pl.multiple_of(before // ROWS * ROWS, ROWS)
        sublane = jax.lax.broadcasted_iota(jnp.int32, (ROWS, K), 0)
        for h in range(heads):
            at = pl.ds(block, ROWS), pl.ds(h * K, K)
            y[at] = jnp.where(sublane == before % ROWS, read[h : h + 1], y[at].astype(jnp.float32)).astype(y.dtype)

        mixed = []
        for c, (x, rows) in enumerate(((q, q_rows), (k, k_rows), (v, v_rows))):
            at = [pl.ds((c * W + i) * stride, heads) for i in range(W)]
            for h in range(heads):
                old = windows[0, c, :, h * K : (h + 1) * K].astype(jnp.float32)
                inputs[pl.ds(c * W * stride + h, W - 1, stride=stride)] = old[taps - (W - 1) :]
            inputs[at[-1]] = turn(x, now, rows)
            u = sum((inputs[at[i]] * conv[c, i, 0] for i in range(1, W)), inputs[at[0]] * conv[c, 0, 0])
            mixed.append((u * jax.nn.sigmoid(u)).astype(x.dtype).astype(jnp.float32))
            for h in range(heads):
                new = inputs[pl.ds((c * W + W - taps) * stride + h, taps, stride=stride)]
                windows_out[0, c, :, h * K : (h + 1) * K] = new.astype(windows_out.dtype)
        q_now, k_now, v_now = mixed
        q_now = q_now * (jax.lax.rsqrt(jnp.sum(q_now * q_now, axis=1, keepdims=True) + 1e-6) * K**-0.5)
        k_now = k_now * jax.lax.rsqrt(jnp.sum(k_now * k_now, axis=1, keepdims=True) + 1e-6)
        z = turn(decay, now, decay_rows) + dt_bias[0]
        rate = jnp.exp(_down(A_log[...], head_0, heads))
        log_decay = -rate * jax.nn.softplus(z) if decay_floor is None else decay_floor * jax.nn.sigmoid(rate * z)
        beta_block = beta[pl.ds(pl.multiple_of(now // ROWS * ROWS, ROWS), ROWS)].astype(jnp.float32)
        beta_now = jnp.where(jax.lax.broadcasted_iota(jnp.int32, beta_block.shape, 0) == now % ROWS, beta_block, 0)
        beta_now = jax.nn.sigmoid(_down(jnp.sum(beta_now, axis=0, keepdims=True), head_0, heads))
        qk = jnp.sum(q_now * k_now, axis=1, keepdims=True)
        pieces = [piece for x in (jnp.exp(log_decay), k_now, q_now) for piece in _pieces(x)]
        for i, x in enumerate((*pieces, v_now, beta_now, qk)):
            vectors[pl.ds(i * stride, heads)] = jnp.broadcast_to(x, (heads, K))


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
