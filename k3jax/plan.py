"""Groups the layers of a model so that each distinct layer body is compiled once, however deep the model is."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Run:
    """`count` equal layers in a row, scanned."""

    kind: Any
    count: int


@dataclass(frozen=True)
class Segment:
    """`repeats` copies of a sequence of runs, scanned. Layers are numbered from `first`."""

    first: int
    repeats: int
    runs: tuple[Run, ...]

    @property
    def period(self) -> int:
        return sum(run.count for run in self.runs)

    def layers(self, run: int) -> tuple[int, ...]:
        """Layer numbers of one run over all repeats, in the order in which their weights are stacked."""
        offset = self.first + sum(r.count for r in self.runs[:run])
        return tuple(offset + g * self.period + j for g in range(self.repeats) for j in range(self.runs[run].count))


def plan(kinds: Sequence[Hashable]) -> tuple[Segment, ...]:
    """Splits layers into head, a repeated group and tail with the fewest layer bodies; no head or tail if empty.

    Kimi K3 (dense layer 0, MLA at every fourth layer and at the last) becomes [K' KK], 22 x [M KKK], [MM]: 5 bodies.
    """
    best, best_cost = _segments(kinds, 0, len(kinds), 1), _bodies(kinds)
    for period in range(1, len(kinds) // 2 + 1):
        for first in range(len(kinds) - 2 * period + 1):
            repeats = 1
            while _same(kinds, first, first + repeats * period, period):
                repeats += 1
            last = first + repeats * period
            cost = _bodies(kinds[:first]) + _bodies(kinds[first : first + period]) + _bodies(kinds[last:])
            if repeats > 1 and cost < best_cost:
                best, best_cost = _segments(kinds, first, period, repeats), cost
    return best


def _same(kinds: Sequence[Hashable], a: int, b: int, n: int) -> bool:
    return list(kinds[a : a + n]) == list(kinds[b : b + n])


def _bodies(kinds: Sequence[Hashable]) -> int:
    return sum(1 for _ in groupby(kinds))


def _segments(kinds: Sequence[Hashable], first: int, period: int, repeats: int) -> tuple[Segment, ...]:
    last = first + period * repeats
    parts = ((0, first, 1), (first, first + period, repeats), (last, len(kinds), 1))
    return tuple(
        Segment(start, n, tuple(Run(kind, len(list(same))) for kind, same in groupby(kinds[start:stop])))
        for start, stop, n in parts
        if stop > start
    )
