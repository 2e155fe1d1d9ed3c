"""Training data: examples from jsonl files or generated transcripts, packed into rows of fixed length, through grain.

    rows = Rows(Jsonl(path="data.jsonl").examples(tokenizer), rows=8, row_length=512, seed=0)
    micro_batches = rows.next(2)

A line of a jsonl file is a conversation, {"messages": [...], "tools": [...]}, tokens, {"ids": [...], "weights": [...]},
or a preference (Pairs).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import grain
import numpy as np
from grain.experimental import FirstFitPackIterDataset

from k3jax.chat import encode_chat_with_roles
from k3jax.chat.messages import ROLES
from k3jax.config import ConfigError
from k3jax.tokenizer import Tokenizer
from train.config import RunError, TrainConfig, require_whole

Example = dict[str, np.ndarray]  # ids, targets int32 [n] and weights fp32 [n]; a pair also `part` int32 [n]
MAX_SEGMENTS = 1024  # sequences in a row
FP32_MAX = float(np.finfo(np.float32).max)


class DataError(RunError):
    """Data that cannot be trained on; the message names file and line."""


@runtime_checkable
class Examples(Protocol):
    """Examples by number. `where` names one in error messages."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...

    def where(self, index: int) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Jsonl:
    """A file of conversations or token ids, one JSON object per line.

    roles     whose tokens are learned; of the assistant those that it generates, not the opener of its messages.
              Token ids are learned where `weights` is not 0, everywhere without weights
    thinking  whether conversations are rendered with thinking (k3jax.chat)
    """

    path: str
    roles: tuple[str, ...] = ("assistant",)
    thinking: bool = False

    def __post_init__(self) -> None:
        _check_roles(self.roles)

    def examples(self, tokenizer: Tokenizer | None) -> "JsonlExamples":
        return JsonlExamples(self.path, partial(_encode, self, tokenizer))


@dataclass(frozen=True, kw_only=True)
class Transcripts:
    """Conversations that environments generate: `count` in all, the tasks taking turns.

    tasks  (environment, skill) each: see the `transcript` method of train.rl environments
    """

    tasks: tuple[tuple[Any, float], ...]
    count: int
    seed: int = 0
    roles: tuple[str, ...] = ("assistant",)
    thinking: bool = False

    def __post_init__(self) -> None:
        _check_roles(self.roles)
        require_whole(self, 1, "count")
        if not self.tasks:
            raise ConfigError("tasks is empty: name at least one environment with its skill.")

    def examples(self, tokenizer: Tokenizer | None) -> "TranscriptExamples":
        return TranscriptExamples(self, _needed(tokenizer, "Transcripts"))


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """A file of preferences, one JSON object per line: {"messages": [...], "chosen": {...}, "rejected": {...}, "tools": [...]}.

    chosen and rejected are what the assistant answers: a message, or a list of messages that may hold tool results.
    """

    path: str
    thinking: bool = False

    def examples(self, tokenizer: Tokenizer | None) -> "JsonlExamples":
        return JsonlExamples(self.path, partial(_encode_pair, self, _needed(tokenizer, "Pairs")))


