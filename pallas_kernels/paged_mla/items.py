"""Blocks of latents in the order in which the TPU kernel of `paged_latent_attention` reads them, as lists of grid steps.

Where lengths are a numpy array, they are known when the program is traced, and so are the lists.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32


class Items(NamedTuple):
    """One block of tokens of one sequence per item, in equal shares for the cores that read at the same time.

    sequence  whose block it is; every sequence has one block at least
    block     which one of the sequence
    short     by how many tokens the block ends before all T queries see all of it: 0, the usual case, if nothing is to be
              masked; block + T - 1 if nothing is to be read. Behind the end of a share, its last item stands with that.
    visited   sequences of which a share has an item
    count     items of a share; int if known when the program is traced
    """

    sequence: Int32[Array, " CN"]
    block: Int32[Array, " CN"]
    short: Int32[Array, " CN"]
    visited: Bool[Array, "C B"]
    count: Int32[Array, ""] | int


def items(lengths: Int32[Array, " B"], *, queries: int, block: int, capacity: int, cores: int) -> Items:
    """Items of sequences of at most `capacity` tokens, in `cores` shares."""
    xp: Any = np if isinstance(lengths, np.ndarray) else jnp
    B = lengths.shape[0]
    n = -(-B * max(1, -(-capacity // block)) // cores)
    blocks = xp.maximum(1, -(-lengths // block))
    end = xp.cumsum(blocks)
    total = end[-1]
    count = -(-total // cores)
    place = xp.arange(cores)[:, None] * count + xp.minimum(xp.arange(n), count - 1)
    item = xp.minimum(place, total - 1)
    sequence = xp.searchsorted(end, item.reshape(-1), side="right").reshape(item.shape)
    block_of = item - (end - blocks)[sequence]
    short = xp.maximum(0, block + queries - 1 - xp.maximum(0, lengths[sequence] - block_of * block))
    real = (xp.arange(n) < count) & (place < total)
    short = xp.where(real, short, block + queries - 1)
    of_share = xp.arange(B)
    visited = (of_share >= sequence[:, :1]) & (of_share <= sequence[:, -1:])
    sequence, block_of, short = (x.astype(xp.int32).reshape(-1) for x in (sequence, block_of, short))
    return Items(sequence, block_of, short, visited, int(count) if xp is np else count.astype(xp.int32))
