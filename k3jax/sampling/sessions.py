"""States kept between requests, found again by the tokens that they have absorbed."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from k3jax.sampling.params import Routes
from k3jax.sampling.steps import Rows, load, save


@dataclass(frozen=True, kw_only=True)
class Session:
    """A state that the Sampler keeps: that after exactly these ids, under one adapter and one version of the weights.

    KDA's state exists at its end only, so it serves prompts that begin with all of its ids, no others.
    """

    ids: np.ndarray = field(repr=False)  # int32
    adapter: int  # 0: none
    version: int  # of the weights that made it
    logprobs: np.ndarray | None = field(default=None, repr=False)  # raw, of ids[1:]; None: not all known
    routes: Routes | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def key(self) -> tuple[int, bytes]:
        return self.adapter, self.ids.tobytes()


class SessionStore:
    """Slots for states; the least recently used session makes room. A slot is written by `put` alone.

    rows  the slots: empty sequences, at the largest capacity
    """

    def __init__(self, rows: Rows):
        self.slots = rows.hidden.shape[0]
        self._rows = rows
        self._entries: OrderedDict[tuple[int, bytes], tuple[int, Session]] = OrderedDict()
        self._free = list(range(self.slots))[::-1]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, session: Session) -> bool:
        entry = self._entries.get(session.key)
        return entry is not None and entry[1].version == session.version

    def find(self, ids: np.ndarray, adapter: int, logprobs: bool) -> Session | None:
        """The longest session that ids (int32) begin with, under the adapter; with `logprobs`, one that knows its own."""
        content = ids.tobytes()
        lengths = sorted({s.tokens for _, s in self._entries.values() if s.adapter == adapter and s.tokens <= len(ids)})
        for length in reversed(lengths):
            entry = self._entries.get((adapter, content[: length * ids.itemsize]))
            if entry is not None and (entry[1].logprobs is not None or not logprobs):
                self._entries.move_to_end(entry[1].key)
                return entry[1]
        return None

    def load(self, sessions: Sequence[Session | None], *, capacity: int) -> Rows:
        """Copies of the sessions' states, one a row; an empty sequence for None."""
        slots = [self.slots if s is None else self._entries[s.key][0] for s in sessions]
        return load(self._rows, np.array(slots, np.int32), capacity=capacity)

    def put(self, rows: Rows, sessions: Sequence[Session | None]) -> None:
        """Keeps the rows that have a session; there may be more rows. If they outnumber the slots, the last ones stay."""
        slot_of_row = [self.slots] * rows.hidden.shape[0]
        for row, session in enumerate(sessions):
            if session is None:
                continue
            if session.key in self._entries:  # its state is there already
                slot, known = self._entries.pop(session.key)
                self._entries[session.key] = slot, known if session.logprobs is None else session
                continue
            if not self._free:
                _, (slot, _) = self._entries.popitem(last=False)
                self._free.append(slot)
                slot_of_row = [self.slots if s == slot else s for s in slot_of_row]
            slot_of_row[row] = self._free.pop()
            self._entries[session.key] = slot_of_row[row], session
        self._rows = save(self._rows, rows, np.array(slot_of_row, np.int32))

    def drop(self, session: Session) -> None:
        entry = self._entries.pop(session.key, None)
        if entry is not None:
            self._free.append(entry[0])

    def flush(self, *, adapters_only: bool = False) -> None:
        """Forgets everything, or what was made under an adapter."""
        for _, session in list(self._entries.values()):
            if session.adapter or not adapters_only:
                self.drop(session)


def row_bytes(rows: Rows) -> int:
    """Bytes of one row of (possibly abstract) rows."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(rows)) // rows.hidden.shape[0]
