"""Short convolution as W shifted products, which XLA fuses into one pass over the input."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32


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
    inputs = jnp.concatenate([window, x], axis=1)
    y = _convolve(inputs, weight.astype(jnp.float32), reset).astype(x.dtype)
    return y, _last_inputs(inputs, weight.shape[1], reset, lengths).astype(window.dtype)


@jax.custom_vjp
def _convolve(
    inputs: Float[Array, "B S D"], weight: Float32[Array, "D W"], reset: Bool[Array, "B T"] | None
) -> Float32[Array, "B T D"]:
    """y in fp32 of the window and the row's tokens in one array, S = W - 1 + T."""
    return jax.nn.silu(_weighted_sum(_taps(inputs, weight.shape[1], reset), weight))


def _convolve_forward(inputs: Array, weight: Array, reset: Array | None) -> tuple[Array, tuple]:
    return _convolve(inputs, weight, reset), (inputs, weight, reset)


def _convolve_backward(saved: tuple, dy: Float32[Array, "B T D"]) -> tuple[Array, Array, None]:
    """Sums over tokens by a product with ones: XLA's CPU reduction of leading axes is many times slower."""
    inputs, weight, reset = saved
    W = weight.shape[1]
    taps = _taps(inputs, W, reset)
    dz = jax.vjp(jax.nn.silu, _weighted_sum(taps, weight))[1](dy)[0]
    ones = jnp.ones_like(dy[..., 0])
    dweight = [jnp.einsum("bt,btd->d", ones, dz * tap, precision="highest") for tap in taps]
    dtaps = [dz * weight[:, i] for i in range(W)]
    dinputs = jax.linear_transpose(lambda x: _taps(x, W, reset), inputs)(dtaps)[0]
    return dinputs, jnp.stack(dweight, axis=1), None


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _taps(
    inputs: Float[Array, "B S D"], W: int, reset: Bool[Array, "B T"] | None
) -> list[Float32[Array, "B T D"]]:
    """Each token's last W inputs in fp32, oldest first, zero where a reset lies between."""
    T = inputs.shape[1] - W + 1
    taps = [lax.slice_in_dim(inputs, i, i + T, axis=1).astype(jnp.float32) for i in range(W)]
    if reset is not None:
        reaches = jnp.ones_like(reset)
        for back in range(1, W):
            reaches &= ~jnp.pad(reset, ((0, 0), (back - 1, 0)))[:, :T]
            taps[W - 1 - back] = jnp.where(reaches[..., None], taps[W - 1 - back], 0)
    return taps


def _weighted_sum(taps: list[Array], weight: Float32[Array, "D W"]) -> Float32[Array, "B T D"]:
    return sum((tap * weight[:, i] for i, tap in enumerate(taps)), jnp.zeros((), jnp.float32))


def _last_inputs(
    inputs: Float[Array, "B S D"],
    W: int,
    reset: Bool[Array, "B T"] | None,
    lengths: Int32[Array, " B"] | None,
) -> Float[Array, "B {W}-1 D"]:
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
