"""What the chat encoder and the parser share: Kimi K3's markers, attributes, argument types and errors.

The format (XTML) writes a tag as <|open|>name key="value"<|sep|> ... <|close|>name<|sep|>, where the
markers are special tokens and everything else, names and attributes included, is ordinary text.
"""

import re
from dataclasses import dataclass
from typing import Any

from k3jax.tokenizer import Tokenizer

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"

# Stands for an image inside a text; the encoder replaces it by the image's prompt.
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"


class ChatError(ValueError):
    """A conversation or option that the format cannot express."""


class ChatTypeError(ChatError, TypeError):
    """A field of a message has the wrong type."""


class MissingFieldError(ChatError, KeyError):
    """A message or content part lacks a field."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class UnsupportedEffortError(ChatError, AssertionError):
    """A thinking effort that the model was not trained with."""


@dataclass(frozen=True)
class Markers:
    """Ids of the four structural tokens."""

    open: int
    close: int
    sep: int
    end_of_message: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Markers":
        """Raises ChatError for a tokenizer to which a marker is a text like any other: its model has another format."""
        names = (OPEN, CLOSE, SEP, END_OF_MESSAGE)
        if missing := [name for name in names if name not in tokenizer.special_tokens]:
            raise ChatError(
                f"This tokenizer has no special tokens {', '.join(missing)}: its model knows another chat format than "
                "Kimi K3's, or none. Use the tokenizer of a K3 checkpoint, or give token ids instead of messages."
            )
        return cls(*map(tokenizer.special_id, names))


def stop_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids that end a turn by themselves: <|end_of_msg|>, and [EOS] where the tokenizer has one.

    A model that forgets <|end_of_msg|> ends with <|close|>message<|sep|>: ChatParser.done tells.
    """
    ids = [tokenizer.special_id(END_OF_MESSAGE)]
    if "[EOS]" in tokenizer.special_tokens:
        ids.append(tokenizer.special_id("[EOS]"))
    return ids


def escape_attribute(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape_attribute(value: str) -> str:
    # The other order would turn an escaped "&quot;" (&amp;quot;) into a quote.
    return value.replace("&quot;", '"').replace("&amp;", "&")


_ATTRIBUTE = re.compile(r'\s([^\s"=]+)="([^"]*)"')


def parse_tag(text: str) -> tuple[str, dict[str, str]]:
    """'call tool="f" index="1"' -> ("call", {"tool": "f", "index": "1"}); what is no attribute is ignored."""
    name = text.split(maxsplit=1)[0] if text.strip() else ""
    return name, {key: unescape_attribute(value) for key, value in _ATTRIBUTE.findall(text)}


def json_type(value: Any) -> str:
    """The type attribute of an argument."""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case list() | tuple():
            return "array"
    raise ChatTypeError(f"A tool argument must be a JSON value, got {type(value).__name__}.")
