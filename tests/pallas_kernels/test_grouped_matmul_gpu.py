"""Laws of the grouped matmul's kernels for NVIDIA GPUs, run by Pallas's interpreter or lowered for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import gpu, grouped_matmul
from pallas_kernels.target import target

N, K, M, E = 50, 96, 32, 4
multiply = jax.jit(partial(grouped_matmul, impl="gpu"))
any_sizes = pytest.mark.parametrize(
    "sizes", [[13, 13, 12, 12], [0, 50, 0, 0], [0, 1, 0, 49], [7, 0, 9, 20], [0, 0, 0, 3], [0] * 4], ids=str
)


@pytest.fixture(autouse=True)
def interpreted():
    with target("gpu", interpret=True):
        yield


@jax.jit
def gradients(x, w, sizes, g):
    return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, impl="gpu"), x, w)[1](g)


def draw(n=N, k=K, m=M, e=E, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in ((n, k), (e, k, m), (n, m))]


def spans(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def formula(x, w, sizes):
    x, w = (np.asarray(t, np.float64) for t in (x, w))
    y = np.zeros((x.shape[0], w.shape[2]))
    for e, span in enumerate(spans(sizes)):
        y[span] = x[span] @ w[e]
    return y


def weight_gradient(x, g, sizes):
    return np.stack([np.asarray(x[s], np.float64).T @ np.asarray(g[s], np.float64) for s in spans(sizes)])


def int32(sizes):
    return jnp.asarray(sizes, jnp.int32)


def assert_close(got, expected, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)


@any_sizes
def test_each_row_meets_the_matrix_of_its_group_and_the_rest_is_zero(sizes):
    x, w, _ = draw()
    y = multiply(x, w, int32(sizes))
    assert_close(y, formula(x, w, sizes))
    assert not np.any(y[sum(sizes) :])


@any_sizes
def test_gradients_equal_those_of_the_formula(sizes):
    x, w, g = draw()
    dx, dw = gradients(x, w, int32(sizes), g)
    assert_close(dx, formula(g, w.swapaxes(1, 2), sizes))
    assert_close(dw, weight_gradient(x, g, sizes))


def test_bf16_rows_are_summed_in_fp32():
    x, w, g = draw(n=300, dtype=jnp.bfloat16)  # tiles of 128 rows
    sizes = [140, 0, 129, 20]
    y, (dx, dw) = multiply(x, w, int32(sizes)), gradients(x, w, int32(sizes), g)
    for got, expected in (
        (y, formula(x, w, sizes)), (dx, formula(g, w.swapaxes(1, 2), sizes)), (dw, weight_gradient(x, g, sizes))
    ):  # fmt: skip
        assert got.dtype == jnp.bfloat16
        assert np.mean(got == jnp.asarray(expected, jnp.bfloat16)) > 0.98  # the rest sits on a rounding boundary of bf16


def test_rows_past_the_last_group_change_no_bit_even_if_they_hold_nan():
    x, w, g = draw()
    sizes = int32([7, 0, 9, 20])
    spoilt_x, spoilt_g = x.at[36:].set(jnp.nan), g.at[36:].set(jnp.nan)
    assert np.array_equal(multiply(x, w, sizes), multiply(spoilt_x, w, sizes))
    clean, spoilt = gradients(x, w, sizes, g), gradients(spoilt_x, w, sizes, spoilt_g)
    assert all(np.array_equal(a, b) for a, b in zip(clean, spoilt, strict=True))
    assert not np.any(clean[0][36:])


def test_matrices_of_groups_without_rows_are_not_read():
    x, w, g = draw()
    sizes = int32([20, 0, 20, 10])
    poisoned = w.at[1].set(jnp.nan)
    assert np.all(np.isfinite(multiply(x, poisoned, sizes)))
    assert np.all(np.isfinite(gradients(x, poisoned, sizes, g)[0]))


@pytest.mark.parametrize("rows", [1, 5])
def test_fewer_rows_than_a_tile_work(rows):
    x, w, _ = draw(n=rows)
    sizes = [0, rows - 1, 0, 1]
    assert_close(multiply(x, w, int32(sizes)), formula(x, w, sizes))


def test_every_one_of_many_experts_may_be_hit_or_missed():
    x, w, g = draw(n=40, k=16, m=16, e=224)
    sizes = np.bincount(np.random.default_rng(1).choice(224, 40), minlength=224)
    assert_close(multiply(x, w, int32(sizes)), formula(x, w, sizes))
    assert np.array_equal(np.any(gradients(x, w, int32(sizes), g)[1], axis=(1, 2)), sizes > 0)


@any_sizes
@pytest.mark.parametrize("rows", [16, 32])
def test_tiles_cover_every_row_once_with_its_group(sizes, rows):
    tiles = [np.asarray(t) for t in gpu.tiles_of(int32(sizes), N, rows)]
    found = np.full(N, -1)
    for group, begin, end in zip(*tiles, strict=True):
        assert end - begin <= rows
        if begin < end:
            assert np.all(found[begin:end] == -1)
            found[begin:end] = group
    assert np.array_equal(found, np.repeat(np.arange(5), [*sizes, N - sum(sizes)]))


def lowered(f, *arguments):
    """The program as it goes to a card, without one; newer versions of jax look for a real card otherwise."""
    card = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=card)
    with target("gpu"), jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [14 * 1024, 64], ids=["training", "decode"])
def test_the_kernels_lower_for_cuda_at_the_real_sizes(dtype, rows):
    x, w, g = (jax.ShapeDtypeStruct(s, dtype) for s in ((rows, 3584), (14, 3584, 3072), (rows, 3072)))
    text = lowered(gradients, x, w, jax.ShapeDtypeStruct((14,), jnp.int32), g)
    assert all(f'"{name}"' in text for name in ("grouped_matmul_dx", "grouped_matmul_dw"))
    assert "stablehlo.dot" not in text and "ragged_dot" not in text


def test_what_the_kernels_cannot_take_is_named():
    x, w, _ = draw(k=40)
    with pytest.raises(ValueError, match="multiples of 16, got K=40 and M=32"):
        multiply(x, w, int32([50, 0, 0, 0]))
    with pytest.raises(ValueError, match="both be bf16 or both fp32, got bfloat16 and float32"):
        multiply(x.astype(jnp.bfloat16), w, int32([50, 0, 0, 0]))
    with target("cpu"), pytest.raises(ValueError, match="it is a kernel for gpu"):
        multiply(x, w, int32([50, 0, 0, 0]))
