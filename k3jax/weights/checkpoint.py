"""Loads and saves models as official checkpoints: strict, streamed, onto a mesh, reading only what it needs.

    model = load("Kimi-K3", mesh=mesh)
    save(model, "out")

`python -m k3jax.weights --help` looks into checkpoints and converts them.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from k3jax.config import K3Config
from k3jax.model import K3
from k3jax.progress import Progress
from k3jax.sharding import TRAIN, Rules, shardings
from k3jax.weights.match import match
from k3jax.weights.names import Location, Parameter, Spelling, TensorNames, is_mtp, spelling_of
from k3jax.weights.reader import DTYPES, CheckpointError, Reader, Tensor, dtype_name, read_folder
from k3jax.weights.writer import Spec, write_folder

MAX_SHARD_BYTES = 5_000_000_000
_PIECE = 1 << 30  # bytes of a stack gathered on the host for an accelerator, or one layer if that is more
_SPELLING = "checkpoint_spelling"  # attribute of a loaded model, for save
_THREADS = min(8, os.cpu_count() or 1)

logger = logging.getLogger(__name__)


def load(
    folder: str | Path,
    config: K3Config | None = None,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    rules: Rules = TRAIN,
    scale_bias: int = 127,
) -> K3:
    """The model in a checkpoint folder, on the default device or spread over `mesh` by `rules`.

    config      instead of the folder's config.json; whether experts are packed, the tensors decide alone
    dtype       of weights and computation instead of the config's; what the release has in fp32 stays fp32
    scale_bias  exponent bias of MXFP4 scales: 127, or 125 for checkpoints of an older exporter

    Every tensor must be there, have its shape and belong to the model. The exception is a
    multi-token-prediction layer, which a checkpoint may have or lack: what is left out is logged. Raises
    CheckpointError with the list of faults, ConfigError or FileNotFoundError. Beyond the model itself, a host
    holds at most one piece of one parameter.
    """
    tensors = read_folder(folder)
    config = stored_config(K3Config.load(folder) if config is None else config, tensors)
    config = config if dtype is None else config.in_dtype(dtype)
    model = abstract(config)
    table = TensorNames(model, config)
    sources = match(tensors, table, str(folder))
    state = nnx.state(model)
    places = {} if mesh is None else dict(nnx.to_flat_state(shardings(state, mesh, rules)))
    parameters = {p.path: p for p in table.parameters}
    filled = []
    with Reader() as reader, ThreadPoolExecutor(_THREADS) as pool:
        total = sum(t.stop - t.start for parts in sources.values() for t in parts)
        source = _Source(reader, pool, Progress("load", total), scale_bias)
        for path, variable in nnx.to_flat_state(state):
            p = parameters[path]
            read = partial(source.read, p, sources[path])
            place = places[path].get_value() if path in places else None
            filled.append((path, variable.replace(_array(variable.get_value().shape, p, read, place))))
    nnx.update(model, nnx.from_flat_state(filled))
    setattr(model, _SPELLING, spelling_of(tensors, table))
    return model


def save(
    model: K3,
    folder: str | Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: Any = None,
    spelling: Spelling | None = None,
) -> None:
    """Writes a model as an official checkpoint: config.json, safetensors files and, if several, their index.

    A model that was loaded is written as its checkpoint was spelled. `dtype` replaces that of the weights,
    except of those that are always fp32. LoRA adapters are not part of it (k3jax.lora). Tensors are gathered
    one at a time. An earlier checkpoint in the folder stays whole until the new one is complete. All
    processes must call this together.
    """
    config = model.config if dtype is None else model.config.in_dtype(dtype)
    table = TensorNames(abstract(config), config)
    used = spelling or getattr(model, _SPELLING, None) or Spelling.default(config)
    arrays = {path: v.get_value() for path, v in nnx.to_flat_state(nnx.state(model))}
    locations, specs = zip(*official_specs(table, used), strict=True)
    progress = Progress("save", sum(s.nbytes for s in specs))

    def fetch(i: int) -> np.ndarray:
        value = _official(locations[i].parameter, gather(arrays, locations[i]), specs[i])
        progress.add(value.nbytes)
        return value

    write_folder(
        folder,
        specs,
        fetch,
        config=config.to_dict(),
        max_shard_bytes=max_shard_bytes,
        writer=jax.process_index() == 0,
    )
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {folder}")


def abstract(config: K3Config) -> K3:
    """The model of a config with shapes in place of arrays."""
    return nnx.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0)))


def official_specs(table: TensorNames, spelling: Spelling) -> Iterator[tuple[Location, Spec]]:
    """Every tensor of a model with its name, dtype and shape in a checkpoint."""
    for at in table.locations():
        p = at.parameter
        dtype = spelling.scale_dtype if p.path[-1] == "scale" else dtype_name(p.dtype)
        yield at, Spec(table.name(at, spelling), dtype, p.stored_shape(spelling))


def stored_config(config: K3Config, tensors: Mapping[str, Tensor]) -> K3Config:
    """`config` with what the tensors decide: packed experts, and whether there is a prediction layer."""
    packed = any(name.endswith(".weight_packed") for name in tensors)
    if config.moe is not None and config.moe.mxfp4 != packed:
        config = replace(config, moe=replace(config.moe, mxfp4=packed))
    if config.num_mtp_layers and not any(is_mtp(name, config) for name in tensors):
        logger.warning("The checkpoint has no multi-token-prediction layer, which its config announces.")
        config = replace(config, num_mtp_layers=0)
    return config


class _Source:
    """Reads parameters, or parts of them, from the tensors that they are made of."""

    def __init__(self, reader: Reader, pool: ThreadPoolExecutor, progress: Progress, scale_bias: int):
        self.reader, self.pool, self.progress, self.scale_bias = reader, pool, progress, scale_bias

    def read(self, p: Parameter, tensors: Sequence[Tensor], index: tuple[slice, ...]) -> np.ndarray:
        """p[index] in host memory, read in file order; aligned, so that the CPU backend uses it in place."""
        out = _aligned(tuple(s.stop - s.start for s in index), p.dtype)
        lead, inner = index[: len(p.lead)], index[len(p.lead) :]
        numbers = np.arange(len(tensors)).reshape(p.lead)[lead]
        views = out.reshape(-1, *out.shape[len(lead) :])
        jobs = sorted(
            zip((tensors[i] for i in numbers.reshape(-1).tolist()), views, strict=True),
            key=lambda job: (job[0].file, job[0].start),
        )
        step = -(-len(jobs) // (4 * _THREADS))
        batches = [jobs[i : i + step] for i in range(0, len(jobs), step)]
        self.progress.add(sum(self.pool.map(partial(self._batch, p, inner), batches)))
        return out

    def _batch(
        self, p: Parameter, inner: tuple[slice, ...], jobs: Sequence[tuple[Tensor, np.ndarray]]
    ) -> int:
        index = inner[::-1] if p.transpose else inner
        total = 0
        for tensor, out in jobs:
            if p.path[-1] == "scale":
                tensor = tensor._replace(dtype="U8")  # E8M0: the same bytes
            view = p.view if p.path[-1] != "A_log" else (max(tensor.shape),)
            total += self.reader.read_into(out, tensor, view, index, p.transpose)
            if p.path[-1] == "scale" and self.scale_bias != 127:
                out[...] = rebias(out, self.scale_bias, p.name)
        return total


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary: the CPU backend takes it over instead of copying it."""
    dtype = np.dtype(dtype)
    size = prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def rebias(scales: np.ndarray, bias: int, name: str) -> np.ndarray:
    """Scales 2^(byte - bias) as bytes of bias 127. Raises CheckpointError if one leaves E8M0."""
    shifted = scales.astype(np.int16) + (127 - bias)
    if scales.size and not (0 <= shifted.min() and shifted.max() <= 254):
        found = f"from {scales.min()} to {scales.max()}"
        raise CheckpointError(
            f"{name}: scale bytes {found} leave the range of E8M0 with an exponent bias of {bias}."
        )
    return shifted.astype(np.uint8)


