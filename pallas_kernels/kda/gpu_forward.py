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
    C, Tiling, add_up, bounded, dot, inverse, masked, masks, of_keep, of_read, parts, products, tokens,
)  # fmt: skip
from pallas_kernels.target import current

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
    return launch(_prepare_kernel, program, "kda_prepare", (program.N, program.H, program.B), out, warps=8)(inputs)


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
    here = tokens(given.skip, program.T, b, h, i)
    tiles, dtype, K = program.tiles, program.dtype, program.K
    resets = None if given.reset is None else here.load_resets(given.reset)
    pairs = masks(tiles, resets)
    log_decay = bounded(here.load(given.log_decay, K), resets, tiles)
    split = parts(log_decay, dtype)
    q, k = (here.load(ref, K).astype(jnp.float32) for ref in (given.q, given.k))
    A, L = products(q, k, split, pairs, tiles, dtype)
    solve = inverse(L * here.load(given.beta)[None], dtype).astype(dtype)
    read = masked(pairs.reads, jnp.exp(add_up(of_read, split)))
    keep = masked(pairs.keeps, jnp.exp(add_up(of_keep, split)))
    chunk = b, h, i
    out.A[chunk] = A.astype(dtype)
    out.q_read[chunk] = (q * read).astype(dtype)
    out.k_keep[chunk] = (k * keep).astype(dtype)
    out.w[chunk] = dot(solve, k * read, dtype).astype(dtype)
    out.u[chunk] = dot(solve, here.load(given.v, program.V), dtype).astype(dtype)
    out.last[chunk] = masked(pairs.last_reads, jnp.exp(jnp.sum(log_decay, 0)))
    if out.L is not None:
        out.L[chunk] = L.astype(dtype)
        out.inverse[chunk] = solve


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
