"""Pairs the tensors of a checkpoint with the parameters of a model; an error lists what does not fit."""

import difflib
import logging
from collections.abc import Mapping, Sequence
from math import prod

from k3jax.weights.names import Location, Parameter, Path, TensorNames, is_mtp, spelling_of
from k3jax.weights.reader import CheckpointError, Reader, Tensor

_LISTED = 10  # faults of one kind shown in full
_CANDIDATES = 200  # names compared with a faulty one
_FLOATS = ("BF16", "F16", "F32", "F64")
_DTYPES = {"packed": ("U8",), "scale": ("U8", "F8_E8M0")}

logger = logging.getLogger(__name__)


def match(tensors: Mapping[str, Tensor], table: TensorNames, where: str) -> dict[Path, list[Tensor]]:
    """Per parameter its tensors by layer and expert. Raises CheckpointError listing every fault."""
    found: dict[Path, list[Tensor | None]] = {p.path: [None] * prod(p.lead) for p in table.parameters}
    unexpected, faults, mtp = [], [], []
    for name, tensor in tensors.items():
        at = table.locate(name)
        if at is None:
            (mtp if is_mtp(name, table.config) else unexpected).append(name)
            continue
        p = at.parameter
        slots, slot = found[p.path], _slot(at)
        if slots[slot] is not None:
            faults.append(f"{name}: the checkpoint holds this tensor twice, under two spellings")
        elif not p.accepts(tensor.shape):
            faults.append(f"{name}: shape {list(tensor.shape)}, but this config needs {list(p.stored)}")
        elif tensor.dtype not in _DTYPES.get(str(p.path[-1]), _FLOATS):
            faults.append(f"{name}: dtype {tensor.dtype} is not supported here")
        slots[slot] = tensor
    spelling = spelling_of(tensors, table)
    missing = [
        table.name(at, spelling) for at in table.locations() if found[at.parameter.path][_slot(at)] is None
    ]
    if missing or unexpected or faults:
        raise CheckpointError(
            f"{where} does not fit its config: {len(missing)} tensors missing, {len(unexpected)} unexpected, "
            f"{len(faults)} unusable."
            + _section(
                "Missing", [f"{n}{_nearest(n, unexpected + mtp)}" for n in missing[:_LISTED]], len(missing)
            )
            + _section(
                "Unexpected", [f"{n}{_nearest(n, missing)}" for n in unexpected[:_LISTED]], len(unexpected)
            )
            + _section("Unusable", faults[:_LISTED], len(faults))
        )
    if mtp:
        size = sum(tensors[name].stop - tensors[name].start for name in mtp)
        logger.warning(
            "%s: %d tensors (%.2f GB) of a multi-token-prediction layer are not loaded, such as %s.",
            where,
            len(mtp),
            size / 1e9,
            mtp[0],
        )
    complete = {path: [t for t in slots if t is not None] for path, slots in found.items()}
    for p in table.parameters:
        _check_dtypes(p, complete[p.path])
        if p.path[-1] == "A_log":
            _check_padding(p, complete[p.path])
    return complete


def _slot(at: Location) -> int:
    return (at.layer or 0) * (at.parameter.experts or 1) + (at.expert or 0)


def _nearest(name: str, others: Sequence[str]) -> str:
    leaf = name.rsplit(".", 2)[-2:]
    same = [other for other in others if other.rsplit(".", 2)[-2:] == leaf]
    near = difflib.get_close_matches(name, (same or list(others))[:_CANDIDATES], 1)
    return f"   (nearest: {near[0]})" if near else ""


def _section(title: str, lines: Sequence[str], total: int) -> str:
    if not total:
        return ""
    more = [f"… and {total - len(lines)} more"] if total > len(lines) else []
    return "".join(f"\n  {line}" for line in [f"{title}:", *(f"  {line}" for line in [*lines, *more])])


def _check_dtypes(p: Parameter, tensors: Sequence[Tensor]) -> None:
    """Logs where the checkpoint is wider than the model."""
    wanted = {"bfloat16": "BF16", "float32": "F32"}.get(str(p.dtype))
    others = {t.dtype for t in tensors} - {wanted}
    if wanted == "BF16" and others:
        logger.warning(
            "%s is stored in %s and rounded to bfloat16; dtype='float32' keeps it.",
            p.name,
            ", ".join(sorted(others)),
        )


def _check_padding(p: Parameter, tensors: Sequence[Tensor]) -> None:
    """What pads A_log beyond its heads must be zero."""
    heads = p.shape[0]
    with Reader() as reader:
        for layer, tensor in zip(p.layers or (), tensors, strict=True):
            found = max(tensor.shape)
            if found != heads and reader.read(tensor).reshape(-1)[heads:].any():
                name = p.name.format(layer)
                raise CheckpointError(f"{name} has {found} numbers for {heads} heads; the others must be 0.")
