"""Attention of multi-head latent attention: over expanded keys and values, or over the cached latents themselves."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import run
from pallas_kernels.mla import latent_xla, xla

IMPLS = {"xla": xla}
LATENT_IMPLS = {"xla": latent_xla}


def attention(
    q: Float[Array, "B T H Dk"],
    k: Float[Array, "B S H Dk"],
    v: Float[Array, "B S H Dv"],
    *,
    scale: float,
    q_segments: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
    q_positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    impl: str | None = None,
) -> Float[Array, "B T H Dv"]:
    """Softmax attention whose queries may be fewer than its keys.

        o = softmax(scale q k') v   over keys of the query's segment with kv_position <= q_position

    Segment 0 is padding: such keys are never attended, and a query without any key gives exactly zero. None: segment 1
    everywhere. Softmax and sums run in fp32; the result has v's dtype. Differentiable in q, k and v.
    """
    return run("attention", IMPLS, impl, q, k, v, scale=scale, q_segments=q_segments, kv_segments=kv_segments,
               q_positions=q_positions, kv_positions=kv_positions)


def latent_attention(
    q: Float[Array, "B T H L"],
    latent: Float[Array, "B S L"],
    *,
    value_dim: int,
    scale: float,
    q_segments: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
    q_positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    impl: str | None = None,
) -> Float[Array, "B T H Lv"]:
    """The absorbed form, for one or a few queries per sequence: all heads share the latents as keys, and their first
    `value_dim` numbers as values. Masking and precision as in `attention`."""
    return run("latent_attention", LATENT_IMPLS, impl, q, latent, value_dim=value_dim, scale=scale, q_segments=q_segments,
               kv_segments=kv_segments, q_positions=q_positions, kv_positions=kv_positions)
