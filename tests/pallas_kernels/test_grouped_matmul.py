"""Laws of the grouped matmul, with plain and with MXFP4 weights."""

from contextlib import nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import IMPLS, grouped_matmul, grouped_matmul_mxfp4
from pallas_kernels.grouped_matmul.bench_cpu import main as bench
from pallas_kernels.grouped_matmul.decode import as_bf16, decode
from pallas_kernels.grouped_matmul.visits import Visits
from pallas_kernels.mxfp4 import dequantize, quantize
from pallas_kernels.target import target

N, K, M, E = 50, 32, 16, 4
every_impl = pytest.mark.parametrize("impl", IMPLS)
tiled = pytest.mark.parametrize("impl", ["tpu", "xla"])
multiply = jax.jit(grouped_matmul, static_argnames="impl")


@pytest.fixture(autouse=True)
def interpreted(request):
    """Kernels for TPUs and GPUs run in Pallas's interpreter."""
    impl = getattr(request.node, "callspec", None) and request.node.callspec.params.get("impl")
    with target(impl, interpret=True) if impl in ("tpu", "gpu") else nullcontext():
        yield

any_sizes = pytest.mark.parametrize(
    "sizes",
    [[13, 13, 12, 12], [0, 50, 0, 0], [0, 1, 0, 49], [8, 16, 0, 26], [7, 0, 9, 20], [0, 0, 0, 3], [0] * 4],
    ids=str,
)


@partial(jax.jit, static_argnames="impl")
def gradients(x, w, sizes, g, *, impl):
    return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, impl=impl), x, w)[1](g)


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


def int32(sizes):
    return jnp.asarray(sizes, jnp.int32)


@every_impl
@any_sizes
def test_each_row_meets_the_matrix_of_its_group_and_the_rest_is_zero(sizes, impl):
    x, w, _ = draw()
    y = multiply(x, w, int32(sizes), impl=impl)
    np.testing.assert_allclose(y, formula(x, w, sizes), rtol=1e-5, atol=1e-5)
    assert not np.any(y[sum(sizes) :])


@every_impl
@any_sizes
def test_gradients_equal_those_of_the_formula(sizes, impl):
    x, w, g = draw()
    dx, dw = gradients(x, w, int32(sizes), g, impl=impl)
    np.testing.assert_allclose(dx, formula(g, w.swapaxes(1, 2), sizes), rtol=1e-5, atol=1e-5)
    for e, span in enumerate(spans(sizes)):
        expected = np.asarray(x[span], np.float64).T @ np.asarray(g[span], np.float64)
        np.testing.assert_allclose(dw[e], expected, rtol=1e-5, atol=1e-5)


@tiled
def test_rows_past_the_last_group_change_no_bit_even_if_they_hold_nan(impl):
    x, w, g = draw()
    sizes = int32([7, 0, 9, 20])
    spoilt_x, spoilt_g = x.at[36:].set(jnp.nan), g.at[36:].set(jnp.nan)
    assert np.array_equal(multiply(x, w, sizes, impl=impl), multiply(spoilt_x, w, sizes, impl=impl))
    clean, spoilt = gradients(x, w, sizes, g, impl=impl), gradients(spoilt_x, w, sizes, spoilt_g, impl=impl)
    assert all(np.array_equal(a, b) for a, b in zip(clean, spoilt, strict=True))
    assert not np.any(clean[0][36:])


@tiled
def test_matrices_of_groups_without_rows_are_not_read(impl):
    x, w, _ = draw()
    y = multiply(x, w.at[1].set(jnp.nan), int32([20, 0, 20, 10]), impl=impl)
    assert np.all(np.isfinite(y))


@tiled
@pytest.mark.parametrize("rows", [1, 5])
def test_fewer_rows_than_a_tile_work(rows, impl):
    x, w, _ = draw(n=rows)
    sizes = [0, rows - 1, 0, 1]
    np.testing.assert_allclose(multiply(x, w, int32(sizes), impl=impl), formula(x, w, sizes), rtol=1e-5, atol=1e-5)


@tiled
def test_bf16_rows_are_summed_in_fp32(impl):
    x, w, g = draw(dtype=jnp.bfloat16)
    sizes = [13, 13, 12, 12]
    y = multiply(x, w, int32(sizes), impl=impl)
    assert y.dtype == jnp.bfloat16
    expected = jnp.asarray(formula(x, w, sizes), jnp.bfloat16)
    assert np.mean(y == expected) > 0.98  # the rest sits on a rounding boundary of bf16
    assert [t.dtype for t in gradients(x, w, int32(sizes), g, impl=impl)] == [jnp.bfloat16] * 2


