"""The backward kernels: each chunk's factors again, the gradient of the state from the last chunk to the first, the rest at once.

With x, w and the names of gpu_forward.py, and dS the gradient of the state after the chunk:

    dwrite = A' do + (k X) dS;   dS <- diag(P_last) dS + (q P)' do - w' (beta dwrite)
    dv = inverse' (beta dwrite);   dL = -dv (beta x)';   dA = do (beta x)';   dbeta = sum x dwrite - L' dv

and every factor of a decay hands its own product with its gradient to the log decays that it sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from pallas_kernels.kda.gpu_chunk import (
    C,
    add_up,
    begin_and_grow,
    bounded,
    dot,
    keep_factor,
    last_factor,
    level_factor,
    level_pairs,
    of_keep,
    of_level,
    of_one_sequence,
    of_read,
    of_tile,
    parts,
    read_factor,
    tile_pairs,
    tokens,
    where,
)
from pallas_kernels.kda.gpu_forward import Inputs, Program, launch, prepare


def backward(
    inputs: Inputs,
    states: Float[Array, "B H N K V"],
    do: Float[Array, "B T H V"],
    dlast: Float32[Array, "B H K V"],
    program: Program,
) -> tuple[Inputs, Float32[Array, "B H K V"]]:
    """Gradients of the inputs, None for integers, and of the first state, from those of o and of the last state."""
    N, H, B, K, V = program.N, program.H, program.B, program.K, program.V
    reads, writes = prepare(inputs, program, save=True)
    beta, skip = inputs.beta, inputs.skip
    dq, dk, dv, dlog_decay, dbeta = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:5])
    values, pairs = program.array(C, V), program.array(C, C)

    out = jax.ShapeDtypeStruct(dlast.shape, jnp.float32), program.array(K, V), values
    call = launch(_states_kernel, program, "kda_state_gradients", (V // program.width, H, B), out, warps=4)
    dstate, dstates, dwrite = call(writes.w, reads.q_read, reads.k_keep, reads.A, reads.last, beta, skip, do, dlast)

    out = dv, dbeta, values, pairs, program.array(C, dtype=jnp.float32), pairs
    call = launch(_values_kernel, program, "kda_value_gradients", (N, H, B), out, warps=4)
    dv, dbeta, write, *dpairs = call(inputs, writes.w, writes.u, writes.L, writes.inverse, states, dwrite, do)

    call = launch(_keys_kernel, program, "kda_key_gradients", (K // program.width * N, H, B), (dq, dk, dlog_decay), warps=8)
    dq, dk, dlog_decay = call(inputs, states, dstates, write, do, dv, *dpairs)
    return inputs._replace(q=dq, k=dk, v=dv, log_decay=dlog_decay, beta=dbeta, reset=None, skip=None), dstate


def _states_kernel(program: Program, w, q_read, k_keep, A, decay, beta, skip, do, dlast, dfirst, dstates, dwrite) -> None:
    j, h, b = (pl.program_id(axis) for axis in range(3))
    dtype, columns = program.dtype, pl.ds(j * program.width, program.width)

    def step(n, dstate):
        i = program.N - 1 - n
        here = tokens(skip, program.T, b, h, i)
        narrow = dstate.astype(dtype)
        dstates[b, h, i, :, columns] = narrow
        do_here = here.load(do, program.width, j * program.width)
        dwrite_here = dot(A[b, h, i].T, do_here, dtype) + dot(k_keep[b, h, i], narrow, dtype)
        dwrite[b, h, i, :, columns] = dwrite_here.astype(dtype)
        dx = dwrite_here * here.load(beta)[:, None]
        read = dot(q_read[b, h, i].T, do_here, dtype) - dot(w[b, h, i].T, dx, dtype)
        return dstate * decay[b, h, i][:, None] + read

    dfirst[b, h, :, columns] = jax.lax.fori_loop(0, program.N, step, dlast[b, h, :, columns])


def _values_kernel(
    program: Program, given: Inputs, w, u, L, inverse, states, dwrite, do, dv, dbeta, write, dA, dself, dL
) -> None:
    i, h, b = (pl.program_id(axis) for axis in range(3))
    chunk, dtype, width = (b, h, i), program.dtype, program.width
    here = tokens(given.skip, program.T, b, h, i)
    beta_here, w_here, inverse_here = here.load(given.beta), w[chunk], inverse[chunk]

    def part(j, sums):
        columns = pl.ds(j * width, width)
        x = u[b, h, i, :, columns].astype(jnp.float32) - dot(w_here, states[b, h, i, :, columns], dtype)
        write_here = (x * beta_here[:, None]).astype(dtype)
        write[b, h, i, :, columns] = write_here
        dwrite_here = dwrite[b, h, i, :, columns].astype(jnp.float32)
        dv_here = dot(inverse_here.T, dwrite_here * beta_here[:, None], dtype)
        here.store(dv, dv_here, j * width)
        do_here = here.load(do, width, j * width)
        added = (
            dot(do_here, write_here.T, dtype), dot(dv_here, x.T, dtype),
            jnp.sum(do_here.astype(jnp.float32) * write_here.astype(jnp.float32), 1), jnp.sum(x * dwrite_here, 1),
        )  # fmt: skip
        return tuple(total + x for total, x in zip(sums, added, strict=True))

    zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in ((C, C), (C, C), C, C))
    dA_here, toward, dself[chunk], dbeta_here = jax.lax.fori_loop(0, program.V // width, part, zeros)
    here.store(dbeta, dbeta_here - jnp.sum(L[chunk].astype(jnp.float32) * toward, 0))
    cuts = here.load_resets(given.reset)
    dA[chunk] = of_one_sequence(dA_here, cuts).astype(dtype)
    dL[chunk] = of_one_sequence(toward * -beta_here[None], cuts).astype(dtype)


def _keys_kernel(program: Program, given: Inputs, states, dstates, write, do, dv, dA, dself, dL, dq, dk, dlog_decay) -> None:
    """One chunk and `width` of its channels of keys."""
    part, h, b = (pl.program_id(axis) for axis in range(3))
    tiles, dtype, width = program.tiles, program.dtype, program.width
    i, first = part // (program.K // width), part % (program.K // width) * width
    chunk, columns = (b, h, i), pl.ds(first, width)
    here = tokens(given.skip, program.T, b, h, i)
    cuts = here.load_resets(given.reset)

    def pull(which: Any, products: Float32[Array, "C width"]) -> Float32[Array, "C width"]:
        return add_up(which, parts(products, dtype), transposed=True)

    log_decay = bounded(here.load(given.log_decay, width, first), cuts, tiles)
    split = parts(log_decay, dtype)

    def rows() -> list[Float32[Array, "C width"]]:
        """q and k, read anew for each use: that costs less than the registers to keep them."""
        return [here.load(ref, width, first).astype(jnp.float32) for ref in (given.q, given.k)]

    dA_here, dL_here = dA[chunk], dL[chunk]
    q, k = rows()
    begin, grow = begin_and_grow(split, tiles)
    dA_tile, dL_tile = (where(tile_pairs(tiles), x) for x in (dA_here, dL_here))
    dq_begin = dot(dA_tile, k * grow, dtype) * begin
    dk_begin = dot(dL_tile, k * grow, dtype) * begin
    dk_grow = (dot(dA_tile.T, q * begin, dtype) + dot(dL_tile.T, k * begin, dtype)) * grow
    dself_here = dself[chunk][:, None]
    dq_sum, dk_sum = dq_begin + dself_here * k, dk_begin + dk_grow + dself_here * q
    dG = pull(of_tile(tiles), q * dq_begin + k * dk_begin - k * dk_grow)

    def level(n, sums):
        dq_sum, dk_sum, dG = sums
        q, k = rows()
        half = tiles.size << n
        factor = level_factor(half, split)
        dA_level, dL_level = (where(level_pairs(half), x) for x in (dA_here, dL_here))
        k_level = (k * factor).astype(dtype)
        dq_level = dot(dA_level, k_level, dtype) * factor
        dk_level = dot(dA_level.T, q * factor, dtype) + dot(dL_level, k_level, dtype) + dot(dL_level.T, k_level, dtype)
        dk_level *= factor
        return dq_sum + dq_level, dk_sum + dk_level, dG + pull(of_level(half), q * dq_level + k * dk_level)

    dq_sum, dk_sum, dG = jax.lax.fori_loop(0, tiles.levels, level, (dq_sum, dk_sum, dG))

    def through_states(j, sums):
        values = pl.ds(j * width, width)
        state, dstate = states[b, h, i, columns, values], dstates[b, h, i, columns, values]
        do_here, dv_here = (here.load(ref, width, j * width) for ref in (do, dv))
        added = (
            dot(do_here, state.T, dtype), dot(dv_here, state.T, dtype), dot(write[b, h, i, :, values], dstate.T, dtype),
            jnp.sum(state.astype(jnp.float32) * dstate.astype(jnp.float32), 1),
        )  # fmt: skip
        return tuple(total + x for total, x in zip(sums, added, strict=True))

    zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in ((C, width), (C, width), (C, width), width))
    dq_read, dk_read, dk_keep, dlast = jax.lax.fori_loop(0, program.V // width, through_states, zeros)

    q, k = rows()
    read = read_factor(split, cuts)
    dq_read, dk_read, dk_keep = dq_read * read, dk_read * -read, dk_keep * keep_factor(split, cuts)
    dlast *= last_factor(log_decay, cuts)
    dG += pull(of_read, q * dq_read + k * dk_read) + pull(of_keep, k * dk_keep) + dlast[None]
    dq_sum, dk_sum = dq_sum + dq_read, dk_sum + dk_read + dk_keep

    here.store(dq, dq_sum, first)
    here.store(dk, dk_sum, first)
    unbounded = here.load(given.log_decay, width, first)
    dG *= jnp.exp(unbounded - jnp.maximum(unbounded, tiles.floor))
    here.store(dlog_decay, dG if cuts is None else where(~cuts.here[:, None], dG), first)
