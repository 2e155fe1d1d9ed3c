"""K3Config: everything that defines a model's computation."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from k3jax.config.fields import ConfigError, require
from k3jax.config.parts import (
    AttentionKind,
    FeedForwardKind,
    KDAConfig,
    MLAConfig,
    MoEConfig,
    VisionConfig,
    require_positive,
    require_sizes,
)
from k3jax.config.reader import read
from k3jax.config.writer import written

REMAT_POLICIES = ("none", "layer", "group")


@dataclass(frozen=True, kw_only=True)
class K3Config:
    """Everything that defines the computation; sizes are those of the checkpoint.

    Raises ConfigError, naming the field as config.json does, for values that cannot be computed with.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense layer
    attention: tuple[AttentionKind, ...]  # one per layer
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig | None
    vision: VisionConfig | None = None
    attn_res_block: int | None = None  # layers per Attention Residuals block; None: plain residuals
    hidden_act: Literal["situ", "silu"] = "silu"
    situ_beta: float = 1.0
    situ_linear_beta: float | None = None
    norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6  # q_a_layernorm and kv_a_layernorm
    init_std: float = 0.02
    context_length: int = 4096  # tokens
    num_mtp_layers: int = 0
    pad_token_id: int = 0
    bos_token_id: int = 1
    eos_token_id: int = 2
    media_token_id: int | None = None
    dtype: Any = jnp.bfloat16  # of activations and matrix products
    param_dtype: Any = jnp.bfloat16  # of weights that the release stores in bf16
    state_dtype: Any = jnp.float32  # of KDA states in a cache
    remat: Literal["none", "layer", "group"] = "layer"

    def __post_init__(self):
        require_sizes("", {
            "vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers, "max_position_embeddings": self.context_length,
            "attn_res_block_size": 1 if self.attn_res_block is None else self.attn_res_block,
        })  # fmt: skip
        require(self.hidden_act in ("situ", "silu"), f"hidden_act must be 'situ' or 'silu', got {self.hidden_act!r}")
        require(self.hidden_act == "situ" or self.situ_linear_beta is None,
                f"activation_situ_linear_beta needs hidden_act 'situ', got {self.hidden_act!r}")
        require(self.remat in REMAT_POLICIES, f"remat must be one of {REMAT_POLICIES}, got {self.remat!r}")
        require_positive("rms_norm_eps", self.norm_eps)
        require_positive("latent_norm_eps", self.latent_norm_eps)
        require_positive("activation_situ_beta", self.situ_beta)
        require_positive("activation_situ_linear_beta", 1.0 if self.situ_linear_beta is None else self.situ_linear_beta)
        require(0 <= self.init_std < math.inf, f"initializer_range must be a number of at least 0, got {self.init_std!r}")
        require(self.num_mtp_layers >= 0, f"num_nextn_predict_layers must be at least 0, got {self.num_mtp_layers!r}")
        self._check_experts()
        ids = {name: getattr(self, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        if self.media_token_id is not None:
            ids["media_placeholder_token_id"] = self.media_token_id
        for name, value in ids.items():
            require(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < self.vocab_size,
                    f"{name} must be a token id in 0..{self.vocab_size - 1} (vocab_size={self.vocab_size}), got {value!r}")

    def _check_experts(self) -> None:
        m = self.moe
        if m is None:
            return
        require(m.first_layer <= self.num_layers,
                f"first_k_dense_replace={m.first_layer} exceeds num_hidden_layers={self.num_layers}: "
                f"without experts in any layer, leave num_experts out")
        width = m.latent_size or self.hidden_size
        require(not m.mxfp4 or (width % 32 == 0 and m.intermediate_size % 32 == 0),
                f"MXFP4 groups of 32 need expert sizes that are multiples of 32, got {width} and {m.intermediate_size}")

    @property
    def num_layers(self) -> int:
        """Layers, without MTP layers."""
        return len(self.attention)

    @property
    def num_blocks(self) -> int:
        """Attention Residuals snapshots after the last layer."""
        return 0 if self.attn_res_block is None else -(-self.num_layers // self.attn_res_block)

    def feed_forward(self, layer: int) -> FeedForwardKind:
        """What layer `layer` (0-based) has after its attention."""
        m = self.moe
        return "moe" if m is not None and layer >= m.first_layer and layer % m.layer_freq == 0 else "dense"

    def in_dtype(self, dtype: Any) -> "K3Config":
        """The same model with weights and computation in `dtype`."""
        return replace(self, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))

    @classmethod
    def load(cls, folder: str | Path) -> "K3Config":
        """Reads `config.json` of a checkpoint folder (or that file itself). Raises ConfigError or FileNotFoundError."""
        path = Path(folder)
        path = path / "config.json" if path.is_dir() or path.suffix != ".json" else path
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: a checkpoint folder needs a config.json.")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        try:
            return cls.from_dict(raw)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "K3Config":
        """Reads the parsed config.json, nested or flat. Raises ConfigError."""
        return cls(**read(raw))

    def to_dict(self) -> dict[str, Any]:
        """The official config.json of this model: nested with Attention Residuals or vision, else flat."""
        return written(self)

    def save(self, folder: str | Path) -> None:
        """Writes `config.json` into the folder."""
        (Path(folder) / "config.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n")
