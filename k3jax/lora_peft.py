"""Adapters on disk in PEFT's format: adapter_config.json and adapter_model.safetensors, strict in both directions.

Routed experts are read in three layouts: a matrix per expert (`experts.7.w1.lora_A.weight`, also what is written), all
experts stacked ([E, r, in] and [E, out, r]), and PEFT's flat one for stacked parameters ([E * r, in] and [out, r * E]).
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from k3jax.config import K3Config
from k3jax.lora import Adapters, LoRAConfig, Projection, ends_with

HEAD = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class AdapterError(ValueError):
    """An adapter folder that does not fit; the message lists what is wrong."""


# Fields that would change the result, and the only values that this format reader implements.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "use_dora": (False,), "use_qalora": (False,), "use_bdlora": (None, False), "lora_bias": (False,),
    "fan_in_fan_out": (False,), "modules_to_save": (None, []), "layer_replication": (None,),
    "trainable_token_indices": (None,), "alora_invocation_tokens": (None,), "arrow_config": (None,),
    "kasa_config": (None,), "monteclora_config": (None,), "velora_config": (None,), "layers_pattern": (None, []),
}


def read_config(folder: str | Path) -> LoRAConfig:
    """The LoRAConfig in a PEFT folder. Raises AdapterError or FileNotFoundError."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a PEFT adapter folder has {CONFIG} and {WEIGHTS}.")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise AdapterError(f"{path} is not valid JSON: {error}") from error
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {raw.get('peft_type')!r}, only 'LORA' can be loaded.")
    for name, allowed in _UNSUPPORTED.items():
        if name in raw and raw[name] not in allowed:
            raise AdapterError(f"{path}: {name}={raw[name]!r} is not supported, only {allowed[0]!r}.")
    targets = raw.get("target_modules") or []
    if isinstance(targets, str):
        raise AdapterError(f"{path}: target_modules is the pattern {targets!r}; list the module names instead.")
    targets = [*targets, *(raw.get("target_parameters") or [])]
    try:
        return LoRAConfig(
            rank=raw.get("r"), alpha=raw.get("lora_alpha"), targets=tuple(targets), rslora=raw.get("use_rslora", False),
            rank_pattern=raw.get("rank_pattern") or {}, alpha_pattern=raw.get("alpha_pattern") or {},
        )
    except (TypeError, ValueError) as error:
        raise AdapterError(f"{path}: {error}") from None


def load(adapters: Adapters, name: str, folder: str | Path) -> int:
    """Adds the adapter in a PEFT folder under `name` and returns its id.

    Raises AdapterError listing tensors that have no place, no partner or another shape (an adapter for another base).
    """
    config = read_config(folder)
    tensors = _read_weights(Path(folder) / WEIGHTS)
    parts, faults = [], []
    for p in adapters.projections:
        part, wrong = _take(tensors, p, config)
        faults += wrong
        parts += [] if part is None else [(p, *part)]
    for extra in sorted(tensors)[:10]:
        faults.append(f"{extra} {tensors[extra].shape}: no such module in this model, or no rank columns beside it")
    if not parts and not faults:
        faults.append("no adapter weights in it")
    if not any(np.any(b) for *_, b, _ in parts) and not faults and parts:
        faults.append("every B is zero: the adapter would change nothing")
    if faults:
        raise AdapterError(f"{folder} does not fit this model:\n  " + "\n  ".join(faults[:20]))
    adapter = adapters.allocate(name, config)
    for p, a, b, scale in parts:
        adapters.write(adapter, p, a, b, scale)
    return adapter.id


