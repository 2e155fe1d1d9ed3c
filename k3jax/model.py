"""The whole model: embedding, layers, final mix and norm, head; vision tower and MTP layer where the config has them.

One forward serves training (no cache, packed rows), prefill and decode (with a cache, one sequence per row).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.attnres import AttentionResidual
from k3jax.cache import Cache, require_room
from k3jax.config import K3Config
from k3jax.linear import Embedding, Linear, LoRAOwners
from k3jax.mtp import MTPLayer
from k3jax.multimodal import merge_images, require_features
from k3jax.norm import RMSNorm
from k3jax.packing import Packing
from k3jax.param import normal
from k3jax.stack import Layers
from k3jax.vision import MoonViT, Patches, PatchMerger


class Output(NamedTuple):
    """What a forward pass gives: hidden states, the cache after the tokens (None without one), the experts taken."""

    hidden: Float[Array, "B T D"]  # after the final norm; `model.logits` turns it into logits
    cache: Cache | None
    routing: tuple[Any, ...]  # per stack of layers: k3jax.moe.Routing with layers in front, or None


class TextModel(nnx.Module):
    """Token ids or embeddings to final hidden states."""

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, init=normal(config.init_std), dtype=config.param_dtype,
            compute_dtype=config.dtype, rngs=rngs,
        )
        self.layers = Layers(config, rngs=rngs)
        if config.attn_res_block is not None:
            self.output_attn_res = AttentionResidual(config, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, axis="embed", dtype=config.param_dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], packing: Packing, cache: Cache | None = None, picks: Any = None, histogram: bool = False
    ) -> Output:
        x = jnp.where(packing.valid[..., None], x, 0)  # whatever padding holds, NaN included, ends here
        stream, cache, routing = self.layers(x, packing, cache, picks, histogram)
        if stream.blocks is None:
            return Output(self.norm(stream.prefix), cache, routing)
        h, _ = self.output_attn_res.normed(stream.prefix, stream.blocks, self.config.num_blocks, self.norm)
        return Output(h, cache, routing)


class K3(nnx.Module):
    """Kimi K3 and, with other switches in the config, Kimi-Linear."""

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        self.config = config
        self.model = TextModel(config, rngs=rngs)
        self.lm_head = Linear(
            config.hidden_size, config.vocab_size, ("embed", "vocab"), init=normal(config.init_std),
            dtype=config.param_dtype, rngs=rngs,
        )
        if config.vision is not None:
            kind: Any = {"param_dtype": config.param_dtype, "init_std": config.init_std, "rngs": rngs}
            self.vision_tower = MoonViT(config.vision, dtype=config.dtype, **kind)
            self.mm_projector = PatchMerger(config.vision, config.hidden_size, **kind)
        if config.num_mtp_layers:
            self.mtp = MTPLayer(config, rngs=rngs)
        self.lora_owners: LoRAOwners | None = nnx.data(None)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        *,
        cache: Cache | None = None,
        adapters: Int[Array, " B"] | Int[Array, "B T"] | None = None,
        picks: Any = None,
        histogram: bool = False,
        image_features: Float[Array, "B M D"] | None = None,
    ) -> Output:
        """Hidden states of T tokens per row.

        segments  0 = padding, 1, 2, … = sequences packed in the row; None: one sequence, no padding.
                  With a cache a row is one sequence, continued: 1 for a token, 0 for padding after it.
        adapters  LoRA adapter of each row (or token); 0 or None: the base model
        picks     experts to use instead of the router's choice: the `routing` experts of an earlier call
        histogram also count what Quantile Balancing needs
        image_features  what `encode_images` made of each row's images, for the placeholders in `ids`

        Raises ValueError for tokens beyond the cache's capacity and for placeholders without a feature. Both depend on
        values, which only a call outside jit can see: before one inside, compare lengths with `cache.capacity` and call
        `k3jax.check_placeholders`.
        """
        packing = self.packing(ids, segments, cache, adapters)
        if cache is not None and cache.capacity is not None:
            require_room(packing, cache.capacity)
        require_features(ids, image_features, self.config)
        x = self.model.embed_tokens(ids, packing)
        if image_features is not None:
            x = merge_images(x, ids, image_features, self.config)
        return self.model(x, packing, cache, picks, histogram)

    def encode_images(self, patches: Patches) -> Float[Array, "B C D"]:
        """Embeddings of each row's image tokens, in order (`k3jax.vision.pack_patches`)."""
        return self.mm_projector(self.vision_tower(patches))

    def packing(
        self, ids: Int[Array, "B T"], segments: Any = None, cache: Cache | None = None, adapters: Any = None
    ) -> Packing:
        """What each token's place is, with the arguments of a call: for `logits`, which runs the head's adapters too."""
        segments = jnp.ones_like(ids) if segments is None else segments
        if adapters is not None and adapters.ndim == 1:
            adapters = jnp.broadcast_to(adapters[:, None], ids.shape)
        if adapters is not None and self.lora_owners is None:
            raise ValueError("Adapters were asked for, but the model has none: attach them with k3jax.lora.Adapters.")
        owners = None if self.lora_owners is None else self.lora_owners[...]
        return Packing.of(segments, 0 if cache is None else cache.length, adapters=adapters, owners=owners)

    def logits(self, hidden: Float[Array, "B T D"], packing: Packing | None = None) -> Float[Array, "B T V"]:
        """Logits in fp32, also of a bf16 model."""
        return self.lm_head(hidden, packing, jnp.float32)

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """A cache for `batch` sequences of at most `capacity` tokens each."""
        return Cache.empty(self.config, self.model.layers.segments, batch, capacity)
