"""Which settings make a run what it is: kept in its checkpoints, so that another run cannot go on from them unnoticed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# What may change while a run is interrupted: where it writes, how far it goes (lr then follows the longer schedule), what it
# watches, what it trades between time and memory.
FREE = frozenset("out steps save_every keep max_refused logprob_chunk remat heldout heldout_every".split())


def settings(config: Any) -> dict[str, str]:
    """Path of each field that decides what is computed -> its value, as text: {"lr": "0.001", "adapter.rank": "8", …}.

    Fields that are dataclasses are gone into; other objects stand for themselves by the name of their class.
    """
    found = {}
    for field in dataclasses.fields(config):
        if field.name in FREE:
            continue
        value = getattr(config, field.name)
        found[field.name] = _text(value)
        if dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{name}": text for name, text in settings(value).items()}
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """["lr=0.1 (was 0.001)", …] for names that both have: a later version may know more."""
    return [f"{name}={now[name]} (was {before[name]})" for name in now if name in before and before[name] != now[name]]


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_text, value)) + ")"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(value[key])}" for key in sorted(value)) + "}"
    plain = value is None or isinstance(value, str | int | float) or hasattr(value, "itemsize")
    return str(value) if plain else type(value).__qualname__
