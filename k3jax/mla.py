"""Gated multi-head latent attention without positional encoding (NoPE): one small latent per token is all it caches."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.cache import MLAState
from k3jax.checks import require_hidden
from k3jax.config import K3Config
from k3jax.linear import Linear, precision
from k3jax.norm import RMSNorm
from k3jax.packing import Packing
from k3jax.param import normal
from pallas_kernels.mla import attention, latent_attention

# With a cache, at most this many new tokens attend to the latents directly. Per query, key and head that costs
# 2*kv_lora + rope against nope + rope + value multiplications (1088 against 320 in K3), but it saves expanding every
# cached latent to keys and values.
ABSORBED_TOKENS = 16


class MultiHeadLatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) without rotary positions, its output gated (arXiv 2607.24653).

        q = W_qb norm(W_qa x);  c, k_r = W_kva x;  k_n, v = W_kvb norm(c);  k = [k_n, k_r]
        y = W_o [softmax(q k' / sqrt(nope + rope)) v * sigmoid(W_g x)]      causal, softmax in fp32
    """

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        c, D = config.mla, config.hidden_size
        H, qk_dim, kv_dim = c.num_heads, c.nope_dim + c.rope_dim, c.nope_dim + c.value_dim
        self.config = config
        kind: dict[str, Any] = {"init": normal(config.init_std), "dtype": config.param_dtype, "rngs": rngs}
        norm: dict[str, Any] = {"eps": config.latent_norm_eps, "dtype": config.param_dtype, "rngs": rngs}
        if c.q_lora_rank is None:
            self.q_proj = Linear(D, H * qk_dim, ("embed", "heads"), **kind)
        else:
            self.q_a_proj = Linear(D, c.q_lora_rank, ("embed", None), **kind)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, **norm)
            self.q_b_proj = Linear(c.q_lora_rank, H * qk_dim, (None, "heads"), **kind)
        self.kv_a_proj_with_mqa = Linear(D, c.kv_lora_rank + c.rope_dim, ("embed", None), **kind)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, **norm)
        self.kv_b_proj = Linear(c.kv_lora_rank, H * kv_dim, (None, "heads"), **kind)
        if c.output_gate:
            self.g_proj = Linear(D, H * c.value_dim, ("embed", "heads"), **kind)
        self.o_proj = Linear(H * c.value_dim, D, ("heads", "embed"), **kind)

    def __call__(
        self, x: Float[Array, "B T D"], packing: Packing | None = None, cache: MLAState | None = None
    ) -> tuple[Float[Array, "B T D"], MLAState]:
        """Attends over T tokens per row; y in x's dtype.

        packing  sequences and positions of the tokens; None: each row is one sequence from its start, without padding
        cache    what the row's earlier tokens left; a row is then one sequence, with padding after its tokens, and the
                 packing must tell how many came before:

            state = MLAState.empty(config, batch, capacity)
            y, state = layer(x[:, :30], Packing.of(ones[:, :30]), state)
            z, state = layer(x[:, 30:], Packing.of(ones[:, 30:], start=30), state)

        Returns y and the latents: the cache with the new ones at their positions; without a cache those of x, [B, T, L],
        which have no room for more. Raises ValueError for wrong shapes, a cache without a packing, and tokens beyond
        its capacity, as far as they show (`MLAState.append`).
        """
        c = self.config.mla
        require_hidden(x, self.config.hidden_size, None if packing is None else packing.segments.shape, type(self).__name__)
        if cache is not None and packing is None:
            raise ValueError("MultiHeadLatentAttention: a cache alone does not tell how many tokens it holds. Make it with "
                             "MLAState.empty(config, batch, capacity) and pass packing=Packing.of(segments, start=tokens "
                             "that came before) with every call.")
        B, T, _ = x.shape
        packing = Packing.of(jnp.ones((B, T), jnp.int32)) if packing is None else packing
        q = self._queries(x, packing).reshape(B, T, c.num_heads, c.nope_dim + c.rope_dim)
        latent = self._latents(x, packing)
        if cache is None:
            state = MLAState(latent)
            o = self._attend_expanded(q, latent, packing.segments, packing.positions, packing, packing)
        else:
            state = cache.append(latent, packing)
            o = self._attend_cache(q, state.read(), packing)
        o = o.reshape(B, T, c.num_heads * c.value_dim)
        if c.output_gate:
            o = o * jax.nn.sigmoid(self.g_proj(x, packing))
        return self.o_proj(o, packing), state

    def _queries(self, x: Float[Array, "B T D"], packing: Packing) -> Float[Array, "B T HQ"]:
        if self.config.mla.q_lora_rank is None:
            return self.q_proj(x, packing)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, packing)), packing)

    def _latents(self, x: Float[Array, "B T D"], packing: Packing) -> Float[Array, "B T L"]:
        """What is cached per token: the normalised latent, then the key part shared by all heads."""
        both = self.kv_a_proj_with_mqa(x, packing)
        c, k_rope = jnp.split(both, [self.config.mla.kv_lora_rank], axis=-1)
        return jnp.concatenate([self.kv_a_layernorm(c), k_rope], axis=-1)

    def _attend_cache(self, q: Array, latent: Float[Array, "B S L"], packing: Packing) -> Array:
        B, S, _ = latent.shape
        positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        if q.shape[1] <= ABSORBED_TOKENS:
            return self._attend_absorbed(q, latent, positions, packing)
        keys = Packing(jnp.ones((B, S), jnp.int32), positions, _per_row(packing.adapters, S), packing.owners)
        queries = Packing(packing.valid.astype(jnp.int32), packing.positions)
        return self._attend_expanded(q, latent, queries.segments, queries.positions, keys, keys)

    def _attend_expanded(
        self, q: Array, latent: Float[Array, "B S L"], segments: Array, positions: Array, keys: Packing, adapters: Packing
    ) -> Float[Array, "B T H V"]:
        """Keys and values of every head from the latents, then ordinary attention."""
        c, (B, S, _) = self.config.mla, latent.shape
        low, k_rope = jnp.split(latent, [c.kv_lora_rank], axis=-1)
        kv = self.kv_b_proj(low, adapters).reshape(B, S, c.num_heads, c.nope_dim + c.value_dim)
        k_nope, v = jnp.split(kv, [c.nope_dim], axis=-1)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (B, S, c.num_heads, c.rope_dim))
        return attention(
            q, jnp.concatenate([k_nope, k_rope], -1), v, scale=(c.nope_dim + c.rope_dim) ** -0.5,
            q_segments=segments, kv_segments=keys.segments, q_positions=positions, kv_positions=keys.positions,
        )

    def _attend_absorbed(
        self, q: Array, latent: Float[Array, "B S L"], positions: Array, packing: Packing
    ) -> Float[Array, "B T H V"]:
        """(q W_k') against the latents themselves, then W_v: nothing per head is ever stored per cached token."""
        c = self.config.mla
        q_nope, q_rope = jnp.split(q, [c.nope_dim], axis=-1)
        q_latent = jnp.concatenate([self._into_latent(q_nope, packing), q_rope], axis=-1)
        u = latent_attention(
            q_latent, latent, value_dim=c.kv_lora_rank, scale=(c.nope_dim + c.rope_dim) ** -0.5,
            q_positions=packing.positions, kv_positions=positions, q_segments=packing.valid.astype(jnp.int32),
            kv_segments=jnp.ones_like(positions),
        )
        return self._out_of_latent(u, packing)

    def _into_latent(self, q: Float[Array, "B T H N"], packing: Packing) -> Float[Array, "B T H L"]:
        def times(low: Array, weight: Array) -> Array:
            return jnp.einsum("bthn,lhn->bthl", low, weight.astype(q.dtype), precision=precision(q.dtype))

        y, pool, gate = times(q, self._kv_b(self.kv_b_proj.kernel[...], 0)), self.kv_b_proj.lora, packing.rank_gate
        if pool is None or gate is None:
            return y
        a, b = pool.weights
        low = jnp.where(gate[:, :, None], times(q, self._kv_b(b, 0)), 0) * pool.scale[...]
        return y + jnp.einsum("bthr,lr->bthl", low.astype(q.dtype), a.astype(q.dtype), precision=precision(q.dtype))

    def _out_of_latent(self, u: Float[Array, "B T H L"], packing: Packing) -> Float[Array, "B T H V"]:
        def times(low: Array, weight: Array) -> Array:
            return jnp.einsum("bthl,lhv->bthv", low, weight.astype(u.dtype), precision=precision(u.dtype))

        y, pool, gate = times(u, self._kv_b(self.kv_b_proj.kernel[...], 1)), self.kv_b_proj.lora, packing.rank_gate
        if pool is None or gate is None:
            return y
        a, b = pool.weights
        low = jnp.einsum("bthl,lr->bthr", u, a.astype(u.dtype), precision=precision(u.dtype))
        low = (jnp.where(gate[:, :, None], low, 0) * pool.scale[...]).astype(u.dtype)
        return y + times(low, self._kv_b(b, 1))

    def _kv_b(self, weight: Float[Array, "I HKV"], part: int) -> Float[Array, "I H N"]:
        """Columns of a kv_b_proj weight that make keys (part 0) or values (part 1)."""
        c = self.config.mla
        return jnp.split(weight.reshape(weight.shape[0], c.num_heads, -1), [c.nope_dim], axis=-1)[part]


def _per_row(adapters: Array | None, size: int) -> Array | None:
    """Adapters of a row's cached tokens: those of its first new token, since a cached row is one sequence."""
    return None if adapters is None else jnp.broadcast_to(adapters[:, :1], (adapters.shape[0], size))