class JsonlExamples:
    """All lines of a file, checked and encoded at once. Raises DataError naming the first line that is wrong."""

    def __init__(self, path: str, encode: Callable[[dict[str, Any]], Example]):
        self.path = path
        self.lines: list[int] = []
        self.examples: list[Example] = []
        for number, entry in read_jsonl(path):
            try:
                self.examples.append(encode(entry))
            except (ValueError, RunError) as error:
                raise DataError(f"{path} line {number}: {error}") from error
            except (TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
                raise DataError(f"{path} line {number} is not of the form needed: {type(error).__name__}: {error}") from error
            self.lines.append(number)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def where(self, index: int) -> str:
        return f"{self.path} line {self.lines[index]}"


class TranscriptExamples:
    """Transcripts, made when they are asked for."""

    def __init__(self, config: Transcripts, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer

    def __len__(self) -> int:
        return self.config.count

    def __getitem__(self, index: int) -> Example:
        environment, skill = self.config.tasks[index % len(self.config.tasks)]
        messages = environment.transcript(self.config.seed, index // len(self.config.tasks), skill)
        return chat_example(self.tokenizer, messages, None, self.config.roles, self.config.thinking)

    def where(self, index: int) -> str:
        environment, _ = self.config.tasks[index % len(self.config.tasks)]
        return f"transcript {index} ({environment.name})"


def read_jsonl(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers, from 1, and the objects of lines that are not blank. Raises DataError: no file, no JSON, no line."""
    if not Path(path).is_file():
        raise DataError(f"There is no data file {path}.")
    empty = True
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path} line {number} is not JSON: {error}") from error
            if not isinstance(entry, dict):
                raise DataError(f"{path} line {number}: a JSON object is needed, got {type(entry).__name__}.")
            empty = False
            yield number, entry
    if empty:
        raise DataError(f"{path} has no examples: it is empty. Give it a JSON object per line.")


def chat_example(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Any, roles: tuple[str, ...], thinking: bool,
    first_message: int = -1,
) -> Example:
    """A conversation as ids and next-token targets, weighted 1 where `roles` wrote the target, from first_message on."""
    chat = encode_chat_with_roles(
        tokenizer, cast(Any, messages), tools=tools, thinking=thinking, add_generation_prompt=False
    )
    assistant = ROLES.index("assistant")
    learned = np.isin(chat.role, [ROLES.index(role) for role in roles]) & (chat.generated | (chat.role != assistant))
    learned &= chat.message >= first_message
    return token_example(chat.ids, learned)


def token_example(ids: Any, weights: Any) -> Example:
    """n tokens as n - 1 inputs, targets and weights of the targets."""
    ids = np.asarray(ids, np.int32)
    return {"ids": ids[:-1], "targets": ids[1:], "weights": np.asarray(weights, np.float32)[1:]}


def _encode(config: Jsonl, tokenizer: Tokenizer | None, entry: dict[str, Any]) -> Example:
    if "messages" in entry:
        tools = entry.get("tools")
        _require_messages(entry)
        example = chat_example(_needed(tokenizer, "messages"), entry["messages"], tools, config.roles, config.thinking)
    elif "ids" in entry:
        ids, weights = entry["ids"], entry.get("weights")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise ValueError("ids must be a list of whole numbers from 0 to 2**31 - 1.")
        weights = [1.0] * len(ids) if weights is None else weights
        if not isinstance(weights, list) or not all(type(w) in (int, float) and abs(w) <= FP32_MAX for w in weights):
            raise ValueError("weights must be a list of numbers that are finite in float32.")
        if len(weights) != len(ids):
            raise ValueError(f"there are {len(ids)} ids but {len(weights)} weights: one per id is needed.")
        example = token_example(ids, weights)
    else:
        raise ValueError(f"messages or ids are needed, got the keys {', '.join(entry) or 'none'}.")
    if not example["weights"].any():
        raise ValueError("no token of this example is learned: every weight is 0.")
    return example


def _encode_pair(config: Pairs, tokenizer: Tokenizer, entry: dict[str, Any]) -> Example:
    """Chosen and rejected conversation one after the other; `part` says which is which."""
    if missing := [name for name in ("messages", "chosen", "rejected") if name not in entry]:
        raise ValueError(f"a pair needs messages, chosen and rejected; {' and '.join(missing)} missing.")
    _require_messages(entry)
    halves = []
    for part, name in enumerate(("chosen", "rejected"), 1):
        answer = entry[name] if isinstance(entry[name], list) else [entry[name]]
        half = chat_example(
            tokenizer, [*entry["messages"], *answer], entry.get("tools"), ("assistant",), config.thinking, len(entry["messages"])
        )
        if not half["weights"].any():
            raise ValueError(f"{name} has no token of the assistant.")
        halves.append(half | {"part": np.full(len(half["ids"]), part, np.int32)})
    return {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}


def _require_messages(entry: Mapping[str, Any]) -> None:
    messages = entry["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError('messages must be a list of objects such as {"role": "user", "content": "…"}.')


def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer in a folder. Raises DataError if a file of it is damaged, FileNotFoundError if it is not there."""
    try:
        return Tokenizer(folder)
    except ValueError as error:
        raise DataError(f"The tokenizer in {folder} cannot be used. {error}") from error


def _needed(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise DataError(f"{what} need a tokenizer: put tiktoken.model and tokenizer_config.json into the checkpoint's folder.")
    return tokenizer


def _check_roles(roles: tuple[str, ...]) -> None:
    unknown = [role for role in roles if role not in ROLES]
    if unknown or not roles:
        raise ConfigError(f"roles={roles}: some of {', '.join(ROLES)} are needed.")


class Rows:
    """Endless micro-batches of packed rows, in an order that the seed alone decides; each pass is shuffled anew.

    A micro-batch has ids, targets, segments int32 [rows, row_length] and weights fp32, and for pairs segments 2p - 1
    (chosen) and 2p (rejected). Padding has segment 0. `state` and `restore` continue exactly, packing included.
    cut  cut longer examples at row_length; otherwise they are refused, by name
    """

    def __init__(
        self, examples: Examples, *, rows: int, row_length: int, seed: int, vocab_size: int, cut: bool = False,
        max_segments: int = MAX_SEGMENTS,
    ):
        checked = _Checked(examples, row_length, vocab_size, cut)
        if isinstance(examples, JsonlExamples):  # in memory: find what does not fit before work starts
            for index in range(len(examples)):
                checked[index]
        fields = examples[0].keys()
        data = grain.MapDataset.source(cast(Any, checked)).seed(seed).shuffle().repeat()
        reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=64)
        packed = FirstFitPackIterDataset(
            data.to_iter_dataset(reading),
            length_struct=dict.fromkeys(fields, row_length),
            num_packing_bins=rows,
            shuffle_bins=False,
            max_sequences_per_bin=max_segments,
        )
        self.iterator = iter(packed.batch(rows))

    def next(self, count: int) -> list[dict[str, np.ndarray]]:
        """The next `count` micro-batches."""
        return [_micro_batch(next(self.iterator)) for _ in range(count)]

    def state(self) -> dict[str, Any]:
        return self.iterator.get_state()

    def restore(self, state: dict[str, Any]) -> None:
        self.iterator.set_state(state)


class DataFeed:
    """Rows of a data set as batches for train.loop: `accumulate` micro-batches per step."""

    def __init__(
        self, examples: Examples, config: TrainConfig, vocab_size: int, cut: bool, max_segments: int = MAX_SEGMENTS
    ):
        self.accumulate = config.accumulate
        self.rows = Rows(
            examples, rows=config.rows, row_length=config.row_length, seed=config.seed, vocab_size=vocab_size, cut=cut,
            max_segments=max_segments,
        )

    def next(self, step: int) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """The batch, and the figure tokens_in: how many tokens it has, padding left out."""
        batch = self.rows.next(self.accumulate)
        return batch, {"tokens_in": float(sum(np.count_nonzero(micro["segments"]) for micro in batch))}

    def after(self, step: int, figures: Mapping[str, float]) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return self.rows.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.rows.restore(state)


class _Checked:
    """Examples that fit a row and a vocabulary. Raises DataError for one that does not."""

    def __init__(self, examples: Examples, row_length: int, vocab_size: int, cut: bool):
        self.examples, self.row_length, self.vocab_size, self.cut = examples, row_length, vocab_size, cut

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        example = self.examples[index]
        length = len(example["ids"])
        if length > self.row_length and not self.cut:
            shorter = "shorten the pair" if "part" in example else "cut the example (cut=true)"
            raise DataError(
                f"{self.examples.where(index)} has {length + 1} tokens, but a row holds {self.row_length + 1}. "
                f"Use longer rows (row_length={length}) or {shorter}."
            )
        top = max(example["ids"].max(initial=0), example["targets"].max(initial=0))
        if top >= self.vocab_size:
            raise DataError(f"{self.examples.where(index)} has the token id {top}, outside the model's {self.vocab_size} ids.")
        return {name: values[: self.row_length] for name, values in example.items()}


def _micro_batch(packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    segments = packed["ids_segment_ids"].astype(np.int32)
    if "part" in packed:
        segments = np.where(segments > 0, 2 * (segments - 1) + packed["part"], 0).astype(np.int32)
    return {name: packed[name] for name in ("ids", "targets", "weights")} | {"segments": segments}
