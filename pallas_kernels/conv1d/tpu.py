"""The short convolution on TPU: each input is read once, forward and backward, and taps are shifted inside the chip.

A grid step holds a tile of tokens of all channels, with the 16 inputs before it, of which the taps take the last W - 1; before
a row's first tile they are the window. `reach` says for each token how many tokens back no reset lies between. Backward, with z
the sum under SiLU and dz = dy silu'(z), computed again from x and for the first tokens of the next tile too:

    dx_t = sum_b weight[:, W - 1 - b] dz_(t+b)  over b <= reach_(t+b);    dweight[:, i] = sum_t dz_t tap_i(t)
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.conv1d import xla
from pallas_kernels.target import current, why_not_on

LANES = 128
HALO = 16  # tokens before and behind a tile: those of one packed bf16 register
ROWS = 128  # tokens of a tile
PIECE = 48  # tokens that are computed at once, within the registers
CHANNELS = 4096  # at most: a tile's windows then take 10 MiB of VMEM


def why_not(
    x: Array, weight: Array, window: Array, *, reset: Array | None = None, lengths: Array | None = None
) -> str | None:
    if reason := why_not_on("tpu", x):
        return reason
    (_, T, D), W = x.shape, weight.shape[1]
    if x.dtype not in (jnp.bfloat16, jnp.float32) or window.dtype != x.dtype:
        return f"x and window must both be bf16 or fp32, got {x.dtype} and {window.dtype}"
    if D % LANES or D > CHANNELS:
        return f"D must be a multiple of {LANES} up to {CHANNELS}, got {D}"
    if W - 1 > HALO:
        return f"it takes at most {HALO + 1} taps, got {W}"
    if T < ROWS // 2:
        return f"its tiles of {ROWS} tokens would be mostly padding with T={T}"
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
    W = weight.shape[1]
    y, tail = _convolve(x, weight.astype(jnp.float32), window, reset)
    if lengths is None:
        x, reset = tail, None if reset is None else reset[:, -(W - 1) :]
    return y, xla._last_inputs(jnp.concatenate([window, x], axis=1), W, reset, lengths)


@jax.custom_vjp
def _convolve(x: Array, weight: Float32[Array, "D W"], window: Array, reset: Array | None) -> tuple[Array, Array]:
    """y and the row's last W - 1 inputs, whose gradient thus needs no pass over x of its own."""
    (B, T, D), W = x.shape, weight.shape[1]
    xs, halo, reach, tiles = _operands(x, window, reset, W)
    y = pl.pallas_call(
        partial(_forward_kernel, W),
        out_shape=jax.ShapeDtypeStruct(xs.shape, x.dtype),
        grid=(B, tiles),
        in_specs=[_tile(D), _before(D), _first(D), _tile(1), _whole(W, D)],
        out_specs=_tile(D),
        scratch_shapes=[_scratch(HALO + ROWS), _scratch(ROWS)],
        compiler_params=_params(),
        interpret=current().interpret,
        name="conv1d_forward",
    )(xs, xs, halo, reach, weight.T)
    return y[:, :T], x[:, T - W + 1 :]


def _forward(x: Array, weight: Array, window: Array, reset: Array | None) -> tuple[Any, tuple[Any, ...]]:
    return _convolve(x, weight, window, reset), (x, weight, window, reset)


def _backward(saved: tuple[Any, ...], grads: tuple[Array, Array]) -> tuple[Array, Array, Array, None]:
    (dy, dtail), (x, weight, window, reset) = grads, saved
    (B, T, D), W = x.shape, weight.shape[1]
    xs, halo, reach, tiles = _operands(x, window, reset, W)
    dys = _padded(dy)
    dx, dweight = pl.pallas_call(
        partial(_backward_kernel, W),
        out_shape=[jax.ShapeDtypeStruct(xs.shape, x.dtype), jax.ShapeDtypeStruct((B, tiles, W, D), jnp.float32)],
        grid=(B, tiles),
        in_specs=[_tile(D), _before(D), _first(D), _behind(D, tiles), _tile(D), _behind(D, tiles), _tile(1), _behind(1, tiles),
                  _whole(W, D)],
        out_specs=[_tile(D), pl.BlockSpec((None, None, W, D), lambda b, i: (b, i, 0, 0))],
        scratch_shapes=[_scratch(2 * HALO + ROWS), _scratch(ROWS + HALO), _scratch(ROWS + HALO)],
        compiler_params=_params(),
        interpret=current().interpret,
        name="conv1d_backward",
    )(xs, xs, halo, xs, dys, dys, reach, reach, weight.T)

    def first_tokens(window: Array) -> Array:
        inputs = jnp.concatenate([window, x[:, : W - 1]], axis=1)
        return xla._convolve(inputs, weight, None if reset is None else reset[:, : W - 1]).astype(x.dtype)

    dwindow = jax.vjp(first_tokens, window)[1](dy[:, : W - 1])[0]
    dx = dx[:, :T].at[:, T - W + 1 :].add(dtail)
    return dx, jnp.sum(dweight, (0, 1)).T, dwindow, None


_convolve.defvjp(_forward, _backward)


