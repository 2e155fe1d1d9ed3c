"""Generation: a Sampler turns prompts into samples with a few compiled steps, and keeps states to resume from.

    sampler = Sampler(model, tokenizer, capacity=512)
    params = SamplingParams(max_tokens=64, temperature=0.8, n=4, seed=0)
    samples = sampler.generate([prompt_ids], params)[0]  # 4 samples of one prompt, prefilled once
"""

from collections.abc import Sequence

import jax
import numpy as np

from k3jax.model import K3
from k3jax.sampling.drafts import Draft, Prompt, adapter_rows, bucket, drawing
from k3jax.sampling.live import LiveWeights, Look
from k3jax.sampling.params import Sample, SamplingParams, replay
from k3jax.sampling.sessions import Session, SessionStore, row_bytes
from k3jax.sampling.steps import BLOCK, Rows, decode, fork, prefill, start
from k3jax.sampling.text import StopText
from k3jax.tokenizer import Tokenizer

__all__ = ["Sample", "Sampler", "SamplingParams", "Session", "replay"]

# Each size of a batch, a piece of a prompt or a cache is one more program to compile. Sizes of batches and pieces are a
# factor of 4 apart, since compiling costs more than some padding; caches 2, since every decode step reads all of one.
SMALLEST_PIECE = 16  # tokens
SMALLEST_CAPACITY = 128  # tokens


