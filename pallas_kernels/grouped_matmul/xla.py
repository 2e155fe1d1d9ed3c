"""Grouped matmul in XLA: a loop over blocks of rows, each times the matrix of its group.

`lax.ragged_dot` is lowered to a dense product over all E groups on CPU (and may be on GPU): E times the work.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.blocks import Blocks, block_rows, split


def why_not(*args: Array, **kwargs: object) -> str | None:
    return None


@jax.custom_vjp
def grouped_matmul(x: Float[Array, "N K"], w: Float[Array, "E K M"], group_sizes: Int[Array, "E"]) -> Float[Array, "N M"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    return _forward(x, w, group_sizes)[0]


def _forward(x: Array, w: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    blocks = split(group_sizes, x.shape[0], block_rows(x.shape[0], w.shape[0]))
    y = multiply(x, blocks, lambda rows, group: dot(rows, w[group]), w.shape[2])
    return y, (x, w, group_sizes)


def _backward(saved: tuple[Array, Array, Array], g: Float[Array, "N M"]) -> tuple[Array, Array, None]:
    x, w, group_sizes = saved
    blocks = split(group_sizes, x.shape[0], block_rows(x.shape[0], w.shape[0]))
    dx = multiply(g, blocks, lambda rows, group: dot(rows, w[group].T), x.shape[1])

    def add(b: Array, dw: Array) -> Array:
        real = blocks.real[b][:, None]
        xs, gs = (jnp.where(real, a[blocks.rows[b]], 0) for a in (x, g))
        return dw.at[blocks.group[b]].add(dot(xs.T, gs, jnp.float32))

    dw = jax.lax.fori_loop(0, blocks.used, add, jnp.zeros(w.shape, jnp.float32))
    return dx, dw.astype(w.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def multiply(x: Float[Array, "N K"], blocks: Blocks, times: object, size: int) -> Float[Array, "N M"]:
    """times(rows, group) for every block in use, put back in row order."""

    def step(b: Array, y: Array) -> Array:
        rows = jnp.where(blocks.real[b][:, None], x[blocks.rows[b]], 0)
        return jax.lax.dynamic_update_index_in_dim(y, times(rows, blocks.group[b]).astype(y.dtype), b, 0)

    y = jax.lax.fori_loop(0, blocks.used, step, jnp.zeros((*blocks.rows.shape, size), x.dtype))
    return jnp.where(blocks.inside[:, None], y.reshape(-1, size)[blocks.place], 0)


def dot(a: Array, b: Array, dtype: object = None) -> Array:
    precision = "highest" if a.dtype == jnp.float32 else None
    y = jnp.matmul(a, b.astype(a.dtype), precision=precision, preferred_element_type=jnp.float32)
    return y.astype(dtype or a.dtype)
