"""Which rows a TPU kernel works on in each step of its grid: rows sorted by group, cut into tiles of equal size.

A visit is a tile of rows and one group that has rows in it; a tile in which groups meet is visited once for each. There are at
most ceil(N / rows) + E visits, whatever the sizes of the groups are, so the grid is static.

Kernels get the visits as differences from those of equal groups. Nothing but the compiler's estimate depends on that: it takes
prefetched numbers for zero, and so it counts a program for equal groups, with each slice of a matrix fetched and decoded once
per group and with no work in visits that do not exist.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


@dataclass(frozen=True)
class Visits:
    """The visits of N rows in `groups` groups: visit i works on rows begin to end of a tile, with the matrix of a group."""

    N: int
    groups: int
    rows: int  # of a tile

    @property
    def tiles(self) -> int:
        return -(-self.N // self.rows)

    @property
    def steps(self) -> int:
        return self.tiles + self.groups

    def of_tiles(self, group_sizes: Int32[Array, " E"]) -> Int32[Array, " four_steps"]:
        """Every tile is visited, one behind the last group too, with no rows to work on."""
        ends = jnp.append(jnp.cumsum(group_sizes), self.N)
        begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
        last = jnp.max(jnp.where(group_sizes > 0, jnp.arange(self.groups), 0))
        return self._differences(begins, ends, jnp.zeros_like(ends), last)

    def of_groups(self, group_sizes: Int32[Array, " E"]) -> Int32[Array, " four_steps"]:
        """Every group is visited, one without rows too."""
        ends = jnp.cumsum(group_sizes)
        return self._differences(ends - group_sizes, ends, jnp.ones_like(ends), jnp.asarray(self.groups - 1))

    def _differences(self, begins: Array, ends: Array, least: Array, last: Array) -> Array:
        """`least` visits for a group without rows; visits without a group, and those past the end, keep the `last` group's
        matrix, and the latter the last tile too, so that they move nothing."""
        first = jnp.minimum(begins // self.rows, self.tiles - 1)
        count = jnp.where(ends > begins, (ends - 1) // self.rows - first + 1, least)
        until = jnp.cumsum(count)
        step = jnp.arange(self.steps, dtype=jnp.int32)
        i = jnp.minimum(step, until[-1] - 1)
        span = jnp.searchsorted(until, i, side="right", method="compare_all")
        tile = first[span] + i - (until - count)[span]
        works = (step < until[-1]) & (span < self.groups)
        begin = jnp.where(works, jnp.maximum(begins[span] - tile * self.rows, 0), 0)
        end = jnp.where(works, jnp.minimum(ends[span] - tile * self.rows, self.rows), 0)
        found = tile, jnp.minimum(span, last), begin, end
        return jnp.concatenate([a - b for a, b in zip(found, self._expected(step), strict=True)]).astype(jnp.int32)

    def _expected(self, i: Array) -> tuple[Array, ...]:
        """tile, group, begin, end of visit i if groups are equal, up to rows that do not divide."""
        mean = max(self.N // self.groups, 1)
        per_group, per_tile = max(mean // self.rows, 1), max(self.rows // mean, 1)
        tile = jnp.minimum(jax.lax.div(i, jnp.int32(per_tile)), self.tiles - 1)
        group = jnp.minimum(jax.lax.div(i, jnp.int32(per_group)), self.groups - 1)
        exists = i < max(self.groups * per_group, self.tiles)
        return tile, group, jnp.zeros_like(i), jnp.where(exists, self.rows, 0)

    def tile(self, i: Any, differences: Any) -> Any:
        return self._expected(i)[0] + differences[i]

    def group(self, i: Any, differences: Any) -> Any:
        return self._expected(i)[1] + differences[self.steps + i]

    def span(self, i: Any, differences: Any) -> tuple[Any, Any]:
        """begin and end within the tile; both 0 if there are no rows to work on."""
        return differences[2 * self.steps + i], self._expected(i)[3] + differences[3 * self.steps + i]

    def opens_tile(self, i: Any, differences: Any) -> Any:
        """Whether visit i is the first one of its tile."""
        return (i == 0) | (self.tile(i, differences) != self.tile(jnp.maximum(i - 1, 0), differences))

    def opens_group(self, i: Any, differences: Any) -> Any:
        """Whether visit i is the first one of its group."""
        return (i == 0) | (self.group(i, differences) != self.group(jnp.maximum(i - 1, 0), differences))

    def closes_group(self, i: Any, differences: Any) -> Any:
        """Whether visit i is the last one of its group."""
        after = jnp.minimum(i + 1, self.steps - 1)
        return (i == self.steps - 1) | (self.group(i, differences) != self.group(after, differences))
