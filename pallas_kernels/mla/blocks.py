"""Which blocks of keys the queries of a block may see, as lists of grid steps for the TPU kernels of `attention`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

PARTLY, WHOLLY, FIRST, LAST = 1, 2, 4, 8


class Steps(NamedTuple):
    """Pairs of blocks in the order in which a kernel visits them, per row of the batch.

    outer, inner  the pair; all pairs of an outer block follow each other, and each outer block has one at least
    flags  PARTLY or WHOLLY visible (neither: nothing to compute), FIRST and LAST of its outer block
    Beyond a row's last pair, it is repeated with flags 0: nothing is loaded and nothing computed.
    """

    outer: Int32[Array, " BN"]
    inner: Int32[Array, " BN"]
    flags: Int32[Array, " BN"]
    count: Int32[Array, ""] | int  # of the row with the most; int if places are known when the program is traced


def visible(
    queries: Int32[Array, "B 2 M"], keys: Int32[Array, "B 2 S"], q_size: int, k_size: int
) -> tuple[Bool[Array, "B Q J"], Bool[Array, "B Q J"]]:
    """Per pair of blocks whether some query may see some key, and whether every query surely sees every key.

    Judged by the ranges of segments and positions (row 0 and 1 of `queries` and `keys`) in each block: safe for any order,
    tight for sorted ones.
    """
    big = jnp.iinfo(jnp.int32).max

    def ranges(places: Array, size: int) -> dict[str, Array]:
        segments, positions = jnp.moveaxis(places.reshape(places.shape[0], 2, -1, size), 1, 0)
        real = segments != 0
        low = {"segment": jnp.where(real, segments, big), "position": jnp.where(real, positions, big)}
        high = {"segment": segments, "position": jnp.where(real, positions, -1)}
        return (
            {f"low_{name}": jnp.min(x, -1) for name, x in low.items()}
            | {f"high_{name}": jnp.max(x, -1) for name, x in high.items()}
            | {"full": jnp.all(real, -1)}
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
    B, outer_blocks, inner_blocks = some.shape
    n = outer_blocks * inner_blocks
    first = jnp.argmax(some, -1)
    last = jnp.where(jnp.any(some, -1), inner_blocks - jnp.argmax(some[..., ::-1], -1), first + 1)
    end = jnp.cumsum(last - first, -1)
    count = end[:, -1]
    step = jnp.minimum(jnp.arange(n), count[:, None] - 1)
    outer = jnp.sum(end[:, None] <= step[..., None], -1)

    def at(x: Array) -> Array:
        return jnp.take_along_axis(x, outer, 1)

    inner = at(last) - at(end) + step
    pair = outer * inner_blocks + inner
    flags = jnp.where(every, WHOLLY, jnp.where(some, PARTLY, 0)).reshape(B, n)
    flags = jnp.take_along_axis(flags, pair, 1)
    flags += jnp.where(inner == at(first), FIRST, 0) + jnp.where(inner == at(last) - 1, LAST, 0)
    flags = jnp.where(jnp.arange(n) < count[:, None], flags, 0)
    lists = (x.astype(jnp.int32).reshape(-1) for x in (outer, inner, flags))
    most: Any = jnp.max(count).astype(jnp.int32)
    return Steps(*lists, most if isinstance(most, jax.core.Tracer) else int(most))
