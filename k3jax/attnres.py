"""Attention Residuals (arXiv 2603.15031): each sub-layer reads a learned mix over depth instead of one running sum."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from k3jax.config import K3Config
from k3jax.norm import RMSNorm
from k3jax.param import normal, param
from pallas_kernels.attn_res import attn_res, attn_res_norm


class ResidualScore(nnx.Module):
    """The row that scores a candidate: weight [D], stored [1, D] in a checkpoint."""

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        self.weight = param(rngs, (config.hidden_size,), ("embed",), normal(config.init_std), config.param_dtype)


class AttentionResidual(nnx.Module):
    """mix(prefix, blocks): softmax over the snapshots of earlier blocks and the running prefix sum."""

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, axis="embed", dtype=config.param_dtype, rngs=rngs)
        self.proj = ResidualScore(config, rngs=rngs)

    def __call__(
        self, prefix: Float[Array, "B T D"], blocks: Float[Array, "N B T D"], count: Int[Array, ""] | int
    ) -> Float[Array, "B T D"]:
        """Only the first `count` of the N slots are read; 0 returns `prefix`."""
        return attn_res(prefix, blocks, count, self._weight, eps=self.norm.eps)

    def normed(
        self, prefix: Float[Array, "B T D"], blocks: Float[Array, "N B T D"], count: Int[Array, ""] | int, norm: RMSNorm
    ) -> tuple[Float[Array, "B T D"], Float[Array, "N B T D"]]:
        """norm(mix), and the blocks for whoever reads them next (`pallas_kernels.attn_res.attn_res_norm`)."""
        return attn_res_norm(prefix, blocks, count, self._weight, norm.weight[...], eps=norm.eps)

    @property
    def _weight(self) -> Float32[Array, " D"]:
        return self.norm.weight[...].astype(jnp.float32) * self.proj.weight[...].astype(jnp.float32)


def snapshot(
    blocks: Float[Array, "N B T D"], prefix: Float[Array, "B T D"], layer: Int[Array, ""] | int, block_size: int
) -> Float[Array, "N B T D"]:
    """Writes `prefix` into the slot of `layer`'s block if the layer begins one; else returns `blocks` as they are."""
    slot = layer // block_size
    old = jax.lax.dynamic_index_in_dim(blocks, slot, keepdims=False)
    new = jnp.where(layer % block_size == 0, prefix, old)
    return jax.lax.dynamic_update_index_in_dim(blocks, new, slot, 0)
