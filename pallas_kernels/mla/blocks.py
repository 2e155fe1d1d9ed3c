"""Which blocks of keys the queries of a block may see, as lists of grid steps for the TPU kernels of `attention`.

Where segments and positions are numpy arrays, they are known when the program is traced, and so are the lists.
"""

from types import ModuleType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

PARTLY, NOTHING, FIRST, LAST = 1, 2, 4, 8  # 0: every query sees every key, the usual case


class Steps(NamedTuple):
    """Pairs of blocks in the order in which a kernel visits them, per row of the batch.

    outer, inner  the pair; all pairs of an outer block follow each other, and each outer block has one at least
    flags  0, or a sum of: PARTLY or NOTHING visible, FIRST and LAST of its outer block
    Beyond a row's last pair, it is repeated with NOTHING visible: nothing is loaded and nothing computed.
    """

    outer: Int32[Array, " BN"]
    inner: Int32[Array, " BN"]
    flags: Int32[Array, " BN"]
    count: Int32[Array, ""] | int  # pairs of the row with the most of them; int if known when the program is traced


def module(*arrays: object) -> ModuleType:
    """numpy if all arrays are numpy's, else jax.numpy."""
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


def visible(
    queries: Int32[Array, "B 2 M"], keys: Int32[Array, "B 2 S"], q_size: int, k_size: int
) -> tuple[Bool[Array, "B Q J"], Bool[Array, "B Q J"]]:
    """Per pair of blocks whether some query may see some key, and whether every query surely sees every key.

    Judged by the ranges of segments and positions (row 0 and 1 of `queries` and `keys`) in each block: safe for any order,
    tight for sorted ones.
    """
    xp, big = module(queries, keys), np.iinfo(np.int32).max

    def ranges(places: Array, size: int) -> dict[str, Array]:
        segments, positions = xp.moveaxis(places.reshape(places.shape[0], 2, -1, size), 1, 0)
        real = segments != 0
        low = {"segment": xp.where(real, segments, big), "position": xp.where(real, positions, big)}
        high = {"segment": segments, "position": xp.where(real, positions, -1)}
        return (
            {f"low_{name}": xp.min(x, -1) for name, x in low.items()}
            | {f"high_{name}": xp.max(x, -1) for name, x in high.items()}
            | {"full": xp.all(real, -1)}
        )

    q = {name: x[:, :, None] for name, x in ranges(queries, q_size).items()}
    k = {name: x[:, None] for name, x in ranges(keys, k_size).items()}
    some = (q["low_segment"] <= k["high_segment"]) & (k["low_segment"] <= q["high_segment"])
    some &= k["low_position"] <= q["high_position"]
    every = q["full"] & k["full"] & (k["high_position"] <= q["low_position"])
    every &= (q["low_segment"] == k["high_segment"]) & (k["low_segment"] == q["high_segment"])
    return some, every


def steps(some: Bool[Array, "B Q J"], every: Bool[Array, "B Q J"]) -> Steps:
    """The pairs from each outer block's (axis 1) first to its last inner block (axis 2) of which something is visible."""
    xp = module(some, every)
    B, outer_blocks, inner_blocks = some.shape
    n = outer_blocks * inner_blocks
    first = xp.argmax(some, -1)
    last = xp.where(xp.any(some, -1), inner_blocks - xp.argmax(some[..., ::-1], -1), first + 1)
    end = xp.cumsum(last - first, -1)
    count = end[:, -1]
    step = xp.minimum(xp.arange(n), count[:, None] - 1)
    outer = xp.sum(end[:, None] <= step[..., None], -1)

    def at(x: Array) -> Array:
        return xp.take_along_axis(x, outer, 1)

    inner = at(last) - at(end) + step
    pair = outer * inner_blocks + inner
    flags = xp.where(every, 0, xp.where(some, PARTLY, NOTHING)).reshape(B, n)
    flags = xp.take_along_axis(flags, pair, 1)
    flags += xp.where(inner == at(first), FIRST, 0) + xp.where(inner == at(last) - 1, LAST, 0)
    flags = xp.where(xp.arange(n) < count[:, None], flags, NOTHING)
    outer, inner, flags = (x.astype(xp.int32).reshape(-1) for x in (outer, inner, flags))
    return Steps(outer, inner, flags, int(count.max()) if xp is np else xp.max(count).astype(xp.int32))
