"""Splits sorted rows into blocks of one group each, so that a scan multiplies only what is there.

Every group is padded to whole blocks. That takes at most N / rows + E blocks, a static number; blocks past the last
one in use are skipped at run time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Blocks(NamedTuple):
    rows: Int[Array, "G R"]  # row of x for each place of a block
    real: Bool[Array, "G R"]  # False: padding of the block
    group: Int[Array, "G"]
    used: Int[Array, ""]  # blocks that hold any row
    place: Int[Array, "N"]  # block * R + place of each row of x
    inside: Bool[Array, "N"]  # False: past the last group


def block_rows(n: int, groups: int) -> int:
    """Rows per block: about the mean group, a power of two in 8..128."""
    rows = 8
    while rows < 128 and rows * groups < n:
        rows *= 2
    return rows


def split(group_sizes: Int[Array, "E"], n: int, rows: int) -> Blocks:
    E = group_sizes.shape[0]
    blocks = -(-n // rows) + min(E, n)
    per_group = -(-group_sizes // rows)
    first_row = jnp.cumsum(group_sizes) - group_sizes
    last_block = jnp.cumsum(per_group)
    first_block = last_block - per_group
    b = jnp.arange(blocks)
    group = jnp.minimum(jnp.searchsorted(last_block, b, side="right"), E - 1).astype(jnp.int32)
    offset = ((b - first_block[group]) * rows)[:, None] + jnp.arange(rows)
    real = (offset < group_sizes[group][:, None]) & (b < last_block[-1])[:, None]
    row = jnp.clip(first_row[group][:, None] + offset, 0, n - 1)
    r = jnp.arange(n)
    of_row = jnp.minimum(jnp.searchsorted(first_row + group_sizes, r, side="right"), E - 1)
    place = first_block[of_row] * rows + r - first_row[of_row]
    inside = r < group_sizes.sum()
    return Blocks(row, real, group, last_block[-1], jnp.where(inside, place, 0), inside)
