"""Grouped matmul as a loop over tiles of rows that share a group.

Every group is cut into tiles from its first row on. There are at most N / rows + min(E, N) of them, and only
those that exist are run: a few rows touch the matrices of a few groups, however many there are. (On CPU,
jax.lax.ragged_dot becomes a product of all rows with all E matrices.)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8

from pallas_kernels.mxfp4 import dequantize

MIN_ROWS, MAX_ROWS = 8, 256  # of a tile


class Tiles(NamedTuple):
    """Tile i has the rows begin[i] to end[i] of group[i]; the first `count` tiles exist."""

    group: Int32[Array, " n"]
    begin: Int32[Array, " n"]
    end: Int32[Array, " n"]
    count: Int32[Array, ""]


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "N K"], w: Float[Array, "E K M"], group_sizes: Int32[Array, " E"]
) -> Float[Array, "N M"]:
    return _each_tile(x, group_sizes, lambda rows, e: _dot("nk,km->nm", rows, w[e]), w.shape[2])


def _forward(x: Array, w: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(x, w, group_sizes), (x, w, group_sizes)


def _backward(inputs: tuple[Array, Array, Array], g: Float[Array, "N M"]) -> tuple[Array, Array, None]:
    x, w, group_sizes = inputs
    dx = _each_tile(g, group_sizes, lambda rows, e: _dot("nm,km->nk", rows, w[e]), w.shape[1])
    return dx, _weight_gradient(x, g, w, group_sizes), None


grouped_matmul.defvjp(_forward, _backward)


@jax.custom_vjp
def grouped_matmul_mxfp4(
    x: Float[Array, "N K"],
    packed: UInt8[Array, "E M Khalf"],
    scale: UInt8[Array, "E M Kgroup"],
    group_sizes: Int32[Array, " E"],
) -> Float[Array, "N M"]:
    def times(rows: Array, e: Array) -> Array:
        return _dot("nk,mk->nm", rows, dequantize(packed[e], scale[e], x.dtype))

    return _each_tile(x, group_sizes, times, packed.shape[1])


def _forward_mxfp4(
    x: Array, packed: Array, scale: Array, group_sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul_mxfp4(x, packed, scale, group_sizes), (packed, scale, group_sizes)


def _backward_mxfp4(
    inputs: tuple[Array, Array, Array], g: Float[Array, "N M"]
) -> tuple[Array, None, None, None]:
    packed, scale, group_sizes = inputs

    def times(rows: Array, e: Array) -> Array:
        return _dot("nm,mk->nk", rows, dequantize(packed[e], scale[e], g.dtype))

    return _each_tile(g, group_sizes, times, 2 * packed.shape[2]), None, None, None


grouped_matmul_mxfp4.defvjp(_forward_mxfp4, _backward_mxfp4)


def _each_tile(
    x: Float[Array, "N K"], group_sizes: Int32[Array, " E"], times: Callable[[Array, Array], Array], size: int
) -> Float[Array, "N M"]:
    """times(rows, group) of every tile, put where its rows were; zeros in rows without a group."""
    N = x.shape[0]
    if not (N and group_sizes.size):
        return jnp.zeros((N, size), x.dtype)
    rows = _tile_rows(N, group_sizes.shape[0])
    tiles = _tiles(group_sizes, N, rows)

    def add(i: Array, y: Array) -> Array:
        start, inside = _window(tiles, i, N, rows)
        old = jax.lax.dynamic_slice_in_dim(y, start, rows)
        new = times(jax.lax.dynamic_slice_in_dim(x, start, rows), tiles.group[i]).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(inside, new, old), start, 0)

    return jax.lax.fori_loop(0, tiles.count, add, jnp.zeros((N, size), x.dtype))


def _weight_gradient(
    x: Float[Array, "N K"], g: Float[Array, "N M"], w: Float[Array, "E K M"], group_sizes: Int32[Array, " E"]
) -> Float[Array, "E K M"]:
    """x'g of each group, summed in fp32 over the group's tiles, which follow each other."""
    N = x.shape[0]
    if not (N and group_sizes.size):
        return jnp.zeros_like(w)
    rows = _tile_rows(N, group_sizes.shape[0])
    tiles = _tiles(group_sizes, N, rows)

    def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, dw = carry
        start, inside = _window(tiles, i, N, rows)
        x_i, g_i = (jnp.where(inside, jax.lax.dynamic_slice_in_dim(t, start, rows), 0) for t in (x, g))
        continued = (i > 0) & (tiles.group[i] == tiles.group[jnp.maximum(i - 1, 0)])
        total = jnp.where(continued, total, 0) + _dot("nk,nm->km", x_i, g_i)
        return total, jax.lax.dynamic_update_index_in_dim(dw, total.astype(w.dtype), tiles.group[i], 0)

    start = jnp.zeros(w.shape[1:], jnp.float32), jnp.zeros(w.shape, w.dtype)
    return jax.lax.fori_loop(0, tiles.count, add, start)[1]


def _tile_rows(N: int, E: int) -> int:
    """The power of two from the mean size of a group on; fewer rows repeat reading w, more are padding."""
    mean = min(max(N // E, MIN_ROWS), MAX_ROWS)
    return min(N, 1 << (mean - 1).bit_length())


def _tiles(group_sizes: Int32[Array, " E"], N: int, rows: int) -> Tiles:
    E = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    per_group = -(-group_sizes // rows)
    tiles_until = jnp.cumsum(per_group)
    tile = jnp.arange(-(-N // rows) + min(E, N), dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(tiles_until, tile, side="right"), E - 1).astype(jnp.int32)
    nth_of_group = tile - (tiles_until - per_group)[group]
    begin = (ends - group_sizes)[group] + nth_of_group * rows
    return Tiles(group, begin, jnp.minimum(begin + rows, ends[group]), tiles_until[-1])


def _window(tiles: Tiles, i: Array, N: int, rows: int) -> tuple[Array, Bool[Array, "rows 1"]]:
    """Where to slice `rows` rows that contain tile i, and which of them belong to it."""
    start = jnp.minimum(tiles.begin[i], N - rows)
    row = start + jnp.arange(rows)
    return start, ((row >= tiles.begin[i]) & (row < tiles.end[i]))[:, None]


def _dot(spec: str, x: Array, y: Array) -> Float[Array, "P Q"]:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)
