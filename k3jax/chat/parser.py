"""Reads what the model generates, token by token: reasoning, content and tool calls.

It looks at token ids, never at decoded text, so a marker that the model spells in letters stays text.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from k3jax.chat.format import Markers, parse_tag, stop_token_ids
from k3jax.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    index: int  # from 0
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    index: int
    text: str  # the next piece of the arguments' JSON text


@dataclass(frozen=True)
class ToolCallEnd:
    index: int


Delta = ReasoningDelta | ContentDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    arguments  JSON text, every value spelled as the model spelled it (1e2 stays 1e2). It may be no valid
               JSON if the model wrote a block of raw JSON, or if the call is not complete
    complete   False if the output was cut off inside the call: do not run it
    """

    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True)
class ParsedMessage:
    """What one turn of the model says. ended is False if the output was cut off before the turn's end."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    ended: bool

    def message(self) -> dict[str, Any]:
        """The assistant message that encode_chat takes, in the OpenAI shape."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


def parse_completion(
    tokenizer: Tokenizer, ids: Iterable[int], *, thinking: bool = True, first_call: int = 0
) -> ParsedMessage:
    """Parse a whole completion; see ChatParser."""
    parser = ChatParser(tokenizer, thinking=thinking, first_call=first_call)
    deltas = parser.feed(ids) + parser.finish()
    return join_deltas(deltas, ended=parser.done)


def join_deltas(deltas: Iterable[Delta], *, ended: bool) -> ParsedMessage:
    """The message that a parser's deltas, all of them in order, add up to."""
    reasoning: list[str] = []
    content: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    complete: set[int] = set()
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart():
                starts.append(delta)
                arguments.append([])
            case ArgumentsDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index):
                complete.add(index)
    calls = (
        ToolCall(start.id, start.name, "".join(arguments[start.index]), start.index in complete)
        for start in starts
    )
    return ParsedMessage("".join(reasoning), "".join(content), tuple(calls), ended)


Place = Literal["think", "response", "message", "tools", "call", "argument", "json"]

# Argument types whose text is JSON itself. Any other type is a string.
_JSON_TYPES = ("number", "boolean", "null", "array", "object")


