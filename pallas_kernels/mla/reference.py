"""MLA attention written as its formula, with all scores at once."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    *,
    scale: float,
    q_positions: Int32[Array, "B T"],
    kv_positions: Int32[Array, "B S"],
    q_segments: Int32[Array, "B T"] | None = None,
    kv_segments: Int32[Array, "B S"] | None = None,
) -> Float[Array, "B T H V"]:
    q_segments = jnp.ones_like(q_positions) if q_segments is None else q_segments
    kv_segments = jnp.ones_like(kv_positions) if kv_segments is None else kv_segments
    seen = (q_segments[:, :, None] == kv_segments[:, None]) & (kv_segments[:, None] != 0)
    seen &= kv_positions[:, None] <= q_positions[:, :, None]
    seen = seen[:, None]
    q = jnp.where(q_segments[..., None, None] != 0, q, 0).astype(jnp.float32)
    k, value = (jnp.where(kv_segments[..., None, None] != 0, x, 0).astype(jnp.float32) for x in (k, v))
    score = jnp.where(seen, scale * jnp.einsum("bthk,bshk->bhts", q, k, precision="highest"), -jnp.inf)
    top = jnp.max(score, -1, keepdims=True)
    weight = jnp.where(seen, jnp.exp(score - jnp.where(jnp.isfinite(top), top, 0)), 0)
    total = jnp.sum(weight, -1, keepdims=True)
    prob = weight / jnp.where(total > 0, total, 1)
    return jnp.einsum("bhts,bshv->bthv", prob, value, precision="highest").astype(v.dtype)


def latent_attention(
    q: Float[Array, "B T H LR"],
    latent: Float[Array, "B S LR"],
    *,
    value_dim: int,
    scale: float,
    q_positions: Int32[Array, "B T"],
    kv_positions: Int32[Array, "B S"],
    q_segments: Int32[Array, "B T"] | None = None,
    kv_segments: Int32[Array, "B S"] | None = None,
) -> Float[Array, "B T H L"]:
    k = jnp.broadcast_to(latent[:, :, None], (*latent.shape[:2], q.shape[2], latent.shape[-1]))
    return attention(
        q, k, k[..., :value_dim].astype(q.dtype), scale=scale, q_positions=q_positions,
        kv_positions=kv_positions, q_segments=q_segments, kv_segments=kv_segments,
    )
