"""The forward kernels: what each chunk does to a state, all chunks at once; the states, one after the other; the outputs.

With P the decay from a chunk's begin to a token and X that from the token to its end, both of the token's own channels:

    x = (I + L diag(beta))^-1 (v - (k P) S) = u - w S
    o = (q P) S + A (beta x);   S <- diag(P_last) S + (k X)' (beta x)
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda.gpu_chunk import (
    C, Tiling, bounded, dot, inverse, keep_factor, last_factor, parts, products, read_factor, tokens,
)  # fmt: skip
from pallas_kernels.target import current

KEYS = 32  # channels per step of a program that walks over all of a chunk's
VALUES = 32  # of a state's columns, which do not depend on each other, per program


class Inputs(NamedTuple):
    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float32[Array, "B T H K"]
    beta: Float32[Array, "B T H"]
    reset: Int32[Array, "B T"] | None
    skip: Int32[Array, " B"]  # tokens of each row's first chunk that are before its first token


class Program(NamedTuple):
    """What the kernels are compiled for."""

    B: int
    T: int
    H: int
    K: int
    V: int
    N: int
    dtype: Any
    tiles: Tiling

    def array(self, *sizes: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.B, self.H, self.N, *sizes), dtype or self.dtype)


class Chunks(NamedTuple):
    """What `prepare` knows of each chunk; L and inverse for the backward only."""

    w: Float[Array, "B H N C K"]
    u: Float[Array, "B H N C V"]
    q_read: Float[Array, "B H N C K"]
    k_keep: Float[Array, "B H N C K"]
    A: Float[Array, "B H N C C"]
    last: Float32[Array, "B H N K"]
    L: Float[Array, "B H N C C"] | None = None
    inverse: Float[Array, "B H N C C"] | None = None


def prepare(inputs: Inputs, program: Program, *, save: bool) -> Chunks:
    keys, values, pairs = (program.array(C, size) for size in (program.K, program.V, C))
    saved = (pairs, pairs) if save else ()
    out = Chunks(keys, values, keys, keys, pairs, program.array(program.K, dtype=jnp.float32), *saved)
    return launch(_prepare_kernel, program, "kda_prepare", (program.N, program.H, program.B), out, warps=4)(inputs)


def forward(
    inputs: Inputs, state: Float32[Array, "B H K V"], program: Program
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"], Float[Array, "B H N K V"]]:
    """o, the last state, and the state before each chunk in q's dtype."""
    chunks = prepare(inputs, program, save=False)
    _, _, v, _, beta, _, skip = inputs
    K, V = program.K, program.V
    out = jax.ShapeDtypeStruct(state.shape, jnp.float32), program.array(K, V), program.array(C, V)
    call = launch(_states_kernel, program, "kda_states", (V // VALUES, program.H, program.B), out, warps=4)
    last, states, write = call(chunks.w, chunks.u, chunks.k_keep, chunks.last, beta, skip, state)
    out = jax.ShapeDtypeStruct(v.shape, v.dtype)
    call = launch(_output_kernel, program, "kda_output", (program.N, program.H, program.B), out, warps=8)
    return call(chunks.q_read, chunks.A, states, write, skip), last, states


def launch(kernel: Any, program: Program, name: str, grid: tuple[int, ...], out: Any, *, warps: int) -> Any:
    return pl.pallas_call(
        partial(kernel, program), grid=grid, out_shape=out, interpret=current().interpret, name=name,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
    )  # fmt: skip


def _prepare_kernel(program: Program, given: Inputs, *outputs: Any) -> None:
    out = Chunks(*outputs)
    i, h, b = (pl.program_id(axis) for axis in range(3))
    chunk, tiles, dtype = (b, h, i), program.tiles, program.dtype
    here = tokens(given.skip, program.T, b, h, i)
    cuts = here.load_resets(given.reset)

    def load(ref, j):
        return here.load(ref, KEYS, j * KEYS).astype(jnp.float32)

    def pairs(j, sums):
        split = parts(bounded(load(given.log_decay, j), cuts, tiles), dtype)
        added = products(lambda: (load(given.q, j), load(given.k, j)), split, cuts, tiles, dtype)
        return tuple(total + x for total, x in zip(sums, added, strict=True))

    zeros = jnp.zeros((C, C), jnp.float32)
    A, L = jax.lax.fori_loop(0, program.K // KEYS, pairs, (zeros, zeros))
    out.A[chunk] = A.astype(dtype)
    solve = inverse(L * here.load(given.beta)[None], dtype).astype(dtype)
    if out.L is not None:
        out.L[chunk] = L.astype(dtype)
        out.inverse[chunk] = solve

    def rows(j, _):
        columns = pl.ds(j * KEYS, KEYS)
        log_decay = bounded(load(given.log_decay, j), cuts, tiles)
        split = parts(log_decay, dtype)
        read, k = read_factor(split, cuts), load(given.k, j)
        out.q_read[b, h, i, :, columns] = (load(given.q, j) * read).astype(dtype)
        out.k_keep[b, h, i, :, columns] = (k * keep_factor(split, cuts)).astype(dtype)
        out.w[b, h, i, :, columns] = dot(solve, k * read, dtype).astype(dtype)
        out.last[b, h, i, columns] = last_factor(log_decay, cuts)
        return ()

    def values(j, _):
        out.u[b, h, i, :, pl.ds(j * KEYS, KEYS)] = dot(solve, load(given.v, j), dtype).astype(dtype)
        return ()

    jax.lax.fori_loop(0, program.K // KEYS, rows, ())
    jax.lax.fori_loop(0, program.V // KEYS, values, ())


def _states_kernel(program: Program, w, u, k_keep, decay, beta, skip, first, last, states, write) -> None:
    j, h, b = (pl.program_id(axis) for axis in range(3))
    dtype, columns = program.dtype, pl.ds(j * VALUES, VALUES)

    def step(i, state):
        narrow = state.astype(dtype)
        states[b, h, i, :, columns] = narrow
        x = u[b, h, i, :, columns].astype(jnp.float32) - dot(w[b, h, i], narrow, dtype)
        added = (x * tokens(skip, program.T, b, h, i).load(beta)[:, None]).astype(dtype)
        write[b, h, i, :, columns] = added
        return state * decay[b, h, i][:, None] + dot(k_keep[b, h, i].T, added, dtype)

    last[b, h, :, columns] = jax.lax.fori_loop(0, program.N, step, first[b, h, :, columns])


def _output_kernel(program: Program, q_read, A, states, write, skip, o) -> None:
    i, h, b = (pl.program_id(axis) for axis in range(3))
    chunk, dtype = (b, h, i), program.dtype
    total = dot(q_read[chunk], states[chunk], dtype) + dot(A[chunk], write[chunk], dtype)
    tokens(skip, program.T, b, h, i).store(o, total)
