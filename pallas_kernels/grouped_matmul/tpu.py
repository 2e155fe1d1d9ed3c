"""Grouped matmul on TPU: a step of the grid multiplies one tile of rows by a slice of one group's matrix.

All of the inner dimension is in VMEM at once: no partial sum is written. Slices of the matrices are the outer dimension of the
grid, so a slice is fetched once for all rows of its group, and matrices of groups without rows are not fetched.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.visits import Visits
from pallas_kernels.target import current, in_hbm, why_not_on

VMEM = 26 * 2**20  # bytes that blocks may take
LIMIT = 32 * 2**20  # bytes that the compiler may give a kernel, of 64 MiB on v5p and tpu7x
MAX_ROWS = 256  # of a tile


def why_not(x: Array, w: Array, group_sizes: Array) -> str | None:
    if reason := why_not_on("tpu", x, w):
        return reason
    E, K, M = w.shape
    if x.dtype not in (jnp.bfloat16, jnp.float32) or w.dtype != x.dtype:
        return f"x and w must both be bf16 or both fp32, got {x.dtype} and {w.dtype}"
    for name, size in ("K", K), ("M", M):
        if size % 128 and (size > 128 or size % 8):
            return f"sizes of matrices must be multiples of 128, or multiples of 8 below, got {name}={size}"
    if (needed := max(_bytes(K, min(M, 128), x.dtype), _bytes(M, min(K, 128), x.dtype))) > VMEM:
        return over(needed, K, M)
    return None


def over(needed: int, K: int, M: int) -> str:
    return f"a slice of a {K} x {M} matrix and a tile of rows take {needed / 2**20:.0f} MiB of VMEM, over {VMEM / 2**20:.0f}"


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "N K"], w: Float[Array, "E K M"], group_sizes: Int32[Array, " E"]
) -> Float[Array, "N M"]:
    return _product(x, w, group_sizes, transposed=False)


def _forward(x: Array, w: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(x, w, group_sizes), (x, w, group_sizes)


def _backward(inputs: tuple[Array, Array, Array], g: Float[Array, "N M"]) -> tuple[Array, Array, None]:
    x, w, group_sizes = inputs
    return _product(g, w, group_sizes, transposed=True), _weight_gradient(x, g, w, group_sizes), None


grouped_matmul.defvjp(_forward, _backward)


def tile_rows(N: int, dtype: Any) -> int:
    """All rows where they are few, else as many as keep the matrix unit busy while the next matrix is fetched."""
    least = 32 // jnp.dtype(dtype).itemsize
    return min(-(-N // least) * least, MAX_ROWS)


def slice_size(size: int, step: int, fits: Callable[[int], bool]) -> int:
    """The largest slice of `size` of which `fits(slice)`: an even number of equal slices that are multiples of `step`, as two
    cores share them, or else all of it."""
    slices = [size // n for n in range(2, size // step + 1, 2) if size % (n * step) == 0]
    return next((n for n in slices if fits(n)), step if size % step == 0 and not fits(size) else size)


def _bytes(inner: int, outer: int, dtype: Any) -> int:
    """Of VMEM, for a product: x, the slice of w and y, each twice; the sum in fp32."""
    size = jnp.dtype(dtype).itemsize
    return 2 * size * (MAX_ROWS * inner + inner * outer + MAX_ROWS * outer) + 4 * MAX_ROWS * outer


def _product(x: Array, w: Array, group_sizes: Array, *, transposed: bool) -> Array:
    """x w of each group, or x w'."""
    N, inner = x.shape
    outer = w.shape[1 if transposed else 2]
    visits = Visits(N, w.shape[0], tile_rows(N, x.dtype))
    block = slice_size(outer, 128, lambda n: _bytes(inner, n, x.dtype) <= VMEM)
    if transposed:
        w_block = pl.BlockSpec((1, block, inner), lambda j, i, d: (visits.group(i, d), j, 0))
    else:
        w_block = pl.BlockSpec((1, inner, block), lambda j, i, d: (visits.group(i, d), 0, j))
    return pl.pallas_call(
        partial(_product_kernel, visits=visits, contract=1 if transposed else 0),
        out_shape=jax.ShapeDtypeStruct((N, outer), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(outer // block, visits.steps),
            in_specs=[pl.BlockSpec((visits.rows, inner), lambda j, i, d: (visits.tile(i, d), 0)), w_block],
            out_specs=pl.BlockSpec((visits.rows, block), lambda j, i, d: (visits.tile(i, d), j)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=LIMIT),
        name="grouped_matmul_dx" if transposed else "grouped_matmul",
        interpret=current().interpret,
    )(visits.of_tiles(group_sizes), *in_hbm(x, w))


def _product_kernel(differences: Any, x: Any, w: Any, y: Any, *, visits: Visits, contract: int) -> None:
    put_rows(visits, differences, y, lambda: dot(x[...], w[0], 1, contract))


def put_rows(visits: Visits, differences: Any, y: Any, product: Callable[[], Array]) -> None:
    """Writes the visit's rows of `product()` [rows, outer] into y, whose other rows keep what earlier visits of the tile wrote,
    or become zero in the first one."""
    i = pl.program_id(1)
    begin, end = visits.span(i, differences)

    @pl.when(visits.opens_tile(i, differences))
    def _() -> None:
        y[...] = jnp.zeros_like(y)

    @pl.when(begin < end)
    def _() -> None:
        y[...] = jnp.where(inside(begin, end, y.shape), product().astype(y.dtype), y[...])


def inside(begin: Array, end: Array, shape: tuple[int, ...]) -> Array:
    """Which rows of a tile belong to a visit."""
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= begin) & (row < end)


def dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, y, (((x_axis,), (y_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _weight_gradient(x: Array, g: Array, w: Array, group_sizes: Array) -> Float[Array, "E K M"]:
    """x'g of each group, summed in fp32 over its visits, which follow each other."""
    (N, K), (E, _, M) = x.shape, w.shape
    visits = Visits(N, E, tile_rows(N, x.dtype))
    rows, size = visits.rows, x.dtype.itemsize

    def needed(k: int, m: int) -> int:
        return 2 * size * (rows * (k + m) + k * m) + 2 * 4 * k * m  # the sum, and a product that is added to it

    m = slice_size(M, 128, lambda m: m <= 1024)
    k = slice_size(K, 128, lambda k: needed(k, m) <= VMEM)
    return pl.pallas_call(
        partial(_weight_gradient_kernel, visits=visits),
        out_shape=jax.ShapeDtypeStruct((E, K, M), w.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(K // k, M // m, visits.steps),
            in_specs=[
                pl.BlockSpec((rows, k), lambda a, b, i, d: (visits.tile(i, d), a)),
                pl.BlockSpec((rows, m), lambda a, b, i, d: (visits.tile(i, d), b)),
            ],
            out_specs=pl.BlockSpec((1, k, m), lambda a, b, i, d: (visits.group(i, d), a, b)),
            scratch_shapes=[pltpu.VMEM((k, m), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=LIMIT
        ),
        name="grouped_matmul_dw",
        interpret=current().interpret,
    )(visits.of_groups(group_sizes), *in_hbm(x, g))


def _weight_gradient_kernel(differences: Any, x: Any, g: Any, dw: Any, total: Any, *, visits: Visits) -> None:
    i = pl.program_id(2)
    begin, end = visits.span(i, differences)

    @pl.when(visits.opens_group(i, differences))
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(begin < end)
    def _() -> None:
        # Both: rows of other groups and behind the last one may hold NaN.
        x_i, g_i = (jnp.where(inside(begin, end, t.shape), t[...], 0) for t in (x, g))
        total[...] += dot(x_i, g_i, 0, 0)

    @pl.when(visits.closes_group(i, differences))
    def _() -> None:
        dw[0] = total[...].astype(dw.dtype)