LONG = 600  # rows, more than two tiles


@st.composite
def any_groups(draw, groups=6):
    """Sizes of groups with up to LONG rows together: empty ones, and ones that hold everything, are likely."""
    total = draw(st.sampled_from([0, 1, 255, 256, 257, LONG - 1, LONG]) | st.integers(0, LONG))
    edge = st.sampled_from([0, total]) | st.integers(0, total)
    return np.diff(sorted([0, *(draw(edge) for _ in range(groups - 1)), total]))


@tiled
@settings(max_examples=25)
@given(sizes=any_groups())
def test_any_sizes_over_several_tiles_equal_the_formula(sizes, impl):
    x, w, g = draw(n=LONG, k=16, m=8, e=6)
    x, g = (t.at[sum(sizes) :].set(jnp.nan) for t in (x, g))
    y, (dx, dw) = multiply(x, w, int32(sizes), impl=impl), gradients(x, w, int32(sizes), g, impl=impl)
    np.testing.assert_allclose(y, formula(x, w, sizes), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, formula(g, w.swapaxes(1, 2), sizes), rtol=1e-5, atol=1e-5)
    for e, span in enumerate(spans(sizes)):
        np.testing.assert_allclose(dw[e], np.float64(x[span]).T @ np.float64(g[span]), rtol=1e-5, atol=1e-4)


@tiled
@settings(max_examples=15)
@given(sizes=any_groups())
def test_any_sizes_over_several_tiles_equal_the_formula_with_packed_weights(sizes, impl):
    x, _, g = draw(n=LONG, k=PACKED_K, m=PACKED_M)
    x, g = (t.at[sum(sizes) :].set(jnp.nan) for t in (x, g))
    packed, scale = packed_weights(e=6)
    w = dequantize(packed, scale, jnp.float32).swapaxes(1, 2)
    y, dx = product_and_gradient(x, packed, scale, int32(sizes), g, impl=impl)
    np.testing.assert_allclose(y, formula(x, w, sizes), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dx, formula(g, w.swapaxes(1, 2), sizes), rtol=1e-5, atol=1e-4)


def test_every_one_of_896_experts_may_be_hit_or_missed():
    x, w, g = draw(n=160, k=4, m=3, e=896)
    sizes = np.bincount(np.random.default_rng(1).choice(896, 160), minlength=896)
    np.testing.assert_allclose(multiply(x, w, int32(sizes)), formula(x, w, sizes), rtol=1e-5, atol=1e-5)
    dw = gradients(x, w, int32(sizes), g, impl="xla")[1]
    assert np.array_equal(np.any(dw, axis=(1, 2)), sizes > 0)


def test_8192_tokens_with_16_experts_each_go_through_in_one_call():
    x, w, g = draw(n=8192 * 16, k=2, m=2, e=32)
    sizes = np.bincount(np.random.default_rng(1).integers(0, 32, len(x)), minlength=32)
    np.testing.assert_allclose(multiply(x, w, int32(sizes)), formula(x, w, sizes), rtol=1e-5, atol=1e-5)
    dx, dw = gradients(x, w, int32(sizes), g, impl="xla")
    np.testing.assert_allclose(dx, formula(g, w.swapaxes(1, 2), sizes), rtol=1e-5, atol=1e-5)
    for e, span in enumerate(spans(sizes)):
        expected = np.asarray(x[span], np.float64).T @ np.asarray(g[span], np.float64)
        np.testing.assert_allclose(dw[e], expected, rtol=1e-4, atol=1e-3)


@partial(jax.jit, static_argnames="impl")
def product_and_gradient(x, packed, scale, sizes, g, *, impl):
    y, pull = jax.vjp(lambda x: grouped_matmul_mxfp4(x, packed, scale, sizes, impl=impl), x)
    return y, pull(g)[0]


PACKED_K, PACKED_M = 256, 128  # the least that the TPU kernel takes


@cache
def packed_weights(e=E, m=PACKED_M, k=PACKED_K):
    return quantize(jnp.asarray(np.random.default_rng(2).normal(size=(e, m, k)), jnp.float32))


