"""Attention over paged latents with an online softmax over blocks of gathered pages, in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

KV_BLOCK = 512  # tokens gathered at once, of each sequence

Carry = tuple[Float[Array, "B T H"], Float[Array, "B T H"], Float[Array, "B T H L"]]


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
    B, T, H, W = q.shape
    if not (q.size and pool.size and page_table.size):
        return jnp.zeros((B, T, H, value_dim), q.dtype)
    pages = max(1, KV_BLOCK // pool.shape[1])
    size = pages * pool.shape[1]
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))
    common = jnp.result_type(q, pool)
    precision = jax.lax.Precision.HIGHEST if common == jnp.float32 else None
    last = lengths[:, None] - T + jnp.arange(T)

    def add_block(j: Array, carry: Carry) -> Carry:
        top, total, acc = carry
        latent = pool[jax.lax.dynamic_slice_in_dim(table, j * pages, pages, 1), :, :W].reshape(B, size, W)
        slot = j * size + jnp.arange(size)
        latent = jnp.where((slot < lengths[:, None])[..., None], latent, 0).astype(common)
        score = scale * jnp.einsum(
            "bthl,bsl->bths", q.astype(common), latent, precision=precision, preferred_element_type=jnp.float32
        )
        score = jnp.where((slot <= last[..., None])[:, :, None], score, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(score, -1))
        base = jnp.where(new_top == -jnp.inf, 0, new_top)
        weight, keep = jnp.exp(score - base[..., None]), jnp.exp(top - base)
        value = jnp.einsum(
            "bths,bsl->bthl", weight.astype(common), latent[..., :value_dim], precision=precision,
            preferred_element_type=jnp.float32,
        )
        return new_top, keep * total + jnp.sum(weight, -1), keep[..., None] * acc + value

    nothing = jnp.full((B, T, H), -jnp.inf), jnp.zeros((B, T, H)), jnp.zeros((B, T, H, value_dim))
    blocks = (jnp.max(lengths, initial=0) + size - 1) // size
    _, total, acc = jax.lax.fori_loop(0, blocks, add_block, nothing)
    return (acc / jnp.where(total > 0, total, 1)[..., None]).astype(q.dtype)