def _array(
    shape: tuple[int, ...],
    p: Parameter,
    read: Callable[[tuple[slice, ...]], np.ndarray],
    place: NamedSharding | None,
) -> jax.Array:
    """The parameter on its devices. Each distinct part is read once per process."""
    if place is None:
        return _on_device(tuple(slice(0, n) for n in shape), p, read, None)
    parts: dict[Any, jax.Array] = {}
    arrays = []
    for device, index in place.addressable_devices_indices_map(shape).items():
        ranges = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        if ranges not in parts:
            parts[ranges] = _on_device(tuple(slice(*r) for r in ranges), p, read, device)
        arrays.append(jax.device_put(parts[ranges], device))
    return jax.make_array_from_single_device_arrays(shape, place, arrays)


def _on_device(index: tuple[slice, ...], p: Parameter, read: Any, device: jax.Device | None) -> jax.Array:
    """p[index] on a device (None: the default). What exceeds _PIECE is put together there, layer by layer."""
    shape = tuple(s.stop - s.start for s in index)
    size = prod(shape) * np.dtype(p.dtype).itemsize
    if p.layers is None or size <= _PIECE or _takes_over(device):
        return jax.device_put(read(index), device).block_until_ready()
    step = max(1, _PIECE * shape[0] // size)
    whole = jnp.zeros(shape, p.dtype, device=device)
    for start in range(0, shape[0], step):
        first = index[0].start + start
        piece = read((slice(first, min(first + step, index[0].stop)), *index[1:]))
        whole = _insert(whole, jax.device_put(piece, device), start).block_until_ready()
    return whole


def _takes_over(device: jax.Device | None) -> bool:
    """Whether arrays of this device live in the host memory that they were read into."""
    return (jax.default_backend() if device is None else device.platform) == "cpu"


@partial(jax.jit, donate_argnums=0)
def _insert(whole: jax.Array, piece: jax.Array, start: jax.Array | int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, piece, start, 0)


def gather(arrays: Mapping[Any, jax.Array], at: Location) -> np.ndarray:
    """One tensor of a model in host memory, shaped as the model holds it."""
    array = arrays[at.parameter.path]
    lead = tuple(n for n in (at.layer, at.expert) if n is not None)
    if not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array[lead], tiled=True))
    out = None
    for shard in array.addressable_shards:
        start = tuple(s.indices(n)[0] for s, n in zip(shard.index, array.shape, strict=True))[: len(lead)]
        local = tuple(i - s for i, s in zip(lead, start, strict=True))
        if shard.replica_id != 0 or any(not 0 <= i < n for i, n in zip(local, shard.data.shape)):  # noqa: B905
            continue
        on_host = next(iter(shard.data.devices())).platform == "cpu"
        value = np.asarray(shard.data)[local] if on_host else np.asarray(shard.data[local])
        if value.shape == array.shape[len(lead) :]:
            return value
        out = np.empty(array.shape[len(lead) :], array.dtype) if out is None else out
        out[shard.index[len(lead) :]] = value
    assert out is not None
    return out


def _official(p: Parameter, value: np.ndarray, spec: Spec) -> np.ndarray:
    """A tensor in the shape and dtype of the checkpoint."""
    value = value.T if p.transpose else value
    if p.path[-1] == "scale":
        return value.view(DTYPES[spec.dtype])
    value = value.astype(p.dtype, copy=False)
    if value.size != prod(spec.shape):
        value = np.pad(value, (0, spec.shape[0] - value.size))
    return value.reshape(spec.shape)
