"""Grouped matmul with MXFP4 weights in XLA: a block's matrix is dequantised when its turn comes, never all of them."""

import jax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.grouped_matmul.blocks import block_rows, split
from pallas_kernels.grouped_matmul.xla import dot, multiply
from pallas_kernels.mxfp4 import dequantize


def why_not(*args: Array, **kwargs: object) -> str | None:
    return None


@jax.custom_vjp
def grouped_matmul_mxfp4(
    x: Float[Array, "N K"], packed: UInt8[Array, "E M Khalf"], scale: UInt8[Array, "E M Kgroup"], group_sizes: Int[Array, "E"]
) -> Float[Array, "N M"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul_mxfp4`."""
    return _forward(x, packed, scale, group_sizes)[0]


def _forward(x: Array, packed: Array, scale: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    blocks = split(group_sizes, x.shape[0], block_rows(x.shape[0], packed.shape[0]))
    y = multiply(x, blocks, lambda rows, e: dot(rows, dequantize(packed[e], scale[e], x.dtype).T), packed.shape[1])
    return y, (packed, scale, group_sizes)


def _backward(saved: tuple[Array, Array, Array], g: Float[Array, "N M"]) -> tuple[Array, None, None, None]:
    packed, scale, group_sizes = saved
    blocks = split(group_sizes, g.shape[0], block_rows(g.shape[0], packed.shape[0]))
    dx = multiply(g, blocks, lambda rows, e: dot(rows, dequantize(packed[e], scale[e], g.dtype)), packed.shape[2] * 2)
    return dx, None, None, None


grouped_matmul_mxfp4.defvjp(_forward, _backward)
