"""Attention over cached latents in XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.mla.mask import masked_softmax, visible


def why_not(*args: Array, **kwargs: object) -> str | None:
    return None


def latent_attention(
    q: Float[Array, "B T H L"], latent: Float[Array, "B S L"], *, value_dim: int, scale: float,
    q_segments: Int[Array, "B T"] | None, kv_segments: Int[Array, "B S"] | None,
    q_positions: Int[Array, "B T"], kv_positions: Int[Array, "B S"],
) -> Float[Array, "B T H Lv"]:
    """See `pallas_kernels.mla.latent_attention`."""
    precision = "highest" if q.dtype == jnp.float32 else None
    see = visible(q_segments, kv_segments, q_positions, kv_positions)[:, None]
    scores = jnp.einsum("bthl,bsl->bhts", q, latent, precision=precision, preferred_element_type=jnp.float32) * scale
    p = masked_softmax(scores, see).astype(latent.dtype)
    o = jnp.einsum("bhts,bsl->bthl", p, latent[..., :value_dim], precision=precision, preferred_element_type=jnp.float32)
    return o.astype(q.dtype)