def save(adapters: Adapters, name: str, folder: str | Path) -> None:
    """Writes an adapter as a PEFT folder; each file is complete or absent."""
    adapter, folder = adapters[name], Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = HEAD + _model_prefix(adapters.model.config)
    tensors = {}
    for p in adapters.covered(adapter.config):
        a, b, _ = (np.asarray(x) for x in adapters.read(adapter, p))
        for module, index in _modules(p):
            tensors |= _tensors(prefix + module, p, a[index], b[index])
    config = adapter.config
    targets = sorted({_target(p) for p in adapters.covered(config)})
    written = {
        "peft_type": "LORA", "base_model_name_or_path": None, "task_type": "CAUSAL_LM", "inference_mode": True,
        "r": config.rank, "lora_alpha": config.alpha, "target_modules": targets, "use_rslora": config.rslora,
        "rank_pattern": dict(config.rank_pattern), "alpha_pattern": dict(config.alpha_pattern), "bias": "none",
        "lora_dropout": 0.0, "fan_in_fan_out": False, "init_lora_weights": True, "modules_to_save": None, "use_dora": False,
    }
    _replace(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    _replace(folder / CONFIG, lambda path: Path(path).write_text(json.dumps(written, indent=1) + "\n"))


def _model_prefix(config: K3Config) -> str:
    """The prefix of text modules in the official nested layout."""
    return "" if config.attn_res_block is None and config.vision is None else "language_model."


def _target(p: Projection) -> str:
    """The shortest name that PEFT's suffix rule reads as these modules and no others of the model."""
    return p.name.replace("self_attn.", "") if p.name.startswith("self_attn.") else p.name.removeprefix("experts.")


def _modules(p: Projection) -> list[tuple[str, tuple[int, ...]]]:
    """(checkpoint name, index into the stacked arrays) of every matrix of a projection."""
    if len(p.stack) == 2:
        return [
            (name.replace(".experts.", f".experts.{e}."), (layer, e))
            for layer, name in enumerate(p.names)
            for e in range(p.stack[1])
        ]
    return [(name, (layer,) if p.stack else ()) for layer, name in enumerate(p.names)]


def _tensors(module: str, p: Projection, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    one, two = ("lora_embedding_A", "lora_embedding_B") if p.is_embedding else ("lora_A.weight", "lora_B.weight")
    return {f"{module}.{one}": np.ascontiguousarray(a.T), f"{module}.{two}": np.ascontiguousarray(b.T)}


def _read_weights(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a PEFT adapter folder has {CONFIG} and {WEIGHTS}.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise AdapterError(f"{path} is not a whole safetensors file: {error}") from None
    short = {}
    for name, value in tensors.items():
        key = name.removeprefix(HEAD).removeprefix("language_model.")
        short[key] = value.astype(np.float32)
    return short


def _take(tensors: dict[str, np.ndarray], p: Projection, config: LoRAConfig) -> tuple[tuple[Any, Any, Any] | None, list[str]]:
    """Removes this projection's tensors. Returns (A, B, scale), zero where a layer has none, and what is wrong."""
    rank = config.rank_of(p.names[0])
    if len(p.stack) == 2:
        _split_experts(tensors, p, rank)
    a = np.zeros((*p.stack, p.in_size, rank), np.float32)
    b = np.zeros((*p.stack, rank, p.out_size), np.float32)
    scale = np.zeros((*p.stack, rank), np.float32)
    found, faults = False, []
    one, two = ("lora_embedding_A", "lora_embedding_B") if p.is_embedding else ("lora_A.weight", "lora_B.weight")
    for module, index in _modules(p):
        low, up = tensors.pop(f"{module}.{one}", None), tensors.pop(f"{module}.{two}", None)
        if low is None and up is None:
            continue
        if low is None or up is None:
            faults.append(f"{module}: {one if low is None else two} is missing")
        elif low.shape != (rank, p.in_size) or up.shape != (p.out_size, rank):
            faults.append(f"{module}: A {low.shape} and B {up.shape}, but rank {rank} on this base needs "
                          f"{(rank, p.in_size)} and {(p.out_size, rank)}")
        elif not (np.isfinite(low).all() and np.isfinite(up).all()):
            faults.append(f"{module}: holds NaN or infinite numbers")
        else:
            a[index], b[index], scale[index], found = low.T, up.T, config.scale_of(module), True
    if not found and not faults and any(ends_with(p.names[0], t) for t in config.targets):
        faults.append(f"{p.names[0]}: named in target_modules, but no weights for it")
    return ((a, b, scale) if found else None), faults


def _split_experts(tensors: dict[str, np.ndarray], p: Projection, rank: int) -> None:
    """Rewrites stacked or flat tensors of all experts as one pair per expert."""
    E = p.stack[1]
    for name in p.names:
        low, up = tensors.get(f"{name}.lora_A.weight"), tensors.get(f"{name}.lora_B.weight")
        if low is None or up is None:
            continue
        if low.ndim == 2 and low.shape[0] == E * rank and up.ndim == 2 and up.shape[1] == E * rank:
            low = low.reshape(E, rank, -1)
            up = np.moveaxis(up.reshape(up.shape[0], rank, E), -1, 0)
        if low.ndim != 3 or up.ndim != 3 or len(low) != E or len(up) != E:
            continue
        del tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        for e in range(E):
            module = name.replace(".experts.", f".experts.{e}.")
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = low[e], up[e]


def _replace(path: Path, write: Any) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".saving-")
    os.close(handle)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def summary(adapters: Adapters, name: str) -> Mapping[str, float]:
    """Frobenius norm of scale * A B per projection: what an adapter does, at a glance."""
    adapter = adapters[name]
    norms = {}
    for p in adapters.covered(adapter.config):
        a, b, scale = (np.asarray(x, np.float64) for x in adapters.read(adapter, p))
        gram = np.einsum("...ir,...is->...rs", a, a) * np.einsum("...ro,...so->...rs", b, b)
        total = np.einsum("...rs,...r,...s->...", gram, scale, scale)
        norms |= {f"{name}": float(np.sqrt(np.sum(t))) for name, t in zip(p.names, np.atleast_1d(total), strict=True)}
    return norms