def _forward_kernel(W: int, x: Any, before: Any, first: Any, reach: Any, weight: Any, y: Any, inputs: Any, reached: Any) -> None:
    start = pl.program_id(1) == 0
    reached[...] = jnp.broadcast_to(reach[...], reached.shape)

    def lanes(i: Array, carry: None) -> None:
        j = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        inputs[:HALO] = jnp.where(start, first[:, j].astype(jnp.float32), before[:, j].astype(jnp.float32))
        inputs[HALO:] = x[:, j].astype(jnp.float32)
        for at in _pieces(ROWS):
            z = _sum(_taps(W, inputs, reached, at), weight[:, j])
            y[at, j] = (z * jax.nn.sigmoid(z)).astype(y.dtype)

    jax.lax.fori_loop(0, x.shape[1] // LANES, lanes, None)


def _backward_kernel(
    W: int, x: Any, before: Any, first: Any, behind: Any, dy: Any, dy_behind: Any, reach: Any, reach_behind: Any, weight: Any,
    dx: Any, dweight: Any, inputs: Any, dz: Any, reached: Any,
) -> None:
    start, last = pl.program_id(1) == 0, pl.program_id(1) == pl.num_programs(1) - 1
    reached[:ROWS] = jnp.broadcast_to(reach[...], (ROWS, LANES))
    reached[ROWS:] = jnp.broadcast_to(reach_behind[...], (HALO, LANES))

    def slope(at: slice, w: Array) -> Array:
        z = _sum(_taps(W, inputs, reached, at), w)
        sigmoid = jax.nn.sigmoid(z)
        return sigmoid * (1 + z * (1 - sigmoid))

    def lanes(i: Array, carry: None) -> None:
        j = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        inputs[:HALO] = jnp.where(start, first[:, j].astype(jnp.float32), before[:, j].astype(jnp.float32))
        inputs[HALO : HALO + ROWS] = x[:, j].astype(jnp.float32)
        inputs[HALO + ROWS :] = behind[:, j].astype(jnp.float32)
        w = weight[:, j]
        for at in _pieces(ROWS):
            dz[at] = dy[at, j].astype(jnp.float32) * slope(at, w)
        behind_it = slice(ROWS, ROWS + HALO)
        dz[behind_it] = jnp.where(last, 0.0, dy_behind[:, j].astype(jnp.float32) * slope(behind_it, w))
        sums = [jnp.zeros((1, LANES), jnp.float32)] * W
        for at in _pieces(ROWS):
            own = dz[at]
            sums = [s + jnp.sum(own * tap, 0, keepdims=True) for s, tap in zip(sums, _taps(W, inputs, reached, at), strict=True)]
            total = own * w[W - 1 :]
            for b in range(1, W):
                later = slice(at.start + b, at.stop + b)
                total += jnp.where(reached[later] >= b, dz[later], 0.0) * w[W - 1 - b : W - b]
            dx[at, j] = total.astype(dx.dtype)
        dweight[:, j] = jnp.concatenate(sums)

    jax.lax.fori_loop(0, x.shape[1] // LANES, lanes, None)


def _pieces(rows: int) -> list[slice]:
    return [slice(i, min(i + PIECE, rows)) for i in range(0, rows, PIECE)]


def _taps(W: int, inputs: Any, reached: Any, at: slice) -> list[Float32[Array, "rows 128"]]:
    """The last W inputs of tokens `at`, oldest first, zero beyond their reach. `inputs` begins HALO tokens before `reached`."""
    back = [inputs[HALO + at.start - b : HALO + at.stop - b] for b in range(W)]
    return [jnp.where(reached[at] >= b, back[b], 0.0) if b else back[b] for b in reversed(range(W))]


def _sum(taps: list[Array], weight: Float32[Array, "W 128"]) -> Float32[Array, "rows 128"]:
    products = [tap * weight[i : i + 1] for i, tap in enumerate(taps)]
    return sum(products[1:], products[0])


def _operands(x: Array, window: Array, reset: Array | None, W: int) -> tuple[Array, Array, Float32[Array, "B P 1"], int]:
    """Tokens padded to tiles, the window as the end of HALO inputs, reach, and the number of tiles."""
    B, T, _ = x.shape
    reach = jnp.full((B, T), W - 1.0)
    if reset is not None:
        open_ = jnp.ones((B, T), bool)
        reach = jnp.zeros((B, T))
        for b in range(1, W):
            open_ &= ~jnp.pad(reset, ((0, 0), (b - 1, 0)))[:, :T]
            reach += open_
    xs = _padded(x)
    return xs, jnp.pad(window, ((0, 0), (HALO - (W - 1), 0), (0, 0))), _padded(reach[..., None]), xs.shape[1] // ROWS


def _padded(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % ROWS), (0, 0)))


def _tile(D: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, ROWS, D), lambda b, i: (b, i, 0))


def _before(D: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, HALO, D), lambda b, i: (b, jnp.maximum(i * (ROWS // HALO) - 1, 0), 0))


def _behind(D: int, tiles: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, HALO, D), lambda b, i: (b, jnp.minimum(i + 1, tiles - 1) * (ROWS // HALO), 0))


def _first(D: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, HALO, D), lambda b, i: (b, 0, 0))


def _whole(W: int, D: int) -> pl.BlockSpec:
    return pl.BlockSpec((W, D), lambda b, i: (0, 0))


def _scratch(rows: int) -> Any:
    return pltpu.VMEM((rows, LANES), jnp.float32)


def _params() -> Any:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=20 * 2**20)
