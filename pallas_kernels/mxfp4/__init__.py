"""MXFP4 weights (OCP Microscaling v1.0): E2M1 numbers, two per byte, and a power of two per 32 inputs."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels.dispatch import run
from pallas_kernels.mxfp4 import reference, xla

IMPLS = {"xla": xla, "reference": reference}
GROUP = 32  # inputs per scale


def dequantize(
    packed: UInt8[Array, "*n O Ihalf"],
    scale: Shaped[Array, "*n O Igroup"],
    dtype: Any = jnp.bfloat16,
    *,
    impl: str | None = None,
) -> Float[Array, "*n O I"]:
    """The numbers that packed weights stand for.

        weight[o, i] = (-1)**sign * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code] * 2**(scale[o, i // 32] - 127)

    packed  bits 0-2 of a nibble are the code, bit 3 the sign; the low nibble is the even column
    scale   E8M0, byte 255 is NaN; its bytes as uint8, or as float8_e8m0fnu like safetensors' F8_E8M0
    Exact in bf16 and fp32, except that the results of byte 0 (2**-127) may be flushed to zero where they are
    subnormal, and that results past the largest number of `dtype` are inf.
    """
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    if packed.dtype != jnp.uint8 or scale.dtype != jnp.uint8:
        raise ValueError(f"MXFP4 weights and scales are bytes (uint8), got {packed.dtype} and {scale.dtype}.")
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(
            f"packed {packed.shape} and scale {scale.shape} do not belong together: "
            "[..., out, in/2] needs a scale [..., out, in/32]."
        )
    return run("dequantize", IMPLS, impl, packed, scale, dtype)


def quantize(
    weight: Float[Array, "*n O I"], *, impl: str | None = None
) -> tuple[UInt8[Array, "*n O Ihalf"], UInt8[Array, "*n O Igroup"]]:
    """Packs finite weights along their last axis, as `dequantize` reads them: (packed, scale).

        top   = max |w| over 32 inputs;  e = floor(log2 top)
        scale = 127 + e - 2 + (top >= 1.75 * 2**e)
        code  = nearest to |w| / 2**(scale - 127), ties to the even code, at most 6

    The scale is, byte for byte, that of compressed-tensors, in whose format K3 is released. Its last term is
    not in the OCP rule: a top of 7 or more in units of the OCP scale, which 6 would clip, takes the next one.
    A group of zeros gets scale 1 (byte 127). The sign of zeros is kept. Computed in fp32.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"A scale serves {GROUP} inputs; got {weight.shape[-1]}, which is no multiple.")
    return run("quantize", IMPLS, impl, weight)
