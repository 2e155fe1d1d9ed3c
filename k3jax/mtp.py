"""Multi-token prediction: one more layer, which predicts the token after the next (arXiv 2412.19437)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from k3jax.cache import MLAState
from k3jax.config import ConfigError, K3Config
from k3jax.linear import Linear
from k3jax.mla import MultiHeadLatentAttention
from k3jax.mlp import MLP
from k3jax.moe import LatentMoE, Routing
from k3jax.norm import RMSNorm
from k3jax.packing import Packing
from k3jax.param import normal


class SharedHead(nnx.Module):
    """The norm before the head. The head itself is the main model's."""

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(
            config.hidden_size, eps=config.norm_eps, axis="embed", dtype=config.param_dtype, rngs=rngs
        )


class MTPLayer(nnx.Module):
    """From the hidden state of token t and the embedding of token t + 1, the state that predicts token t + 2:

        h = eh_proj [enorm(embedding), hnorm(hidden)]
        h += self_attn(input_layernorm h);  h += block_sparse_moe(post_attention_layernorm h)
        result = shared_head.norm(h)

    The tensors of Kimi K3's own MTP layer were not seen: its report says that one is trained, not how it is
    stored, nor whether it mixes Attention Residuals. This follows DeepSeek-V3, whose checkpoints store it as
    layer model.layers.{num_layers}, under the names of the attributes here, except that they call the
    feed-forward `mlp` and add copies of the embedding and the head (embed_tokens, shared_head.head); both are
    the main model's here. Residuals are plain. Attention is MLA: its cache takes back a rejected draft by
    forgetting the position.
    """

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        if config.num_mtp_layers != 1:
            raise ConfigError(
                f"num_nextn_predict_layers={config.num_mtp_layers} is not supported, only 0 or 1"
            )
        D = config.hidden_size
        norm: dict[str, Any] = {
            "eps": config.norm_eps,
            "axis": "embed",
            "dtype": config.param_dtype,
            "rngs": rngs,
        }
        self.config = config
        self.enorm = RMSNorm(D, **norm)
        self.hnorm = RMSNorm(D, **norm)
        self.eh_proj = Linear(
            2 * D, D, ("embed", None), init=normal(config.init_std), dtype=config.param_dtype, rngs=rngs
        )
        self.input_layernorm = RMSNorm(D, **norm)
        self.self_attn = MultiHeadLatentAttention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(D, **norm)
        if config.moe is None:
            self.mlp = MLP(config, rngs=rngs)
        else:
            self.block_sparse_moe = LatentMoE(config, rngs=rngs)
        self.shared_head = SharedHead(config, rngs=rngs)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        next_embeds: Float[Array, "B T D"],
        packing: Packing,
        cache: MLAState | None = None,
        picks: Int32[Array, "B T k"] | None = None,
        histogram: bool = False,
    ) -> tuple[Float[Array, "B T D"], MLAState, Routing | None]:
        """Returns the hidden states for the main model's head, the attention's new state, and the routing.

        hidden       of the main model after its final norm (`Output.hidden`)
        next_embeds  embedding of the token after each; at the last token of a sequence it may be anything,
                     as it reaches only that token's result
        packing      that of the tokens of `hidden`; with a cache, it tells how many tokens came before
        """
        if cache is not None or self.config.remat == "none":
            return self._forward(hidden, next_embeds, packing, cache, picks, histogram)
        graphdef, state = nnx.split(self)

        @jax.checkpoint
        def forward(state: Any, hidden: Array, next_embeds: Array, packing: Packing, picks: Any) -> Any:
            return nnx.merge(graphdef, state)._forward(hidden, next_embeds, packing, None, picks, histogram)

        return forward(state, hidden, next_embeds, packing, picks)

    def _forward(
        self,
        hidden: Array,
        next_embeds: Array,
        packing: Packing,
        cache: MLAState | None,
        picks: Any,
        histogram: bool,
    ) -> tuple[Array, MLAState, Routing | None]:
        h = self.eh_proj(jnp.concatenate([self.enorm(next_embeds), self.hnorm(hidden)], -1), packing)
        a, state = self.self_attn(self.input_layernorm(h), packing, cache)
        h = h + a
        x = self.post_attention_layernorm(h)
        if self.config.moe is None:
            f, routing = self.mlp(x, packing), None
        else:
            f, routing = self.block_sparse_moe(x, packing, picks, histogram)
        return self.shared_head.norm(h + f), state, routing

    def empty_cache(self, batch: int, capacity: int) -> MLAState:
        """For `batch` sequences of at most `capacity` tokens each."""
        return MLAState.empty(self.config, batch, capacity)
