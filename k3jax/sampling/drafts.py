"""Prompts and samples under way, on the host: what goes into the compiled steps and what has come out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3jax.sampling.distribution import Shape
from k3jax.sampling.params import Routes, Sample, SamplingParams
from k3jax.sampling.sessions import Session
from k3jax.sampling.steps import Block, Drawing, Prefilled
from k3jax.sampling.text import StopText

SMALLEST_STOP_IDS = 8


@dataclass
class Prompt:
    """A prompt, what it asks for, and what is known of the tokens that were absorbed."""

    ids: np.ndarray  # int32
    params: SamplingParams
    adapter: int
    seed: int
    version: int  # of the weights that its adapter runs on
    session: Session | None = None  # what it resumes from
    branch: int = 0  # tokens after which its state is kept on the way; 0: nowhere
    routes: list[Routes] = field(default_factory=list)  # in pieces
    _logprobs: list[np.ndarray] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens that need not be computed."""
        return 0 if self.session is None else self.session.tokens

    def begin(self, session: Session | None, branch: int = 0) -> None:
        """Starts over, after what the session has absorbed."""
        self.session, self.branch = session, branch
        self._logprobs = [] if session is None or session.logprobs is None else [session.logprobs]
        self.routes = [] if session is None or session.routes is None else [session.routes]

    def take(self, row: int, count: int, result: Prefilled) -> None:
        """Adds what the step found for this prompt's next `count` ids. Arrays are on the host."""
        if result.logprobs is not None:
            self._logprobs.append(np.asarray(result.logprobs[row, :count]))
        if result.routes is not None:
            self.routes.append(tuple(None if r is None else np.asarray(r[:, row, :count]) for r in result.routes))

    def next_stop(self, absorbed: int) -> int:
        """Where its state is next of interest: after `branch` tokens, then after all."""
        return self.branch if absorbed < self.branch else len(self.ids)

    @property
    def logprobs(self) -> np.ndarray | None:
        """Raw, of ids[1:]; None unless computed for all of them."""
        return self._logprobs_of(len(self.ids))

    def _logprobs_of(self, absorbed: int) -> np.ndarray | None:
        known = np.concatenate(self._logprobs) if self._logprobs else np.zeros(0, np.float32)
        if self.session is None:
            known = known[1:]  # nothing comes before the first id
        return known if len(known) == absorbed - 1 else None

    def kept(self, absorbed: int) -> Session:
        """The session of its state, which has absorbed that many of its ids."""
        return Session(ids=self.ids[:absorbed], adapter=self.adapter, version=self.version,
                       logprobs=self._logprobs_of(absorbed), routes=_join(self.routes))  # fmt: skip


