"""The forward kernels: what each chunk reads and writes, all at once; the states, one after the other; the outputs, all at once.

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
    C,
    Resets,
    Tiling,
    Tokens,
    bounded,
    diagonal,
    dot,
    invert,
    keep_factor,
    last_factor,
    of_one_sequence,
    parts,
    products,
    read_factor,
    tokens,
)
from pallas_kernels.target import current


class Inputs(NamedTuple):
    """Those of the op, in its shapes; reset as integers."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float32[Array, "B T H K"]
    beta: Float32[Array, "B T H"]
    reset: Int32[Array, "B T"] | None
    skip: Int32[Array, " B"]  # tokens of each row's first chunk that are before its first token


class Program(NamedTuple):
    """What the kernels are compiled for: sizes, N chunks, the dtype of q, k and v."""

    B: int
    T: int
    H: int
    K: int
    V: int
    N: int
    dtype: Any
    tiles: Tiling

    @property
    def width(self) -> int:
        """Channels of keys or values per step or program: as many as registers hold."""
        return 16 if self.dtype == jnp.float32 else 32

    def array(self, *sizes: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.B, self.H, self.N, *sizes), dtype or self.dtype)


class Reads(NamedTuple):
    """How each chunk reads the state before it and what it wrote, and what it keeps of both."""

    q_read: Float[Array, "B H N C K"]
    k_keep: Float[Array, "B H N C K"]
    last: Float32[Array, "B H N K"]
    A: Float[Array, "B H N C C"]


class Writes(NamedTuple):
    """What each chunk writes, given the state before it; L and inverse are for the backward."""

    w: Float[Array, "B H N C K"]
    u: Float[Array, "B H N C V"]
    L: Float[Array, "B H N C C"] | None = None
    inverse: Float[Array, "B H N C C"] | None = None


def prepare(inputs: Inputs, program: Program, *, save: bool) -> tuple[Reads, Writes]:
    """Both are kernels of their own because the products of the one leave no registers for those of the other."""
    keys, values, pairs = (program.array(C, size) for size in (program.K, program.V, C))
    grid = program.N, program.H, program.B
    out = keys, keys, program.array(program.K, dtype=jnp.float32), pairs
    reads = launch(_reads_kernel, program, "kda_reads", grid, out, warps=4)(inputs)
    out = (keys, values, pairs, pairs) if save else (keys, values)
    writes = launch(_writes_kernel, program, "kda_writes", grid, out, warps=4)(inputs)
    return Reads(*reads), Writes(*writes)


def forward(
    inputs: Inputs, state: Float32[Array, "B H K V"], program: Program
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"], Float[Array, "B H N K V"]]:
    """o, the last state, and the state before each chunk in q's dtype."""
    reads, writes = prepare(inputs, program, save=False)
    _, _, v, _, beta, _, skip = inputs
    K, V = program.K, program.V
    out = jax.ShapeDtypeStruct(state.shape, jnp.float32), program.array(K, V), program.array(C, V)
    call = launch(_states_kernel, program, "kda_states", (V // program.width, program.H, program.B), out, warps=4)
    last, states, write = call(writes.w, writes.u, reads.k_keep, reads.last, beta, skip, state)
    out = jax.ShapeDtypeStruct(v.shape, v.dtype)
    call = launch(_output_kernel, program, "kda_output", (program.N, program.H, program.B), out, warps=8)
    return call(reads.q_read, reads.A, states, write, skip), last, states


def launch(kernel: Any, program: Program, name: str, grid: tuple[int, ...], out: Any, *, warps: int) -> Any:
    """The call of `kernel(program, *refs)`."""
    return pl.pallas_call(
        partial(kernel, program), grid=grid, out_shape=out, interpret=current().interpret, name=name,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
    )  # fmt: skip


class _Here(NamedTuple):
    """One program's tokens, with what depends on their log decays, in blocks of `width` channels."""

    program: Program
    given: Inputs
    tokens: Tokens
    cuts: Resets | None

    def load(self, ref: Any, j: Any) -> Float32[Array, "C width"]:
        return self.tokens.load(ref, self.program.width, j * self.program.width).astype(jnp.float32)

    def log_decay(self, j: Any) -> Float32[Array, "C width"]:
        return bounded(self.load(self.given.log_decay, j), self.cuts, self.program.tiles)

    def products(self, rows: Any) -> Float32[Array, "C C"]:
        """Those of `rows` with the keys, over all channels."""

        def add(j, total):
            tiles, dtype = self.program.tiles, self.program.dtype
            split = parts(self.log_decay(j), dtype)
            return total + products(self.load(rows, j), self.load(self.given.k, j), split, tiles, dtype)

        total = jax.lax.fori_loop(0, self.program.K // self.program.width, add, jnp.zeros((C, C), jnp.float32))
        return of_one_sequence(total, self.cuts)


def _here(program: Program, given: Inputs) -> tuple[tuple[Any, Any, Any], _Here]:
    i, h, b = (pl.program_id(axis) for axis in range(3))
    here = tokens(given.skip, program.T, b, h, i)
    return (b, h, i), _Here(program, given, here, here.load_resets(given.reset))


def _reads_kernel(program: Program, given: Inputs, q_read, k_keep, last, A) -> None:
    chunk, here = _here(program, given)
    dtype, width = program.dtype, program.width

    def rows(j, own):
        columns = pl.ds(j * width, width)
        log_decay, q, k = here.log_decay(j), here.load(given.q, j), here.load(given.k, j)
        split = parts(log_decay, dtype)
        q_read[*chunk, :, columns] = (q * read_factor(split, here.cuts)).astype(dtype)
        k_keep[*chunk, :, columns] = (k * keep_factor(split, here.cuts)).astype(dtype)
        last[*chunk, columns] = last_factor(log_decay, here.cuts)
        return own + jnp.sum(q * k, 1)

    own = jax.lax.fori_loop(0, program.K // width, rows, jnp.zeros(C, jnp.float32))
    A[chunk] = jnp.where(diagonal(), own[:, None], here.products(given.q)).astype(dtype)


def _writes_kernel(program: Program, given: Inputs, w, u, *saved: Any) -> None:
    chunk, here = _here(program, given)
    dtype, width = program.dtype, program.width
    triangle = here.products(given.k)
    solve = invert(triangle * here.tokens.load(given.beta)[None], dtype).astype(dtype)
    if saved:
        L, inverse = saved
        L[chunk], inverse[chunk] = triangle.astype(dtype), solve

    def keys(j, _):
        read = read_factor(parts(here.log_decay(j), dtype), here.cuts)
        w[*chunk, :, pl.ds(j * width, width)] = dot(solve, here.load(given.k, j) * read, dtype).astype(dtype)
        return ()

    def values(j, _):
        u[*chunk, :, pl.ds(j * width, width)] = dot(solve, here.load(given.v, j), dtype).astype(dtype)
        return ()

    jax.lax.fori_loop(0, program.K // width, keys, ())
    jax.lax.fori_loop(0, program.V // width, values, ())


def _states_kernel(program: Program, w, u, k_keep, decay, beta, skip, first, last, states, write) -> None:
    j, h, b = (pl.program_id(axis) for axis in range(3))
    dtype, columns = program.dtype, pl.ds(j * program.width, program.width)

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
