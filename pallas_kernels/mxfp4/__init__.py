"""MXFP4: E2M1 numbers, two per byte, with one E8M0 scale per 32 inputs (OCP Microscaling Formats)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

GROUP = 32  # inputs per scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0..7; bit 3 is the sign


def dequantize(
    packed: UInt8[Array, "*n O Ihalf"], scale: UInt8[Array, "*n O Igroup"], dtype: Any = jnp.bfloat16
) -> Float[Array, "*n O I"]:
    """weight[o, i] = code value * 2**(scale - 127). The low nibble is the even column. Exact in bf16."""
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    magnitude = jnp.asarray(MAGNITUDES, jnp.float32)[codes & 7]
    value = jnp.where(codes & 8, -magnitude, magnitude)
    factor = jnp.ldexp(jnp.float32(1), scale.astype(jnp.int32) - 127)
    grouped = value.reshape(*scale.shape, GROUP) * factor[..., None]
    return grouped.reshape(value.shape).astype(dtype)


def quantize(weight: Float[Array, "*n O I"]) -> tuple[UInt8[Array, "*n O Ihalf"], UInt8[Array, "*n O Igroup"]]:
    """Packs along the last axis; the scale is 2**(floor(log2(max |w|)) - 2), codes round to nearest, ties to even."""
    grouped = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, GROUP)
    top = jnp.max(jnp.abs(grouped), -1)
    exponent = jnp.where(top > 0, jnp.frexp(top)[1] - 1 - 2, -127)
    scale = jnp.clip(exponent + 127, 0, 254).astype(jnp.uint8)
    x = grouped * jnp.ldexp(jnp.float32(1), 127 - scale.astype(jnp.int32))[..., None]
    size = jnp.abs(x)
    bounds = jnp.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], jnp.float32)
    up = jnp.asarray([False, True, False, True, False, True, False])  # a tie goes to the even code
    code = ((size[..., None] > bounds) | (up & (size[..., None] == bounds))).sum(-1).astype(jnp.uint8)
    code = jnp.where(jnp.signbit(x), code | 8, code).reshape(*weight.shape[:-1], -1, 2)
    return (code[..., 0] | (code[..., 1] << 4)).astype(jnp.uint8), scale
