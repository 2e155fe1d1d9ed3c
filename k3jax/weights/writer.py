"""Writes checkpoint folders, tensor by tensor; an earlier checkpoint stays whole until the new one is."""

import errno
import fcntl
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k3jax.weights.reader import DTYPES, INDEX, SINGLE, CheckpointError, as_bytes, dtype_name, read_index

STAGING = ".saving-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Spec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def write_folder(
    folder: str | Path,
    specs: Sequence[Spec],
    fetch: Callable[[int], np.ndarray],
    *,
    config: Mapping[str, Any],
    max_shard_bytes: int,
    beside: Sequence[Path] = (),
    writer: bool = True,
) -> None:
    """Writes tensors, config.json and, for several files, the index. `fetch(i)` returns specs[i]'s value.

    Files in `beside` are copied into the folder with them.

    Values are fetched one at a time. The files are written to a hidden folder inside and moved when all are
    complete: until then an earlier checkpoint in the folder stays as it was, and two savers take turns.
    `writer=False` only fetches, in the same order: for the other processes of a distributed save.
    """
    shards = _shards(specs, max_shard_bytes)
    if not writer:
        for _, members in shards:
            for i in members:
                fetch(i)
        return
    with replacing(folder, (SINGLE, INDEX)) as staging:
        for name, members in shards:
            write_file(staging / name, [specs[i] for i in members], map(fetch, members))
        if len(shards) > 1:
            weight_map = {specs[i].name: name for name, members in shards for i in members}
            index = {"metadata": {"total_size": sum(s.nbytes for s in specs)}, "weight_map": weight_map}
            write_json(staging / INDEX, index)
        write_json(staging / "config.json", config)
        for file in beside:
            shutil.copyfile(file, staging / file.name)


def _shards(specs: Sequence[Spec], limit: int) -> list[tuple[str, list[int]]]:
    """Consecutive tensors up to `limit` bytes per file, a larger one alone; wide dtypes first, to align."""
    groups: list[list[int]] = [[]]
    size = 0
    for i, spec in enumerate(specs):
        if groups[-1] and size + spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += spec.nbytes
    names = (
        [SINGLE]
        if len(groups) == 1
        else [f"model-{n + 1:05}-of-{len(groups):05}.safetensors" for n in range(len(groups))]
    )
    width = lambda i: -DTYPES[specs[i].dtype].itemsize  # noqa: E731
    return [(name, sorted(group, key=width)) for name, group in zip(names, groups, strict=True)]


def write_file(file: Path, specs: Sequence[Spec], values: Iterable[np.ndarray]) -> None:
    """One safetensors file. `values` are asked for one at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb", buffering=0) as f:
        _write(f.fileno(), memoryview(struct.pack("<Q", len(text)) + text))
        for spec, value in zip(specs, values, strict=True):
            assert (dtype_name(value.dtype), value.shape) == spec[1:], spec
            _write(f.fileno(), as_bytes(np.ascontiguousarray(value)))
        os.fsync(f.fileno())


def write_json(file: Path, value: Any) -> None:
    with open(file, "w") as f:
        f.write(json.dumps(value, indent=1) + "\n")
        f.flush()
        os.fsync(f.fileno())


def _write(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]


def disk_full(error: BaseException | None) -> bool:
    """Whether a full disk, a quota or a limit on the size of files is behind an error."""
    return any(
        getattr(e, "errno", None) in _FULL or any(os.strerror(number) in str(e) for number in _FULL) for e in causes(error)
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what is behind it, the latest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def replacing(folder: str | Path, last: Sequence[str]) -> Iterator[Path]:
    """A folder hidden in `folder`: its files replace those there if the block succeeds, else they go.

    `last` are the files without which a folder is no checkpoint: the old ones go first, the new ones come last.
    Both folders are locked by flock, which the system drops when a process dies: what a killed saver left is
    removed.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with locked(folder):
                for old in folder.glob(STAGING + "*"):
                    with locked(old, wait=False) as free:
                        if free:
                            shutil.rmtree(old, ignore_errors=True)
                staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=folder))
                stack.callback(shutil.rmtree, staging, ignore_errors=True)
                stack.enter_context(locked(staging))
            yield staging
            with locked(folder):
                _replace(folder, staging, last)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = next(shutil.disk_usage(f).free for f in (folder, *folder.parents) if f.exists())
        reason = f"{os.strerror(error.errno)} while saving ({free} bytes free); {folder} is unchanged"
        raise OSError(error.errno, f"{reason}. Free some space, or save to another disk.") from error


def _replace(folder: Path, staging: Path, last: Sequence[str]) -> None:
    """Moves the new files in, what makes them a checkpoint last: a half-done move is not taken for one."""
    try:
        old = set(read_index(folder / INDEX).values()) if (folder / INDEX).exists() else set()
    except CheckpointError:
        old = set()
    for name in [*last, *old]:
        (folder / name).unlink(missing_ok=True)
    for file in sorted(staging.iterdir(), key=lambda f: f.name in last):
        os.replace(file, folder / file.name)
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[bool | None]:
    """Holds an flock on a folder, which the system drops when the process dies. Yields True if it is held, False if another
    has it (and `wait` is false) or there is no such folder, None if the file system has no locks."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except BlockingIOError:
            held = False
        except OSError:
            held = None
        yield held
    finally:
        os.close(fd)
