"""The normed Attention Residuals mix on TPU: one pass over the sources in use, forward and backward.

In the notation of `xla.py`, with h the mix rounded to the dtype of the stream, u its norm weight, dy the gradient of
y = u h s, s = rsqrt(mean_d h**2 + eps):

    g = s (dy u - h s**2 mean_d(dy u h))          gradient of the mix, from which `xla.py` goes on
    du = sum over tokens of dy h s

The backward computes scores and mix again: it holds the sources anyway, so this moves no byte. The gradient of the blocks
is added in place to that of their later readers, slot by slot, and slots that are not in use are left alone.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attn_res import tpu_backward, tpu_forward
from pallas_kernels.attn_res.tpu_tile import GROUP, LANES, VMEM
from pallas_kernels.target import why_not_on


def why_not(
    prefix: Array, blocks: Array, count: Any, weight: Array, norm_weight: Array, *, eps: float
) -> str | None:
    if reason := why_not_on("tpu", prefix):
        return reason
    if prefix.dtype != blocks.dtype or prefix.dtype not in (jnp.bfloat16, jnp.float32):
        return f"prefix and blocks must both be bf16 or fp32, got {prefix.dtype} and {blocks.dtype}"
    N, D = blocks.shape[0], prefix.shape[-1]
    if D % LANES:
        return f"D must be a multiple of {LANES}, got {D}"
    need = GROUP * tpu_backward.bytes_per_token(N, D, prefix.dtype.itemsize)
    if need > VMEM:
        return f"{GROUP} tokens of {N + 1} sources of {D} channels take {need >> 20} MiB, over {VMEM >> 20} MiB of VMEM"
    return None


def attn_res_norm(
    prefix: Float[Array, "B T D"],
    blocks: Float[Array, "N B T D"],
    count: int | Int32[Array, ""],
    weight: Float32[Array, " D"],
    norm_weight: Float[Array, " D"],
    *,
    eps: float,
) -> tuple[Float[Array, "B T D"], Float[Array, "N B T D"]]:
    norm_weight = norm_weight.astype(prefix.dtype).astype(jnp.float32)
    return _mix(eps, prefix, blocks, jnp.asarray(count, jnp.int32), weight, norm_weight)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(
    eps: float, prefix: Array, blocks: Array, count: Array, weight: Array, norm_weight: Array
) -> tuple[Array, Array]:
    return tpu_forward.forward(eps, prefix, blocks, count, weight, norm_weight), blocks


def _forward(eps: float, *inputs: Any) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    return _mix(eps, *inputs), inputs


def _backward(eps: float, inputs: tuple[Any, ...], grads: tuple[Array, Array]) -> tuple[Any, ...]:
    prefix, blocks, count, weight, norm_weight = inputs
    dprefix, dblocks, dweight, dnorm_weight = tpu_backward.backward(eps, prefix, blocks, count, weight, norm_weight, *grads)
    return dprefix, dblocks, None, dweight, dnorm_weight


_mix.defvjp(_forward, _backward)
