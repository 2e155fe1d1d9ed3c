"""Kimi K3 in JAX: config, modules, weights, tokenizer, LoRA and sampling.

    from k3jax import K3, K3Config, KimiDeltaAttention

Names are imported when they are first used, so `import k3jax` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3jax.attnres import AttentionResidual as AttentionResidual
    from k3jax.cache import Cache as Cache
    from k3jax.cache import KDAState as KDAState
    from k3jax.cache import MLAState as MLAState
    from k3jax.chat import encode_chat as encode_chat
    from k3jax.chat import parse_completion as parse_completion
    from k3jax.chat import stop_token_ids as stop_token_ids
    from k3jax.config import ConfigError as ConfigError
    from k3jax.config import K3Config as K3Config
    from k3jax.config import KDAConfig as KDAConfig
    from k3jax.config import MLAConfig as MLAConfig
    from k3jax.config import MoEConfig as MoEConfig
    from k3jax.config import VisionConfig as VisionConfig
    from k3jax.images import ImageConfig as ImageConfig
    from k3jax.images import expand_media_pads as expand_media_pads
    from k3jax.images import preprocess as preprocess
    from k3jax.kda import KimiDeltaAttention as KimiDeltaAttention
    from k3jax.layer import Layer as Layer
    from k3jax.lora import Adapters as Adapters
    from k3jax.lora import LoRAConfig as LoRAConfig
    from k3jax.lora import load_peft as load_peft
    from k3jax.lora import save_peft as save_peft
    from k3jax.lora.merge import merge as merge
    from k3jax.mla import MultiHeadLatentAttention as MultiHeadLatentAttention
    from k3jax.mlp import MLP as MLP
    from k3jax.model import K3 as K3
    from k3jax.moe import LatentMoE as LatentMoE
    from k3jax.mtp import MTPLayer as MTPLayer
    from k3jax.multimodal import check_placeholders as check_placeholders
    from k3jax.packing import Packing as Packing
    from k3jax.router import Router as Router
    from k3jax.sampling import Sampler as Sampler
    from k3jax.sampling import SamplingParams as SamplingParams
    from k3jax.tokenizer import Tokenizer as Tokenizer
    from k3jax.vision import MoonViT as MoonViT
    from k3jax.vision import Patches as Patches
    from k3jax.vision import PatchMerger as PatchMerger
    from k3jax.vision import pack_patches as pack_patches
    from k3jax.weights import load as load
    from k3jax.weights import save as save

_HOME = {
    "attnres": ("AttentionResidual",),
    "cache": ("Cache", "KDAState", "MLAState"),
    "chat": ("encode_chat", "parse_completion", "stop_token_ids"),
    "config": ("ConfigError", "K3Config", "KDAConfig", "MLAConfig", "MoEConfig", "VisionConfig"),
    "images": ("ImageConfig", "expand_media_pads", "preprocess"),
    "kda": ("KimiDeltaAttention",),
    "layer": ("Layer",),
    "lora": ("Adapters", "LoRAConfig", "load_peft", "save_peft"),
    "lora.merge": ("merge",),
    "mla": ("MultiHeadLatentAttention",),
    "mlp": ("MLP",),
    "model": ("K3",),
    "moe": ("LatentMoE",),
    "mtp": ("MTPLayer",),
    "multimodal": ("check_placeholders",),
    "packing": ("Packing",),
    "router": ("Router",),
    "sampling": ("Sampler", "SamplingParams"),
    "tokenizer": ("Tokenizer",),
    "vision": ("MoonViT", "PatchMerger", "Patches", "pack_patches"),
    "weights": ("load", "save"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'k3jax' has no attribute {name!r}")
    return getattr(import_module(f"k3jax.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE])
