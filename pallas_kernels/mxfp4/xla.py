"""MXFP4 by integer arithmetic on the bits of bf16 and fp32 numbers: elementwise, so XLA fuses it.

An E2M1 code, shifted to the top of a float's mantissa, is the exponent and mantissa of its number up to a
constant in the exponent, to which the scale byte is added. That takes no product of floats, which would flush
subnormal results, and no table, whose lookups are slow.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

GROUP = 32


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


def dequantize(
    packed: UInt8[Array, "*n O Ihalf"], scale: UInt8[Array, "*n O Igroup"], dtype: Any
) -> Float[Array, "*n O I"]:
    bits, mantissa, container = (16, 7, jnp.bfloat16) if dtype == jnp.bfloat16 else (32, 23, jnp.float32)
    unsigned = jnp.dtype(f"uint{bits}")
    pairs = packed.reshape(*scale.shape, GROUP // 2, 1).astype(unsigned)
    nibble = (pairs >> jnp.asarray([0, 4], unsigned)) & 15
    code = nibble & 7
    in_range = jnp.clip(scale, 1, 252)  # every result is a normal number, 0, or 2**-127
    base = (in_range.astype(unsigned) - 1)[..., None, None] << mantissa
    # Code 1 (0.5) is subnormal: so is the result if base is 0, else it becomes the normal number 2**-1.
    low = jnp.where((base == 0) | (code == 0), code << (mantissa - 1), base)
    magnitude = jnp.where(code < 2, low, (code << (mantissa - 1)) + base)
    value = jax.lax.bitcast_convert_type(magnitude | (nibble & 8) << (bits - 4), container)
    beyond = jnp.where(scale == 255, jnp.nan, jnp.exp2(scale.astype(jnp.float32) - in_range))[..., None, None]
    value = jnp.where(beyond == 1, value, value * beyond.astype(container))
    return value.reshape(*packed.shape[:-1], -1).astype(dtype)


def quantize(
    weight: Float[Array, "*n O I"],
) -> tuple[UInt8[Array, "*n O Ihalf"], UInt8[Array, "*n O Igroup"]]:
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, GROUP)
    top = jnp.max(jnp.abs(groups), -1)
    # A quarter added to a mantissa of 1.75 or more carries into the exponent.
    exponent = (jax.lax.bitcast_convert_type(top, jnp.int32) + (1 << 21)) >> 23
    scale = jnp.where(top > 0, jnp.maximum(exponent - 2, 0), 127)
    inverse = jax.lax.bitcast_convert_type((254 - scale) << 23, jnp.float32)
    size = jnp.abs(groups) * inverse[..., None]
    # Numbers are 0.5 apart below 2, 1 below 4, then 2: rounding to even in these steps keeps ties even.
    steps = jnp.where(size < 2, 2.0, jnp.where(size < 4, 1.0, 0.5))
    first = jnp.where(size < 2, 0, jnp.where(size < 4, 2, 4))
    code = jnp.minimum(jnp.round(size * steps).astype(jnp.int32) + first, 7)
    code = (code | jnp.where(jnp.signbit(groups), 8, 0)).astype(jnp.uint8).reshape(*weight.shape[:-1], -1, 2)
    return code[..., 0] | code[..., 1] << 4, scale.astype(jnp.uint8)
