"""Encodes a conversation as Kimi K3 expects it: messages and options -> text segments -> token ids."""

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np
from jaxtyping import Bool, Int8, Int32

from k3jax.chat.format import ChatError, Markers, MissingFieldError, UnsupportedEffortError
from k3jax.chat.messages import (
    ROLES,
    Message,
    Segment,
    SegmentWriter,
    in_call_order,
    role_of,
    tool_name,
    write_assistant,
    write_message,
)
from k3jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)

EFFORTS = ("low", "high", "max")


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of chat_segments, encode_chat and encode_chat_with_roles."""

    tools: Sequence[Mapping[str, Any]] | None
    thinking: bool
    thinking_effort: str | None
    tool_choice: str | Mapping[str, Any] | None
    response_format: str | Mapping[str, Any] | None
    add_generation_prompt: bool
    image_prompts: Sequence[str] | None


@dataclass(frozen=True)
class EncodedChat:
    """Token ids and, for each of them, who wrote it."""

    ids: Int32[np.ndarray, " T"]
    role: Int8[np.ndarray, " T"]  # index into ROLES
    message: Int32[np.ndarray, " T"]  # index in the caller's list; -1: an option message or the prompt's end
    generated: Bool[np.ndarray, " T"]  # what the assistant model writes: the mask of a training loss


def chat_segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = "max",
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: str | Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    image_prompts: Sequence[str] | None = None,
) -> list[Segment]:
    """The segments of a conversation, in order.

    messages         dicts in the OpenAI shape: role (system, user, assistant, tool) and content (a text, a
                     list of parts {"type": "text" | "image" | "image_url", ...}, or None); name; for the
                     assistant reasoning_content (or reasoning) and tool_calls; for a tool tool_call_id.
                     A system message with tools extends the toolset. As in the reference, other roles are
                     left out (with a warning), a run of tool results whose tool_call_ids all match is put in
                     the order of the calls, and arguments given as JSON text are parsed, so a number spelled
                     1e2 is written 100.0
    tools            OpenAI tool declarations
    thinking         the model thinks before it answers; False: past reasoning is left out, too
    thinking_effort  low, high or max; None leaves the instruction out. Ignored without thinking
    tool_choice      none or required add an instruction; auto, and a named tool (a dict), add nothing
    response_format  {"type": "json_object"} or {"type": "json_schema", "json_schema": ...}, or "text"
    add_generation_prompt  end with the opener that the model continues
    image_prompts    for each image, in order, the text that stands for it (see k3jax.images)

    Raises ChatError (a ValueError), which is also a KeyError for a missing field, a TypeError for a field of
    the wrong type and an AssertionError for an unsupported effort, as in the reference.

    chat_segments(messages[:k]) is a prefix of chat_segments(messages) if messages[k] is an assistant message
    without a name, and tool_choice and response_format, which come after the conversation, add nothing.
    """
    writer = SegmentWriter(image_prompts)
    if tools:
        writer.instruction("tool-declare", _declaration(_TOOLS, tools))
    if thinking and thinking_effort is not None:
        writer.instruction("thinking-effort", _effort_instruction(thinking_effort))
    _write_conversation(writer, messages, thinking)
    writer.begin("system", None)
    if instruction := _choice_instruction(tool_choice):
        writer.instruction("tool-choice", instruction)
    if instruction := _format_instruction(response_format):
        writer.instruction("response-format", instruction)
    if add_generation_prompt:
        writer.begin("assistant", None)
        writer.open("message", [("role", "assistant")])
        writer.open("think" if thinking else "response")
    writer.check_images_used()
    return writer.segments


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], **options: Unpack[ChatOptions]
) -> list[int]:
    """Token ids of a conversation; see chat_segments for the messages and options.

    Raises ChatError also if the tokenizer has no markers of this format (`Markers.of`).
    """
    return list(itertools.chain.from_iterable(_pieces(tokenizer, chat_segments(messages, **options))))


def encode_chat_with_roles(
    tokenizer: Tokenizer, messages: Sequence[Message], **options: Unpack[ChatOptions]
) -> EncodedChat:
    """The ids of encode_chat and, per token, its role, its message and whether the model generates it.

    Generated are, of each assistant message, the tokens after the opener that a prompt ends with (that of
    think, or of response without thinking) up to and including <|end_of_msg|>.
    """
    segments = chat_segments(messages, **options)
    pieces = _pieces(tokenizer, segments)
    lengths = [len(piece) for piece in pieces]

    def per_token(values: list[int] | list[bool], dtype: type) -> np.ndarray:
        return np.repeat(np.array(values, dtype), lengths)

    return EncodedChat(
        ids=np.array(list(itertools.chain.from_iterable(pieces)), np.int32),
        role=per_token([ROLES.index(segment.role) for segment in segments], np.int8),
        message=per_token([-1 if s.message is None else s.message for s in segments], np.int32),
        generated=per_token([segment.generated for segment in segments], np.bool_),
    )


def _pieces(tokenizer: Tokenizer, segments: Sequence[Segment]) -> list[list[int]]:
    """The ids of each segment."""
    Markers.of(tokenizer)
    return [tokenizer.encode(segment.text, segment.allow_special) for segment in segments]


def _write_conversation(writer: SegmentWriter, messages: Sequence[Message], thinking: bool) -> None:
    calls: Sequence[Mapping[str, Any]] = ()  # of the latest assistant message
    results = 0  # tool messages since then
    for index, message, called_tool in in_call_order(messages):
        role = role_of(message, index)
        if role not in ROLES:
            log.warning("Message %d has the role %r, which Kimi K3 does not know: left out.", index, role)
            continue
        writer.begin(role, index)
        name = [("name", str(message["name"]))] if message.get("name") else []
        if role == "tool":
            results += 1
            tool = called_tool or tool_name(message, calls, results, index)
            write_message(writer, message, [("tool", tool), ("index", str(results))])
        elif role == "assistant":
            calls, results = message.get("tool_calls") or (), 0
            write_assistant(writer, message, name, thinking)
        elif role == "system" and message.get("tools"):
            if message.get("content"):
                log.warning("Message %d declares tools, so its content is left out.", index)
            writer.instruction("tool-declare", _declaration(_NEW_TOOLS, message["tools"]))
        else:
            write_message(writer, message, name)


_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n"
_NEW_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
    "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_CHOICES = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
_RAW_JSON = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)


def _compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _declaration(heading: str, tools: Sequence[Mapping[str, Any]]) -> str:
    return f"{heading}\n```json\n{_compact_json(tools)}\n```"


def _effort_instruction(effort: str) -> str:
    if effort not in EFFORTS:
        raise UnsupportedEffortError(
            f"thinking_effort={effort!r} is not supported. Use one of {', '.join(EFFORTS)}, "
            f"or None for no instruction."
        )
    return _EFFORT.format(effort=effort)


def _choice_instruction(tool_choice: str | Mapping[str, Any] | None) -> str | None:
    if tool_choice is None or tool_choice == "auto" or isinstance(tool_choice, Mapping):
        return None
    if tool_choice not in _CHOICES:
        raise ChatError(f"tool_choice={tool_choice!r} must be auto, none, required or a named tool (a dict).")
    return f"The system is invoked with `tool_choice={tool_choice}`.\n{_CHOICES[tool_choice]}"


def _format_instruction(response_format: str | Mapping[str, Any] | None) -> str | None:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if kind is None or kind == "text":
        return None
    invoked = f"The system is invoked with `response_format={kind}`.\n{_RAW_JSON}"
    if kind == "json_object":
        return invoked
    if kind != "json_schema":
        raise ChatError(f"response_format={kind!r} must be text, json_object or json_schema.")
    schema = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    if not isinstance(schema, Mapping):
        raise MissingFieldError(f"response_format json_schema needs a json_schema object, got {schema!r:.80}")
    schema = schema.get("schema", schema.get("json_schema", schema))
    return f"{invoked}\nThe JSON data must match the following schema:\n```json\n{_compact_json(schema)}\n```"
