"""States kept between requests, found again by the tokens that they have absorbed."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from k3jax.cache import bytes_per_sequence
from k3jax.config import K3Config
from k3jax.sampling.params import Routes
from k3jax.sampling.steps import Rows, extract, insert

Key = tuple[int, int, bytes]


@dataclass(frozen=True, kw_only=True, eq=False)
class Session:
    """A state that the Sampler keeps: that after exactly these ids, under one adapter and one version of the weights.

    KDA's state exists at its end only, so it serves prompts that begin with all of its ids, no others.
    """

    ids: np.ndarray = field(repr=False)  # int32
    adapter: int  # 0: none
    version: int  # of the weights that made it (LiveWeights.version)
    logprobs: np.ndarray | None = field(default=None, repr=False)  # raw, of ids[1:]; None: not all known
    routes: Routes | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """How many tokens it has absorbed."""
        return len(self.ids)

    @cached_property
    def key(self) -> Key:
        """What identifies it. Keys under one adapter and version sort like their ids."""
        return _key(self.ids, self.adapter, self.version)


class Kept(NamedTuple):
    """A session and its state."""

    session: Session
    row: Rows  # batch 1
    bytes: int


class SessionStore:
    """States of sessions, each no larger than its tokens need; the least recently used make room. Allocates nothing in
    advance, and a kept state is never written again.

    limit  bytes that the states take together, at most
    """

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self._kept: OrderedDict[Key, Kept] = OrderedDict()  # by last use
        self._keys: list[Key] = []  # sorted: ids that share a beginning are neighbours

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Session]:
        return (kept.session for kept in self._kept.values())

    def __contains__(self, session: Session) -> bool:
        return session.key in self._kept

    def find(self, ids: np.ndarray, adapter: int, version: int, logprobs: bool) -> Session | None:
        """The longest session that ids (int32) begin with, under this adapter and version; with `logprobs`, one that knows
        its own. Counts as its use."""
        end = len(ids)
        while end:
            near = self._neighbours(ids[:end], adapter, version)[0]
            if near is None:
                return None
            # Whatever ids begin with sorts before them, and none that is longer than `shared` lies between them and `near`.
            shared = common(near.ids, ids[:end])
            if shared == near.tokens and (near.logprobs is not None or not logprobs):
                self._kept.move_to_end(near.key)
                return near
            end = min(shared, near.tokens - 1)
        return None

    def shared(self, ids: np.ndarray, adapter: int, version: int) -> int:
        """Tokens of the longest beginning that ids share with any session under this adapter and version."""
        near = self._neighbours(ids, adapter, version)
        return max((common(session.ids, ids) for session in near if session is not None), default=0)

    def load(self, session: Session, rows: Rows, row: int) -> Rows:
        """The rows, which are donated, with a copy of the session's state in one of them."""
        return insert(rows, self._kept[session.key].row, np.int32(row))

    def put(self, session: Session, rows: Rows, row: int, *, capacity: int, size: int) -> None:
        """Keeps a copy of a row: `capacity` tokens of its latents, `size` bytes in all. A state that is there already gains
        what the session knows of its logprobs; one larger than the limit is not kept."""
        known = self._kept.pop(session.key, None)
        if known is not None:
            better = known.session if session.logprobs is None else session
            self._kept[session.key] = known._replace(session=better)
            return
        if size > self.limit:
            return
        while self.used + size > self.limit:
            self.drop(next(iter(self)))
        self._kept[session.key] = Kept(session, extract(rows, np.int32(row), capacity=capacity), size)
        insort(self._keys, session.key)
        self.used += size

    def drop(self, session: Session) -> None:
        """Forgets a session that is kept."""
        self.used -= self._kept.pop(session.key).bytes
        del self._keys[bisect_left(self._keys, session.key)]

    def keep_only(self, wanted: Callable[[Session], bool]) -> None:
        """Forgets all others."""
        for session in [s for s in self if not wanted(s)]:
            self.drop(session)

    def _neighbours(self, ids: np.ndarray, adapter: int, version: int) -> tuple[Session | None, Session | None]:
        """The sessions whose ids come last up to these and first after them, in order of the ids."""
        at = bisect_right(self._keys, _key(ids, adapter, version))

        def session(index: int) -> Session | None:
            if 0 <= index < len(self._keys) and self._keys[index][:2] == (adapter, version):
                return self._kept[self._keys[index]].session
            return None

        return session(at - 1), session(at)


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest beginning that two arrays of ids share."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def state_bytes(config: K3Config, capacity: int) -> int:
    """Bytes of one copy of a sequence's state with room for `capacity` tokens: `Rows` of batch 1. Devices of a mesh that
    replicate it hold one copy each."""
    fixed, per_token = bytes_per_sequence(config)
    length = jnp.dtype(jnp.int32).itemsize
    return fixed + per_token * capacity + config.hidden_size * jnp.dtype(config.dtype).itemsize + length


def _key(ids: np.ndarray, adapter: int, version: int) -> Key:
    return adapter, version, ids.astype(">u4").tobytes()  # big-endian: sorts like the ids
