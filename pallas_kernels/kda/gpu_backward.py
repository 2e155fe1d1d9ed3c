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
    C, add_up, begin_and_grow, bounded, dot, masked, masks, of_keep, of_level, of_read, of_tile, parts, tokens,
)  # fmt: skip
from pallas_kernels.kda.gpu_forward import VALUES, Inputs, Program, launch, prepare

KEYS = 64  # channels of keys per program of the last kernel


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

    call = launch(_values_kernel, program, "kda_value_gradients", (N, H, B), (dv, dbeta, values, pairs, pairs), warps=8)
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
    beta_here = here.load(beta)
    x = u[chunk].astype(jnp.float32) - dot(w[chunk], states[chunk], dtype)
    dwrite_here = dwrite[chunk].astype(jnp.float32)
    dv_here = dot(inverse[chunk].T, dwrite_here * beta_here[:, None], dtype)
    here.store(dv, dv_here)
    toward = dot(dv_here, x.T, dtype)
    through_L = jnp.sum(L[chunk].astype(jnp.float32) * toward, 0)
    here.store(dbeta, jnp.sum(x * dwrite_here, 1) - through_L)
    dL[chunk] = (toward * -beta_here[None]).astype(dtype)
    write_here = (x * beta_here[:, None]).astype(dtype)
    write[chunk] = write_here
    dA[chunk] = dot(here.load(do, program.V), write_here.T, dtype).astype(dtype)


def _keys_kernel(program: Program, given: Inputs, states, dstates, write, do, dv, dA, dL, dq, dk, dlog_decay) -> None:
    """One chunk and KEYS of its channels."""
    part, h, b = (pl.program_id(axis) for axis in range(3))
    i, first = part // (program.K // KEYS), part % (program.K // KEYS) * KEYS
    chunk, columns = (b, h, i), pl.ds(first, KEYS)
    tiles, dtype = program.tiles, program.dtype
    here = tokens(given.skip, program.T, b, h, i)
    resets = None if given.reset is None else here.load_resets(given.reset)
    pairs = masks(tiles, resets)
    unbounded = here.load(given.log_decay, KEYS, first)
    log_decay = bounded(unbounded, resets, tiles)
    split = parts(log_decay, dtype)
    q, k = (here.load(ref, KEYS, first).astype(jnp.float32) for ref in (given.q, given.k))

    def pull(which: Any, products: Float32[Array, "C KEYS"]) -> Float32[Array, "C KEYS"]:
        return add_up(which, parts(products, dtype), transposed=True)

    state, dstate = states[b, h, i, columns], dstates[b, h, i, columns]
    read = masked(pairs.reads, jnp.exp(add_up(of_read, split)))
    dq_read = dot(here.load(do, program.V), state.T, dtype) * read
    dk_read = dot(here.load(dv, program.V), state.T, dtype) * -read
    keep = masked(pairs.keeps, jnp.exp(add_up(of_keep, split)))
    dk_keep = dot(write[chunk], dstate.T, dtype) * keep
    last = masked(pairs.last_reads, jnp.exp(jnp.sum(log_decay, 0)))
    dlast = last * jnp.sum(state.astype(jnp.float32) * dstate.astype(jnp.float32), 1)
    dG = pull(of_read, q * dq_read + k * dk_read) + pull(of_keep, k * dk_keep) + dlast[None]

    dA_here, dL_here = dA[chunk], dL[chunk]
    ddiagonal = jnp.sum(jnp.where(pairs.diagonal, dA_here.astype(jnp.float32), 0.0), 1)[:, None]
    dq_sum, dk_sum = dq_read + ddiagonal * k, dk_read + dk_keep + ddiagonal * q

    begin, grow = begin_and_grow(split, tiles)
    dA_tile, dL_tile = (jnp.where(pairs.tile, x, jnp.zeros_like(x)) for x in (dA_here, dL_here))
    dq_begin = dot(dA_tile, k * grow, dtype) * begin
    dk_begin = dot(dL_tile, k * grow, dtype) * begin
    dk_grow = (dot(dA_tile.T, q * begin, dtype) + dot(dL_tile.T, k * begin, dtype)) * grow
    dq_sum, dk_sum = dq_sum + dq_begin, dk_sum + dk_begin + dk_grow
    dG += pull(of_tile(tiles), q * dq_begin + k * dk_begin - k * dk_grow)

    for half, mask in zip(tiles.levels, pairs.levels, strict=True):
        factor = jnp.exp(add_up(of_level(half), split))
        dA_level, dL_level = (jnp.where(mask, x, jnp.zeros_like(x)) for x in (dA_here, dL_here))
        k_level = (k * factor).astype(dtype)
        dq_level = dot(dA_level, k_level, dtype) * factor
        dk_level = dot(dA_level.T, q * factor, dtype) + dot(dL_level, k_level, dtype) + dot(dL_level.T, k_level, dtype)
        dk_level *= factor
        dq_sum, dk_sum = dq_sum + dq_level, dk_sum + dk_level
        dG += pull(of_level(half), q * dq_level + k * dk_level)

    here.store(dq, dq_sum, first)
    here.store(dk, dk_sum, first)
    clamped = jnp.exp(unbounded - jnp.maximum(unbounded, tiles.floor))
    here.store(dlog_decay, dG * clamped if resets is None else jnp.where(resets[:, None], 0.0, dG * clamped), first)
