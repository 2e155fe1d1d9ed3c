"""Decode of Kimi Delta Attention on TPU: each active slot's state is read once and written once, all else stays in VMEM.

The grid goes over blocks of heads and, within one, over rows. At row r the conv window of row r passes through, and the state
of row r - 8: so whatever is computed per channel is done for 8 rows at once, one in each sublane, between their windows and
their states. Rows of one block of heads that follow each other on the same slot move no data; an idle row takes the slot of the
active one before it (or of the first one) and leaves it alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.target import current, why_not_on

ROWS = 8  # sublanes
HEADS = 12  # most heads of a block: 0.8 MB of state, in four buffers


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
    N, W = len(slots), weights.conv.shape[1]
    heads = _heads_per_block(H)
    blocks, R = pl.cdiv(N, ROWS), min(N, ROWS)
    slots = jnp.pad(slots, (0, blocks * ROWS - N), constant_values=-1)
    lanes = heads * K

    now = lambda h, r, *_: (jnp.minimum(r // ROWS, blocks - 1), h)  # noqa: E731
    before = lambda h, r, *_: (jnp.maximum(r // ROWS - 1, 0), h)  # noqa: E731
    tokens = pl.BlockSpec((R, lanes), now)
    tokens_before = pl.BlockSpec((R, lanes), before)
    state = pl.BlockSpec((1, heads, K, K), lambda h, r, slots, moved: (moved[jnp.maximum(r - ROWS, 0)], h, 0, 0))
    window = pl.BlockSpec(
        (1, 3, W - 1, lanes), lambda h, r, slots, moved: (moved[jnp.minimum(r, blocks * ROWS - 1)], 0, 0, h)
    )
    per_head = pltpu.VMEM((heads * ROWS, K), jnp.float32)
    y, states, windows = pl.pallas_call(
        partial(_kernel, decay_floor=decay_floor, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(H // heads, (blocks + 1) * ROWS),
            in_specs=[
                tokens, tokens, tokens, tokens_before,
                pl.BlockSpec((R, H), lambda h, r, *_: (before(h, r)[0], 0)),
                tokens_before,
                pl.BlockSpec((3, W, lanes), lambda h, r, *_: (0, 0, h)),
                pl.BlockSpec((1, H), lambda h, r, *_: (0, 0)),
                pl.BlockSpec((1, lanes), lambda h, r, *_: (0, h)),
                pl.BlockSpec((1, K), lambda h, r, *_: (0, 0)),
                state, window,
            ],
            out_specs=[tokens_before, state, window],
            scratch_shapes=[
                pltpu.VMEM((3, ROWS, lanes), jnp.float32),
                pltpu.VMEM((3, ROWS, lanes), jnp.float32),
                pltpu.VMEM((3 * heads * ROWS, K), jnp.float32),
                per_head, per_head, per_head, per_head,
                pltpu.VMEM((ROWS, K), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((N, H * K), x.gate.dtype), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pool)],
        input_output_aliases={12: 1, 13: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=current().interpret,
        name="kda_decode",
    )(
        slots, _moved_slots(slots), x.q, x.k, x.v, x.decay, x.beta, x.gate,
        weights.conv, weights.A_log[None], weights.dt_bias[None], weights.o_norm[None], *pool,
    )
    return y, Pool(states, windows)


def _heads_per_block(H: int) -> int:
    """The largest divisor of H up to HEADS that leaves at least two blocks, for the two cores of a v5p."""
    return max(n for n in range(1, HEADS + 1) if H % n == 0 and (n < H or H == 1))


def _moved_slots(slots: Int32[Array, "N"]) -> Int32[Array, "N"]:
    """The slot in VMEM at each row: its own or, of an idle row, that of the last active row before it, else of the first."""
    active = slots >= 0
    last = jax.lax.cummax(jnp.where(active, jnp.arange(len(slots)), -1))
    return jnp.maximum(slots[jnp.where(last < 0, jnp.argmax(active), last)], 0)


def _kernel(
    slots, moved, q, k, v, decay, beta, gate, conv, A_log, dt_bias, o_norm, states, windows,
    y, states_out, windows_out,
    x_rows, sums, columns, values, betas, products, read, live,
    *, decay_floor: float | None, eps: float,
):
    """One row's window and the state of the row 8 before it, of one block of heads.

    x_rows    q, k, v of the 8 rows whose windows pass
    sums      their convolutions without the token itself
    columns   decay, k, q of the 8 rows whose states pass, [(3 heads row) K]; values, betas, products: v, beta, k'q
    read      o of those rows, live: 1 in rows that are active
    """
    _, heads, K, _ = states.shape
    W = conv.shape[1]
    R = q.shape[0]
    block, r = pl.program_id(0), pl.program_id(1)
    j = r % ROWS
    before = r - ROWS

    @pl.when(r == 0)
    def _():  # an idle row's blocks go back as they came, even if no row is active
        states_out[...] = states[...]
        windows_out[...] = windows[...]

    @pl.when((j == 0) & (r >= ROWS))
    def _():
        rate = jnp.exp(A_log[...])
        beta_of_all = jax.nn.sigmoid(beta[...].astype(jnp.float32))
        for h in range(heads):
            lanes, rows = pl.ds(h * K, K), pl.ds(h * ROWS, R)
            mixed = []
            for c in range(3):
                u = sums[c, :R, lanes] + x_rows[c, :R, lanes] * conv[c, W - 1 : W, lanes]
                mixed.append((u * jax.nn.sigmoid(u)).astype(q.dtype).astype(jnp.float32))
            q_h, k_h, v_h = mixed
            q_h = q_h * (jax.lax.rsqrt(jnp.sum(q_h * q_h, axis=1, keepdims=True) + 1e-6) * K**-0.5)
            k_h = k_h * jax.lax.rsqrt(jnp.sum(k_h * k_h, axis=1, keepdims=True) + 1e-6)
            z = _pick(rate, block * heads + h) * (decay[:, lanes].astype(jnp.float32) + dt_bias[:, lanes])
            rate_h = _pick(rate, block * heads + h)
            z = decay[:, lanes].astype(jnp.float32) + dt_bias[:, lanes]
            log_decay = -rate_h * jax.nn.softplus(z) if decay_floor is None else decay_floor * jax.nn.sigmoid(rate_h * z)
            for i, column in enumerate((jnp.exp(log_decay), k_h, q_h)):
                columns[pl.ds((i * heads + h) * ROWS, R)] = column
            values[rows] = v_h
            betas[rows] = jnp.broadcast_to(_pick(beta_of_all, block * heads + h), (R, K))
            products[rows] = jnp.broadcast_to(jnp.sum(q_h * k_h, axis=1, keepdims=True), (R, K))

    @pl.when(j == 0)
    def _():
        for c, x in enumerate((q, k, v)):
            x_rows[c, :R] = x[...].astype(jnp.float32)

    @pl.when((before < 0) | (slots[jnp.maximum(before, 0)] < 0))
    def _():
        live[pl.ds(j, 1)] = jnp.zeros((1, K), jnp.float32)

    @pl.when((before >= 0) & (slots[jnp.maximum(before, 0)] >= 0))
    def _():
        live[pl.ds(j, 1)] = jnp.ones((1, K), jnp.float32)
        across = columns[pl.ds(j, 3 * heads, stride=ROWS)].T
        for h in range(heads):
            row = pl.ds(h * ROWS + j, 1)
            decay_h, k_h, q_h = (across[:, i * heads + h :][:, :1] for i in range(3))
            S = states[0, h] * decay_h
            w = betas[row] * (values[row] - jnp.sum(S * k_h, axis=0, keepdims=True))
            states_out[0, h] = S + k_h * w
            read[row] = jnp.sum(S * q_h, axis=0, keepdims=True) + products[row] * w

    last = slots.shape[0] - 1

    @pl.when((r <= last) & (slots[jnp.minimum(r, last)] >= 0))
    def _():
        for c in range(3):
            old = windows[0, c].astype(jnp.float32)
            sums[c, pl.ds(j, 1)] = jnp.sum(old * conv[c, : W - 1], axis=0, keepdims=True)
            new = jnp.concatenate([old[1:], x_rows[c, pl.ds(j, 1)]], axis=0)
            windows_out[0, c] = new.astype(windows_out.dtype)

    @pl.when((j == ROWS - 1) & (before >= 0))
    def _():
        for h in range(heads):
            lanes = pl.ds(h * K, K)
            o = read[pl.ds(h * ROWS, R)].astype(v.dtype).astype(jnp.float32)
            o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=1, keepdims=True) + eps)
            o = o * o_norm[...] * jax.nn.sigmoid(gate[:, lanes].astype(jnp.float32))
            y[:, lanes] = jnp.where(live[:R] > 0, o, 0).astype(y.dtype)


def _pick(x: Float[Array, "R H"], h: Int32[Array, ""]) -> Float[Array, "R 1"]:
    """Column h, in every lane."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.sum(jnp.where(lane == h, x, 0), axis=1, keepdims=True)
