"""Settings of a training run, from a Python file and arguments.

A config file is Python with a function `config()` that returns a frozen dataclass; arguments `name=value` replace its
fields, nested ones with dots. Everything is checked before any work starts.
"""

import ast
import dataclasses
import difflib
import math
import re
import runpy
import traceback
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp

from k3jax.config import ConfigError

Config = TypeVar("Config")


class RunError(RuntimeError):
    """Why a run cannot start or go on, for its user: data, disk, numbers. The message is all there is to see."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What every run has. A step takes `accumulate` micro-batches of `rows` packed rows of `row_length` tokens."""

    out: str  # folder for checkpoints, metrics.jsonl and pictures
    steps: int  # optimizer steps
    lr: float  # the peak of the schedule
    rows: int  # per micro-batch
    row_length: int  # tokens
    accumulate: int = 1  # micro-batches per step
    warmup: float = 0.01  # share of the steps
    final_lr: float = 0.0  # share of lr that the cosine ends at
    weight_decay: float = 0.1
    clip: float = 1.0  # global norm of the gradient
    seed: int = 0
    save_every: int = 100  # steps
    keep: int = 2  # checkpoints
    max_refused: int = 10  # steps in a row with a loss or gradient that is not finite, before the run stops
    logprob_chunk: int = 512  # tokens per row whose logits exist at one time
    remat: str = "layer"  # none: fastest, most memory

    def __post_init__(self) -> None:
        require_positive(self, "lr", "clip")
        require_whole(self, 1, "steps", "rows", "row_length", "accumulate", "save_every", "keep", "max_refused")
        require_whole(self, 1, "logprob_chunk")
        require_whole(self, 0, "seed")
        require_share(self, "warmup", "final_lr")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"weight_decay={self.weight_decay!r}: a number of at least 0 is needed.")
        if not self.out:
            raise ConfigError("out is empty: name the folder that the run writes to.")


def require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{name}={value!r}: a positive, finite number is needed, such as {name}=1e-3.")


def require_whole(config: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r}: a whole number of at least {least} is needed.")


