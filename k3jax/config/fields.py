"""A JSON object of which every field must be known: fields are taken one by one, what is left over is an error."""

import difflib
import math
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the field."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(message)


_MISSING = object()


class Fields:
    """The fields of `raw`, an object found at `where`. Each method takes one; `finish` refuses the others by name."""

    def __init__(self, raw: Any, where: str):
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where} must be an object, got {type(raw).__name__}")
        self.raw, self.where, self.known = dict(raw), where, set()

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """Takes a field of any value; without a default it must be there."""
        self.known.add(name)
        if name in self.raw:
            return self.raw.pop(name)
        if default is _MISSING:
            near = difflib.get_close_matches(name, self.raw, 1)
            hint = f" (found {near[0]!r} instead)" if near else ""
            raise ConfigError(f"{self.where} lacks {name!r}{hint}")
        return default

    def expect(self, name: str, *allowed: Any, required: bool = False) -> Any:
        """Takes a field whose other values are not supported; `allowed[0]` is the default unless it is required."""
        value = self.take(name) if required else self.take(name, allowed[0])
        if value not in allowed:
            raise ConfigError(f"{self.where}: {name}={value!r} is not supported, only {' or '.join(map(repr, allowed))}")
        return value

    def whole(self, name: str, default: Any = _MISSING, least: int = 1) -> Any:
        """Takes a whole number; without one, a default that may be None."""
        value = self.take(name, default)
        if value is not default and (type(value) is not int or value < least):
            raise ConfigError(f"{self.where}: {name} must be a whole number of at least {least}, got {value!r}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """Takes a finite number; without one, a default that may be None."""
        value = self.take(name, default)
        if value is not default and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ConfigError(f"{self.where}: {name} must be a finite number, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Takes true or false."""
        value = self.take(name, default)
        if type(value) is not bool:
            raise ConfigError(f"{self.where}: {name} must be true or false, got {value!r}")
        return value

    def wholes(self, name: str) -> list[int]:
        """Takes a list of whole numbers of at least 1."""
        value = self.take(name)
        if not isinstance(value, list) or any(type(item) is not int or item < 1 for item in value):
            raise ConfigError(f"{self.where}: {name} must be a list of whole numbers of at least 1, got {value!r}")
        return value

    def ignore(self, *names: str) -> None:
        """Takes fields that say nothing about the computation, whatever they hold."""
        for name in names:
            self.take(name, None)

    def finish(self) -> None:
        """Refuses what was not taken, with the nearest known name."""
        for name in self.raw:
            near = difflib.get_close_matches(name, self.known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{self.where}: unknown field {name!r}{hint}")
