"""Adapters on disk in PEFT's format: adapter_config.json and adapter_model.safetensors, strict in both directions.

Routed experts are read in four layouts: a matrix per expert (`experts.7.w1.lora_A.weight`, also what is written), all
experts stacked ([E, r, in] and [E, out, r]), stacked with one factor shared by all ([1, r, in] or [1, out, r]), and PEFT's
flat one for stacked parameters ([E * r, in] and [out, r * E]).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from k3jax.config import K3Config
from k3jax.lora.adapters import Adapters, LoRAConfig, Placed
from k3jax.lora.peft_config import CONFIG, AdapterError, base_name, read_config, written_config
from k3jax.lora.targets import Projection, ends_with, projections, shortest_targets
from k3jax.weights.names import PREFIX, Spelling
from k3jax.weights.reader import CheckpointError, Reader, Tensor, read_header
from k3jax.weights.writer import Spec, replacing, write_file, write_json

HEAD = "base_model.model."
WEIGHTS = "adapter_model.safetensors"

logger = logging.getLogger(__name__)


def load_peft(adapters: Adapters, name: str, folder: str | Path) -> int:
    """Adds the adapter in a PEFT folder under `name` and returns its id. An error leaves everything as it was.

    Every module that the config targets must have both tensors, and no other tensor may be there. Raises
    FileNotFoundError; AdapterError with the list of faults; ValueError if columns are lacking or the name is taken.
    Two bases of equal shapes cannot be told apart: the format has a name for the base, but no trace of its weights.
    """
    folder = Path(folder)
    config, targeted = read_config(folder)
    every = list(projections(adapters.model))
    with Reader() as reader:
        tensors = _Tensors(folder / WEIGHTS, reader)
        found = {p.name: list(tensors.take(p, config)) for p in every}
        faults = _unknown_targets(config, every) + tensors.faults
        faults += _coverage(every, found, targeted, tensors.faulty) + tensors.leftovers()
        if not faults and not any(found.values()):
            faults = ["no adapter weights in it"]
        _raise(folder, faults)
        names = [matrix for p in every for matrix, _ in p.matrices]
        config = replace(config, targets=shortest_targets([m.name for ms in found.values() for m in ms], names))
        adapters.check(name, config)
        parts = [_placed(p, scale, found[p.name], faults) for p, scale in adapters.covered(config)]
        _raise(folder, faults)
    if not any(np.any(part.a) and np.any(part.b) for part in parts):
        logger.warning("%s: every A or every B is zero, so the adapter changes nothing.", folder)
    return adapters.install(name, config, parts)


def save_peft(adapters: Adapters, name: str, folder: str | Path, *, base: str | None = None) -> None:
    """Writes an adapter as a PEFT folder. An earlier one there stays whole until the new one is complete.

    base  the checkpoint that it belongs to, which later errors name
    Raises ValueError if a weight is not finite, OSError if the disk is full. All processes must call this together.
    """
    adapter, folder = adapters[name], Path(folder)
    prefix = HEAD + _model_prefix(adapters.model.config)
    tensors, names = {}, []
    for matrix, p, a, b, _ in adapters.read_matrices(name):
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ValueError(f"Adapter {name!r} holds NaN or infinite numbers, in {matrix} first. It was not saved.")
        low, up = _halves(p)
        tensors[f"{prefix}{matrix}.{low}"] = np.ascontiguousarray(a.T)
        tensors[f"{prefix}{matrix}.{up}"] = np.ascontiguousarray(b.T)
        names.append(matrix)
    targets = shortest_targets(names, (matrix for p in projections(adapters.model) for matrix, _ in p.matrices))
    if jax.process_index() == 0:
        with replacing(folder, (CONFIG,)) as staging:
            write_file(staging / WEIGHTS, [Spec(n, "F32", value.shape) for n, value in tensors.items()], tensors.values())
            write_json(staging / CONFIG, written_config(replace(adapter.config, targets=targets), base))
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {folder}")


def _model_prefix(config: K3Config) -> str:
    """The prefix of text modules in the official layout."""
    return Spelling.default(config).prefix


def _halves(p: Projection) -> tuple[str, str]:
    return ("lora_embedding_A", "lora_embedding_B") if p.is_embedding else ("lora_A.weight", "lora_B.weight")


def _raise(folder: Path, faults: list[str]) -> None:
    if faults:
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        base = base_name(folder)
        made = f" It was made for {base}." if base else ""
        raise AdapterError(f"{folder} does not fit this model.{made}\n  " + "\n  ".join(faults[:20]) + more)


class _Matrix:
    """A and B of one matrix, not read yet."""

    def __init__(self, name: str, index: tuple[int, ...], read: Callable[[], tuple[np.ndarray, np.ndarray]]):
        self.name, self.index, self.read = name, index, read


class _Tensors:
    """The tensors of an adapter file, taken one pair at a time; what is left over belongs nowhere."""

    def __init__(self, path: Path, reader: Reader):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: a PEFT adapter folder has {CONFIG} and {WEIGHTS}.")
        try:
            header = read_header(path)
        except CheckpointError as error:
            raise AdapterError(str(error)) from None
        self.reader, self.faults, self.faulty = reader, [], set()
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in header.items():
            short = name.removeprefix(HEAD).removeprefix(PREFIX)
            if short in self.tensors:
                self.faults.append(f"{name}: there twice, with and without {PREFIX!r}")
            if tensor.dtype not in ("F32", "BF16", "F16"):
                self.faults.append(f"{name}: its dtype is {tensor.dtype}, adapters are F32, BF16 or F16")
            self.tensors[short] = tensor

    def take(self, p: Projection, config: LoRAConfig) -> Iterator[_Matrix]:
        """Removes this projection's tensors and yields the matrices that they make up; notes what is wrong with them."""
        if len(p.stack) == 2:
            for layer in range(len(p.layers)):
                yield from self._take_experts(p, layer, config)
        for name, index in p.matrices:
            pair = self._pop(name, p)
            if pair is not None:
                rank = config.rank_of(name)
                shapes = (rank, p.in_size), (p.out_size, rank)
                if self._fits(name, pair, shapes):
                    yield _Matrix(name, index, lambda pair=pair: (self._read(pair[0]).T, self._read(pair[1]).T))

    def _take_experts(self, p: Projection, layer: int, config: LoRAConfig) -> Iterator[_Matrix]:
        """The experts of a layer whose matrices lie in one pair of tensors: stacked, with a shared factor, or flat."""
        pair = self._pop(p.layers[layer], p)
        if pair is None:
            return
        E, here = p.stack[1], [(name, index) for name, index in p.matrices if index[0] == layer]
        ranks = {config.rank_of(name) for name, _ in here}
        if len(ranks) > 1:
            self.faults.append(f"{p.layers[layer]}: one tensor for all experts, but rank_pattern gives them ranks {ranks}")
            return
        rank = ranks.pop()
        stacked = (E, rank, p.in_size), (E, p.out_size, rank)
        flat = (E * rank, p.in_size), (p.out_size, rank * E)
        of_a, of_b = (1 if tensor.shape[:1] == (1,) else E for tensor in pair)  # 1: one factor for all experts
        as_stacked = (of_a, *stacked[0][1:]), (of_b, *stacked[1][1:])
        if not self._fits(p.layers[layer], pair, flat if len(pair[0].shape) == 2 else as_stacked):
            self.faulty |= {name for name, _ in here}
            return

        @cache
        def both() -> tuple[np.ndarray, np.ndarray]:
            a, b = (self._read(tensor) for tensor in pair)
            if b.ndim == 2:
                return a.reshape(stacked[0]), np.moveaxis(b.reshape(-1, rank, E), -1, 0)
            return np.broadcast_to(a, stacked[0]), np.broadcast_to(b, stacked[1])

        for name, index in here:
            yield _Matrix(name, index, lambda e=index[1]: (both()[0][e].T, both()[1][e].T))

    def _pop(self, module: str, p: Projection) -> tuple[Tensor, Tensor] | None:
        low, up = _halves(p)
        a, b = self.tensors.pop(f"{module}.{low}", None), self.tensors.pop(f"{module}.{up}", None)
        if a is not None and b is not None:
            return a, b
        if a is not None or b is not None:
            self.faults.append(f"{module}: {low if a is None else up} is missing")
            self.faulty.add(module)
        return None

    def _fits(self, module: str, pair: tuple[Tensor, Tensor], shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
        fits = (pair[0].shape, pair[1].shape) == shapes
        if not fits:
            self.faulty.add(module)
            self.faults.append(
                f"{module}: A {pair[0].shape} and B {pair[1].shape}, but its rank and this base need {shapes[0]} and "
                f"{shapes[1]}: another rank, another base model, or added tokens"
            )
        return fits

    def _read(self, tensor: Tensor) -> np.ndarray:
        return self.reader.read(tensor).astype(np.float32)

    def leftovers(self) -> list[str]:
        faults = []
        for name, tensor in self.tensors.items():
            whole = not any(part.startswith("lora_") for part in name.split("."))
            kind = "a whole weight (modules_to_save, added tokens), only LoRA" if whole else "no such module in this model"
            faults.append(f"{name} {tensor.shape}: {kind + ' can be loaded' if whole else kind}")
        return faults


def _coverage(
    every: list[Projection], found: dict[str, list[_Matrix]], targeted: Callable[[str], bool], faulty: set[str]
) -> list[str]:
    """Where weights, targets of the config and rank columns of the model differ. `faulty` matrices have their fault."""
    faults = []
    for p in every:
        present = [m.name for m in found[p.name]]
        wanted = {name for name, _ in p.matrices if targeted(name)}
        faults += [f"{m}: target_modules names it, but it has no weights" for m in sorted(wanted - {*present} - faulty)]
        faults += [f"{m}: has weights, but target_modules does not name it" for m in sorted({*present} - wanted)]
        faults += [f"{m}: has two pairs of weights" for m, n in Counter(present).items() if n > 1]
        if present and p.module.lora is None:
            faults.append(f"{p.name}: no rank columns beside it: name it in Adapters(targets=…)")
    return faults


def _unknown_targets(config: LoRAConfig, every: list[Projection]) -> list[str]:
    if len(config.targets) == 1:  # a pattern, or a name whose weights were found or missed
        return []
    names = [name for p in every for name in (*p.layers, *(m for m, _ in p.matrices))]
    unknown = [target for target in config.targets if not any(ends_with(name, (target,)) for name in names)]
    return [f"target_modules: this model has no {', '.join(unknown)}"] if unknown else []


def _placed(p: Projection, scale: np.ndarray, matrices: list[_Matrix], faults: list[str]) -> Placed:
    """Reads a projection's matrices into arrays of the model's layout."""
    a = np.zeros((*p.stack, p.in_size, scale.shape[-1]), np.float32)
    b = np.zeros((*p.stack, scale.shape[-1], p.out_size), np.float32)
    for m in matrices:
        low, up = m.read()
        if not (np.isfinite(low).all() and np.isfinite(up).all()):
            faults.append(f"{m.name}: holds NaN or infinite numbers")
        rank = low.shape[-1]
        a[m.index][:, :rank], b[m.index][:rank] = low, up
    return Placed(p, a, b, scale)
