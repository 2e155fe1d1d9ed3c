"""Routed experts between two forms in memory: kernel [..., in, out] and packed MXFP4 [..., out, in/2]."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.mxfp4 import dequantize, quantize


def pack(kernel: Float[Array, "*n I O"]) -> tuple[UInt8[Array, "*n O I2"], UInt8[Array, "*n O I32"]]:
    """(packed, scale) of the nearest MXFP4 weights, a scale per 32 inputs. ValueError unless 32 divides I."""
    if kernel.shape[-2] % 32:
        raise ValueError(f"MXFP4 scales groups of 32 inputs, but this kernel has {kernel.shape[-2]} inputs.")
    return quantize(jnp.swapaxes(kernel, -1, -2))


def unpack(
    packed: UInt8[Array, "*n O I2"], scale: UInt8[Array, "*n O I32"], dtype: Any
) -> Float[Array, "*n I O"]:
    """The kernel that packed weights stand for; exact in bf16 and fp32."""
    return jnp.swapaxes(dequantize(packed, scale, dtype), -1, -2)
