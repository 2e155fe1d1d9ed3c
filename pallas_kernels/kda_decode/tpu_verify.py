"""Drafted windows of Kimi Delta Attention on TPU: a state is read once and written once, whatever the number of tokens.

A row has M = R + T tokens, those of the window before (decay 1 and beta 0 where they were not accepted: they leave the state as
it is) and the drafted ones. With D_ij the product of the decays of tokens j + 1 to i, and the state S that the row finds,

    w_i = beta_i (v_i - (k_i D_i0)'S - sum_(j < i) (k_i D_ij k_j) w_j)
    o_i = (q_i D_i0)'S + sum_(j <= i) (q_i D_ij k_j) w_j
    S <- diag(D_R0) S + sum_(j <= R) (D_Rj k_j) w_j'

so the state meets M + T vectors in one product and R in another; all else is vectors of [heads, K], one head in each sublane.
A product of decays is built token by token: nothing overflows, whatever the decay.

Both products are fp32 made of bf16: a number is the sum of three pieces, and of the nine products of pieces the six largest
count. For the reads, the pieces of the vectors are stacked as rows, so that each piece of the state enters the matrix unit once.
For the write they are stacked along the contraction, so that one pass does it, and makes the column of D_R0 as well.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.kda.gate import log_decay_at
from pallas_kernels.kda_decode import tpu
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
from pallas_kernels.target import current

HEADS = 12  # most heads of a block
TOKENS = 8  # most of a window
BLOCK = 8  # rows whose tokens come together
PRODUCTS = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))  # of pieces; what is left out is below 2^-24 of the whole


def why_not(
    x: Projected, before: Projected, accepted: Int32[Array, " N"], weights: Weights, pool: Pool, slots: Int32[Array, " N"],
    *, decay_floor: float | None, eps: float,
) -> str | None:
    if reason := tpu.why_not(x, weights, pool, slots, decay_floor=decay_floor, eps=eps):
        return reason
    R, T = before.q.shape[1], x.q.shape[1]
    return None if 1 <= R <= TOKENS and 1 <= T <= TOKENS else f"windows must have 1 to {TOKENS} tokens, got {R} and {T}"


def kda_verify(
    x: Projected, before: Projected, accepted: Int32[Array, " N"], weights: Weights, pool: Pool, slots: Int32[Array, " N"],
    *, decay_floor: float | None, eps: float,
) -> tuple[Float[Array, "N T HK"], Pool]:
    """See `pallas_kernels.kda_decode.kda_verify`."""
    _, H, K, _ = pool.states.shape
    (N, R, _), T = before.q.shape, x.q.shape[1]
    W, taps = weights.conv.shape[1], pool.windows.shape[2]
    heads = max(n for n in range(1, HEADS + 1) if H % n == 0)
    groups, lanes, stride = H // heads, heads * K, stride_of(heads)
    parts = cores()
    n = pl.cdiv(N, parts * ROWS) * ROWS  # rows of a part

    def padded(a: Array, value: int = 0) -> Array:
        return jnp.pad(a, ((0, parts * n - N), *[(0, 0)] * (a.ndim - 1)), constant_values=value)

    def vmem(*shape: int, dtype=jnp.float32):
        return pltpu.VMEM(shape, dtype)

    def tokens(length: int, all_heads: bool = False) -> pl.BlockSpec:
        width = H if all_heads else lanes
        return pl.BlockSpec((BLOCK, length, width), lambda p, g, r, *_: ((p * n + r) // BLOCK, 0, 0 if all_heads else g))

    def slot(p, r, standing, slots):
        return jnp.maximum(slots[standing[p, r + 1]], 0)

    slots = padded(slots, -1)
    y, states, windows = pl.pallas_call(
        partial(_kernel, decay_floor=decay_floor, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(parts, groups, n),
            in_specs=[
                *[tokens(R)] * 4, tokens(R, True), *[tokens(T)] * 5, tokens(T, True),
                pl.BlockSpec((3, W, lanes), lambda p, g, *_: (0, 0, g)), *[pl.BlockSpec(memory_space=pltpu.VMEM)] * 3,
                pl.BlockSpec((1, heads, K, K), lambda p, g, r, standing, slots, _: (slot(p, r, standing, slots), g, 0, 0)),
                pl.BlockSpec((1, 3, taps, lanes), lambda p, g, r, standing, slots, _: (slot(p, r, standing, slots), 0, 0, g)),
            ],
            out_specs=[tokens(T), *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            scratch_shapes=[
                vmem(3 * (taps + R + T) * stride, K), vmem((R + T) * stride, K), vmem(T * stride, K),
                vmem(3 * W * stride, K), vmem(heads, K), vmem(heads, K),
                vmem(3 * _tiles(R + 2 * T) * stride, K), vmem(_tiles(R + 2 * T) * stride, K),
                vmem(_tiles(len(PRODUCTS) * R + 3) * stride, K), vmem(_tiles(len(PRODUCTS) * R + 3) * stride, K),
                vmem(2, heads, K, K), vmem(2, 3, taps, lanes, dtype=pool.windows.dtype), pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((parts * n, T, H * K), x.gate.dtype),
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pool),
        ],
        input_output_aliases={18: 1, 19: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        interpret=current().interpret,
        name="kda_verify",
    )(
        standing_of(slots, parts), slots, padded(accepted),
        *map(padded, (before.q, before.k, before.v, before.decay, before.beta)),
        *map(padded, (x.q, x.k, x.v, x.decay, x.gate, x.beta)),
        weights.conv, weights.A_log[None], weights.dt_bias[None], weights.o_norm[None], *pool,
    )
    return y[:N], Pool(states, windows)


def _tiles(rows: int) -> int:
    """Rounded up to whole tiles of bf16."""
    return pl.cdiv(rows, ROWS) * ROWS


def _kernel(
    standing, slots, accepted,
    q_0, k_0, v_0, decay_0, beta_0, q_1, k_1, v_1, decay_1, gate, beta_1, conv, A_log, dt_bias, o_norm, states, windows,
    y, states_to, windows_to,
    inputs, decays, gates, taps_of, bias, rate, reads, read, writes, written, states_out, windows_out, stored,
    *, decay_floor: float | None, eps: float,
):
    """One row of one block of heads; *_0 are tokens of the window before, *_1 drafted ones.

    inputs   of the convolutions, [(q k v, I + R + T, head) K], and taps_of [(q k v, W, head) K]
    decays, gates, bias, rate  [(token, head) K], [head K]
    reads    pieces of the M + T vectors that meet the state, [(piece, vector, head) K]; read: what they found, [(vector, head) K]
    writes   pieces of D_Rj k_j for all PRODUCTS, then those of D_R0; written: pieces of w_j, then zeros, [(vector, head) K]
    """
    _, heads, K, _ = states.shape
    W, I = conv.shape[1], windows.shape[2]  # noqa: E741
    R, T = q_0.shape[1], q_1.shape[1]
    M, stride = R + T, stride_of(heads)
    part, r, n = pl.program_id(0), pl.program_id(2), pl.num_programs(2)
    head_0 = pl.program_id(1) * heads
    ours, lanes = pl.ds(head_0, heads), pl.ds(pl.multiple_of(head_0 * K, K), heads * K)
    row, buffer, i = part * n + r, jax.lax.rem(r, 2), jax.lax.rem(r, BLOCK)

    def active(r):
        return (r >= 0) & (slots[part * n + jnp.maximum(r, 0)] >= 0)

    def to_pool(r, kind):
        """The copy of a row's new state (kind 0) or windows (1)."""
        slot, buffer = slots[part * n + jnp.maximum(r, 0)], jax.lax.rem(r + 2, 2)
        to = (states_to.at[slot, ours], windows_to.at[slot, :, :, lanes])[kind]
        return pltpu.make_async_copy((states_out, windows_out)[kind].at[buffer], to, stored.at[kind])

    def at(place):
        """All heads of one vector."""
        return pl.ds(pl.multiple_of(place * stride, 8), heads)

    def of(h, place, count):
        """One head of some vectors."""
        return pl.ds(place * stride + h, count, stride=stride)

    def turn(x, to, place):
        """[tokens (head K)] -> [(token, head) K]"""
        for h in range(heads):
            to[of(h, place, x.shape[1])] = x[i, :, h * K : (h + 1) * K].astype(jnp.float32)

    @pl.when(r == 0)
    def _():
        for h in range(heads):
            for c in range(3):
                taps_of[of(h, c * W, W)] = conv[c, :, h * K : (h + 1) * K]
            bias[h : h + 1] = dt_bias[:, pl.ds(pl.multiple_of((head_0 + h) * K, K), K)]
        for scratch in (reads, writes, written):
            scratch[...] = jnp.zeros_like(scratch)
        rate[...] = jnp.broadcast_to(jnp.exp(down(A_log[...], head_0, heads)), (heads, K))

    @pl.when(~active(r))
    def _():
        y[i] = jnp.zeros(y.shape[1:], y.dtype)

    @pl.when(active(r))
    def _():
        replayed = accepted[row]
        mixed = []
        for c, (u_0, u_1) in enumerate(((q_0, q_1), (k_0, k_1), (v_0, v_1))):
            begin = c * (I + M)
            for h in range(heads):
                inputs[of(h, begin, I)] = windows[0, c, :, h * K : (h + 1) * K].astype(jnp.float32)
            turn(u_0, inputs, begin + I)

            def convolved(last, c=c, dtype=u_1.dtype):
                """silu of the taps that end there, as the layer rounds it."""
                u = sum((inputs[at(last - W + 1 + j)] * taps_of[at(c * W + j)] for j in range(1, W)),
                        inputs[at(last - W + 1)] * taps_of[at(c * W)])
                return (u * jax.nn.sigmoid(u)).astype(dtype).astype(jnp.float32)

            first = [jnp.where(j < replayed, convolved(begin + I + j), 0) for j in range(R)] if c else []
            for h in range(heads):
                new = inputs[of(h, begin + replayed, I)].astype(windows_out.dtype)
                windows_out[buffer, c, :, h * K : (h + 1) * K] = new
            turn(u_1, inputs, begin + I + replayed)
            mixed.append(first + [convolved(begin + I + replayed + j) for j in range(T)])
        turn(decay_0, decays, 0)
        turn(decay_1, decays, R)
        turn(gate, gates, 0)
        betas = jax.nn.sigmoid(jnp.concatenate([beta_0[i].astype(jnp.float32), beta_1[i].astype(jnp.float32)]))

        q, k = [unit(x) * K**-0.5 for x in mixed[0]], [unit(x) for x in mixed[1]]
        decay, beta = [], []
        for m in range(M):
            kept = m < replayed if m < R else True
            d = jnp.exp(log_decay_at(rate[...], decays[at(m)] + bias[...], decay_floor))
            decay.append(jnp.where(kept, d, 1))
            beta.append(jnp.where(kept, down(betas[m : m + 1], head_0, heads), 0))

        vectors = _tiles(M + T)

        def meet(place, x):
            """The state later."""
            for j, piece in enumerate(pieces_of(x)):
                reads[at(j * vectors + place)] = piece

        keys, queries = [], []  # k_i D_ij k_j and q_i D_ij k_j
        for m in range(M):
            keys.append({})
            x = k[m] * decay[m]
            for j in reversed(range(m)):
                keys[m][j] = jnp.sum(x * k[j], axis=1, keepdims=True)
                x = x * decay[j]
            meet(m, x)
        for m in range(R, M):
            queries.append({})
            x = q[m - R]
            for j in reversed(range(m + 1)):
                queries[-1][j] = jnp.sum(x * k[j], axis=1, keepdims=True)
                x = x * decay[j]
            meet(M + m - R, x)

        for h in range(heads):  # all factors are numbers of bf16: one pass each, and exact
            x = reads[of(h, 0, 3 * vectors)]
            found = 0.0
            for count, S in zip((3, 2, 1), pieces_of(states[0, h]), strict=True):
                products = jnp.dot(x[: count * vectors], S, preferred_element_type=jnp.float32)
                found += sum(products[j * vectors : (j + 1) * vectors] for j in range(count))
            read[of(h, 0, vectors)] = found

        w = []
        for m in range(M):
            seen = sum((keys[m][j] * w[j] for j in range(m)), read[at(m)])
            w.append(beta[m] * (mixed[2][m] - seen))
        for t in range(T):
            o = read[at(M + t)]
            for j in range(R + t + 1):
                o = o + queries[t][j] * w[j]
            o = o.astype(v_1.dtype).astype(jnp.float32)
            gates[at(t)] = gated_norm(o, o_norm[...], gates[at(t)], eps)
        for h in range(heads):
            y[i, :, h * K : (h + 1) * K] = gates[of(h, 0, T)].astype(y.dtype)

        kept = jnp.ones((heads, K), jnp.float32)
        for j in reversed(range(R)):
            pieces = pieces_of(kept * k[j]), pieces_of(w[j])
            for c, (of_k, of_w) in enumerate(PRODUCTS):
                writes[at(c * R + j)], written[at(c * R + j)] = pieces[0][of_k], pieces[1][of_w]
            kept = kept * decay[j]
        rows = len(PRODUCTS) * R
        for j, piece in enumerate(pieces_of(kept)):
            writes[at(rows + j)] = piece
        ones = (jax.lax.broadcasted_iota(jnp.int32, (_tiles(rows + 3), K), 0) >= rows).astype(jnp.float32)
        for h in range(heads):
            all_rows = of(h, 0, _tiles(rows + 3))
            rest = jnp.concatenate([written[all_rows], ones], axis=1)
            product = jax.lax.dot_general(
                writes[all_rows].astype(jnp.bfloat16), rest.astype(jnp.bfloat16), (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            states_out[buffer, h] = product[:, K:] * states[0, h] + product[:, :K]

    # One copy of each kind is on its way at a time, so that one semaphore tells of it.
    for kind in (0, 1):

        @pl.when(active(r - 1))
        def _(kind=kind):
            to_pool(r - 1, kind).wait()

        @pl.when(active(r))
        def _(kind=kind):
            to_pool(r, kind).start()

        @pl.when(active(r) & (r == n - 1))
        def _(kind=kind):
            to_pool(r, kind).wait()
