"""Grouped matmul written as its formula: a matrix per row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.mxfp4 import dequantize


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


def grouped_matmul(
    x: Float[Array, "N K"], w: Float[Array, "E K M"], group_sizes: Int32[Array, " E"]
) -> Float[Array, "N M"]:
    row, ends = jnp.arange(x.shape[0]), jnp.cumsum(group_sizes)
    real = (row < ends[-1])[:, None]
    group = jnp.minimum(jnp.searchsorted(ends, row, side="right"), w.shape[0] - 1)
    rows = jnp.where(real, x, 0).astype(jnp.float32)
    y = jnp.einsum("nk,nkm->nm", rows, w[group].astype(jnp.float32), precision="highest")
    return jnp.where(real, y, 0).astype(x.dtype)


def grouped_matmul_mxfp4(
    x: Float[Array, "N K"],
    packed: UInt8[Array, "E M Khalf"],
    scale: UInt8[Array, "E M Kgroup"],
    group_sizes: Int32[Array, " E"],
) -> Float[Array, "N M"]:
    return grouped_matmul(x, dequantize(packed, scale, x.dtype).swapaxes(1, 2), group_sizes)
