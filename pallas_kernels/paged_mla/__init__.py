"""Decoding attention of multi-head latent attention (MLA) layers over latents that lie in pages of a pool."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import run
from pallas_kernels.gradient import without_gradient
from pallas_kernels.paged_mla import gpu, reference, tpu, xla
from pallas_kernels.shapes import checked

IMPLS = {"tpu": tpu, "gpu": gpu, "xla": xla, "reference": reference}


@checked
def paged_latent_attention(
    q: Float[Array, "B T H LR"],
    pool: Float[Array, "P page W"],
    page_table: Int32[Array, "B pages"],
    lengths: Int32[Array, " B"],
    *,
    value_dim: int,
    scale: float,
    impl: str | None = None,
) -> Float[Array, "B T H L"]:
    """Absorbed attention (DeepSeek-V2, arXiv 2405.04434) of the last T tokens of each sequence: all heads share the latents.

        o_t = sum_s softmax_s(scale q_t.latent_s) latent_s[:value_dim]          s <= length - T + t
        latent_s = pool[page_table[s // page], s % page]

    q           queries in the space of the latents: (q_nope W_k', q_rope), L + R numbers (512 + 64 in K3, neither rotated)
    pool        per token the normalised latent (L = value_dim), then the shared key, then any number of zeros. With W = 640
                for K3's 576 it takes no more memory on a TPU, which stores whole tiles, and each program gets it as it lies;
                XLA stores rows of 576 another way round and copies the pool in each program
    page_table  pages of each sequence, in order, each below P; what stands past its last used page is not looked at
    lengths     tokens of each sequence, the T new ones included: they are in the pool already. 0: no sequence. More than
                the pages of its row hold are taken for as many as they hold
    Returns o in q's dtype, exactly 0 where nothing is seen; W_v takes it to values. Softmax and sums run in fp32, and fp32
    latents are multiplied at full precision. Pages that are not used may hold anything, so may the rest of a last page.
    No gradient: it is for decoding. Raises TypeError where one is asked for.
    """
    if not 0 < value_dim <= q.shape[-1] <= pool.shape[-1]:
        raise ValueError(f"value_dim={value_dim} must be between 1 and {q.shape[-1]}, the latent size, and that at most "
                         f"{pool.shape[-1]}, what the pool has room for.")
    lengths = jnp.minimum(lengths, page_table.shape[1] * pool.shape[1])
    q, pool = without_gradient("paged_latent_attention", (q, pool))
    return run("paged_latent_attention", IMPLS, impl, q, pool, page_table, lengths, value_dim=value_dim, scale=scale)
