"""The grouped matmul's kernels for NVIDIA GPUs: what is their own; test_grouped_matmul.py holds the op's laws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import gpu, grouped_matmul, grouped_matmul_mxfp4
from pallas_kernels.mxfp4 import dequantize
from pallas_kernels.target import target
from tests.pallas_kernels.test_grouped_matmul import formula, int32, spans

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


def weight_gradient(x, g, sizes):
    return np.stack([np.asarray(x[s], np.float64).T @ np.asarray(g[s], np.float64) for s in spans(sizes)])


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


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


@jax.jit
def product_and_gradient(x, packed, scale, sizes, g):
    y, pull = jax.vjp(lambda x: grouped_matmul_mxfp4(x, packed, scale, sizes, impl="gpu"), x)
    return y, pull(g)[0]


def packed_weights(e=E, m=M, k=K):
    """Every byte of two codes, and scales from 2**-20 to 2**19."""
    rng = np.random.default_rng(2)
    packed, scale = rng.integers(0, 256, (e, m, k // 2)), rng.integers(107, 147, (e, m, k // 32))
    return jnp.asarray(packed, jnp.uint8), jnp.asarray(scale, jnp.uint8)


def decoded(packed, scale):
    return np.asarray(dequantize(packed, scale, jnp.float32, impl="reference"), np.float64).swapaxes(1, 2)


def assert_near(got, expected):
    """Up to the rounding to bf16, in the L2 norm: weights are of very different size here."""
    assert np.linalg.norm(np.asarray(got, np.float64) - expected) <= 2**-8 * np.linalg.norm(expected)


@any_sizes
def test_packed_weights_multiply_bf16_rows_like_their_dequantised_ones(sizes):
    x, _, g = draw(dtype=jnp.bfloat16)
    packed, scale = packed_weights()
    w = decoded(packed, scale)
    y, dx = product_and_gradient(x, packed, scale, int32(sizes), g)
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert_near(y, formula(x, w, sizes))
    assert_near(dx, formula(g, w.swapaxes(1, 2), sizes))


@pytest.mark.parametrize("byte", [0, 1, 16, 127, 240, 254, 255])
def test_every_code_and_scale_is_decoded_exactly(byte):
    """A row of the identity picks a column of the matrix; weights below 2**-112 may be lost."""
    packed = jnp.tile(jnp.arange(256, dtype=jnp.uint8).reshape(1, 16, 16), (1, 2, 1))
    scale = jnp.full((1, 32, 1), byte, jnp.uint8)
    got, _ = product_and_gradient(jnp.eye(32), packed, scale, int32([32]), jnp.zeros((32, 32)))
    expected = np.asarray(dequantize(packed, scale, jnp.float32)[0].T)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2.0**-112 if byte < 16 else 0)


def test_packed_matrices_of_groups_without_rows_are_not_read():
    x, _, g = draw()
    packed, scale = packed_weights()
    poisoned = scale.at[1].set(255)  # NaN
    for got in product_and_gradient(x, packed, poisoned, int32([20, 0, 20, 10]), g):
        assert np.all(np.isfinite(got))


@pytest.mark.parametrize("rows", [14 * 1024, 64], ids=["training", "decode"])
def test_the_packed_kernels_lower_for_cuda_and_nothing_is_decoded_outside(rows):
    x, packed, scale, g = (
        jax.ShapeDtypeStruct(s, dtype)
        for s, dtype in (((rows, 3584), jnp.bfloat16), ((14, 3072, 1792), jnp.uint8), ((14, 3072, 112), jnp.uint8),
                         ((rows, 3072), jnp.bfloat16))
    )  # fmt: skip
    text = lowered(product_and_gradient, x, packed, scale, jax.ShapeDtypeStruct((14,), jnp.int32), g)
    assert all(f'"{name}"' in text for name in ("grouped_matmul_mxfp4", "grouped_matmul_mxfp4_dx"))
    assert "14x3072x3584" not in text and "stablehlo.dot" not in text


def test_packed_sizes_that_do_not_fit_are_named():
    x, _, _ = draw(k=64)
    packed, scale = packed_weights(m=40, k=64)
    with pytest.raises(ValueError, match="multiples of 32, got K=64 and M=40"):
        grouped_matmul_mxfp4(x, packed, scale, int32([50, 0, 0, 0]), impl="gpu")
