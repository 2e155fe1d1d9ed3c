"""Attention over paged latents written as its formula, with all latents and all scores at once."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


def paged_latent_attention(
    q: Float[Array, "B T H LR"],
    pool: Float[Array, "P page W"],
    page_table: Int32[Array, "B pages"],
    lengths: Int32[Array, " B"],
    *,
    value_dim: int,
    scale: float,
) -> Float[Array, "B T H L"]:
    (B, T, _, W), wide = q.shape, jnp.promote_types(jnp.float32, jnp.result_type(q, pool))
    latent = pool[page_table, :, :W].reshape(B, -1, W)
    slot = jnp.arange(latent.shape[1])
    latent = jnp.where(slot[:, None] < lengths[:, None, None], latent, 0).astype(wide)
    seen = slot <= lengths[:, None, None] - T + jnp.arange(T)[:, None]
    score = scale * jnp.einsum("bthl,bsl->bhts", q.astype(wide), latent, precision="highest")
    score = jnp.where(seen[:, None], score, -jnp.inf)
    top = jnp.max(score, -1, keepdims=True)
    weight = jnp.exp(score - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(weight, -1, keepdims=True)
    prob = weight / jnp.where(total > 0, total, 1)
    return jnp.einsum("bhts,bsl->bthl", prob, latent[..., :value_dim], precision="highest").astype(q.dtype)
