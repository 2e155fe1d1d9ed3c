"""Routed experts between two forms in memory: kernel [..., in, out] and packed MXFP4 [..., out, in/2]."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

from pallas_kernels.mxfp4 import dequantize, quantize


def pack(kernel: Float[Array, "*n I O"]) -> tuple[UInt8[Array, "*n O I2"], UInt8[Array, "*n O I32"]]:
    """(packed, scale) of the nearest MXFP4 weights, a scale per 32 inputs. ValueError unless 32 divides I."""
    if kernel.shape[-2] % 32:
        raise ValueError(f"MXFP4 scales groups of 32 inputs, but this kernel has {kernel.shape[-2]} inputs.")
    return quantize(jnp.swapaxes(kernel, -1, -2))


def unpack(
    packed: UInt8[Array, "*n O I2"], scale: UInt8[Array, "*n O I32"], dtype: jnp.dtype
) -> Float[Array, "*n I O"]:
    """The kernel that packed weights stand for; exact in bf16 and fp32."""
    return jnp.swapaxes(dequantize(packed, scale, dtype), -1, -2)


def packing_error(kernel: Float[Array, "*n I O"]) -> Float32[Array, "*n"]:
    """Relative L2 distance per matrix between a kernel and what packing makes of it."""
    kernel = kernel.astype(jnp.float32)
    difference = unpack(*pack(kernel), jnp.float32) - kernel
    norm = jnp.sqrt(jnp.sum(kernel**2, (-1, -2)))
    return jnp.sqrt(jnp.sum(difference**2, (-1, -2))) / jnp.where(norm > 0, norm, 1)
