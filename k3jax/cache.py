"""What is kept of the tokens seen so far: KDA states and conv windows of fixed size, MLA latents per token.

One batch row is one sequence. Arrays of layers whose weights are stacked are stacked too, [n, B, ...]; a layer reads
its own with `at` and writes it with `put`, in place inside a scan's carry.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from k3jax.checks import is_concrete
from k3jax.config import K3Config
from k3jax.packing import Packing
from k3jax.plan import Segment
from pallas_kernels.kda_decode import Pool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDAState:
    """State after the last token and the inputs that the short convolutions of q, k, v still need, oldest first.

    `at` slices nothing: it names the layer, so that decode updates the states of a stack where they lie.
    """

    recurrent: Float[Array, "*n B H K V"]
    conv: Float[Array, "*n B 3 W HK"]  # W = conv width - 1
    layer: Int[Array, ""] | None = None  # whose state is read and written, if several are stacked

    @classmethod
    def empty(cls, config: K3Config, batch: int, *stack: int) -> "KDAState":
        """Of `batch` sequences that have not begun; `stack`: how many layers in front, for stacked weights."""
        c = config.kda
        return cls(
            jnp.zeros((*stack, batch, c.num_heads, c.head_dim, c.head_dim), config.state_dtype),
            jnp.zeros((*stack, batch, 3, c.conv_width - 1, c.num_heads * c.head_dim), config.dtype),
        )

    def at(self, layer: Int[Array, ""]) -> "KDAState":
        """The same states, of which `read`, `write` and `pool` see those of one layer of the stack."""
        return replace(self, layer=layer)

    def put(self, layer: Int[Array, ""], new: "KDAState") -> "KDAState":
        """The stack after `new`, which came from `at(layer)` and `write` or `pool`."""
        return replace(new, layer=None)

    def read(self) -> tuple[Float[Array, "B H K V"], Float[Array, "B 3 W HK"]]:
        """State and inputs of one layer."""
        if self.layer is None:
            return self.recurrent, self.conv
        return tuple(jax.lax.dynamic_index_in_dim(a, self.layer, keepdims=False) for a in (self.recurrent, self.conv))

    def write(self, recurrent: Float[Array, "B H K V"], conv: Float[Array, "B 3 W HK"]) -> "KDAState":
        """With that layer's state and inputs replaced, in the dtypes they have here."""
        recurrent, conv = recurrent.astype(self.recurrent.dtype), conv.astype(self.conv.dtype)
        if self.layer is not None:
            put = jax.lax.dynamic_update_index_in_dim
            recurrent, conv = put(self.recurrent, recurrent, self.layer, 0), put(self.conv, conv, self.layer, 0)
        return replace(self, recurrent=recurrent, conv=conv)

    def pool(self) -> tuple[Pool, Int[Array, " B"]]:
        """All layers' states as slots of one pool, and the slot of each row in this layer."""
        rows = jnp.arange(self.recurrent.shape[-4], dtype=jnp.int32)
        flat = Pool(*(a.reshape(-1, *a.shape[-3:]) for a in (self.recurrent, self.conv)))
        return flat, rows if self.layer is None else rows + self.layer * len(rows)

    def with_pool(self, pool: Pool) -> "KDAState":
        """With the states of `pool()` after an update."""
        return replace(self, recurrent=pool.states.reshape(self.recurrent.shape), conv=pool.windows.reshape(self.conv.shape))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLAState:
    """Normalised latent and shared key part of each token, at index = its position; S = capacity in tokens.

    `at` slices nothing: it names the layer, so that `append` writes only what is new into the latents of all layers.
    """

    latent: Float[Array, "*n B S L"]
    layer: Int[Array, ""] | None = None  # whose latents are read and written, if several are stacked

    @classmethod
    def empty(cls, config: K3Config, batch: int, capacity: int, *stack: int) -> "MLAState":
        """Room for `batch` sequences of at most `capacity` tokens; `stack`: how many layers in front, for stacked weights."""
        size = config.mla.kv_lora_rank + config.mla.rope_dim
        return cls(jnp.zeros((*stack, batch, capacity, size), config.dtype))

    @property
    def capacity(self) -> int:
        """Tokens per row that fit."""
        return self.latent.shape[-2]

    def at(self, layer: Int[Array, ""]) -> "MLAState":
        """The same latents, of which `read` and `append` see those of one layer of the stack."""
        return MLAState(self.latent, layer)

    def put(self, layer: Int[Array, ""], new: "MLAState") -> "MLAState":
        """The stack after `new`, which came from `at(layer)` and `append`."""
        return MLAState(new.latent)

    def read(self) -> Float[Array, "B S L"]:
        """Latents of one layer, those of tokens that have not come yet included."""
        return self.latent if self.layer is None else jax.lax.dynamic_index_in_dim(self.latent, self.layer, keepdims=False)

    def append(self, new: Float[Array, "B T L"], packing: Packing) -> "MLAState":
        """Writes each real token at its position; padding is dropped.

        Raises ValueError if what is new does not fit. Inside jit only T > S shows; a token beyond S is dropped there.
        """
        require_room(packing, self.capacity)
        where = jnp.where(packing.valid, packing.positions, self.capacity)
        rows = jnp.arange(new.shape[0])[:, None]
        at = self.latent.at[rows, where] if self.layer is None else self.latent.at[self.layer, rows, where]
        return replace(self, latent=at.set(new.astype(self.latent.dtype), mode="drop", unique_indices=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """State of a batch of sequences after `length` tokens each. One entry of `layers` per stack of layers."""

    layers: tuple[KDAState | MLAState, ...]
    length: Int[Array, " B"]

    @property
    def capacity(self) -> int | None:
        """Tokens that fit; None if no layer keeps anything per token."""
        sizes = {entry.capacity for entry in self.layers if isinstance(entry, MLAState)}
        return sizes.pop() if sizes else None

    @classmethod
    def empty(cls, config: K3Config, segments: tuple[Segment, ...], batch: int, capacity: int) -> "Cache":
        """For `batch` sequences of at most `capacity` tokens each; `segments`: how the model stacks its layers."""
        entries = []
        for segment in segments:
            for r, run in enumerate(segment.runs):
                n = len(segment.layers(r))
                kda = run.kind[0] == "kda"
                entries.append(KDAState.empty(config, batch, n) if kda else MLAState.empty(config, batch, capacity, n))
        return cls(tuple(entries), jnp.zeros(batch, jnp.int32))

    def take(self, rows: Int[Array, " N"]) -> "Cache":
        """A cache whose rows are copies of the given rows: forks one prefix into n samples."""
        layers = jax.tree.map(lambda a: jnp.take(a, rows, axis=1), self.layers)
        return replace(self, layers=layers, length=self.length[rows])


def require_room(packing: Packing, capacity: int) -> None:
    """Raises ValueError if tokens lie beyond a cache of `capacity` tokens per row. Inside jit only T > capacity shows."""
    T = packing.segments.shape[1]
    if T > capacity:
        raise ValueError(f"{T} tokens per row do not fit a cache of {capacity}. Make one with more capacity.")
    if is_concrete(packing.segments, packing.positions):
        last = int(np.max(np.where(np.asarray(packing.segments) > 0, np.asarray(packing.positions), -1)))
        if last >= capacity:
            raise ValueError(f"A row goes on to {last + 1} tokens, but its cache holds {capacity}. Make one with more capacity; "
                             "the state of a call without a cache has room for no further token.")


def bytes_per_sequence(config: K3Config) -> tuple[int, int]:
    """(bytes of fixed state, bytes per cached token) of one sequence."""

    def size(dtype: Any) -> int:
        return jnp.dtype(dtype).itemsize

    kda, mla = config.attention.count("kda"), config.attention.count("mla")
    width = config.kda.num_heads * config.kda.head_dim
    fixed = width * config.kda.head_dim * size(config.state_dtype) + 3 * (config.kda.conv_width - 1) * width * size(config.dtype)
    return kda * fixed, mla * (config.mla.kv_lora_rank + config.mla.rope_dim) * size(config.dtype)
