"""Which keys a query sees."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def visible(
    q_segments: Int[Array, "B T"] | None, kv_segments: Int[Array, "B S"] | None,
    q_positions: Int[Array, "B T"], kv_positions: Int[Array, "B S"],
) -> Bool[Array, "B T S"]:
    see = kv_positions[:, None, :] <= q_positions[:, :, None]
    if q_segments is not None or kv_segments is not None:
        qs = jnp.ones_like(q_positions) if q_segments is None else q_segments
        ks = jnp.ones_like(kv_positions) if kv_segments is None else kv_segments
        see &= (qs[:, :, None] == ks[:, None, :]) & (ks[:, None, :] > 0)
    return see


def masked_softmax(scores: Array, see: Bool[Array, "B #H T S"]) -> Array:
    """Softmax over the visible keys, fp32; all zeros where there is none, with zero gradient."""
    scores = jnp.where(see, scores, -jnp.inf)
    top = jnp.max(scores, -1, keepdims=True)
    p = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    return p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30)
