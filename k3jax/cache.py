"""What is kept of the tokens seen so far: KDA states and conv windows of fixed size, MLA latents per token.

One batch row is one sequence. Arrays of layers whose weights are stacked are stacked too, [n, B, ...]; a layer reads
its own with `at` and writes it with `put`, in place inside a scan's carry.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config
from k3jax.packing import Packing
from k3jax.plan import Segment


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDAState:
    """State after the last token and the inputs that the short convolutions of q, k, v still need, oldest first."""

    recurrent: Float[Array, "*n B H K V"]
    conv: Float[Array, "*n B 3 W HK"]  # W = conv width - 1

    def at(self, layer: Int[Array, ""]) -> "KDAState":
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, layer, keepdims=False), self)

    def put(self, layer: Int[Array, ""], new: "KDAState") -> "KDAState":
        return jax.tree.map(lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b.astype(a.dtype), layer, 0), self, new)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLAState:
    """Normalised latent and shared key part of each token, at index = its position.

    `at` slices nothing: it names the layer, so that `append` writes only what is new into the latents of all layers.
    """

    latent: Float[Array, "*n B S L"]
    layer: Int[Array, ""] | None = None  # whose latents are read and written, if several are stacked

    def at(self, layer: Int[Array, ""]) -> "MLAState":
        return MLAState(self.latent, layer)

    def put(self, layer: Int[Array, ""], new: "MLAState") -> "MLAState":
        return MLAState(new.latent)

    def read(self) -> Float[Array, "B S L"]:
        return self.latent if self.layer is None else jax.lax.dynamic_index_in_dim(self.latent, self.layer, keepdims=False)

    def append(self, new: Float[Array, "B T L"], packing: Packing) -> "MLAState":
        """Writes each real token at its position; padding and what does not fit is dropped."""
        where = jnp.where(packing.valid, packing.positions, self.latent.shape[-2])
        rows = jnp.arange(new.shape[0])[:, None]
        at = self.latent.at[rows, where] if self.layer is None else self.latent.at[self.layer, rows, where]
        return replace(self, latent=at.set(new.astype(self.latent.dtype), mode="drop", unique_indices=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """State of a batch of sequences after `length` tokens each. One entry of `layers` per stack of layers."""

    layers: tuple[KDAState | MLAState, ...]
    length: Int[Array, "B"]

    @property
    def capacity(self) -> int | None:
        """Tokens that fit; None if no layer keeps anything per token."""
        sizes = {entry.latent.shape[-2] for entry in self.layers if isinstance(entry, MLAState)}
        return sizes.pop() if sizes else None

    @classmethod
    def empty(cls, config: K3Config, segments: tuple[Segment, ...], batch: int, capacity: int) -> "Cache":
        entries = []
        for segment in segments:
            for r, run in enumerate(segment.runs):
                attention = run.kind[0]
                make = _empty_kda if attention == "kda" else _empty_mla
                entries.append(make(config, len(segment.layers(r)), batch, capacity))
        return cls(tuple(entries), jnp.zeros(batch, jnp.int32))

    def take(self, rows: Int[Array, "N"]) -> "Cache":
        """A cache whose rows are copies of the given rows: forks one prefix into n samples."""
        layers = jax.tree.map(lambda a: jnp.take(a, rows, axis=1), self.layers)
        return replace(self, layers=layers, length=self.length[rows])


def _empty_kda(config: K3Config, layers: int, batch: int, capacity: int) -> KDAState:
    kda = config.kda
    H, K, W = kda.num_heads, kda.head_dim, kda.conv_width - 1
    return KDAState(
        recurrent=jnp.zeros((layers, batch, H, K, K), config.state_dtype),
        conv=jnp.zeros((layers, batch, 3, W, H * K), config.dtype),
    )


def _empty_mla(config: K3Config, layers: int, batch: int, capacity: int) -> MLAState:
    size = config.mla.kv_lora_rank + config.mla.rope_dim
    return MLAState(jnp.zeros((layers, batch, capacity, size), config.dtype))


def bytes_per_sequence(config: K3Config) -> tuple[int, int]:
    """(bytes of fixed state, bytes per cached token) of one sequence."""

    def size(dtype: Any) -> int:
        return jnp.dtype(dtype).itemsize

    kda, mla = config.attention.count("kda"), config.attention.count("mla")
    width = config.kda.num_heads * config.kda.head_dim
    fixed = width * config.kda.head_dim * size(config.state_dtype) + 3 * (config.kda.conv_width - 1) * width * size(config.dtype)
    return kda * fixed, mla * (config.mla.kv_lora_rank + config.mla.rope_dim) * size(config.dtype)
