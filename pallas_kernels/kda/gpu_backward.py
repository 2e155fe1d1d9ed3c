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
    C, add_up, begin_and_grow, bounded, diagonal, dot, keep_factor, last_factor, level_factor, level_pairs, of_keep, of_level,
    of_read, of_tile, parts, read_factor, tile_pairs, tokens, where,
)  # fmt: skip
from pallas_kernels.kda.gpu_forward import VALUES, Inputs, Program, launch, prepare

KEYS = 32  # channels of keys per program of the last kernel


def backward(
    inputs: Inputs,
    states: Float[Array, "B H N K V"],
    do: Float[Array, "B T H V"],
    dlast: Float32[Array, "B H K V"],
    program: Program,
) -> tuple[list[Array], Float32[Array, "B H K V"]]:
    """Gradients of q, k, v, log_decay, beta, and of the first state, from those of o and of the last state."""
    N, H, B, K, V = program.N, program.H, program.B, program.K, program.V
    chunks = prepare(inputs, program, save=True)
    beta, skip = inputs.beta, inputs.skip
    dq, dk, dv, dlog_decay, dbeta = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:5])
    values, pairs = program.array(C, V), program.array(C, C)

    out = jax.ShapeDtypeStruct(dlast.shape, jnp.float32), program.array(K, V), values
    call = launch(_states_kernel, program, "kda_state_gradients", (V // VALUES, H, B), out, warps=4)
    dstate, dstates, dwrite = call(chunks.w, chunks.q_read, chunks.k_keep, chunks.A, chunks.last, beta, skip, do, dlast)

    call = launch(_values_kernel, program, "kda_value_gradients", (N, H, B), (dv, dbeta, values, pairs, pairs), warps=4)
    dv, dbeta, write, dA, dL = call(chunks.w, chunks.u, chunks.L, chunks.inverse, states, dwrite, beta, skip, do)

    call = launch(_keys_kernel, program, "kda_key_gradients", (K // KEYS * N, H, B), (dq, dk, dlog_decay), warps=4)
    dq, dk, dlog_decay = call(inputs, states, dstates, write, do, dv, dA, dL)
    return [dq, dk, dv, dlog_decay, dbeta], dstate


def _states_kernel(program: Program, w, q_read, k_keep, A, decay, beta, skip, do, dlast, dfirst, dstates, dwrite) -> None:
    j, h, b = (pl.program_id(axis) for axis in range(3))
    dtype, columns = program.dtype, pl.ds(j * VALUES, VALUES)

    def step(n, dstate):
        i = program.N - 1 - n
        here = tokens(skip, program.T, b, h, i)
        narrow = dstate.astype(dtype)
        dstates[b, h, i, :, columns] = narrow
        do_here = here.load(do, VALUES, j * VALUES)
        dwrite_here = dot(A[b, h, i].T, do_here, dtype) + dot(k_keep[b, h, i], narrow, dtype)
        dwrite[b, h, i, :, columns] = dwrite_here.astype(dtype)
        dx = dwrite_here * here.load(beta)[:, None]
        read = dot(q_read[b, h, i].T, do_here, dtype) - dot(w[b, h, i].T, dx, dtype)
        return dstate * decay[b, h, i][:, None] + read

    dfirst[b, h, :, columns] = jax.lax.fori_loop(0, program.N, step, dlast[b, h, :, columns])


def _values_kernel(program: Program, w, u, L, inverse, states, dwrite, beta, skip, do, dv, dbeta, write, dA, dL) -> None:
    i, h, b = (pl.program_id(axis) for axis in range(3))
    chunk, dtype = (b, h, i), program.dtype
    here = tokens(skip, program.T, b, h, i)
    beta_here, w_here, inverse_here = here.load(beta), w[chunk], inverse[chunk]

    def part(j, sums):
        columns = pl.ds(j * VALUES, VALUES)
        x = u[b, h, i, :, columns].astype(jnp.float32) - dot(w_here, states[b, h, i, :, columns], dtype)
        write_here = (x * beta_here[:, None]).astype(dtype)
        write[b, h, i, :, columns] = write_here
        dwrite_here = dwrite[b, h, i, :, columns].astype(jnp.float32)
        dv_here = dot(inverse_here.T, dwrite_here * beta_here[:, None], dtype)
        here.store(dv, dv_here, j * VALUES)
        added = (
            dot(here.load(do, VALUES, j * VALUES), write_here.T, dtype), dot(dv_here, x.T, dtype), jnp.sum(x * dwrite_here, 1),
        )  # fmt: skip
        return tuple(total + x for total, x in zip(sums, added, strict=True))

    zeros = jnp.zeros((C, C), jnp.float32), jnp.zeros((C, C), jnp.float32), jnp.zeros(C, jnp.float32)
    dA_here, toward, dbeta_here = jax.lax.fori_loop(0, program.V // VALUES, part, zeros)
    here.store(dbeta, dbeta_here - jnp.sum(L[chunk].astype(jnp.float32) * toward, 0))
    dL[chunk] = (toward * -beta_here[None]).astype(dtype)
    dA[chunk] = dA_here.astype(dtype)


def _keys_kernel(program: Program, given: Inputs, states, dstates, write, do, dv, dA, dL, dq, dk, dlog_decay) -> None:
    """One chunk and KEYS of its channels."""
    part, h, b = (pl.program_id(axis) for axis in range(3))
    i, first = part // (program.K // KEYS), part % (program.K // KEYS) * KEYS
    chunk, columns = (b, h, i), pl.ds(first, KEYS)
    tiles, dtype = program.tiles, program.dtype
    here = tokens(given.skip, program.T, b, h, i)
    cuts = here.load_resets(given.reset)
    log_decay = bounded(here.load(given.log_decay, KEYS, first), cuts, tiles)
    split = parts(log_decay, dtype)

    def rows() -> list[Float32[Array, "C KEYS"]]:
        """q and k, read anew for each use, which costs less than the registers to keep them."""
        return [here.load(ref, KEYS, first).astype(jnp.float32) for ref in (given.q, given.k)]

    def pull(which: Any, products: Float32[Array, "C KEYS"]) -> Float32[Array, "C KEYS"]:
        return add_up(which, parts(products, dtype), transposed=True)

    q, k = rows()
    state, dstate = states[b, h, i, columns], dstates[b, h, i, columns]
    read = read_factor(split, cuts)
    dq_read = dot(here.load(do, program.V), state.T, dtype) * read
    dk_read = dot(here.load(dv, program.V), state.T, dtype) * -read
    keep = keep_factor(split, cuts)
    dk_keep = dot(write[chunk], dstate.T, dtype) * keep
    last = last_factor(log_decay, cuts)
    dlast = last * jnp.sum(state.astype(jnp.float32) * dstate.astype(jnp.float32), 1)
    dG = pull(of_read, q * dq_read + k * dk_read) + pull(of_keep, k * dk_keep) + dlast[None]

    dA_here, dL_here = dA[chunk], dL[chunk]
    ddiagonal = jnp.sum(where(diagonal(), dA_here.astype(jnp.float32)), 1)[:, None]
    dq_sum, dk_sum = dq_read + ddiagonal * k, dk_read + dk_keep + ddiagonal * q

    q, k = rows()
    begin, grow = begin_and_grow(split, tiles)
    dA_tile, dL_tile = (where(tile_pairs(tiles, cuts), x) for x in (dA_here, dL_here))
    dq_begin = dot(dA_tile, k * grow, dtype) * begin
    dk_begin = dot(dL_tile, k * grow, dtype) * begin
    dk_grow = (dot(dA_tile.T, q * begin, dtype) + dot(dL_tile.T, k * begin, dtype)) * grow
    dq_sum, dk_sum = dq_sum + dq_begin, dk_sum + dk_begin + dk_grow
    dG += pull(of_tile(tiles), q * dq_begin + k * dk_begin - k * dk_grow)

    def level(n, sums):
        dq_sum, dk_sum, dG = sums
        q, k = rows()
        half = tiles.size << n
        factor = level_factor(half, split)
        dA_level, dL_level = (where(level_pairs(half, cuts), x) for x in (dA_here, dL_here))
        k_level = (k * factor).astype(dtype)
        dq_level = dot(dA_level, k_level, dtype) * factor
        dk_level = dot(dA_level.T, q * factor, dtype) + dot(dL_level, k_level, dtype) + dot(dL_level.T, k_level, dtype)
        dk_level *= factor
        return dq_sum + dq_level, dk_sum + dk_level, dG + pull(of_level(half), q * dq_level + k * dk_level)

    dq_sum, dk_sum, dG = jax.lax.fori_loop(0, tiles.levels, level, (dq_sum, dk_sum, dG))
    here.store(dq, dq_sum, first)
    here.store(dk, dk_sum, first)
    unbounded = here.load(given.log_decay, KEYS, first)
    dG *= jnp.exp(unbounded - jnp.maximum(unbounded, tiles.floor))
    here.store(dlog_decay, dG if cuts is None else where(~cuts.here[:, None], dG), first)
