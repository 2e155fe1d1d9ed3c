"""Short convolution as W shifted products, which XLA fuses into one pass over the input."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


def why_not(*args: Array, **kwargs: Array | None) -> str | None:
    return None


def conv1d(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    window: Float[Array, "B W-1 D"],
    *,
    reset: Bool[Array, "B T"] | None = None,
    lengths: Int32[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
    """See `pallas_kernels.conv1d.conv1d`."""
    T, W = x.shape[1], weight.shape[1]
    inputs = jnp.concatenate([window, x], axis=1)
    weight = weight.astype(jnp.float32)
    y = x.astype(jnp.float32) * weight[:, W - 1]
    reaches = None if reset is None else jnp.ones_like(reset)
    for back in range(1, W):
        tap = lax.slice_in_dim(inputs, W - 1 - back, W - 1 - back + T, axis=1).astype(jnp.float32)
        if reset is not None:
            reaches &= ~jnp.pad(reset, ((0, 0), (back - 1, 0)))[:, :T]
            tap = jnp.where(reaches[..., None], tap, 0)
        y += tap * weight[:, W - 1 - back]
    return jax.nn.silu(y).astype(x.dtype), _last_inputs(inputs, W, reset, lengths).astype(window.dtype)


def _last_inputs(
    inputs: Float[Array, "B S D"],
    W: int,
    reset: Bool[Array, "B T"] | None,
    lengths: Int32[Array, " B"] | None,
) -> Float[Array, "B W-1 D"]:
    """The W - 1 inputs that end at each row's length, zero where a reset follows them."""

    def cut(rows: Array) -> Array:
        if lengths is None:
            return rows[:, rows.shape[1] - (W - 1) :]
        return jax.vmap(lambda row, length: lax.dynamic_slice_in_dim(row, length, W - 1))(rows, lengths)

    window = cut(inputs)
    if reset is None:
        return window
    resets = cut(jnp.pad(reset, ((0, 0), (W - 1, 0)))).astype(jnp.int32)
    later = lax.cumsum(resets, axis=1, reverse=True) - resets
    return jnp.where((later > 0)[..., None], 0, window)