def require_share(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ConfigError(f"{name}={value!r}: a share from 0 to 1 is needed.")


def load_config(path: str, kind: type[Config]) -> Config:
    """What `config()` in a Python file returns. Raises ConfigError, with the line, unless that is a `kind`."""
    if not Path(path).is_file():
        near = difflib.get_close_matches(path, [str(p) for p in Path("configs").glob("*.py")], 1)
        raise ConfigError(f"There is no config file {path}.{f' Did you mean {near[0]}?' if near else ''}")
    try:
        names = runpy.run_path(path)
        if not callable(names.get("config")):
            raise ConfigError(f"this file must define a function config() that returns a {kind.__name__}.")
        config = names["config"]()
    except Exception as error:
        raise ConfigError(_mistake_in(path, error)) from error
    if not isinstance(config, kind):
        raise ConfigError(f"{path}: config() returned a {type(config).__name__}, but this program needs a {kind.__name__}.")
    return config


def override(config: Config, arguments: Sequence[str]) -> Config:
    """`config` with fields replaced: ["lr=1e-4", "adapter.rank=8"]. Raises ConfigError on the first that is wrong."""
    changes: dict[str, Any] = {}
    for argument in arguments:
        path, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is not name=value, such as lr=1e-4.")
        names = path.split(".")
        target, level = config, changes
        for depth, name in enumerate(names):
            known = _fields(target, ".".join(names[:depth]), path)
            if name not in known:
                raise ConfigError(_unknown(path, ".".join((*names[:depth], name)), _paths(config)))
            if depth < len(names) - 1:
                target, level = getattr(target, name), level.setdefault(name, {})
        level[names[-1]] = _parse(text, type_hint(type(target), names[-1]), getattr(target, names[-1]), path)
    return _replaced(config, changes)


def _mistake_in(path: str, error: Exception) -> str:
    """What is wrong in a config file, and in which of its lines."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path} line {error.lineno}: {error.msg}."
    ours = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    where = f"{path} line {ours[-1][1]}" if ours else path
    if ours and (found := re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))):
        kind, name = ours[-1][0].f_globals.get(found[1]), found[2]
        known = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
        return f"{where}: {found[1]} has no field {name}.{_hint_for(name, known)}"
    return f"{where}: {error}" if isinstance(error, ValueError) else f"{where}: {type(error).__name__}: {error}"


def _hint_for(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {near[0]}?" if near else f" It has {', '.join(known)}." if known else ""


def _fields(value: Any, at: str, path: str) -> set[str]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise ConfigError(f"{path}: {at} is {value!r}, which has no fields to set.")
    return {f.name for f in dataclasses.fields(value)}


def _paths(config: Any, prefix: str = "") -> list[str]:
    found = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        found.append(prefix + f.name)
        if dataclasses.is_dataclass(value):
            found += _paths(value, f"{prefix}{f.name}.")
    return found


def _unknown(path: str, unknown: str, known: list[str]) -> str:
    by_name = {name.split(".")[-1]: name for name in reversed(known)}
    near = difflib.get_close_matches(path, known, 1)
    near = near or [by_name[name] for name in difflib.get_close_matches(path.split(".")[-1], by_name, 1)]
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(k for k in known if '.' not in k)}."
    return f"There is no field {unknown}. {hint}"


def _replaced(config: Any, changes: Mapping[str, Any], at: str = "") -> Any:
    values = {}
    for name, value in changes.items():
        now = getattr(config, name)
        nested = isinstance(value, dict) and dataclasses.is_dataclass(now)
        values[name] = _replaced(now, value, f"{at}{name}.") if nested else value
    try:
        return dataclasses.replace(config, **values)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{at.removesuffix('.')}: {error}" if at else str(error)) from error


def type_hint(kind: type, name: str) -> Any:
    """The type of a field, names resolved."""
    return typing.get_type_hints(kind)[name]


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; else the type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def type_name(hint: Any) -> str:
    """A type as a reader would write it."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _parse(text: str, hint: Any, current: Any, path: str) -> Any:
    """The value that `text` spells, of the type `hint`."""
    if hint is Any:
        try:
            dtype = jnp.dtype(text)
        except (TypeError, ValueError, SyntaxError):
            dtype = jnp.dtype(bool)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ConfigError(f"{path}={text}: a dtype of real numbers is needed, such as float32 or bfloat16.")
        return dtype
    for kind in members(hint):
        try:
            return _of_kind(text, kind)
        except (ValueError, SyntaxError):
            continue
    shown = f" (now {current!r})" if not dataclasses.is_dataclass(current) else ""
    raise ConfigError(f"{path}={text}: a value of type {type_name(hint)} is needed{shown}.")


def _of_kind(text: str, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is types.NoneType:
        if text != "None":
            raise ValueError
        return None
    if kind is bool:
        return text.lower() == "true" if text.lower() in ("true", "false") else _refuse()
    if kind is int:
        return int(float(text)) if "e" in text and float(text).is_integer() else int(text)
    if kind is float:
        return float(text)
    if kind is str:
        return text
    if origin is typing.Literal:
        return next((a for a in arguments if str(a) == text), None) or _refuse()
    if origin is tuple:
        parts = [p for p in text.strip("()").split(",") if p]
        kinds = [arguments[0]] * len(parts) if arguments[-1] is Ellipsis else list(arguments)
        return tuple(_of_kind(part.strip().strip("'\""), k) for part, k in zip(parts, kinds, strict=True))
    if origin in (dict, Mapping, typing.get_origin(Mapping[str, int])):
        value = ast.literal_eval(text)
        return value if isinstance(value, dict) else _refuse()
    return _refuse()


def _refuse() -> Any:
    raise ValueError