class Sampler:
    """Draws continuations of prompts from a model, many at a time.

    tokenizer      needed for stop strings and texts only
    capacity       most tokens of a prompt and its continuation together; None: the model's context length
    max_batch      most samples in one compiled step, a power of two; more are taken in turn
    prefill_chunk  longer prompts are absorbed in pieces of this many tokens, a power of two
    session_bytes  room for kept states; the least recently used go first
    routes         return the experts chosen for every token (`replay` makes them `picks` for a trainer)
    seed           where the seeds of requests without one come from

    Weights are read from the model at every call: change them there, and kept states that they made are dropped. Batches,
    pieces and caches come in a few sizes, each compiled when first needed; no setting of a request compiles anything,
    except that top logprobs and prompt logprobs do when first asked for.
    """

    def __init__(
        self,
        model: K3,
        tokenizer: Tokenizer | None = None,
        *,
        capacity: int | None = None,
        max_batch: int = 128,
        prefill_chunk: int = 256,
        session_bytes: int = 2**27,
        routes: bool = False,
        seed: int = 0,
    ):
        context = model.config.context_length
        self.capacity = context if capacity is None else capacity
        if not 2 <= self.capacity <= context:
            raise ValueError(f"capacity must lie in 2..{context}, the model's context length, got {capacity}.")
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}.")
        if routes and model.config.moe is None:
            raise ValueError("routes=True needs a model with experts; this one has none.")
        self.model, self.tokenizer, self.routes = model, tokenizer, routes
        self.max_batch, self.prefill_chunk, self.session_bytes = max_batch, prefill_chunk, session_bytes
        self._weights = LiveWeights(model)
        self._seeds = np.random.default_rng(seed)
        self._store: SessionStore | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        adapters: int | Sequence[int] = 0,
        *,
        keep_sessions: bool = False,
    ) -> list[list[Sample]]:
        """`params.n` samples for each prompt of token ids. `params` and `adapters` are one for all or one per prompt.

        A prompt that begins with everything that a kept state has absorbed, under the same adapter, resumes from there:
        tokens and logprobs are those of a cold start up to rounding, and `Sample.cached_tokens` says what was saved.
        keep_sessions  keep the state of every sample as `Sample.session`. Stop strings then cost a call per token.

        Raises ValueError for an empty prompt, ids outside the vocabulary, a prompt that does not fit together with its
        max_tokens, an adapter that the model does not have, and stop strings without a tokenizer.
        """
        look = self._look()
        results: list[list[Draft]] = [
            [Draft(p, i, None if self.tokenizer is None else StopText(self.tokenizer, p.params.stop)) for i in range(p.params.n)]
            for p in self._prompts(prompts, params, adapters)
        ]
        drafts = [draft for row in results for draft in row]
        for first in range(0, len(drafts), self.max_batch):
            self._draw(look, drafts[first : first + self.max_batch], keep_sessions)
        return [[draft.finish() for draft in row] for row in results]

    def generate_text(
        self, prompts: Sequence[str], params: SamplingParams | Sequence[SamplingParams], adapters: int | Sequence[int] = 0
    ) -> list[list[str]]:
        """`generate` from texts to texts. Names of special tokens in a prompt are plain text."""
        if self.tokenizer is None:
            raise ValueError("generate_text needs a tokenizer: Sampler(model, tokenizer).")
        samples = self.generate([self.tokenizer.encode(prompt) for prompt in prompts], params, adapters)
        return [[sample.text or "" for sample in row] for row in samples]

    def prefix(self, ids: Sequence[int], adapter: int = 0, *, logprobs: bool = False) -> Session:
        """Absorbs ids once and keeps the state: prompts that begin with them resume from it, until it is dropped.

        logprobs  also keep the ids' raw logprobs, so that requests for prompt logprobs can resume too
        """
        look = self._look()
        (prompt,) = self._prompts([ids], SamplingParams(max_tokens=1, prompt_logprobs=logprobs), adapter)
        rows = self._prefill(look, [prompt])
        session = prompt.kept(self._weights.version)
        self._sessions(look).put(rows, [session])
        return session

    def flush(self) -> None:
        """Drops every kept state."""
        if self._store is not None:
            self._store.flush()

    def _look(self) -> Look:
        look = self._weights.look()
        if self._store is not None and (look.base_changed or look.adapters_changed):
            self._store.flush(adapters_only=not look.base_changed)
        return look

    def _sessions(self, look: Look) -> SessionStore:
        if self._store is None:
            shapes = jax.eval_shape(lambda state: start(look.graphdef, state, batch=1, capacity=self.capacity), look.state)
            size = row_bytes(shapes)
            if size > self.session_bytes:
                raise ValueError(f"A kept state of capacity={self.capacity} tokens takes {size} bytes, more than "
                                 f"session_bytes={self.session_bytes}. Raise session_bytes or lower capacity.")
            slots = self.session_bytes // size
            self._store = SessionStore(start(look.graphdef, look.state, batch=slots, capacity=self.capacity))
        return self._store

    def _prompts(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], adapters: int | Sequence[int]
    ) -> list[Prompt]:
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        adapters = [adapters] * len(prompts) if isinstance(adapters, int | np.integer) else list(adapters)
        for name, given in (("params", params), ("adapters", adapters)):
            if len(given) != len(prompts):
                raise ValueError(f"{name} must be one for all or one per prompt: got {len(given)} for {len(prompts)} prompts.")
        known = self._weights.adapters
        made = []
        for i, (ids, p, adapter) in enumerate(zip(prompts, params, adapters, strict=True)):
            self._check(f"Prompt {i}", ids, p, int(adapter), known)
            seed = int(self._seeds.integers(2**63)) if p.seed is None else int(p.seed)
            made.append(Prompt(np.asarray(ids, np.int32), p, int(adapter), seed))
        return made

    def _check(self, prompt: str, ids: Sequence[int], params: SamplingParams, adapter: int, known: set[int]) -> None:
        vocabulary = self.model.config.vocab_size
        if len(ids) == 0:
            raise ValueError(f"{prompt} is empty: it needs at least one token, such as the tokenizer's bos_id.")
        for name, values in ((prompt, ids), ("stop_ids", params.stop_ids)):
            wrong = [i for i in values if not 0 <= i < vocabulary]
            if wrong:
                raise ValueError(f"{name}: token id {wrong[0]} is outside the model's vocabulary of {vocabulary} ids.")
        if len(ids) + params.max_tokens > self.capacity:
            raise ValueError(f"{prompt} has {len(ids)} tokens and max_tokens={params.max_tokens}: together more than "
                             f"capacity={self.capacity}. Shorten it, lower max_tokens or raise the Sampler's capacity (at most "
                             f"the model's context length, {self.model.config.context_length}).")
        if adapter and adapter not in known:
            raise ValueError(f"{prompt} wants adapter {adapter}, which the model does not have; it has "
                             f"{sorted(known) or 'none'}. 0 is the base model.")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{prompt} has stop strings, which need a tokenizer: Sampler(model, tokenizer).")

    def _adapter_rows(self, prompts: Sequence[Prompt], batch: int) -> np.ndarray | None:
        return None if self.model.lora_owners is None else adapter_rows(prompts, batch)

    def _prefill(self, look: Look, prompts: list[Prompt]) -> Rows:
        """A row per prompt (and unused ones) that has absorbed all of its ids."""
        batch = bucket(len(prompts), 1, self.max_batch, step=4)
        longest = max(len(p.ids) + p.params.max_tokens for p in prompts)
        capacity = bucket(longest, SMALLEST_CAPACITY, self.capacity, step=2)
        for p in prompts:
            p.begin(None if self._store is None else self._store.find(p.ids, p.adapter, logprobs=p.params.prompt_logprobs))
        sessions = [p.session for p in prompts] + [None] * (batch - len(prompts))
        if self._store is not None and any(sessions):
            rows = self._store.load(sessions, capacity=capacity)
        else:
            rows = start(look.graphdef, look.state, batch=batch, capacity=capacity)
        adapters = self._adapter_rows(prompts, batch)
        logprobs = any(p.params.prompt_logprobs for p in prompts)
        pending = [p.ids[p.cached :] for p in prompts]
        while any(map(len, pending)):
            size = min(max(map(len, pending)), self.prefill_chunk)
            ids = np.zeros((batch, bucket(size, SMALLEST_PIECE, self.prefill_chunk, step=4)), np.int32)
            lengths = np.zeros(batch, np.int32)
            for row, rest in enumerate(pending):
                lengths[row] = min(len(rest), ids.shape[1])
                ids[row, : lengths[row]] = rest[: lengths[row]]
            rows, result = prefill(
                look.graphdef, look.state, rows, ids, lengths, adapters, logprobs=logprobs, routes=self.routes
            )
            result = jax.device_get(result)
            for row, p in enumerate(prompts):
                p.take(row, lengths[row], result)
            pending = [rest[n:] for rest, n in zip(pending, lengths, strict=False)]
        return rows

    def _draw(self, look: Look, drafts: list[Draft], keep_sessions: bool) -> None:
        """Completes the drafts, at most max_batch of them, in one batch."""
        prompts = list({id(d.prompt): d.prompt for d in drafts}.values())
        rows = self._prefill(look, prompts)
        batch = bucket(len(drafts), 1, self.max_batch, step=4)
        row_of = {id(p): row for row, p in enumerate(prompts)}
        source = np.array([row_of[id(d.prompt)] for d in drafts] + [0] * (batch - len(drafts)), np.int32)
        if len(prompts) != len(drafts):
            rows = fork(rows, source)
        settings = drawing(drafts, batch, self._adapter_rows([d.prompt for d in drafts], batch))
        remaining = np.array([d.prompt.params.max_tokens for d in drafts] + [0] * (batch - len(drafts)), np.int32)
        # A state that must not run ahead of its sample is looked at after every token.
        steps = 1 if keep_sessions and any(d.prompt.params.stop for d in drafts) else BLOCK
        top = any(d.prompt.params.top_logprobs for d in drafts)
        lengths = np.asarray(rows.cache.length)
        while remaining.any():
            before = lengths
            rows, remaining, block = decode(
                look.graphdef, look.state, rows, remaining, settings, np.int32(steps), top=top, routes=self.routes
            )
            remaining, block, lengths = jax.device_get((remaining, block, rows.cache.length))
            remaining = remaining.copy()
            for row, draft in enumerate(drafts):
                if block.tokens[0, row] >= 0:
                    draft.take(row, lengths[row] - before[row], block)
                    remaining[row] *= not draft.stopped
        if keep_sessions:
            kept = [d.kept(lengths[row], self._weights.version) for row, d in enumerate(drafts)]
            store = self._sessions(look)
            store.put(rows, [*kept, *[None] * (batch - len(drafts))])
            for draft, session in zip(drafts, kept, strict=True):
                draft.session = session if session in store else None
