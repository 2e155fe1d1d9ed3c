"""Attention of multi-head latent attention (MLA) layers, over expanded keys or over the cached latents."""

from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import run
from pallas_kernels.mla import gpu, reference, tpu, xla
from pallas_kernels.shapes import checked

IMPLS = {"tpu": tpu, "gpu": gpu, "xla": xla, "reference": reference}
LATENT_IMPLS = {"xla": xla, "reference": reference}


@checked
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
    impl: str | None = None,
) -> Float[Array, "B T H V"]:
    """Causal softmax attention where keys and values may differ in size (192 and 128 in K3).

        o_t = sum_s softmax_s(scale q_t.k_s) v_s    over s with kv_segment_s == q_segment_t != 0
                                                    and kv_position_s <= q_position_t

    positions  of each token in its sequence, in any order; a cache slot that holds nothing yet has a position
               past every query's, or segment 0
    segments   0 is padding, 1.. are the sequences of a row; None means 1 everywhere
    Returns o in v's dtype, exactly 0 for a query without any key (padding). Softmax and sums run in fp32, and
    fp32 inputs are multiplied at full precision. What unseen keys and padding hold changes nothing, as long
    as it is finite. Temporary memory grows with T + S, not with T * S, also in the gradient.
    """
    return run(
        "attention", IMPLS, impl, q, k, v, scale=scale, q_positions=q_positions, kv_positions=kv_positions,
        q_segments=q_segments, kv_segments=kv_segments,
    )


@checked
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
    impl: str | None = None,
) -> Float[Array, "B T H L"]:
    """`attention` in its absorbed form (DeepSeek-V2, arXiv 2405.04434): all heads share the cached latents.

        o_t = sum_s softmax_s(scale q_t.latent_s) latent_s[:value_dim]    over the same keys s as `attention`

    q       queries in the space of the latents: (q_nope W_k', q_rope), L + R numbers (512 + 64 in K3)
    latent  what an MLA layer caches per token: the normalised latent (L = value_dim), then the shared key
    Returns o in q's dtype; W_v takes it to values. Of the cache, only the blocks from the first to the last
    with a key for some query are read. For decoding; with many queries, expanded keys take less arithmetic.
    """
    if not 0 < value_dim <= latent.shape[-1]:
        raise ValueError(f"value_dim={value_dim} must be between 1 and {latent.shape[-1]}, the latent size.")
    return run(
        "latent_attention", LATENT_IMPLS, impl, q, latent, value_dim=value_dim, scale=scale, q_positions=q_positions,
        kv_positions=kv_positions, q_segments=q_segments, kv_segments=kv_segments,
    )
