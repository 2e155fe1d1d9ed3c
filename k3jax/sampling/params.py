"""What one asks of the Sampler and what one gets back."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from k3jax.sampling.sessions import Session

MAX_TOP_LOGPROBS = 20

Routes = tuple[np.ndarray | None, ...]  # per stack of layers: experts [layers, tokens, k], int32; None: dense


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. See `k3jax.sampling.distribution.reshape` for what the filters keep.

    seed         the tokens of sample i depend on (seed, i), the prompt and the weights only; None: the Sampler picks one
    stop_ids     ids that end a sample; the one drawn is the sample's last id (it has a logprob to train on)
    stop         strings that end a sample; `text` ends before the string, `ids` with the token that completed it
    top_logprobs that many most likely tokens of the raw model per generated token
    """

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1  # samples
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop, "strings")
        stop_ids = _tuple("stop_ids", self.stop_ids, "token ids")
        _require(all(s and isinstance(s, str) for s in stop), "stop", self.stop, "non-empty strings")
        _require(all(map(_whole, stop_ids)), "stop_ids", self.stop_ids, "token ids, which are whole numbers")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_ids", tuple(map(int, stop_ids)))
        for name in ("temperature", "top_p", "min_p"):
            _require(_real(getattr(self, name)), name, getattr(self, name), "a number")
        _require(_whole(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "a whole number of at least 1")
        _require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", self.temperature,
                 "finite and at least 0 (0 is greedy)")
        _require(_whole(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "a whole number of at least 0 (0 is off)")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1] (1 is off)")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1] (0 is off)")
        _require(self.seed is None or (_whole(self.seed) and 0 <= self.seed < 2**63), "seed", self.seed, "None or in 0..2^63-1")
        _require(_whole(self.n) and self.n >= 1, "n", self.n, "a whole number of at least 1")
        _require(_whole(self.top_logprobs) and 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", self.top_logprobs,
                 f"in 0..{MAX_TOP_LOGPROBS}")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One continuation of a prompt. Logprobs are in nats.

    logprobs         of `ids` under the distribution that they were drawn from: after temperature and filters
    raw_logprobs     of `ids` under the model itself: temperature 1, no filter
    prompt_logprobs  raw, of the prompt's ids but the first
    routes           per stack of layers the experts of every absorbed token [layers, tokens, k], None for dense ones; index =
                     absolute position in prompt + ids. The last id drawn is usually not absorbed: `replay` makes `picks`.
    session          the kept state, from which a longer prompt resumes; None unless asked for
    """

    ids: list[int]
    text: str | None  # None without a tokenizer
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[float] | None = None
    routes: Routes | None = None
    session: "Session | None" = None


def replay(routes: Sequence[Routes], length: int) -> tuple[np.ndarray | None, ...]:
    """`picks` for model(ids [B, length], picks=…) from the routes of B samples, one a row, prompt and ids from position 0.

    Positions past a sample's routes (its last id, padding) get the experts 0..k-1: nothing drawn depends on them.
    """

    return tuple(_stacked([r for r in rows if r is not None], length) for rows in zip(*routes, strict=True))


def _stacked(rows: list[np.ndarray], length: int) -> np.ndarray | None:
    if not rows:
        return None
    layers, _, k = rows[0].shape
    picks = np.broadcast_to(np.arange(k, dtype=np.int32), (layers, len(rows), length, k)).copy()
    for b, row in enumerate(rows):
        picks[:, b, : row.shape[1]] = row[:, :length]
    return picks


def _whole(x: object) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _real(x: object) -> bool:
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


def _tuple(name: str, values: Any, needed: str) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a tuple of {needed}, got {values!r}.")
    return tuple(values)


def _require(holds: bool, name: str, value: object, needed: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {needed}, got {value!r}.")
