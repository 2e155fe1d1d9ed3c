"""The Attention Residuals mix as fused passes over the stored candidates; its gradient keeps only the inputs.

With a_n = sum_d v_nd w_d, r_n = rsqrt(mean_d v_nd**2 + eps), score_n = a_n r_n, p = softmax(score) and g the
gradient of the output:

    dp_n = sum_d g_d v_nd;   ds_n = p_n (dp_n - sum_m p_m dp_m)
    dv_n = p_n g + ds_n (r_n w - a_n r_n**3 v_n / D);   dw = sum_n ds_n r_n v_n
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

PerCandidate = Float32[Array, "M B T"]  # M = N + 1: the blocks, then the prefix


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
    return _mix(eps, prefix, blocks, jnp.asarray(count, jnp.int32), weight)


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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(eps: float, prefix: Array, blocks: Array, count: Array, weight: Array) -> Array:
    a, square = _per_candidate(lambda v: _sums(v * weight, v * v), prefix, blocks)
    prob, _ = _softmax(a, square / prefix.shape[-1], count, eps)
    return _weighted_sum(prob, prefix, blocks, count).astype(prefix.dtype)


def _forward(
    eps: float, prefix: Array, blocks: Array, count: Array, weight: Array
) -> tuple[Array, tuple[Array, ...]]:
    return _mix(eps, prefix, blocks, count, weight), (prefix, blocks, count, weight)


def _backward(eps: float, inputs: tuple[Array, ...], g: Array) -> tuple[Array, Array, None, Array]:
    prefix, blocks, count, weight = inputs
    D = prefix.shape[-1]
    g = g.astype(jnp.float32)
    a, square, dprob = _per_candidate(lambda v: _sums(v * weight, v * v, g * v), prefix, blocks)
    prob, r = _softmax(a, square / D, count, eps)
    used = _used(count, prob)
    dprob = jnp.where(used, dprob, 0.0)
    dscore = prob * (dprob - jnp.sum(prob * dprob, 0))
    along_weight = jnp.where(used, dscore * r, 0.0)
    along_v = jnp.where(used, dscore * a * r**3 / D, 0.0)

    def dv(v: Array, n: int | slice) -> Array:
        return prob[n, ..., None] * g + along_weight[n, ..., None] * weight - along_v[n, ..., None] * v

    dprefix = dv(prefix.astype(jnp.float32), -1)
    dblocks = jnp.where(used[:-1, ..., None], dv(blocks.astype(jnp.float32), slice(None, -1)), 0.0)
    # As a product with ones it costs one stored candidate; as a reduction XLA on CPU stores all its terms.
    rows = _weighted_sum(along_weight, prefix, blocks, count).reshape(-1, D)
    dweight = jnp.dot(jnp.ones(rows.shape[0]), rows, precision=jax.lax.Precision.HIGHEST)
    return dprefix.astype(prefix.dtype), dblocks.astype(blocks.dtype), None, dweight


_mix.defvjp(_forward, _backward)


def _per_candidate(
    sums: Callable[[Array], tuple[Array, ...]], prefix: Array, blocks: Array
) -> list[PerCandidate]:
    of_blocks, of_prefix = sums(blocks.astype(jnp.float32)), sums(prefix.astype(jnp.float32))
    return [jnp.concatenate([x, y[None]]) for x, y in zip(of_blocks, of_prefix, strict=True)]


def _sums(*terms: Float32[Array, "*M B T D"]) -> tuple[Float32[Array, "*M B T"], ...]:
    """Sums of the terms over D. One reduction of several operands reads their shared v once; XLA on CPU would
    store the fp32 v that separate reductions share."""
    zeros = tuple(jnp.float32(0) for _ in terms)
    return jax.lax.reduce(terms, zeros, lambda x, y: tuple(map(jnp.add, x, y)), (terms[0].ndim - 1,))


def _softmax(
    a: PerCandidate, mean_square: PerCandidate, count: Int32[Array, ""], eps: float
) -> tuple[PerCandidate, PerCandidate]:
    """Probabilities, 0 for slots not in use, and r."""
    r = jax.lax.rsqrt(mean_square + eps)
    return jax.nn.softmax(jnp.where(_used(count, a), a * r, -jnp.inf), axis=0), r


def _weighted_sum(
    factor: PerCandidate,
    prefix: Float[Array, "B T D"],
    blocks: Float[Array, "N B T D"],
    count: Int32[Array, ""],
) -> Float32[Array, "B T D"]:
    """sum_n factor_n v_n. A chain of additions becomes one fusion everywhere, a reduction over n does not."""
    total = factor[-1, ..., None] * prefix.astype(jnp.float32)
    for n in range(blocks.shape[0]):
        total += factor[n, ..., None] * jnp.where(n < count, blocks[n].astype(jnp.float32), 0.0)
    return total


def _used(count: Int32[Array, ""], x: PerCandidate) -> Bool[Array, "M 1 1"]:
    slot = jnp.arange(x.shape[0])[:, None, None]
    return (slot < count) | (slot == x.shape[0] - 1)
