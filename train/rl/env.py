"""The protocol between an RL loop and its tasks: an environment makes episodes, an episode answers messages.

Messages are dicts in the OpenAI chat shape. An assistant message comes from a model, so every field of it may
be missing or nonsense: an episode never raises because of one, it ends with reward 0.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from k3jax.config import ConfigError

Message = dict[str, Any]
Task = TypeVar("Task")

HELDOUT_SHARE = 8  # one task in 8 is kept out of training
_MAX_DRAWS = 10_000  # per task asked for, before the task space counts as used up


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What an episode answers to one assistant message.

    reward    of this step; the return of an episode is the sum over its steps
    messages  to append before the model's next turn; empty when done
    """

    reward: float
    done: bool
    messages: list[Message] = field(default_factory=list)


class Episode(Protocol):
    """One conversation on one task. `step` is called with each assistant message until a result says done."""

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Tool declarations in the OpenAI shape, or None."""
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """Figures about the episode so far, to be averaged over episodes. The keys never change."""
        ...

    def messages(self) -> list[Message]:
        """The conversation before the first assistant message."""
        ...

    def step(self, assistant: Message) -> StepResult: ...


class Environment(Protocol):
    """A family of tasks, split into training and held-out tasks that never overlap."""

    name: ClassVar[str]

    def train(self, seed: int, index: int) -> Episode:
        """A fresh episode on training task `index`; equal (seed, index) give equal tasks, in any process."""
        ...

    def heldout(self, n: int) -> Sequence[Episode]:
        """Fresh episodes on the first n held-out tasks, all different. ValueError if there are fewer."""
        ...


def is_heldout(key: str) -> bool:
    """Whether the task that `key` identifies is kept out of training: its SHA-256 alone decides."""
    return hashlib.sha256(key.encode()).digest()[0] % HELDOUT_SHARE == 0


def training_task(
    make: Callable[[random.Random], Task], key: Callable[[Task], str], seed: int, index: int
) -> Task:
    """The first task outside the held-out set that `make` draws from a generator seeded by (seed, index).

    Raises ValueError if `make` finds none, so the task space must be tiny.
    """
    rng = random.Random(f"train/{seed}/{index}")
    for _ in range(_MAX_DRAWS):
        if not is_heldout(key(task := make(rng))):
            return task
    raise ConfigError("No training task was found: the settings allow almost no tasks. Widen their ranges.")


def heldout_tasks(make: Callable[[random.Random], Task], key: Callable[[Task], str], n: int) -> list[Task]:
    """The first n different held-out tasks; the first m of them are those of heldout_tasks(…, m)."""
    rng = random.Random("heldout")
    found: dict[str, Task] = {}
    draws = 0
    while len(found) < n:
        task = make(rng)
        if is_heldout(name := key(task)) and name not in found:
            found[name], draws = task, 0
        elif (draws := draws + 1) > _MAX_DRAWS:
            raise ConfigError(
                f"{n} held-out tasks were asked for, but these settings have only about {len(found)}. "
                f"Ask for fewer, or widen the ranges of the settings."
            )
    return list(found.values())


def text_of(assistant: Message) -> str:
    """The text of a message's content: a string, or the joined text parts of a list; "" for anything else."""
    content = assistant.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


@dataclass(frozen=True)
class Call:
    """A tool call whose arguments are a JSON object. `id` is what the result refers to, None if absent."""

    name: str
    arguments: dict[str, Any]
    id: str | None

    def result(self, content: str) -> Message:
        """The tool message that answers this call."""
        reply: Message = {"role": "tool", "name": self.name, "content": content}
        return reply if self.id is None else reply | {"tool_call_id": self.id}


def single_call(assistant: Message) -> Call | None:
    """The message's tool call, or None unless it has exactly one and that one can be read."""
    calls = assistant.get("tool_calls")
    if not isinstance(calls, list | tuple) or len(calls) != 1 or not isinstance(calls[0], dict):
        return None
    function, id_ = calls[0].get("function"), calls[0].get("id")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return Call(function["name"], arguments, id_ if isinstance(id_, str) else None)


def call_message(name: str, arguments: dict[str, Any], id: str) -> Message:
    """An assistant message without text that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
