"""What a model consists of, by part: parameters, active ones, bytes, dtypes; from a config or headers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from k3jax.config import K3Config
from k3jax.weights.checkpoint import abstract, official_specs, stored_config
from k3jax.weights.names import Parameter, Spelling, TensorNames, is_mtp
from k3jax.weights.reader import INDEX, SINGLE, read_folder
from k3jax.weights.writer import Spec

_VISION = ("vision tower", "projector")
_MTP = "multi-token prediction"


class ParameterCount(NamedTuple):
    """Parameters of a model. An MXFP4 scale is not one."""

    total: int  # of the language model
    active: int  # that a token passes through, embedding and head included
    vision: int  # tower and projector, on top


@dataclass
class Part:
    """One row of the report."""

    tensors: int = 0
    parameters: int = 0
    active: float = 0.0
    nbytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)


def count_parameters(config: K3Config) -> ParameterCount:
    """From shapes alone. 2 779.5 B total and 105.4 B active for Kimi K3."""
    total, active, vision = 0, 0.0, 0
    for p in TensorNames(abstract(config), config).parameters:
        size = p.size * _weight(p)
        part = part_of(p, config)
        if part in _VISION:
            vision += size
        elif part != _MTP:
            total += size
            active += size * _active(p, config)
    return ParameterCount(total, round(active), vision)


def part_of(p: Parameter, config: K3Config) -> str:
    """The part of the model that a parameter belongs to."""
    path = [str(key) for key in p.path]
    if path[0] in ("vision_tower", "mm_projector"):
        return _VISION[path[0] == "mm_projector"]
    if any(key.startswith("mtp") for key in path):
        return _MTP
    if "embed_tokens" in path or "lm_head" in path:
        return "embedding and head"
    if "self_attn" in path:
        assert p.layers is not None
        return "KDA" if config.attention[p.layers[0]] == "kda" else "MLA"
    if "block_sparse_moe" in path:
        inner = path[path.index("block_sparse_moe") + 1]
        return {"experts": "routed experts", "shared_experts": "shared experts", "gate": "router"}.get(
            inner, "latent"
        )
    if "mlp" in path:
        return "dense MLP"
    return "attention residuals" if any(key.endswith("_res") for key in path) else "norms"


def report(path: str | Path) -> str:
    """A text on a checkpoint folder (headers only), or on a config.json alone."""
    path = Path(path)
    config = K3Config.load(path)
    stored: Iterable[Spec]
    if path.is_dir() and ((path / INDEX).exists() or (path / SINGLE).exists()):
        tensors = read_folder(path)
        config = stored_config(config, tensors)
        stored = [Spec(name, t.dtype, t.shape) for name, t in tensors.items()]
        source = f"{len({t.file for t in tensors.values()})} files"
    else:
        stored = ()
        source = "config only; bytes as the release would store them"
    table = TensorNames(abstract(config), config)
    stored = stored or [spec for _, spec in official_specs(table, Spelling.default(config))]
    return "\n".join([*_summary(path, config, source), "", *_rows(_parts(stored, table, config))])


def _parts(stored: Iterable[Spec], table: TensorNames, config: K3Config) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for spec in stored:
        at = table.locate(spec.name)
        if at is None:
            name = _MTP if is_mtp(spec.name, config) else "not in this model"
            size, active = 0, 0.0
        else:
            name = part_of(at.parameter, config)
            size = at.parameter.tensor_size * _weight(at.parameter)
            active = size * _active(at.parameter, config)
        part = parts.setdefault(name, Part())
        part.tensors += 1
        part.parameters += size
        part.active += active
        part.nbytes += spec.nbytes
        part.dtypes[spec.dtype] += spec.nbytes
    return parts


def _summary(path: Path, config: K3Config, source: str) -> list[str]:
    count, moe = count_parameters(config), config.moe
    kinds = [config.feed_forward(i) for i in range(config.num_layers)]
    attention = Counter(config.attention)
    letters = "".join(kind[0].upper() for kind in config.attention)
    layers = f"{config.num_layers} = {attention['kda']} KDA + {attention['mla']} MLA"
    experts = "" if moe is None else f" ({moe.num_experts} experts, {moe.experts_per_token} per token)"
    return [
        f"{path}: {source}",
        f"layers      {layers}; {_runs(kinds)}{experts}",
        f"attention   {letters}",
        f"parameters  {_short(count.total)} total, {_short(count.active)} active"
        + (f"; vision {_short(count.vision)}" if count.vision else ""),
    ]


def _short(n: int) -> str:
    """2779.5 B, 401.2 M, 428 204"""
    return f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" if n >= 1e6 else f"{n:,}"


def _runs(kinds: list[Any]) -> str:
    """0 dense, 1-92 moe"""
    out, start = [], 0
    for kind, same in groupby(kinds):
        stop = start + len(list(same))
        out.append(f"{start}{f'-{stop - 1}' if stop - start > 1 else ''} {kind}")
        start = stop
    return ", ".join(out)


def _rows(parts: dict[str, Part]) -> list[str]:
    whole = Part()
    for part in parts.values():
        whole.tensors += part.tensors
        whole.parameters += part.parameters
        whole.active += part.active
        whole.nbytes += part.nbytes
        whole.dtypes += part.dtypes
    lines = [_row("part", "tensors", "parameters", "active", "bytes", "dtypes")]
    for name, part in [*sorted(parts.items(), key=lambda item: -item[1].nbytes), ("all", whole)]:
        dtypes = ", ".join(dtype for dtype, _ in part.dtypes.most_common())
        numbers = [f"{n:,}" for n in (part.tensors, part.parameters, round(part.active), part.nbytes)]
        lines.append(_row(name, *numbers, dtypes))
    return lines


def _row(*columns: str) -> str:
    part, tensors, parameters, active, nbytes, dtypes = columns
    return f"{part:24}{tensors:>9}{parameters:>19}{active:>17}{nbytes:>19}  {dtypes}"


def _weight(p: Parameter) -> int:
    """Parameters per stored number: two in a packed byte, none in a scale."""
    return {"packed": 2, "scale": 0}.get(str(p.path[-1]), 1)


def _active(p: Parameter, config: K3Config) -> float:
    return (
        1.0
        if p.experts is None or config.moe is None
        else config.moe.experts_per_token / config.moe.num_experts
    )
