"""One run per folder: a second one would write into the first one's checkpoints."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.config import RunError


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Holds `folder` for this process; the system lets go of it however the process ends. Raises RunError if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"Another run writes to {folder}: wait for its end, or name another folder (out=…).") from None
        yield
