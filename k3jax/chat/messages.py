"""Renders one message of a conversation as segments; markers and image prompts alone may be special."""

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from k3jax.chat.format import (
    CLOSE,
    END_OF_MESSAGE,
    IMAGE_PLACEHOLDER,
    OPEN,
    SEP,
    ChatError,
    ChatTypeError,
    MissingFieldError,
    escape_attribute,
    json_type,
)

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]
Attributes = Sequence[tuple[str, str]]


class Segment(NamedTuple):
    """A piece of the prompt, encoded separately from its neighbours."""

    text: str
    allow_special: bool  # True for markers and image prompts only, never for anyone's text
    role: str  # one of ROLES
    message: int | None  # index in the caller's list; None: an option message or the generation prompt
    generated: bool  # True where the assistant model itself writes


class SegmentWriter:
    """Collects segments. Its methods alone decide what may hold special tokens: markers and image prompts."""

    def __init__(self, image_prompts: Sequence[str] | None):
        self.segments: list[Segment] = []
        self.role = "system"
        self._message: int | None = None
        self._generated = False
        self._image_prompts = image_prompts
        self._images_used = 0

    def begin(self, role: str, message: int | None) -> None:
        self.role, self._message, self._generated = role, message, False

    def begin_generated(self) -> None:
        self._generated = True

    def _add(self, text: str, allow_special: bool) -> None:
        if text:
            self.segments.append(Segment(text, allow_special, self.role, self._message, self._generated))

    def open(self, tag: str, attributes: Attributes = ()) -> None:
        self._add(OPEN, True)
        self._add(tag, False)
        for key, value in attributes:
            for text in (f" {key}", '="', escape_attribute(value), '"'):
                self._add(text, False)
        self._add(SEP, True)

    def close(self, tag: str) -> None:
        self._add(CLOSE, True)
        self._add(tag, False)
        self._add(SEP, True)

    def end_message(self) -> None:
        self.close("message")
        self._add(END_OF_MESSAGE, True)

    def text(self, text: str) -> None:
        """Somebody's text; placeholders in it become images if there are image prompts."""
        if self._image_prompts is None:
            self._add(text, False)
            return
        for position, part in enumerate(text.split(IMAGE_PLACEHOLDER)):
            if position:
                self.image()
            self._add(part, False)

    def image(self) -> None:
        if self._image_prompts is None:
            self._add(IMAGE_PLACEHOLDER, True)
            return
        if self._images_used == len(self._image_prompts):
            raise ChatError(
                f"The conversation has more images than the {len(self._image_prompts)} image_prompts. "
                f"Give one prompt per image part or {IMAGE_PLACEHOLDER}."
            )
        self._add(self._image_prompts[self._images_used], True)
        self._images_used += 1

    def check_images_used(self) -> None:
        if self._image_prompts is not None and self._images_used < len(self._image_prompts):
            raise ChatError(
                f"The conversation has {self._images_used} images but there are {len(self._image_prompts)} "
                f"image_prompts. Give one prompt per image part or {IMAGE_PLACEHOLDER}."
            )

    def instruction(self, kind: str, instruction: str) -> None:
        """A whole system message that declares tools or states an option of the request."""
        self.open("message", [("role", "system"), ("type", kind)])
        self._add(instruction, False)
        self.end_message()


def write_message(writer: SegmentWriter, message: Message, attributes: Attributes) -> None:
    writer.open("message", [("role", writer.role), *attributes])
    _write_content(writer, message.get("content"))
    writer.end_message()


def write_assistant(writer: SegmentWriter, message: Message, attributes: Attributes, thinking: bool) -> None:
    writer.open("message", [("role", "assistant"), *attributes])
    if thinking:
        writer.open("think")
        writer.begin_generated()
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(reasoning, str):
            raise ChatTypeError(f"reasoning_content must be a text, got {type(reasoning).__name__}.")
        if reasoning.strip():
            writer.text(reasoning)
        writer.close("think")
    writer.open("response")
    writer.begin_generated()
    _write_content(writer, message.get("content"))
    writer.close("response")
    if calls := message.get("tool_calls"):
        writer.open("tools")
        for index, call in enumerate(calls, start=1):
            _write_call(writer, call, index)
        writer.close("tools")
    writer.end_message()


