"""The command line that all training programs share: CONFIG name=value…, --help, and errors as one line."""

import dataclasses
import inspect
import io
import logging
import sys
import tokenize
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from k3jax.config import ConfigError
from k3jax.weights.reader import CheckpointError
from k3jax.weights.writer import disk_full
from train.config import RunError, load_config, members, override, type_hint, type_name

Config = TypeVar("Config")


def command_line(
    kind: type[Config], main: Callable[[Config], object], examples: Sequence[str],
    choices: Mapping[str, Sequence[type]] | None = None,
) -> int:
    """Reads `CONFIG name=value…` from sys.argv and calls `main`. Returns the exit status of `guarded`.

    choices  field -> the dataclasses that it may hold, for --help, where the field's type does not tell
    """
    arguments = sys.argv[1:]
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(usage(kind, examples, choices or {}))
        return 0 if arguments else 2
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    return guarded(lambda: main(override(load_config(arguments[0], kind), arguments[1:])))


def guarded(work: Callable[[], object]) -> int:
    """Runs a program. Status 0; 2 with one line for what the user can mend; 130 with one line after Ctrl-C."""
    _silence_orbax()
    try:
        work()
    except (ConfigError, RunError, CheckpointError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and disk_full(error):
            text = f"{text.removesuffix('.')}. When there is space, start the same command again: it goes on from its checkpoint."
        print(text, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from the last checkpoint.", file=sys.stderr)
        return 130
    return 0


def usage(kind: type, examples: Sequence[str], choices: Mapping[str, Sequence[type]]) -> str:
    """The text of --help: how to call it, examples, and every field with its type, default and meaning."""
    program = examples[0].split(" configs/")[0]
    shown = "\n".join(f"  {example}" for example in examples)
    return (
        f"usage: {program} CONFIG [name=value ...]\n\nCONFIG is a Python file whose config() returns a {kind.__name__}. Paths "
        f"in it start from the working directory.\n\nexamples:\n{shown}\n\nfields:\n" + "\n".join(_field_lines(kind, "", choices))
    )


def _field_lines(kind: type, prefix: str, choices: Mapping[str, Sequence[type]]) -> list[str]:
    comments = _comments(kind)
    fields = [f for f in dataclasses.fields(kind) if f.init]
    width = max((len(f.name) for f in fields), default=0)
    lines = []
    for f in fields:
        hint = type_hint(kind, f.name)
        default = "" if f.default is dataclasses.MISSING else f" = {f.default!r}"
        comment = f"  # {comments[f.name]}" if f.name in comments else ""
        lines.append(f"  {prefix}{f.name:{width}}  {type_name(hint)}{default}{comment}")
        parts = choices.get(f.name) or [m for m in members(hint) if isinstance(m, type) and dataclasses.is_dataclass(m)]
        for part in parts:
            if len(parts) > 1:
                lines.append(f"  with {part.__name__}:")
            lines += _field_lines(part, f"{prefix}{f.name}.", {})
    return lines


def _comments(kind: type) -> dict[str, str]:
    """Field -> the comment that ends its line, in the class and those it extends."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        name = ""
        for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc("\n" + inspect.getsource(cls))).readline):
            if token.type == tokenize.COMMENT and name in cls.__annotations__ and token.line.lstrip().startswith(f"{name}:"):
                found[name] = token.string.lstrip("# ")
            elif token.type == tokenize.NAME and token.line.lstrip().startswith(f"{token.string}:"):
                name = token.string
    return found


def _silence_orbax() -> None:
    """Orbax tells of every file, and leaves behind coroutines of what failed, of which Python then complains at any
    time. What it raises is told by us."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)


@dataclass(frozen=True)
class _Unraisable:
    """A sys.unraisablehook that leaves out what comes from orbax and its event loops."""

    rest: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        frames = (frame for frame, _ in traceback.walk_tb(unraisable.exc_traceback))
        if not any(frame.f_globals.get("__name__", "").startswith(("orbax.", "asyncio.")) for frame in frames):
            self.rest(unraisable)
