"""Checkpoint folders of safetensors files: headers without data, and slices of tensors.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
bytes. A folder holds `model.safetensors`, or shards with `model.safetensors.index.json`. Nothing here keeps a
file mapped: a slice is read, or mapped, copied and unmapped.
"""

import json
import mmap
import os
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 1 << 30  # bytes; 497 220 tensors in one file need 75 MB
_CHUNK = 8 << 20  # bytes read at once when they cannot go straight to their destination


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; the message names the file or the tensors."""


class Tensor(NamedTuple):
    """Where a tensor lies."""

    file: Path
    dtype: str  # as in the header
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


def dtype_name(dtype: Any) -> str:
    return _NAMES[np.dtype(dtype)]


def read_folder(folder: str | Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder, from headers alone, in file order.

    Raises FileNotFoundError (no weights, or a shard is missing) or CheckpointError (a damaged file, or an
    index that does not describe its shards).
    """
    folder = Path(folder)
    single, index = folder / SINGLE, folder / INDEX
    if not index.exists():
        if not single.exists():
            raise FileNotFoundError(f"{folder} holds no weights: it needs {SINGLE}, or shards with {INDEX}.")
        return read_header(single)
    where = read_index(index)
    if single.exists() and SINGLE not in where.values():
        raise CheckpointError(
            f"{folder} holds both {SINGLE} and an index that does not list it. Remove one of the two."
        )
    files = sorted(set(where.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of the {len(files)} files that {INDEX} lists: {_some(missing)}. "
            "Download them again."
        )
    tensors: dict[str, Tensor] = {}
    for name in files:
        for tensor, place in read_header(folder / name).items():
            if where.get(tensor) != name:
                listed = f"lists it in {where[tensor]}" if tensor in where else "does not list it"
                raise CheckpointError(f"{folder / name} holds {tensor!r}, but {INDEX} {listed}.")
            tensors[tensor] = place
    if absent := [tensor for tensor in where if tensor not in tensors]:
        raise CheckpointError(
            f"{index} lists {len(absent)} tensors which their files do not hold, such as {absent[0]!r} in "
            f"{where[absent[0]]}."
        )
    return tensors


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one file, in file order. Raises CheckpointError if it is truncated or damaged."""
    size = file.stat().st_size
    with open(file, "rb") as f:
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{file} is not a complete safetensors file: {size} bytes, header of {length} bytes. Download it again."
            )
        try:
            raw = json.loads(f.read(length))
            raw.pop("__metadata__", None)
            tensors = {name: _tensor(file, 8 + length, **entry) for name, entry in raw.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} has a damaged header: {error}. Download it again.") from error
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].start))
    end = 8 + length
    for name, t in tensors.items():
        if (
            t.start != end
            or t.dtype in DTYPES
            and t.stop - t.start != prod(t.shape) * DTYPES[t.dtype].itemsize
        ):
            raise CheckpointError(
                f"{file}: {name!r} ({t.dtype} {list(t.shape)}) has offsets that do not fit its shape."
            )
        end = t.stop
    if end != size:
        state = "truncated" if end > size else "damaged"
        raise CheckpointError(
            f"{file} is {state}: its header describes {end} bytes, the file has {size}. Download it again."
        )
    return tensors


def _tensor(file: Path, base: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    return Tensor(file, dtype, tuple(shape), base + data_offsets[0], base + data_offsets[1])


def read_index(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises CheckpointError if that is not what the index holds."""
    try:
        where = json.loads(index.read_text())["weight_map"]
        good = isinstance(where, dict) and all(
            isinstance(name, str) and name == Path(name).name for name in where.values()
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    if not good:
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names in the same folder.")
    return where


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


class Reader:
    """Reads slices of tensors into arrays. Several threads may use it; it closes what it opened on exit."""

    def __init__(self):
        self._files: dict[Path, int] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: Any) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, tensor: Tensor) -> np.ndarray:
        """The whole tensor."""
        out = np.empty(tensor.shape, DTYPES[tensor.dtype])
        self._fill(tensor, tensor.start, as_bytes(out))
        return out

    def read_into(
        self,
        out: np.ndarray,
        tensor: Tensor,
        shape: tuple[int, ...],
        index: tuple[slice, ...],
        transpose: bool,
    ) -> int:
        """out[...] = tensor seen as `shape`, sliced, transposed, cast to out's dtype. Returns bytes read.

        Temporary memory stays under 8 MiB, or one row of the tensor if that is longer.
        """
        dtype = DTYPES[tensor.dtype]
        if not shape:
            shape, index, out = (1,), (slice(0, 1),), out.reshape(1)
        rows, inner = index[0], index[1:]
        first, last, _ = rows.indices(shape[0])
        stride = prod(shape[1:]) * dtype.itemsize
        whole = all(s.indices(n)[:2] == (0, n) for s, n in zip(inner, shape[1:], strict=True))
        if whole and not transpose and out.dtype == dtype and out.flags.c_contiguous:
            self._fill(tensor, tensor.start + first * stride, as_bytes(out))
            return out.nbytes
        total = 0
        step = max(1, _CHUNK // max(stride, 1))
        for row in range(first, last, step):
            end = min(row + step, last)
            block = self._rows(
                tensor, dtype, (end - row, *shape[1:]), tensor.start + row * stride, inner, whole
            )
            where = slice(row - first, end - first)
            if transpose:
                out[:, where] = block.T
            else:
                out[where] = block
            total += block.nbytes
        return total

    def _rows(
        self, tensor: Tensor, dtype: np.dtype, shape: tuple[int, ...], start: int, inner: Any, whole: bool
    ) -> np.ndarray:
        """A block of rows; when only some columns are wanted, only the pages that hold them are touched."""
        if whole:
            block = np.empty(shape, dtype)
            self._fill(tensor, start, as_bytes(block))
            return block
        page = start - start % mmap.ALLOCATIONGRANULARITY
        length = start - page + prod(shape) * dtype.itemsize
        with mmap.mmap(self._open(tensor.file), length, prot=mmap.PROT_READ, offset=page) as view:
            mapped = np.ndarray(shape, dtype, view, start - page)
            block = mapped[(slice(None), *inner)].copy()
            del mapped  # an exported buffer would keep the map open
        return block

    def _fill(self, tensor: Tensor, start: int, out: memoryview) -> None:
        file = self._open(tensor.file)
        done = 0
        while done < len(out):
            n = os.preadv(file, [out[done:]], start + done)
            if n == 0:
                raise CheckpointError(f"{tensor.file} ended while it was read: was it replaced?")
            done += n

    def _open(self, file: Path) -> int:
        fd = self._files.get(file)
        if fd is None:
            fd = os.open(file, os.O_RDONLY)
            if self._files.setdefault(file, fd) != fd:  # another thread was first
                os.close(fd)
                fd = self._files[file]
        return fd


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
