"""What a caller hands to the Sampler, checked before anything runs: one error that says what was given and what is needed."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from k3jax.config import K3Config
from k3jax.sampling.params import SamplingParams

T = TypeVar("T")
_NEEDED = {"params": "SamplingParams", "adapters": "adapter ids (Adapters.id(name) gives the id of a name)"}


def whole_ids(prompts: Any) -> list[np.ndarray]:
    """Each prompt's ids as int64 [T]. Raises TypeError unless they are sequences of whole numbers."""
    needed = "prompts must be a list with one list of token ids per prompt"
    if isinstance(prompts, str) or not _listed(prompts):
        raise TypeError(f"{needed}, got {prompts!r}. Encode texts first, or use generate_text.")
    rows = []
    for i, ids in enumerate(prompts):
        if isinstance(ids, str):
            raise TypeError(f"{needed}, but prompt {i} is the text {ids!r}. Encode it first, or use generate_text.")
        if not _listed(ids):
            raise TypeError(f"{needed}, but prompt {i} is {ids!r}. One prompt is a list of one: [[1, 2, 3]].")
        array = np.asarray(ids) if len(ids) else np.zeros(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TypeError(f"{needed}, but prompt {i} holds something else than whole numbers: {ids!r}.")
        rows.append(array.astype(np.int64))
    return rows


def per_prompt(name: str, given: Any, kind: type[T], count: int) -> list[T]:
    """What was given for each of `count` prompts: one for all, or a sequence of as many.

    Raises TypeError for anything else than `kind` (whole numbers for int) and ValueError for another number of them.
    """
    if _is(given, kind):
        return [given] * count
    if isinstance(given, str) or not _listed(given):
        raise TypeError(f"{name} must be {_NEEDED[name]}, one for all or one per prompt: got {given!r}.")
    given = given if isinstance(given, Sequence) else np.asarray(given).tolist()
    wrong = [value for value in given if not _is(value, kind)]
    if wrong:
        raise TypeError(f"{name} must be {_NEEDED[name]}, one for all or one per prompt: got {wrong[0]!r} among them.")
    if len(given) != count:
        raise ValueError(f"{name} must be one for all or one per prompt: got {len(given)} for {count} prompts.")
    return [kind(value) for value in given] if kind is int else list(given)


def check_fits(prompt: str, ids: np.ndarray, params: SamplingParams, config: K3Config, capacity: int) -> None:
    """Raises ValueError if a prompt is empty, ids lie outside the vocabulary, or prompt and max_tokens exceed the capacity."""
    vocabulary = config.vocab_size
    if len(ids) == 0:
        raise ValueError(f"{prompt} is empty: it needs at least one token, such as the tokenizer's bos_id.")
    for name, values in ((prompt, ids), ("stop_ids", np.array(params.stop_ids, np.int64))):
        wrong = values[(values < 0) | (values >= vocabulary)]
        if len(wrong):
            raise ValueError(f"{name}: token id {wrong[0]} is outside the model's vocabulary of {vocabulary} ids.")
    if len(ids) + params.max_tokens > capacity:
        raise ValueError(f"{prompt} has {len(ids)} tokens and max_tokens={params.max_tokens}: together more than "
                         f"capacity={capacity}. Shorten it, lower max_tokens or raise the Sampler's capacity (at most "
                         f"the model's context length, {config.context_length}).")


def _is(value: Any, kind: type) -> bool:
    if kind is int:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)
    return isinstance(value, kind)


def _listed(value: Any) -> bool:
    return isinstance(value, Sequence) or (hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0)
