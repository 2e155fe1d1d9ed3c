"""Stable LatentMoE: routed experts in a narrow latent space beside shared experts at full width (arXiv 2607.24653)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from k3jax.config import K3Config
from k3jax.linear import Linear, LoRAPool
from k3jax.mlp import MLP, gated_activation
from k3jax.norm import RMSNorm
from k3jax.packing import Packing
from k3jax.param import Packed, normal, param, zeros
from k3jax.router import Router, margin_histogram
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_mxfp4


class Routing(NamedTuple):
    """What the router of one layer did."""

    experts: Int32[Array, "B T k"]
    histogram: Int32[Array, "E bins"] | None  # see k3jax.router.margin_histogram; only on request


class ExpertLinear(nnx.Module):
    """One matrix per expert, bf16 or fp32: kernel [E, in, out]. Rows of x are sorted by expert."""

    def __init__(self, experts: int, in_size: int, out_size: int, axes: Any, *, config: K3Config, rngs: nnx.Rngs):
        self.kernel = param(rngs, (experts, in_size, out_size), ("experts", *axes), normal(config.init_std), config.param_dtype)
        self.lora: LoRAPool | None = nnx.data(None)

    def __call__(self, rows: Float[Array, "N I"], sizes: Int32[Array, " E"], gate: Bool[Array, "N R"] | None) -> Array:
        return _with_lora(grouped_matmul(rows, self.kernel[...].astype(rows.dtype), sizes), self.lora, rows, sizes, gate)


class PackedExpertLinear(nnx.Module):
    """One MXFP4 matrix per expert, kept packed in memory as in the checkpoint: two E2M1 codes per byte along the
    inputs, [E, out, in/2], and one E8M0 scale per 32 inputs, [E, out, in/32]. Frozen."""

    def __init__(self, experts: int, in_size: int, out_size: int, axes: Any, *, config: K3Config, rngs: nnx.Rngs):
        names = ("experts", axes[1], axes[0])
        self.packed = param(rngs, (experts, out_size, in_size // 2), names, zeros, jnp.uint8, Packed)
        self.scale = param(rngs, (experts, out_size, in_size // 32), names, zeros, jnp.uint8, Packed)
        self.lora: LoRAPool | None = nnx.data(None)

    def __call__(self, rows: Float[Array, "N I"], sizes: Int32[Array, " E"], gate: Bool[Array, "N R"] | None) -> Array:
        y = grouped_matmul_mxfp4(rows, self.packed[...], self.scale[...], sizes)
        return _with_lora(y, self.lora, rows, sizes, gate)


def _with_lora(y: Array, pool: LoRAPool | None, rows: Array, sizes: Array, gate: Bool[Array, "N R"] | None) -> Array:
    if pool is None or gate is None:
        return y
    a, b = pool.weights
    low = grouped_matmul(rows, a.astype(rows.dtype), sizes)
    scale = jnp.repeat(pool.scale[...], sizes, axis=0, total_repeat_length=rows.shape[0])
    low = (jnp.where(gate, low, 0) * scale).astype(rows.dtype)
    return y + grouped_matmul(low, b.astype(rows.dtype), sizes)


class Experts(nnx.Module):
    """E(z) = w2 act(w1 z, w3 z) for rows sorted by expert."""

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        assert config.moe is not None
        m = config.moe
        L, F = m.latent_size or config.hidden_size, m.intermediate_size
        make = partial(PackedExpertLinear if m.mxfp4 else ExpertLinear, m.num_experts, config=config, rngs=rngs)
        self.config = config
        self.w1 = make(L, F, ("expert_in", "mlp"))
        self.w3 = make(L, F, ("expert_in", "mlp"))
        self.w2 = make(F, L, ("mlp", "expert_in"))

    def __call__(self, rows: Float[Array, "N L"], sizes: Int32[Array, " E"], gate: Bool[Array, "N R"] | None) -> Array:
        h = gated_activation(self.config, self.w1(rows, sizes, gate), self.w3(rows, sizes, gate))
        return self.w2(h, sizes, gate)


class LatentMoE(nnx.Module):
    """y = up(norm(sum_i p_i E_i(down x))) + shared(x); without a latent the experts work at full width."""

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        assert config.moe is not None
        m, D = config.moe, config.hidden_size
        kind: dict[str, Any] = {"init": normal(config.init_std), "dtype": config.param_dtype, "rngs": rngs}
        self.config = m
        self.gate = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        if m.latent_size is not None:
            self.routed_expert_down_proj = Linear(D, m.latent_size, ("embed", None), **kind)
            if m.latent_norm:
                self.routed_expert_norm = RMSNorm(m.latent_size, eps=config.norm_eps, dtype=config.param_dtype, rngs=rngs)
            self.routed_expert_up_proj = Linear(m.latent_size, D, (None, "embed"), **kind)
        if m.num_shared_experts:
            self.shared_experts = MLP(config, m.num_shared_experts * m.intermediate_size, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        packing: Packing | None = None,
        picks: Int32[Array, "B T k"] | None = None,
        histogram: bool = False,
    ) -> tuple[Float[Array, "B T D"], Routing]:
        """`picks` replays chosen experts; `histogram` adds the counts for Quantile Balancing. Padding goes nowhere."""
        B, T, D = x.shape
        E, k = self.config.num_experts, self.config.experts_per_token
        packing = Packing.of(jnp.ones((B, T), jnp.int32)) if packing is None else packing
        valid = packing.valid.reshape(-1)
        flat_picks = None if picks is None else picks.reshape(-1, k)
        experts, weights, scores = self.gate(x.reshape(-1, D), flat_picks)
        counts = margin_histogram(scores, self.gate.e_score_correction_bias[...], valid, k) if histogram else None

        z = self.routed_expert_down_proj(x, packing) if self.config.latent_size is not None else x
        order, inverse, sizes = _sort_by_expert(jnp.where(valid[:, None], experts, E), E)
        gate = packing.rank_gate
        rows: Array = _spread(z.reshape(B * T, -1), order, inverse, k)
        y = self.experts(rows, sizes, None if gate is None else gate.reshape(B * T, -1)[order // k])
        y = _permute(y, inverse, order).reshape(B * T, k, -1)
        u = jnp.sum(y.astype(jnp.float32) * weights[..., None], 1).astype(x.dtype).reshape(B, T, -1)

        if self.config.latent_size is not None:
            u = self.routed_expert_norm(u) if self.config.latent_norm else u
            u = self.routed_expert_up_proj(u, packing)
        if self.config.num_shared_experts:
            u = u + self.shared_experts(x, packing)
        return u, Routing(experts.reshape(B, T, k), counts)


def _sort_by_expert(
    experts: Int32[Array, "N k"], num_experts: int
) -> tuple[Int32[Array, " Nk"], Int32[Array, " Nk"], Int32[Array, " E"]]:
    """Order of the N*k (token, pick) pairs by expert, its inverse, and the pairs per expert. Id E sorts last, uncounted."""
    flat = experts.reshape(-1)
    pairs = jnp.arange(flat.size, dtype=jnp.int32)
    ids, order = jax.lax.sort_key_val(flat, pairs)
    inverse = jnp.zeros_like(pairs).at[order].set(pairs, unique_indices=True)
    ends = jnp.searchsorted(ids, jnp.arange(num_experts), side="right").astype(jnp.int32)
    return order, inverse, jnp.diff(ends, prepend=0)


@jax.custom_vjp
def _permute(x: Float[Array, "N F"], index: Int32[Array, " N"], inverse: Int32[Array, " N"]) -> Float[Array, "N F"]:
    """x[index] for a permutation, whose gradient is a gather too (XLA would scatter)."""
    return x[index]


_permute.defvjp(lambda x, index, inverse: (x[index], inverse), lambda inverse, g: (g[inverse], None, None))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(z: Float[Array, "N L"], order: Int32[Array, " Nk"], inverse: Int32[Array, " Nk"], k: int) -> Float[Array, "Nk L"]:
    """The row of each (token, pick) pair in expert order. The gradient gathers a token's k rows and sums them."""
    return z[order // k]


def _spread_bwd(k: int, inverse: Array, g: Float[Array, "Nk L"]) -> tuple[Array, None, None]:
    summed = g[inverse].reshape(-1, k, g.shape[-1]).astype(jnp.float32).sum(1)
    return summed.astype(g.dtype), None, None


_spread.defvjp(lambda z, order, inverse, k: (z[order // k], inverse), _spread_bwd)
