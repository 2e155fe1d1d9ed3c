"""What decode of Kimi Delta Attention takes and updates. HK = H heads of K channels side by side; V = K."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


class Projected(NamedTuple):
    """What the layer's projections make of each row's token (or of its T drafted ones), before any bias or non-linearity."""

    q: Float[Array, "N *T HK"]
    k: Float[Array, "N *T HK"]
    v: Float[Array, "N *T HK"]
    decay: Float[Array, "N *T HK"]
    beta: Float[Array, "N *T H"]
    gate: Float[Array, "N *T HK"]


class Weights(NamedTuple):
    """The layer's own. conv[0], conv[1], conv[2] are the taps of q, k and v, that of the newest input last."""

    conv: Float32[Array, "3 W HK"]
    A_log: Float32[Array, " H"]
    dt_bias: Float32[Array, " HK"]
    o_norm: Float32[Array, " K"]


class Pool(NamedTuple):
    """One slot per sequence: S after its last token, and the last I inputs of the convolutions of q, k, v, oldest first.

    I is W - 1, all that is needed, or W: then a slot's windows lie in one piece on a TPU. With three inputs XLA lays out arrays
    with slots innermost, and the kernel's call is put between two copies of all windows.
    """

    states: Float[Array, "slots H K K"]  # fp32; XLA also steps narrower ones, in fp32
    windows: Float[Array, "slots 3 I HK"]


def windows_after(windows: Float[Array, "N 3 I HK"], x: Projected, tokens: Int32[Array, " N"]) -> Float[Array, "N 3 I HK"]:
    """The windows after the first so many tokens of x."""
    inputs = jnp.concatenate([windows, jnp.stack([x.q, x.k, x.v], axis=1).astype(windows.dtype)], axis=2)
    return jax.vmap(lambda a, t: jax.lax.dynamic_slice_in_dim(a, t, windows.shape[2], axis=1))(inputs, tokens)
