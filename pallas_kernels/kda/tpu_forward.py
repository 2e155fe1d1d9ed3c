"""The forward kernel: chunk after chunk, the states of a few heads in VMEM.

The state is held transposed, [V, K], and so are the rows that pass through it: then the decay of the chunk is a row, beta is a
row, and no product needs a transposition but that of v.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda.tpu_chunk import C, Tiling, decays, dot, inverse, masked, masks, products, slots
from pallas_kernels.target import current

HEADS = 1  # per grid step: as many chains of dependent products run side by side


def heads_per_step(H: int, most: int) -> int:
    """The largest divisor of H up to `most`."""
    return next(n for n in range(min(H, most), 0, -1) if H % n == 0)


def forward(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    log_decay: Float32[Array, "B H T K"],
    beta: Float32[Array, "B H 1 T"],
    resets: Int32[Array, "B 1 T"] | None,
    state: Float32[Array, "B H V K"],
    *,
    tiles: Tiling,
    save: bool,
) -> list[Array]:
    """o, the last state, and with `save` the state before each chunk in q's dtype, [B, H, N, V, K]. T is a multiple of C."""
    B, H, T, K = q.shape
    V = v.shape[-1]
    N, heads = T // C, heads_per_step(H, HEADS)
    tokens = partial(_tokens, heads)
    whole = pl.BlockSpec((None, heads, V, K), lambda b, h, i: (b, h, 0, 0))
    inputs = [(q, tokens(K)), (k, tokens(K)), (v, tokens(V)), (log_decay, tokens(K))]
    inputs += [(beta, pl.BlockSpec((None, heads, 1, C), lambda b, h, i: (b, h, 0, i))), (state, whole)]
    if resets is not None:
        inputs.append((resets, pl.BlockSpec((None, 1, C), lambda b, h, i: (b, 0, i))))
    outputs = [(jax.ShapeDtypeStruct(v.shape, v.dtype), tokens(V)), (jax.ShapeDtypeStruct(state.shape, jnp.float32), whole)]
    if save:
        chunk = pl.BlockSpec((None, heads, None, V, K), lambda b, h, i: (b, h, i, 0, 0))
        outputs.append((jax.ShapeDtypeStruct((B, H, N, V, K), q.dtype), chunk))
    return pl.pallas_call(
        partial(_kernel, tiles=tiles, has_resets=resets is not None, save=save),
        name="kda_forward",
        grid=(B, H // heads, N),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        scratch_shapes=[pltpu.VMEM((heads, slots(tiles).number, C, K), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=current().interpret,
    )(*(x for x, _ in inputs))


def _tokens(heads: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, heads, C, width), lambda b, h, i: (b, h, i, 0))


def _kernel(*refs: Any, tiles: Tiling, has_resets: bool, save: bool) -> None:
    q_ref, k_ref, v_ref, log_decay_ref, beta_ref, first_ref, *refs = refs
    resets_ref = refs.pop(0) if has_resets else None
    o_ref, state_ref, *saved_ref, factors_ref = refs
    dtype = q_ref.dtype
    slot = slots(tiles)

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_ref[...] = first_ref[...]

    pairs = masks(tiles, None if resets_ref is None else resets_ref[...])
    for h in range(q_ref.shape[0]):
        factors = factors_ref.at[h]
        last = masked(pairs.last_reads, decays(log_decay_ref.at[h], factors, tiles))
        q, k = q_ref[h].astype(jnp.float32), k_ref[h].astype(jnp.float32)
        v, beta, state = v_ref[h].astype(jnp.float32), beta_ref[h], state_ref[h]
        if save:
            saved_ref[0][h] = state.astype(dtype)
        A, L = products(q, k, factors, pairs, tiles, dtype)
        solve = inverse(L, beta, tiles, dtype)
        read, keep = masked(pairs.reads, factors[slot.read]), masked(pairs.keeps, factors[slot.keep])
        error = v.T - dot(state, k * read, dtype, across=1)
        write = dot(error, solve, dtype, across=1) * beta
        o_ref[h] = (dot(q * read, state, dtype, across=1) + dot(A, write, dtype, across=1)).astype(o_ref.dtype)
        state_ref[h] = state * last + dot(write, k * keep, dtype)
