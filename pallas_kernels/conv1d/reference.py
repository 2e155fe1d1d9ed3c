"""Short convolution as it is defined: one token after the other."""

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
    """The formula of `pallas_kernels.conv1d.conv1d`, with the window carried from token to token."""
    B, T, _ = x.shape
    reset = jnp.zeros((B, T), bool) if reset is None else reset
    lengths = jnp.full(B, T) if lengths is None else lengths
    real = jnp.arange(T) < lengths[:, None]

    def token(window, inputs):
        x, reset, real = inputs
        seen = jnp.where(reset[:, None, None], 0, window)
        taps = jnp.concatenate([seen, x[:, None]], axis=1)
        y = jax.nn.silu(jnp.sum(taps.astype(jnp.float32) * weight.T.astype(jnp.float32), axis=1))
        return jnp.where(real[:, None, None], taps[:, 1:], window), y.astype(x.dtype)

    inputs = window.astype(jnp.promote_types(window.dtype, x.dtype))
    last, y = lax.scan(token, inputs, (jnp.moveaxis(x, 1, 0), reset.T, real.T))
    return jnp.moveaxis(y, 0, 1), last.astype(window.dtype)