@dataclass
class Draft:
    """Sample `number` of a prompt, as far as it is drawn."""

    prompt: Prompt
    number: int
    text: StopText | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    session: Session | None = None
    _routes: list[Routes] = field(default_factory=list)

    @property
    def stopped(self) -> bool:
        """Whether its last id is a stop id or completes a stop string."""
        by_text = self.text is not None and self.text.stopped
        return by_text or (bool(self.ids) and self.ids[-1] in self.prompt.params.stop_ids)

    def take(self, row: int, absorbed: int, block: Block) -> None:
        """Adds what a block drew for this sample, up to a stop string. Arrays are on the host."""
        tokens = block.tokens[:, row]
        ids = tokens[tokens >= 0].tolist()
        if self.text is not None:
            visible = ids[:-1] if ids and ids[-1] in self.prompt.params.stop_ids else ids
            ids = ids[: self.text.feed(visible)]
        n = len(ids)
        self.ids += ids
        self.logprobs += block.logprobs[:n, row].tolist()
        self.raw_logprobs += block.raw_logprobs[:n, row].tolist()
        if not np.isfinite(block.raw_logprobs[:n, row]).all():
            raise FloatingPointError(f"The model's logits are not finite within {len(self.prompt.ids) + len(self.ids)} tokens. "
                                     f"Check its weights and those of adapter {self.prompt.adapter}.")
        if block.top is not None and (k := self.prompt.params.top_logprobs):
            values, best = (a[:n, row, :k].tolist() for a in block.top)
            self.top += [list(zip(*pair, strict=True)) for pair in zip(best, values, strict=True)]
        if block.routes is not None:
            mine = (None if r is None else np.asarray(r[:absorbed, :, row]).swapaxes(0, 1) for r in block.routes)
            self._routes.append(tuple(mine))

    def kept(self, absorbed: int) -> Session:
        """The session of its state, which has absorbed that many tokens."""
        ids = np.concatenate([self.prompt.ids, np.asarray(self.ids, np.int32)])
        assert absorbed <= len(ids), "the state is ahead of the sample"
        known = self.prompt.logprobs
        if known is not None:
            known = np.concatenate([known, np.asarray(self.raw_logprobs, np.float32)])[: absorbed - 1]
        return Session(ids=ids[:absorbed], adapter=self.prompt.adapter, version=self.prompt.version, logprobs=known,
                       routes=self.routes)  # fmt: skip

    @property
    def routes(self) -> Routes | None:
        """Experts of the tokens absorbed so far, prompt included; None unless asked for."""
        routes = _join([*self.prompt.routes, *self._routes])
        end = len(self.prompt.ids) + len(self.ids)
        return None if routes is None else tuple(None if r is None else r[:, :end] for r in routes)

    def finish(self) -> Sample:
        """What the caller gets."""
        params, prompt_logprobs = self.prompt.params, self.prompt.logprobs
        return Sample(
            ids=self.ids, text=None if self.text is None else self.text.finish(),
            logprobs=self.logprobs, raw_logprobs=self.raw_logprobs, finish_reason="stop" if self.stopped else "length",
            prompt_tokens=len(self.prompt.ids), cached_tokens=self.prompt.cached, session=self.session,
            top_logprobs=self.top if params.top_logprobs else None,
            prompt_logprobs=prompt_logprobs.tolist() if params.prompt_logprobs and prompt_logprobs is not None else None,
            routes=self.routes,
        )


def bucket(size: int, smallest: int, largest: int, step: int) -> int:
    """The least of largest, largest / step, largest / step^2, ... that holds `size` and is not under `smallest`."""
    assert size <= largest
    result = largest
    while result // step >= max(size, smallest):
        result //= step
    return result


def adapter_rows(prompts: Sequence[Prompt], batch: int) -> Any:
    """Adapter of each row, int32; rows past the prompts have none."""
    return np.array([p.adapter for p in prompts] + [0] * (batch - len(prompts)), np.int32)


def drawing(drafts: Sequence[Draft], batch: int, adapters: Any) -> Drawing:
    """The drafts' settings as arrays; rows past them draw nothing."""
    params = [d.prompt.params for d in drafts]

    def rows(values: Sequence[float], filler: float, dtype: type) -> Any:
        return np.array([*values, *[filler] * (batch - len(values))], dtype)

    shape = Shape(
        rows([p.temperature for p in params], 1, np.float32), rows([p.top_k for p in params], 0, np.int32),
        rows([p.top_p for p in params], 1, np.float32), rows([p.min_p for p in params], 0, np.float32),
    )
    seeds = rows([d.prompt.seed for d in drafts], 0, np.uint64)
    halves: Any = np.stack([seeds >> np.uint64(32), seeds & np.uint64(2**32 - 1)], 1).astype(np.uint32)
    most = max(len(p.stop_ids) for p in params)
    stop_ids: Any = np.full((batch, max(SMALLEST_STOP_IDS, 1 << (most - 1).bit_length() if most else 0)), -1, np.int32)
    for row, p in enumerate(params):
        stop_ids[row, : len(p.stop_ids)] = p.stop_ids
    return Drawing(shape, halves, rows([d.number for d in drafts], 0, np.int32), stop_ids, adapters)


def _join(pieces: Sequence[Routes]) -> Routes | None:
    if not pieces:
        return None
    return tuple(
        None if stack[0] is None else np.concatenate([piece for piece in stack if piece is not None], 1)
        for stack in zip(*pieces, strict=True)
    )