class ChatParser:
    """A machine that turns generated ids into deltas as they come.

        parser = ChatParser(tokenizer, thinking=True)
        while not parser.done: deltas = parser.feed(next_ids)
        deltas = parser.finish()

    The joined deltas do not depend on how the ids were split over feeds. The completion starts inside think
    (thinking) or response, where the prompt's opener left off.

    Models stray from the format; read are also: response or tools opened without closing think; text right
    after think (it is content); calls outside tools; <|close|>message without closing what is open; a
    missing <|sep|> before the next marker; an argument that does not fit its type (it becomes a JSON string);
    raw JSON in place of arguments. Not shown are: tags cut off at the end, unknown tags (their text belongs
    to what is around them), text between calls, special tokens without a meaning here, and all that follows
    the turn's end.

    first_call  how many calls the conversation holds already: ids are functions.NAME:NUMBER with the number
                counted over the whole conversation, so that they are unique in it
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool = True, first_call: int = 0):
        self.done = False  # the model ended its turn
        self._tokenizer = tokenizer
        self._markers = Markers.of(tokenizer)
        self._stops = frozenset(stop_token_ids(tokenizer))
        self._first_call = first_call
        self._place: Place = "think" if thinking else "response"
        self._decoder = StreamDecoder(tokenizer)
        self._tag = bytearray()  # of the tag that is being read
        self._reading: Literal["open", "close"] | None = None
        self._blank: list[str] = []  # whitespace that becomes text only if text follows it
        self._calls = 0
        self._call: _Call | None = None  # the one that is open
        self._deltas: list[Delta] = []

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """Deltas that these ids complete. After done, ids are ignored."""
        ordinary: list[int] = []
        for token in map(int, ids):
            if self.done:
                break
            if self._tokenizer.is_special(token):
                self._read_text(ordinary)
                ordinary = []
                self._read_special(token)
            else:
                ordinary.append(token)
        self._read_text(ordinary)
        return self._taken()

    def finish(self) -> list[Delta]:
        """What the end of the ids leaves: half a character, or a value that was held back."""
        if not self.done:
            self._flush_text()
            if self._call is not None:
                self._emit_arguments(self._call.cut_off())
        return self._taken()

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read_special(self, token: int) -> None:
        if token == self._markers.sep:
            self._end_tag()
        elif token in (self._markers.open, self._markers.close):
            self._end_tag()
            if not self.done:
                self._flush_text()
                self._reading = "open" if token == self._markers.open else "close"
        elif token in self._stops:
            self._end_tag()
            if not self.done:
                self._flush_text()
                self._end_turn()
        else:
            self._tokenizer.token_bytes(token)  # refuses an id outside the vocabulary

    def _end_tag(self) -> None:
        if self._reading is None:
            return
        name, attributes = parse_tag(self._tag.decode("utf-8", errors="replace"))
        reading, self._reading = self._reading, None
        self._tag.clear()
        if reading == "open":
            self._open(name, attributes)
        else:
            self._close(name)

    def _open(self, name: str, attributes: dict[str, str]) -> None:
        match name:
            case "think" | "response" | "tools":
                self._end_call()
                self._enter(name)
            case "call":
                self._end_call()
                self._begin_call(attributes.get("tool", ""))
            case "argument" if self._call is not None:
                self._emit_arguments(self._call.end_value())
                key, type_ = attributes.get("key", ""), attributes.get("type", "string")
                self._emit_arguments(self._call.begin_argument(key, type_))
                self._enter("argument")
            case "json" if self._call is not None:
                self._emit_arguments(self._call.end_value())
                self._call.begin_json()
                self._enter("json")
            case "message":  # the model goes on to somebody else's message
                self._end_turn()

    def _close(self, name: str) -> None:
        match name:
            case "think" | "response" if self._place == name:
                self._enter("message")
            case "argument" | "json" if self._place == name and self._call is not None:
                self._emit_arguments(self._call.end_value())
                self._enter("call")
            case "call" if self._call is not None:
                self._end_call()
                self._enter("tools")
            case "tools" if self._place in ("tools", "call", "argument", "json"):
                self._end_call()
                self._enter("message")
            case "message":
                self._end_turn()

    def _enter(self, place: Place) -> None:
        self._place = place
        self._blank.clear()

    def _end_turn(self) -> None:
        self._end_call()
        self.done = True

    def _begin_call(self, name: str) -> None:
        index = self._calls
        self._calls += 1
        self._call = _Call(index)
        self._deltas.append(ToolCallStart(index, f"functions.{name}:{self._first_call + index}", name))
        self._enter("call")

    def _end_call(self) -> None:
        if self._call is None:
            return
        self._emit_arguments(self._call.end())
        self._deltas.append(ToolCallEnd(self._call.index))
        self._call = None

    def _emit_arguments(self, text: str) -> None:
        if text and self._call is not None:
            self._deltas.append(ArgumentsDelta(self._call.index, text))

    def _read_text(self, ids: list[int]) -> None:
        if not ids:
            return
        if self._reading is not None:
            self._tag += b"".join(map(self._tokenizer.token_bytes, ids))
        else:
            self._write(self._decoder.feed(ids))

    def _flush_text(self) -> None:
        self._write(self._decoder.finish())

    def _write(self, text: str) -> None:
        if self._place in ("message", "call"):
            self._blank.append(text)
            if not text.strip():
                return
            text = "".join(self._blank)
            self._open("response" if self._place == "message" else "json", {})
        if not text:
            return
        match self._place:
            case "think":
                self._deltas.append(ReasoningDelta(text))
            case "response":
                self._deltas.append(ContentDelta(text))
            case "argument" | "json" if self._call is not None:
                self._emit_arguments(self._call.write(text))


class _Call:
    """Builds the JSON text of one call's arguments; each method returns what it adds to that text.

    Strings are escaped and shown as they come. Values of other types are held back until they end, since
    only then is it known whether they are JSON.
    """

    def __init__(self, index: int):
        self.index = index
        self._kind: Literal["none", "arguments", "json"] = "none"
        self._value: Literal["string", "held", "raw", "ignored"] | None = None  # None: between values
        self._held: list[str] = []

    def begin_argument(self, key: str, type_: str) -> str:
        if self._kind == "json":
            self._value = "ignored"
            return ""
        before = "{" if self._kind == "none" else ", "
        self._kind = "arguments"
        self._value = "held" if type_ in _JSON_TYPES else "string"
        quote = '"' if self._value == "string" else ""
        return f"{before}{json.dumps(key, ensure_ascii=False)}: {quote}"

    def begin_json(self) -> None:
        """A block that is the whole of the arguments; ignored if there are arguments already."""
        self._value = "raw" if self._kind == "none" else "ignored"
        if self._kind == "none":
            self._kind = "json"

    def write(self, text: str) -> str:
        match self._value:
            case "raw":
                return text
            case "string":
                return json.dumps(text, ensure_ascii=False)[1:-1]
            case "held":
                self._held.append(text)
        return ""

    def end_value(self) -> str:
        value, self._value = self._value, None
        if value == "string":
            return '"'
        if value == "held":
            text = self._take_held()
            return text if _is_json(text) else json.dumps(text, ensure_ascii=False)
        return ""

    def end(self) -> str:
        text = self.end_value()
        if self._kind == "none":
            return "{}"
        return text + "}" if self._kind == "arguments" else text

    def cut_off(self) -> str:
        return self._take_held()

    def _take_held(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        return text


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        # Numbers are not converted: a long one would be slow, and int() refuses thousands of digits.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True
