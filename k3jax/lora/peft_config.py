"""PEFT's adapter_config.json: what can be honoured is, what would change the result and cannot is refused by name."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from k3jax.lora.adapters import LoRAConfig
from k3jax.lora.targets import ends_with, spellings

CONFIG = "adapter_config.json"


class AdapterError(ValueError):
    """An adapter folder that does not fit; the message lists what is wrong."""


# Read here, or of no consequence for a trained adapter.
_KNOWN = tuple("""
    peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules target_parameters exclude_modules
    layers_to_transform layers_pattern auto_mapping base_model_name_or_path eva_config inference_mode lora_dropout megatron_core
    peft_version qalora_group_size revision runtime_config task_type
""".split())
# How A and B began. Others (pissa, olora, corda, loftq, lora_ga) changed the base weights as well.
_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def read_config(folder: Path) -> tuple[LoRAConfig, Callable[[str], bool]]:
    """The LoRAConfig in a PEFT folder, and whether a matrix is targeted. Raises AdapterError or FileNotFoundError.

    The config's own targets are what the file names, not resolved: PEFT can also exclude modules or choose layers.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a PEFT adapter folder has {CONFIG} and its weights.")
    try:
        raw: Any = json.loads(path.read_text())
    except ValueError as error:
        raise AdapterError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else None
        raise AdapterError(f"{path}: peft_type is {kind!r}, only 'LORA' can be loaded.")
    for name in ("r", "lora_alpha", "target_modules"):
        if name not in raw:
            raise AdapterError(f"{path} lacks {name!r}.")
    for name, value in raw.items():
        allowed = {"bias": value == "none", "init_lora_weights": value in _HARMLESS_INITS}
        if not allowed.get(name, name in _KNOWN or not value):
            raise AdapterError(f"{path}: {name}={value!r} is not supported: it would change what the adapter computes.")
    try:
        modules, parameters = raw["target_modules"] or [], raw.get("target_parameters") or []
        config = LoRAConfig(
            rank=raw["r"],
            alpha=raw["lora_alpha"],
            targets=(modules,) if isinstance(modules, str) else (*modules, *parameters),
            rslora=bool(raw.get("use_rslora")),
            rank_pattern=raw.get("rank_pattern") or {},
            alpha_pattern=raw.get("alpha_pattern") or {},
        )
        return config, _targeted(raw, modules, parameters)
    except (TypeError, AttributeError, ValueError, re.error) as error:
        raise AdapterError(f"{path}: {error}") from None


def base_name(folder: Path) -> str | None:
    """The name of the base model in the config of a folder that `read_config` has read, if there is one."""
    return json.loads((folder / CONFIG).read_text()).get("base_model_name_or_path")


def _targeted(raw: Mapping[str, Any], modules: Any, parameters: list[str]) -> Callable[[str], bool]:
    """PEFT's rules: a list is of last parts of names, a string is a pattern for a whole name; layers restrict a list."""
    named, excluded = _selector(modules), _selector(raw.get("exclude_modules") or [])
    layers, patterns = raw.get("layers_to_transform"), raw.get("layers_pattern") or [r"[^.]*"]
    layers = [layers] if isinstance(layers, int) else layers
    patterns = [patterns] if isinstance(patterns, str) else patterns
    numbers = [re.compile(rf".*\.{pattern}\.(\d+)\.") for pattern in patterns]

    def in_layers(matrix: str) -> bool:
        found = next((m for number in numbers if (m := number.match(matrix))), None)
        return found is not None and int(found[1]) in (layers or ())

    def targeted(matrix: str) -> bool:
        if ends_with(matrix, parameters):
            return True
        if not named(matrix) or excluded(matrix):
            return False
        return not layers or isinstance(modules, str) or in_layers(matrix)

    return targeted


def _selector(names: str | list[str]) -> Callable[[str], bool]:
    if not isinstance(names, str):
        return lambda matrix: ends_with(matrix, names)
    pattern = re.compile(names)
    return lambda matrix: any(pattern.fullmatch(name) for name in (matrix, *spellings(matrix)))


def written_config(config: LoRAConfig, base: str | None) -> dict[str, Any]:
    """The adapter_config.json of an adapter whose targets are names of modules."""
    return {
        "peft_type": "LORA", "base_model_name_or_path": base, "task_type": "CAUSAL_LM", "inference_mode": True,
        "r": config.rank, "lora_alpha": config.alpha, "target_modules": list(config.targets), "use_rslora": config.rslora,
        "rank_pattern": dict(config.rank_pattern), "alpha_pattern": dict(config.alpha_pattern), "bias": "none",
        "lora_dropout": 0.0, "fan_in_fan_out": False, "init_lora_weights": True, "modules_to_save": None, "use_dora": False,
    }
