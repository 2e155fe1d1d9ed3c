"""Decode of Kimi Delta Attention on TPU: each active slot's state is read once and written once, all else stays in VMEM.

A step of the grid takes 8 rows of one block of heads. Whatever belongs to a channel is computed for the 8 rows at once, one in
each sublane. The states then pass one after the other through a ring of buffers; those of idle rows stay where they are.

A state has its key channels in sublanes, so decay, k and q, which lie along lanes, must become columns, repeated in every lane.
The matrix unit does it: each is cut into three numbers of bf16 whose sum it is exactly, and [pieces, K]' [pieces, 3 K], a
product with zeros and ones, adds them up again in every lane. The vector units could not: it would take them longer than the
state takes to arrive.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.target import current, device_kind, why_not_on

ROWS = 8  # sublanes
HEADS = 24  # most heads of a block: 1.6 MB of state per buffer
RING = 4  # buffers: one computed, two on their way in, one on its way out
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
    blocks, R, lanes = pl.cdiv(N, ROWS), min(N, ROWS), heads * K
    slots = jnp.pad(slots, (0, (blocks + 1) * ROWS - N), constant_values=-1)

    token = pl.BlockSpec((R, lanes), lambda g, b, _: (b, g))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    y, states, windows = pl.pallas_call(
        partial(_kernel, decay_floor=decay_floor, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(H // heads, blocks),
            in_specs=[
                token, token, token, token,
                pl.BlockSpec((R, H), lambda g, b, _: (b, 0)),
                token,
                pl.BlockSpec((3, W, lanes), lambda g, b, _: (0, 0, g)),
                pl.BlockSpec((1, H), lambda g, b, _: (0, 0)),
                pl.BlockSpec((1, lanes), lambda g, b, _: (0, g)),
                pl.BlockSpec((1, K), lambda g, b, _: (0, 0)),
                whole, whole,
            ],
            out_specs=[token, whole, whole],
            scratch_shapes=[
                pltpu.VMEM((RING, heads, K, K), jnp.float32),
                pltpu.VMEM((2, ROWS, 3, taps, lanes), pool.windows.dtype),
                pltpu.VMEM((3, ROWS, lanes), jnp.float32),
                pltpu.VMEM((3, ROWS, lanes), jnp.float32),
                pltpu.VMEM((heads * VECTORS * ROWS, K), jnp.float32),
                pltpu.VMEM((heads * ROWS, K), jnp.float32),
                pltpu.SemaphoreType.DMA((2, RING)),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((N, H * K), x.gate.dtype), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pool)],
        input_output_aliases={11: 1, 12: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=32 * 2**20),
        interpret=current().interpret,
        name="kda_decode",
    )(
        slots, x.q, x.k, x.v, x.decay, x.beta, x.gate,
        weights.conv, weights.A_log[None], weights.dt_bias[None], weights.o_norm[None], *pool,
    )
    return y, Pool(states, windows)


def _heads_per_block(H: int) -> int:
    """The largest divisor of H up to HEADS that leaves a block for each core."""
    cores = 2 if device_kind() in ("TPU v4", "TPU v5") else 1
    return max(n for n in range(1, HEADS + 1) if H % n == 0 and (H // n >= cores or H < cores))


def _kernel(
    slots, q, k, v, decay, beta, gate, conv, A_log, dt_bias, o_norm, states_in, windows_in,
    y, states_out, windows_out,
    states, windows, tokens, sums, vectors, read, state_moved, window_moved,
    *, decay_floor: float | None, eps: float,
):
    """8 rows of one block of heads.

    states   ring of states; windows: those of these 8 rows and of the next
    tokens   q, k, v in fp32; sums: their convolutions without the token itself
    vectors  what the recurrence takes of each row, [(head, VECTORS, row) K]
    read     o, [(head, row) K]
    """
    _, heads, K, _ = states.shape
    W, taps, lanes, R = conv.shape[1], windows.shape[3], windows.shape[4], q.shape[0]
    group, block = pl.program_id(0), pl.program_id(1)
    first = block * ROWS
    head_0 = group * heads

    def active(row: Int32[Array, ""]) -> Bool[Array, ""]:
        return (row >= 0) & (slots[jnp.maximum(row, 0)] >= 0)

    def state_copy(row: Int32[Array, ""], out: bool):
        buffer = states.at[row % RING]
        pooled = (states_out if out else states_in).at[slots[row], pl.ds(head_0, heads)]
        return pltpu.make_async_copy(*((buffer, pooled) if out else (pooled, buffer)), state_moved.at[int(out), row % RING])

    def window_copy(row: Int32[Array, ""], out: bool):
        turn = row // ROWS % 2
        buffer = windows.at[turn, row % ROWS]
        pooled = (windows_out if out else windows_in).at[slots[row], :, :, pl.ds(group * lanes, lanes)]
        return pltpu.make_async_copy(*((buffer, pooled) if out else (pooled, buffer)), window_moved.at[int(out), turn])

    def each_row(begin: Int32[Array, ""], act) -> None:
        @pl.loop(0, ROWS)
        def _(j):
            pl.when(active(begin + j))(lambda: act(begin + j))

    @pl.when(block == 0)
    def _():
        each_row(first, lambda row: window_copy(row, False).start())
        for row in range(2):
            pl.when(active(row))(lambda row=row: state_copy(row, False).start())

    @pl.when(block > 0)
    def _():
        each_row(first - ROWS, lambda row: window_copy(row, True).wait())

    each_row(first + ROWS, lambda row: window_copy(row, False).start())
    each_row(first, lambda row: window_copy(row, False).wait())

    for c, x in enumerate((q, k, v)):
        tokens[c, :R] = x[...].astype(jnp.float32)

    def convolve(row):
        j = row % ROWS
        for c in range(3):
            old = windows[block % 2, j, c].astype(jnp.float32)
            sums[c, pl.ds(j, 1)] = jnp.sum(old[taps - (W - 1) :] * conv[c, : W - 1], axis=0, keepdims=True)
            new = jnp.concatenate([old[1:], tokens[c, pl.ds(j, 1)]], axis=0)
            windows[block % 2, j, c] = new.astype(windows.dtype)
        window_copy(row, True).start()

    each_row(first, convolve)

    rate = jnp.exp(A_log[...])
    betas = jax.nn.sigmoid(beta[...].astype(jnp.float32))
    for h in range(heads):
        at = pl.ds(h * K, K)
        mixed = []
        for c in range(3):
            u = sums[c, :R, at] + tokens[c, :R, at] * conv[c, W - 1 : W, at]
            mixed.append((u * jax.nn.sigmoid(u)).astype(q.dtype).astype(jnp.float32))
        q_h, k_h, v_h = mixed
        q_h = q_h * (jax.lax.rsqrt(jnp.sum(q_h * q_h, axis=1, keepdims=True) + 1e-6) * K**-0.5)
        k_h = k_h * jax.lax.rsqrt(jnp.sum(k_h * k_h, axis=1, keepdims=True) + 1e-6)
        z = decay[:, at].astype(jnp.float32) + dt_bias[:, at]
        rate_h = _pick(rate, head_0 + h)
        log_decay = -rate_h * jax.nn.softplus(z) if decay_floor is None else decay_floor * jax.nn.sigmoid(rate_h * z)
        pieces = [piece for x in (jnp.exp(log_decay), k_h, q_h) for piece in _pieces(x)]
        qk = jnp.sum(q_h * k_h, axis=1, keepdims=True)
        for i, x in enumerate((*pieces, v_h, _pick(betas, head_0 + h), qk)):
            vectors[pl.ds((h * VECTORS + i) * ROWS, R)] = jnp.broadcast_to(x, (R, K))

    piece, column = (jax.lax.broadcasted_iota(jnp.int32, (PIECES, 3 * K), axis) for axis in (0, 1))
    spread = (piece // 3 == column // K).astype(jnp.bfloat16)

    def step(row):
        j, buffer = row % ROWS, row % RING
        state_copy(row, False).wait()
        for h in range(heads):
            x = vectors[pl.ds(h * VECTORS * ROWS + j, VECTORS, stride=ROWS)]
            columns = jax.lax.dot_general(
                x[:PIECES].astype(jnp.bfloat16), spread, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            decay_h, k_h, q_h = (columns[:, i * K : (i + 1) * K] for i in range(3))
            v_h, beta_h, qk = (x[PIECES + i :][:1] for i in range(3))
            S = states[buffer, h] * decay_h
            w = beta_h * (v_h - jnp.sum(S * k_h, axis=0, keepdims=True))
            states[buffer, h] = S + k_h * w
            read[pl.ds(h * ROWS + j, 1)] = jnp.sum(S * q_h, axis=0, keepdims=True) + qk * w
        state_copy(row, True).start()

    @pl.loop(0, ROWS)
    def _(j):
        row = first + j
        pl.when(active(row - 2))(lambda: state_copy(row - 2, True).wait())
        pl.when(active(row + 2))(lambda: state_copy(row + 2, False).start())
        pl.when(active(row))(lambda: step(row))

    sublane = jax.lax.broadcasted_iota(jnp.int32, (R, 1), 0)
    idle = jnp.zeros((R, 1), jnp.int32)
    for j in range(R):
        idle = jnp.where(sublane == j, slots[first + j], idle)
    for h in range(heads):
        at = pl.ds(h * K, K)
        o = read[pl.ds(h * ROWS, R)].astype(v.dtype).astype(jnp.float32)
        o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=1, keepdims=True) + eps)
        o = o * o_norm[...] * jax.nn.sigmoid(gate[:, at].astype(jnp.float32))
        y[:, at] = jnp.where(idle < 0, 0, o).astype(y.dtype)

    @pl.when(block == pl.num_programs(1) - 1)
    def _():
        each_row(first, lambda row: window_copy(row, True).wait())
        for j in range(ROWS - 2, ROWS):
            pl.when(active(first + j))(lambda j=j: state_copy(first + j, True).wait())


def _pieces(x: Float32[Array, "..."]) -> list[Float32[Array, "..."]]:
    """Three numbers of bf16 that add up to x: 8 of its 24 bits each."""
    pieces = []
    for _ in range(3):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        pieces.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
        x = x - pieces[-1]
    return pieces


def _pick(x: Float[Array, "R H"], h: Int32[Array, ""]) -> Float[Array, "R 1"]:
    """Column h, in every lane."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.sum(jnp.where(lane == h, x, 0), axis=1, keepdims=True)
