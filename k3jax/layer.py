"""One layer: attention (KDA or MLA), then a feed-forward (dense or MoE), each on plain or attention residuals."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from k3jax.attnres import AttentionResidual, snapshot
from k3jax.cache import KDAState, MLAState
from k3jax.config import AttentionKind, FeedForwardKind, K3Config
from k3jax.kda import KimiDeltaAttention
from k3jax.mla import MultiHeadLatentAttention
from k3jax.mlp import MLP
from k3jax.moe import LatentMoE, Routing
from k3jax.norm import RMSNorm
from k3jax.packing import Packing


class Residuals(NamedTuple):
    """The stream between layers: a running sum, and with Attention Residuals the snapshots of earlier blocks."""

    prefix: Float[Array, "B T D"]
    blocks: Float[Array, "N B T D"] | None  # slot b is written once, by layer b * attn_res_block


class Layer(nnx.Module):
    """Layer `index` of a model. Its kind is static; its index may be traced, so equal layers share one program."""

    def __init__(self, config: K3Config, kind: tuple[AttentionKind, FeedForwardKind], *, rngs: nnx.Rngs):
        attention, feed_forward = kind
        self.block_size = config.attn_res_block
        norm = {"eps": config.norm_eps, "axis": "embed", "dtype": config.param_dtype, "rngs": rngs}
        if self.block_size is not None:
            self.self_attention_res = AttentionResidual(config, rngs=rngs)
            self.mlp_res = AttentionResidual(config, rngs=rngs)
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        attend: Any = KimiDeltaAttention if attention == "kda" else MultiHeadLatentAttention
        self.self_attn = attend(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.is_moe = feed_forward == "moe"
        if self.is_moe:
            self.block_sparse_moe = LatentMoE(config, rngs=rngs)
        else:
            self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        stream: Residuals,
        index: Int[Array, ""] | int,
        packing: Packing,
        cache: KDAState | MLAState | None = None,
        picks: Int32[Array, "B T k"] | None = None,
        histogram: bool = False,
    ) -> tuple[Residuals, KDAState | MLAState, Routing | None]:
        """Returns the stream after the layer, the attention's new state, and the routing of a MoE layer.

        Blocks are numbered by the layer that begins them. That layer snapshots the running sum before its attention,
        whose output then starts the next sum.
        """
        prefix, blocks = stream
        size = self.block_size
        if blocks is None or size is None:
            a, state = self.self_attn(self.input_layernorm(prefix), packing, cache)
            prefix = prefix + a
            h = self.post_attention_layernorm(prefix)
        else:
            h, blocks = self.self_attention_res.normed(prefix, blocks, (index + size - 1) // size, self.input_layernorm)
            blocks = snapshot(blocks, prefix, index, size)
            a, state = self.self_attn(h, packing, cache)
            prefix = jnp.where(index % size == 0, a, prefix + a)
            h, blocks = self.mlp_res.normed(prefix, blocks, index // size + 1, self.post_attention_layernorm)
        f, routing = self.feed_forward(h, packing, picks, histogram)
        return Residuals(prefix + f, blocks), state, routing

    def feed_forward(
        self, x: Float[Array, "B T D"], packing: Packing, picks: Array | None = None, histogram: bool = False
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        if self.is_moe:
            return self.block_sparse_moe(x, packing, picks, histogram)
        return self.mlp(x, packing), None
