"""What the runs that train a LoRA adapter share: their settings, the model with the adapter on it, saving it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from k3jax.config import ConfigError, K3Config
from k3jax.linear import LoRAParam
from k3jax.lora import Adapters, LoRAConfig
from k3jax.lora.peft import save_peft
from k3jax.model import K3
from k3jax.tokenizer import RANKS_FILE, Tokenizer
from k3jax.weights import load
from train.config import RunError, TrainConfig
from train.data import load_tokenizer
from train.optim import adamw, in_columns
from train.step import Objective, Trainer


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(TrainConfig):
    """A run that trains an adapter in fp32 on a frozen checkpoint, and saves it in PEFT format in out/adapter."""

    checkpoint: str  # folder in the official format
    adapter: LoRAConfig
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the frozen weights and the computation
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Subject:
    """A model and the adapter on it that is trained. Several subjects may share a model and its Adapters."""

    model: K3
    tokenizer: Tokenizer | None
    adapters: Adapters
    name: str

    @property
    def adapter(self) -> int:
        return self.adapters.id(self.name)

    def trainer(self, objective: Callable[[int], Objective], config: AdapterConfig) -> Trainer:
        """A trainer of the adapter, and of no other on the model; `objective` is made for its id."""
        adapter = self.adapters[self.name]

        def require() -> None:
            if self.name not in self.adapters or self.adapters[self.name] != adapter:
                raise RunError(f"Adapter {self.name!r} was removed or replaced while it was trained: make a new trainer.")

        return Trainer(
            self.model, LoRAParam, objective(self.adapter), config,
            lambda c, weights: in_columns(adamw(c, weights), adapter.columns), require=require,
        )

    def save(self, config: AdapterConfig) -> Path:
        folder = Path(config.out) / "adapter"
        save_peft(self.adapters, self.name, folder, base=config.checkpoint)
        return folder


def load_subject(config: AdapterConfig, name: str = "adapter") -> Subject:
    """The checkpoint's model with a new adapter on it."""
    model_config = replace(K3Config.load(config.checkpoint), remat=config.remat)
    if config.row_length > model_config.context_length:
        raise ConfigError(
            f"row_length={config.row_length} exceeds the context of {config.checkpoint}, {model_config.context_length} tokens. "
            f"Use row_length={model_config.context_length} or less."
        )
    tokenizer = load_tokenizer(config.checkpoint) if (Path(config.checkpoint) / RANKS_FILE).exists() else None
    model = load(config.checkpoint, model_config, dtype=config.dtype)
    try:
        adapters = Adapters(model, columns=config.adapter.max_rank, targets=config.adapter.targets)
        adapters.add(name, config.adapter, seed=config.seed)
    except ValueError as error:
        raise ConfigError(f"adapter: {error}") from error
    return Subject(model, tokenizer, adapters, name)