@every_impl
@any_sizes
def test_packed_weights_multiply_like_their_dequantised_ones(sizes, impl):
    x, _, g = draw(k=PACKED_K, m=PACKED_M)
    packed, scale = packed_weights()
    w = dequantize(packed, scale, jnp.float32).swapaxes(1, 2)

    y, dx = product_and_gradient(x, packed, scale, int32(sizes), g, impl=impl)
    np.testing.assert_allclose(y, formula(x, w, sizes), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dx, formula(g, w.swapaxes(1, 2), sizes), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("impl", ["tpu"])
def test_every_code_under_every_scale_is_decoded_like_the_reference(impl):
    """Rows 0 to 255 have their number as scale byte, so usual bytes, and 0, 253, 254 and 255, stand in one matrix."""
    codes = np.arange(128, dtype=np.uint8) * 2 + (np.arange(256) % 2)[:, None].astype(np.uint8)  # all nibble pairs over two rows
    scale = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 8))

    def kernel(packed, scale, out, words, unusual):
        decode(packed, scale, 0, words, unusual)
        out[...] = as_bf16(words)

    out = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), interpret=True,
        scratch_shapes=[pltpu.VMEM((2, 128, 128), jnp.int32), pltpu.SMEM((1,), jnp.int32)],
    )(codes, scale)
    out, expected = np.float32(out), np.float32(dequantize(codes, scale, jnp.float32))
    expected = np.float32(jnp.asarray(expected, jnp.bfloat16))  # past its range, bf16 has inf
    small = np.abs(expected) < 2.0**-126
    np.testing.assert_array_equal(out[~small], expected[~small])
    assert np.all(np.abs(out[small]) < 2.0**-126)


@pytest.mark.parametrize("sizes", [[0, 0, 0, 0], [3, 0, 0, 0], [0, 16, 0, 4], [64, 0, 300, 148], [0, 512, 0, 0]], ids=str)
def test_each_matrix_with_rows_is_fetched_once_and_no_other(sizes):
    """What a kernel fetches in a sweep over its visits: a block is moved when its index changes."""
    visits = Visits(512, 4, 256)
    differences = visits.of_tiles(int32(sizes))
    groups = [int(visits.group(i, differences)) for i in range(visits.steps)]
    fetched = [g for i, g in enumerate(groups) if i == 0 or g != groups[i - 1]]
    assert fetched == ([e for e, size in enumerate(sizes) if size] or [0])
    tiles = [int(visits.tile(i, differences)) for i in range(visits.steps)]
    assert [t for i, t in enumerate(tiles) if i == 0 or t != tiles[i - 1]] == [0, 1]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"x": jnp.float16}, "x must be bf16 or fp32, got float16"),
        ({"k": 128}, "inputs must be a multiple of 256 up to 4096, got 128"),
        ({"m": 64}, "outputs must be a multiple of 128, got 64"),
        ({"m": 131072}, "take .* MiB of VMEM, over 26"),
    ],
    ids=str,
)
def test_packed_weights_that_the_tpu_kernel_cannot_take_are_refused_with_the_reason(change, reason):
    m, k = change.get("m", PACKED_M), change.get("k", PACKED_K)
    x = jax.ShapeDtypeStruct((16, k), change.get("x", jnp.bfloat16))
    packed, scale = (jax.ShapeDtypeStruct((4, m, k // n), jnp.uint8) for n in (2, 32))
    with target("tpu", interpret=True), pytest.raises(ValueError, match=reason):
        jax.eval_shape(partial(grouped_matmul_mxfp4, impl="tpu"), x, packed, scale, jax.ShapeDtypeStruct((4,), jnp.int32))


def temp_bytes(f, *args):
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_temporaries_stay_under_three_times_the_inputs():
    x, w, g = draw(n=512, k=64, m=64, e=32)
    inputs = x.nbytes + w.nbytes
    assert temp_bytes(grouped_matmul, x, w, jnp.zeros(32, jnp.int32)) < inputs
    assert temp_bytes(partial(gradients, impl="xla"), x, w, jnp.zeros(32, jnp.int32), g) < 3 * inputs


def test_packed_weights_are_never_dequantised_all_at_once():
    e, m, k = 64, 64, 64
    x, _, g = draw(n=64, k=k, m=m, e=1)
    packed, scale = packed_weights(e, m, k)
    temp = temp_bytes(partial(product_and_gradient, impl="xla"), x, packed, scale, jnp.zeros(e, jnp.int32), g)
    assert temp < 2 * e * m * k / 4  # a quarter of a bf16 copy


def test_the_program_does_not_grow_with_the_number_of_experts():
    def size(e):
        x, w, g = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 8), (e, 8, 8), (64, 8)))
        sizes = jax.ShapeDtypeStruct((e,), jnp.int32)
        return len(gradients.lower(x, w, sizes, g, impl="xla").as_text())

    assert size(512) < 1.02 * size(16)



def test_the_bench_prints_a_line_per_size_and_kind(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", "--shape", "nano few rows", "--repeats", "1"])
    bench()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(")")[1].split()[0] for line in lines[2:]] == ["fwd", "bwd", "mxfp4"]
