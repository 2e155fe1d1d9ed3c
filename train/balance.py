"""Quantile Balancing: the router bias under which each expert would have got its even share of the batch (arXiv 2607.24653)."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


def next_bias(counts: Int32[Array, "*n E bins"], bias: Float32[Array, "*n E"], top_k: int) -> Float32[Array, "*n E"]:
    """The next e_score_correction_bias from the counts of k3jax.router.margin_histogram under `bias`.

        b_j <- k/E quantile of r_:j over tokens;   b <- b - mean(b)

    Token i picks expert j when b_j > r_ij, so below the quantile lie the k/E of all tokens that are an even load.
    Counts are those of the whole batch: summed over micro-batches (and devices). The bins are equal and span
    [min(bias) - 1, max(bias) + 1]; inside a bin the quantile is interpolated linearly. Without a token the bias stays.
    """
    counts = jnp.asarray(counts, jnp.float32)
    experts, bins = counts.shape[-2:]
    low, high = bias.min(-1, keepdims=True) - 1, bias.max(-1, keepdims=True) + 1
    below = jnp.cumsum(counts, -1)
    total = below[..., -1]
    wanted = total * (top_k / experts)
    bin_ = jnp.argmax(below >= wanted[..., None], -1)
    inside = jnp.take_along_axis(counts, bin_[..., None], -1)[..., 0]
    before = jnp.take_along_axis(below, bin_[..., None], -1)[..., 0] - inside
    part = (wanted - before) / jnp.maximum(inside, 1)
    quantile = low + (bin_ + part) * (high - low) / bins
    centred = quantile - quantile.mean(-1, keepdims=True)
    return jnp.where((total > 0).all(-1, keepdims=True), centred, bias)