def _write_content(writer: SegmentWriter, content: Any) -> None:
    if content is None:
        return
    if isinstance(content, str):
        writer.text(content)
        return
    if not isinstance(content, Sequence):
        raise ChatTypeError(
            f"content must be a text, a list of parts or None, got {type(content).__name__}: {content!r:.80}"
        )
    for part in content:
        if not isinstance(part, Mapping):
            raise ChatTypeError(f"A content part must be a dict, got {type(part).__name__}: {part!r:.80}")
        if "type" not in part:
            raise MissingFieldError(f"A content part needs a type (text, image or image_url): {part!r:.80}")
        if part["type"] in ("image", "image_url"):
            writer.image()
        elif "text" not in part:
            raise MissingFieldError(f"A content part of type {part['type']!r} needs a text: {part!r:.80}")
        elif not isinstance(part["text"], str):
            raise ChatTypeError(f"The text of a content part must be a str, got {part['text']!r:.80}")
        else:
            writer.text(part["text"])


def _write_call(writer: SegmentWriter, call: Mapping[str, Any], index: int) -> None:
    function = _function(call)
    if not isinstance(function.get("name"), str):
        raise MissingFieldError(f"Tool call {index} needs a function name: {call!r:.80}")
    writer.open("call", [("tool", function["name"]), ("index", str(index))])
    arguments = _arguments(function.get("arguments"), function["name"])
    if isinstance(arguments, str):
        writer.open("json", [("type", "object")])
        writer.text(arguments)
        writer.close("json")
    else:
        for key, value in arguments.items():
            writer.open("argument", [("key", str(key)), ("type", json_type(value))])
            writer.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            writer.close("argument")
    writer.close("call")


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The {"name", "arguments"} of a call, which may stand under "function" or in the call itself."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
        raise ChatTypeError(f"A tool call must be a dict, got {call!r:.80}")
    return call.get("function", call)


def _arguments(arguments: Any, tool: str) -> Mapping[str, Any] | str:
    """A call's arguments as a mapping, or as the text itself where that is not JSON."""
    if arguments is None or isinstance(arguments, Mapping):
        return arguments or {}
    if not isinstance(arguments, str):
        raise ChatTypeError(
            f"The arguments of {tool!r} must be a dict or JSON text, got {type(arguments).__name__}."
        )
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
    except (ValueError, RecursionError) as error:
        raise ChatError(f"The arguments of {tool!r} cannot be read: {error}.") from error
    if not isinstance(parsed, dict):
        raise ChatError(
            f"The arguments of {tool!r} must be a JSON object, got {arguments:.80}. "
            f'Name the argument: {{"key": ...}}.'
        )
    return parsed


def role_of(message: Message, index: int) -> str:
    if "role" not in message:
        raise MissingFieldError(f"Message {index} needs a role, one of {', '.join(ROLES)}: {message!r:.80}")
    return message["role"]


def tool_name(message: Message, calls: Sequence[Mapping[str, Any]], position: int, index: int) -> str:
    """The tool that a result comes from: named in the result, else the position-th call (from 1)."""
    name = message.get("tool") or message.get("name")
    if name is None and position <= len(calls):
        name = _function(calls[position - 1]).get("name")
    if name is None:
        raise ChatError(
            f"Message {index} is a tool result, but no call before it says which tool. Give it a name, or a "
            f"tool_call_id of a call in the assistant message before it."
        )
    return str(name)


def _dicts(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    if isinstance(messages, str | Mapping):
        raise ChatTypeError(f"messages must be a list of dicts, got {type(messages).__name__}.")
    for index, message in enumerate(messages):
        if isinstance(message, Mapping):
            yield index, message
        else:
            log.warning("Message %d is a %s, not a dict: left out.", index, type(message).__name__)


def in_call_order(messages: Sequence[Message]) -> Iterator[tuple[int, Message, str | None]]:
    """Yields (index, message, tool) with each run of tool results in the order of the calls that they answer.

    tool is the called tool's name. A run with a result that answers no call of the assistant message before
    it stays as it is, with tool None. What is no dict is left out.
    """
    position: dict[str, int] = {}
    names: list[str | None] = []
    for is_run, group in itertools.groupby(_dicts(messages), key=lambda item: item[1].get("role") == "tool"):
        if not is_run:
            for index, message in group:
                if message.get("role") == "assistant":
                    calls = message.get("tool_calls") or ()
                    names = [_function(call).get("name") for call in calls]
                    ids = [call.get("id") for call in calls]
                    position = {str(ids[i]): i for i in reversed(range(len(ids))) if ids[i] is not None}
                yield index, message, None
            continue
        run = list(group)
        answered = [position.get(str(message.get("tool_call_id", message.get("id")))) for _, message in run]
        known = [call for call in answered if call is not None]
        if len(known) < len(run):
            yield from ((index, message, None) for index, message in run)
            continue
        ordered = sorted(zip(known, run, strict=True), key=lambda item: item[0])
        yield from ((index, message, names[call]) for call, (index, message) in ordered)
