"""Which rows a TPU kernel works on in each step of its grid: rows sorted by group, cut into tiles of equal size.

A visit is a tile of rows and one group that has rows in it; a tile in which groups meet is visited once for each. There are at
most ceil(N / rows) + min(E, N) visits, whatever the sizes of the groups are, so the grid is static.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Visits(NamedTuple):
    """Visit i works on the rows begin[i] to end[i] (none if they are equal) of tile[i], with the matrix of group[i].

    Visits past the last one repeat its tile and its group, so that they move nothing.
    """

    tile: Int32[Array, " n"]
    group: Int32[Array, " n"]
    begin: Int32[Array, " n"]
    end: Int32[Array, " n"]


def of_tiles(group_sizes: Int32[Array, " E"], N: int, rows: int) -> Visits:
    """Every tile is visited: rows after the last group form one more group, which no visit works on."""
    ends = jnp.append(jnp.cumsum(group_sizes), N)
    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    return _visits(begins, ends, jnp.where(ends > begins, 1, 0), N, rows, groups=group_sizes.shape[0])


def of_groups(group_sizes: Int32[Array, " E"], N: int, rows: int) -> Visits:
    """Every group is visited, one without rows too."""
    ends = jnp.cumsum(group_sizes)
    return _visits(ends - group_sizes, ends, jnp.ones_like(ends), N, rows, groups=group_sizes.shape[0])


def _visits(begins: Array, ends: Array, least: Array, N: int, rows: int, *, groups: int) -> Visits:
    tiles = -(-N // rows)
    first = jnp.minimum(begins // rows, tiles - 1)
    count = jnp.where(ends > begins, (ends - 1) // rows - first + 1, least)
    until = jnp.cumsum(count)
    i = jnp.minimum(jnp.arange(tiles + groups, dtype=jnp.int32), until[-1] - 1)
    span = jnp.searchsorted(until, i, side="right")
    tile = first[span] + i - (until - count)[span]
    real = (jnp.arange(i.size) < until[-1]) & (span < groups)
    begin = jnp.where(real, jnp.maximum(begins[span], tile * rows), 0)
    end = jnp.where(real, jnp.minimum(ends[span], (tile + 1) * rows), 0)
    # A visit without a matrix keeps the one that is there.
    last = jnp.max(jnp.where(ends[:groups] > begins[:groups], jnp.arange(groups), 0)) if ends.size > groups else groups - 1
    group = jnp.minimum(span, last)
    return Visits(*(t.astype(jnp.int32) for t in (tile, group, begin, end)))
