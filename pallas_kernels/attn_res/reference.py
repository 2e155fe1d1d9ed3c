"""The Attention Residuals mix written as its formula."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


def attn_res(
    prefix: Float[Array, "B T D"],
    blocks: Float[Array, "N B T D"],
    count: int | Int32[Array, ""],
    weight: Float32[Array, " D"],
    *,
    eps: float,
) -> Float[Array, "B T D"]:
    N = blocks.shape[0]
    used = (jnp.arange(N + 1) < count) | (jnp.arange(N + 1) == N)
    v = jnp.concatenate([blocks, prefix[None]]).astype(jnp.float32)
    v = jnp.where(used[:, None, None, None], v, 0.0)
    score = jnp.sum(v * jax.lax.rsqrt(jnp.mean(v * v, -1, keepdims=True) + eps) * weight, -1)
    prob = jax.nn.softmax(jnp.where(used[:, None, None], score, -jnp.inf), axis=0)
    return jnp.sum(prob[..., None] * v, axis=0).astype(prefix.dtype)


def attn_res_norm(
    prefix: Float[Array, "B T D"],
    blocks: Float[Array, "N B T D"],
    count: int | Int32[Array, ""],
    weight: Float32[Array, " D"],
    norm_weight: Float[Array, " D"],
    *,
    eps: float,
) -> tuple[Float[Array, "B T D"], Float[Array, "N B T D"]]:
    mix = attn_res(prefix, blocks, count, weight, eps=eps)
    h = mix.astype(jnp.float32)
    normed = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
    return norm_weight.astype(mix.dtype) * normed.astype(mix.dtype), blocks
