"""MXFP4 written as its definition: a table of eight magnitudes, distances to each of them."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def why_not(*args: object, **kwargs: object) -> str | None:
    return None


def dequantize(
    packed: UInt8[Array, "*n O Ihalf"], scale: UInt8[Array, "*n O Igroup"], dtype: Any
) -> Float[Array, "*n O I"]:
    nibbles = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*scale.shape, -1)
    value = jnp.where(nibbles & 8, -1.0, 1.0) * jnp.asarray(MAGNITUDES)[nibbles & 7]
    exponent = scale[..., None].astype(jnp.int32) - 127
    # In two steps: one factor of 2**-127 or 2**128 would leave the range of normal fp32 numbers.
    value = jnp.ldexp(jnp.ldexp(value, exponent // 2), exponent - exponent // 2)
    value = jnp.where(scale[..., None] == 255, jnp.nan, value)
    return value.reshape(*scale.shape[:-1], -1).astype(dtype)


def quantize(
    weight: Float[Array, "*n O I"],
) -> tuple[UInt8[Array, "*n O Ihalf"], UInt8[Array, "*n O Igroup"]]:
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, 32)
    top = jnp.max(jnp.abs(groups), -1)
    mantissa, exponent = jnp.frexp(top)  # top = mantissa * 2**exponent, 0.5 <= mantissa < 1
    scale = jnp.where(top > 0, jnp.maximum(127 + exponent - 1 - 2 + (mantissa >= 1.75 / 2), 0), 127)
    size = jnp.ldexp(jnp.abs(groups), (127 - scale)[..., None])
    distance = jnp.abs(jnp.minimum(size, 6)[..., None] - jnp.asarray(MAGNITUDES))
    even_first = jnp.asarray([0, 2, 4, 6, 1, 3, 5, 7])
    code = even_first[jnp.argmin(distance[..., even_first], -1)] | jnp.where(jnp.signbit(groups), 8, 0)
    low, high = jnp.moveaxis(code.reshape(*weight.shape[:-1], -1, 2), -1, 0)
    return (low | high << 4).astype(jnp.uint8), scale.astype(jnp.uint8)
