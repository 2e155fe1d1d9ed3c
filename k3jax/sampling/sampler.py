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
from k3jax.sampling.requests import check_fits, per_prompt, whole_ids
from k3jax.sampling.sessions import Session, SessionStore, state_bytes
from k3jax.sampling.steps import BLOCK, Rows, decode, fork, prefill, start
from k3jax.sampling.text import StopText
from k3jax.tokenizer import Tokenizer

__all__ = ["Sample", "Sampler", "SamplingParams", "Session", "replay"]

# Each size of a batch, a piece of a prompt or a cache is one more program to compile. Sizes of batches and pieces are a
# factor of 4 apart, since compiling costs more than some padding; caches 2, since every decode step reads all of one.
SMALLEST_PIECE = 16  # tokens
SMALLEST_CAPACITY = 128  # tokens
DEFAULT_SESSIONS = 8  # states of full capacity
SMALLEST_DEFAULT = 2**27  # bytes


class Sampler:
    """Draws continuations of prompts from a model, many at a time.

    tokenizer      needed for stop strings and texts only
    capacity       most tokens of a prompt and its continuation together; None: the model's context length
    max_batch      most samples in one compiled step, a power of two; more are taken in turn
    prefill_chunk  longer prompts are absorbed in pieces of this many tokens, a power of two
    session_bytes  most bytes of kept states, which take memory as they come; the least recently used go first. A state
                   takes `state_bytes(config, tokens)`, its tokens rounded up to the next size of a cache; for K3 449 MB
                   and 27.6 kB a token. None: 8 states of full capacity, and at least 2^27 bytes; for K3 that is 4.5 GB
                   with capacity=4096 and 236 GB with its whole context, so say there what the machine can spare.
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
        session_bytes: int | None = None,
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
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        if session_bytes is None:
            session_bytes = max(SMALLEST_DEFAULT, DEFAULT_SESSIONS * state_bytes(model.config, self.capacity))
        self.session_bytes = session_bytes
        self._weights = LiveWeights(model)
        self._seeds = np.random.default_rng(seed)
        self._store = SessionStore(session_bytes)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        adapters: int | Sequence[int] = 0,
        *,
        keep_sessions: bool = False,
    ) -> list[list[Sample]]:
        """`params.n` samples for each prompt of token ids. `params` and `adapters` are one for all or one per prompt.

        A prompt that begins with everything that a kept state has absorbed, under the same adapter and weights, resumes
        from there: tokens and logprobs are those of a cold start up to rounding, and `Sample.cached_tokens` says what was
        saved.

        keep_sessions  keep states: after every prompt, so that the same prompt is not computed again; after every sample,
                       as `Sample.session`, so that a next turn resumes; and where a prompt leaves what is known of earlier
                       ones, if that is 16 tokens or more past what it resumes from. KDA's state cannot be cut back, so of
                       prompts with one beginning and different ends the first two compute it, and all later ones resume.
                       Stop strings then cost a call per token.

        Raises TypeError for what is no list of token ids, parameters or adapter ids, and ValueError for an empty prompt, ids
        outside the vocabulary, a prompt that does not fit together with its max_tokens, an adapter that the model does not
        have, stop strings without a tokenizer, and states to be kept that are larger than session_bytes.
        """
        look = self._look()
        made = self._prompts(prompts, params, adapters)
        if keep_sessions:
            self._require_room(max((len(p.ids) + p.params.max_tokens for p in made), default=1))
        results: list[list[Draft]] = [
            [Draft(p, i, None if self.tokenizer is None else StopText(self.tokenizer, p.params.stop)) for i in range(p.params.n)]
            for p in made
        ]
        drafts = [draft for row in results for draft in row]
        for first in range(0, len(drafts), self.max_batch):
            self._draw(look, drafts[first : first + self.max_batch], keep_sessions)
        return [[draft.finish() for draft in row] for row in results]

    def generate_text(
        self, prompts: Sequence[str], params: SamplingParams | Sequence[SamplingParams], adapters: int | Sequence[int] = 0
    ) -> list[list[str]]:
        """`generate` from texts to texts. Names of special tokens in a prompt are plain text.

        Raises what `generate` raises, ValueError without a tokenizer and TypeError for one text in place of a list.
        """
        if self.tokenizer is None:
            raise ValueError("generate_text needs a tokenizer: Sampler(model, tokenizer).")
        if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
            raise TypeError(f"generate_text needs a list of texts, got {prompts!r}. One prompt is a list of one: [\"hello\"].")
        samples = self.generate([self.tokenizer.encode(prompt) for prompt in prompts], params, adapters)
        return [[sample.text or "" for sample in row] for row in samples]

    def prefix(self, ids: Sequence[int], adapter: int = 0, *, logprobs: bool = False) -> Session:
        """Absorbs ids once and keeps the state: prompts that begin with them resume from it, until it is dropped.

        logprobs  also keep the ids' raw logprobs, so that requests for prompt logprobs can resume too

        Raises what `generate` raises.
        """
        look = self._look()
        (prompt,) = self._prompts([ids], SamplingParams(max_tokens=1, prompt_logprobs=logprobs), adapter)
        self._require_room(len(prompt.ids))
        rows = self._prefill(look, [prompt], keep=False)
        session = prompt.kept(len(prompt.ids))
        self._keep(session, rows, 0)
        return session

    def flush(self) -> None:
        """Drops every kept state."""
        self._store.keep_only(lambda session: False)

    def _look(self) -> Look:
        look = self._weights.look()
        self._store.keep_only(lambda session: session.version == self._weights.version(session.adapter))
        return look

    def _capacity(self, tokens: int) -> int:
        """The size of the cache for that many tokens."""
        return bucket(tokens, SMALLEST_CAPACITY, self.capacity, step=2)

    def _keep(self, session: Session, rows: Rows, row: int) -> None:
        capacity = self._capacity(session.tokens)
        self._store.put(session, rows, row, capacity=capacity, size=state_bytes(self.model.config, capacity))

    def _require_room(self, tokens: int) -> None:
        size = state_bytes(self.model.config, self._capacity(tokens))
        if size > self.session_bytes:
            raise ValueError(f"A kept state of {tokens} tokens takes {size} bytes, more than session_bytes={self.session_bytes}. "
                             f"Raise session_bytes or keep shorter prompts.")

    def _prompts(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], adapters: int | Sequence[int]
    ) -> list[Prompt]:
        rows = whole_ids(prompts)
        every = per_prompt("params", params, SamplingParams, len(rows))
        adapter_ids = per_prompt("adapters", adapters, int, len(rows))
        known = self._weights.adapters
        made = []
        for i, (ids, p, adapter) in enumerate(zip(rows, every, adapter_ids, strict=True)):
            check_fits(f"Prompt {i}", ids, p, self.model.config, self.capacity)
            if adapter and adapter not in known:
                raise ValueError(f"Prompt {i} wants adapter {adapter}, which the model does not have; it has "
                                 f"{sorted(known) or 'none'}. 0 is the base model.")
            if p.stop and self.tokenizer is None:
                raise ValueError(f"Prompt {i} has stop strings, which need a tokenizer: Sampler(model, tokenizer).")
            seed = int(self._seeds.integers(2**63)) if p.seed is None else int(p.seed)
            made.append(Prompt(ids.astype(np.int32), p, int(adapter), seed, self._weights.version(adapter)))
        return made

    def _adapter_rows(self, prompts: Sequence[Prompt], batch: int) -> np.ndarray | None:
        return None if self.model.lora_owners is None else adapter_rows(prompts, batch)

    def _resume(self, prompt: Prompt, keep: bool) -> None:
        """Begins a prompt after the longest kept state that serves it. With `keep`, it will stop where it leaves what is
        known of others, unless that saves later ones nothing: a piece of a prompt is never smaller than SMALLEST_PIECE."""
        of = prompt.ids, prompt.adapter, prompt.version
        session = self._store.find(*of, logprobs=prompt.params.prompt_logprobs)
        shared = self._store.shared(*of) if keep else 0
        prompt.begin(session, shared if shared - (session.tokens if session else 0) >= SMALLEST_PIECE else 0)

    def _prefill(self, look: Look, prompts: list[Prompt], keep: bool) -> Rows:
        """A row per prompt (and unused ones) that has absorbed all of its ids. With `keep`, states are kept at branches and
        at the ends."""
        batch = bucket(len(prompts), 1, self.max_batch, step=4)
        capacity = self._capacity(max(len(p.ids) + p.params.max_tokens for p in prompts))
        rows = start(look.graphdef, look.state, batch=batch, capacity=capacity)
        for row, p in enumerate(prompts):
            self._resume(p, keep)
            if p.session is not None:
                rows = self._store.load(p.session, rows, row)
        adapters = self._adapter_rows(prompts, batch)
        logprobs = any(p.params.prompt_logprobs for p in prompts)
        absorbed = [p.cached for p in prompts]
        while any(n < len(p.ids) for n, p in zip(absorbed, prompts, strict=True)):
            left = [p.next_stop(n) - n for n, p in zip(absorbed, prompts, strict=True)]
            size = min(max(left), self.prefill_chunk)
            ids = np.zeros((batch, bucket(size, SMALLEST_PIECE, self.prefill_chunk, step=4)), np.int32)
            lengths = np.zeros(batch, np.int32)
            for row, p in enumerate(prompts):
                n = lengths[row] = min(left[row], ids.shape[1])
                ids[row, :n] = p.ids[absorbed[row] : absorbed[row] + n]
            rows, result = prefill(
                look.graphdef, look.state, rows, ids, lengths, adapters, logprobs=logprobs, routes=self.routes
            )
            result = jax.device_get(result)
            for row, p in enumerate(prompts):
                p.take(row, lengths[row], result)
                absorbed[row] += int(lengths[row])
                if lengths[row] and absorbed[row] == p.branch:
                    self._keep(p.kept(p.branch), rows, row)
        if keep:
            for row, p in enumerate(prompts):
                self._keep(p.kept(len(p.ids)), rows, row)
        return rows

    def _draw(self, look: Look, drafts: list[Draft], keep_sessions: bool) -> None:
        """Completes the drafts, at most max_batch of them, in one batch."""
        prompts = list({id(d.prompt): d.prompt for d in drafts}.values())
        rows = self._prefill(look, prompts, keep_sessions)
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
            kept = [draft.kept(lengths[row]) for row, draft in enumerate(drafts)]
            for row, session in enumerate(kept):
                self._keep(session, rows, row)
            for draft, session in zip(drafts, kept, strict=True):
                draft.session = session if session in self._store else None
