"""Rows of tokens laid on the grid of chunks, which begins at multiples of the chunk size of a sequence's positions."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped


def on_grid(
    tokens: Sequence[Shaped[Array, "B T ..."]], start: Int32[Array, " B"] | None, C: int
) -> tuple[list[Shaped[Array, "B T2 ..."]], Callable[[Shaped[Array, "B T2 ..."]], Shaped[Array, "B T ..."]]]:
    """The tokens with zeros (inert tokens) before and after, so that chunks of C begin at multiples of C of each row's positions;
    and the way back for an output of them."""
    T = tokens[0].shape[1]
    if start is None:
        return [_pad(x, 0, -T % C) for x in tokens], lambda o: o[:, :T]
    length = T + C - 1 + (1 - T) % C
    skip = start % C
    cut_row = jax.vmap(lax.dynamic_slice_in_dim, (0, 0, None))
    return [cut_row(_pad(x, C, length - T), C - skip, length) for x in tokens], lambda o: cut_row(o, skip, T)


def _pad(x: Shaped[Array, "B T ..."], before: int, after: int) -> Shaped[Array, "B T2 ..."]:
    return jnp.pad(x, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))
