"""Laws of the Attention Residuals mix."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels.attn_res import IMPLS, NORM_IMPLS, attn_res, attn_res_norm, tpu
from pallas_kernels.target import target

GOLDEN = Path(__file__).parents[1] / "golden" / "component_ops.safetensors"
EPS = 1e-5
N, B, T, D = 3, 2, 5, 128
every_impl = pytest.mark.parametrize("impl", IMPLS)
every_norm_impl = pytest.mark.parametrize("impl", NORM_IMPLS)
mix = jax.jit(partial(attn_res, eps=EPS), static_argnames="impl")
normed = jax.jit(partial(attn_res_norm, eps=EPS), static_argnames="impl")


@pytest.fixture(autouse=True)
def interpreted(request):
    """TPU kernels run in Pallas's interpreter."""
    impl = getattr(request.node, "callspec", None) and request.node.callspec.params.get("impl")
    with target("tpu", interpret=True) if impl == "tpu" else nullcontext():
        yield


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    sizes = np.array([0.3, 1.0, 20.0])[:, None, None, None]
    prefix, blocks = rng.normal(size=(B, T, D)), rng.normal(size=(N, B, T, D)) * sizes
    return jnp.asarray(prefix, dtype), jnp.asarray(blocks, dtype), jnp.asarray(rng.normal(size=D), np.float32)


def formula(prefix, blocks, weight):
    v = np.concatenate([blocks, prefix[None]]).astype(np.float64)
    score = np.sum(v / np.sqrt(np.mean(v**2, -1, keepdims=True) + EPS) * np.asarray(weight, np.float64), -1)
    prob = np.exp(score - score.max(0))
    return np.sum((prob / prob.sum(0))[..., None] * v, 0)


@partial(jax.jit, static_argnames="impl")
def gradients(prefix, blocks, count, weight, g, *, impl):
    return jax.vjp(lambda p, b, w: attn_res(p, b, count, w, eps=EPS, impl=impl), prefix, blocks, weight)[1](g)


@every_impl
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_the_mix_equals_the_official_output(blocks, impl):
    case = f"attn_res/{blocks}blocks/"
    golden = {k.removeprefix(case): v for k, v in load_file(GOLDEN).items() if k.startswith(case)}
    weight = golden["norm_weight"] * golden["proj_weight"][0]
    residuals = golden["block_residual"].transpose(1, 0, 2)[:, None]
    out = mix(golden["prefix_sum"][None], residuals, blocks, weight, impl=impl)[0]
    np.testing.assert_allclose(out, golden["out"], rtol=1e-6, atol=2e-6)


@every_impl
@pytest.mark.parametrize("count", range(N + 1))
def test_the_mix_over_the_slots_in_use_equals_the_formula(count, impl):
    prefix, blocks, weight = inputs()
    expected = formula(prefix, blocks[:count], weight)
    np.testing.assert_allclose(mix(prefix, blocks, count, weight, impl=impl), expected, rtol=1e-5, atol=1e-5)


@every_impl
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_slot_in_use_gives_exactly_the_prefix(dtype, impl):
    prefix, blocks, weight = inputs(dtype)
    assert np.array_equal(mix(prefix, blocks, 0, weight, impl=impl), prefix)
    assert np.array_equal(mix(prefix, blocks[:0], 0, weight, impl=impl), prefix)


@every_impl
@pytest.mark.parametrize("garbage", [-3e38, 7.0, np.nan])
def test_slots_not_in_use_change_no_bit_of_output_or_gradients(garbage, impl):
    prefix, blocks, weight = inputs()
    g = jnp.ones_like(prefix)
    clean, spoilt = blocks.at[2:].set(0), blocks.at[2:].set(garbage)
    assert np.array_equal(mix(prefix, clean, 2, weight, impl=impl), mix(prefix, spoilt, 2, weight, impl=impl))
    expected, got = (gradients(prefix, b, jnp.int32(2), weight, g, impl=impl) for b in (clean, spoilt))
    assert all(np.array_equal(x, y) for x, y in zip(expected, got, strict=True))
    assert not np.any(got[1][2:])


@every_impl
@pytest.mark.parametrize("count", [0, 2, N])
def test_gradients_equal_those_of_the_formula_in_double_precision(count, impl):
    prefix, blocks, weight = inputs()
    g = np.random.default_rng(1).normal(size=prefix.shape)
    got = gradients(prefix, blocks, jnp.int32(count), weight, jnp.asarray(g, jnp.float32), impl=impl)

    def loss(prefix, blocks, weight):
        return np.sum(formula(prefix, blocks[:count], weight) * g)

    args = [np.asarray(x, np.float64) for x in (prefix, blocks, weight)]
    rng, step = np.random.default_rng(2), 1e-5
    for i, gradient in enumerate(got):
        direction = rng.normal(size=args[i].shape)
        plus, minus = (loss(*args[:i], args[i] + s * direction, *args[i + 1 :]) for s in (step, -step))
        expected = (plus - minus) / (2 * step)
        along = np.sum(np.asarray(gradient, np.float64) * direction)
        assert along == pytest.approx(expected, rel=2e-4, abs=1e-6)


@every_impl
def test_bf16_candidates_are_scored_and_summed_in_fp32(impl):
    prefix, blocks, weight = inputs(jnp.bfloat16)
    expected = jnp.asarray(formula(prefix, blocks, weight), jnp.bfloat16)
    out = mix(prefix, blocks, N, weight, impl=impl)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), rtol=2**-7)
    assert np.mean(out == expected) > 0.98  # the rest sits on a rounding boundary of bf16


def norm_inputs(dtype=np.float32, tokens=T, slots=N, hidden=D):
    """prefix, blocks, weight, norm weight, and gradients of the normed row and of the blocks."""
    rng = np.random.default_rng(3)
    row, stack = (B, tokens, hidden), (slots, B, tokens, hidden)
    prefix, blocks, dy, dblocks = (jnp.asarray(rng.normal(size=s), dtype) for s in (row, stack, row, stack))
    weight, norm_weight = rng.normal(size=hidden) / hidden**0.5, 1 + 0.2 * rng.normal(size=hidden)
    return prefix, blocks, jnp.asarray(weight, jnp.float32), jnp.asarray(norm_weight, dtype), dy, dblocks


def norm_formula(prefix, blocks, weight, norm_weight):
    h = formula(prefix, blocks, weight)
    return np.asarray(norm_weight, np.float64) * h / np.sqrt(np.mean(h**2, -1, keepdims=True) + EPS)


@partial(jax.jit, static_argnames="impl")
def norm_gradients(prefix, blocks, count, weight, norm_weight, dy, dblocks, *, impl):
    def op(prefix, blocks, weight, norm_weight):
        return attn_res_norm(prefix, blocks, count, weight, norm_weight, eps=EPS, impl=impl)

    return jax.vjp(op, prefix, blocks, weight, norm_weight)[1]((dy, dblocks))


@every_norm_impl
@pytest.mark.parametrize("count", range(N + 1))
def test_the_normed_mix_equals_the_formula_and_the_blocks_pass_through(count, impl):
    prefix, blocks, weight, norm_weight, *_ = norm_inputs()
    y, passed = normed(prefix, blocks, count, weight, norm_weight, impl=impl)
    np.testing.assert_allclose(y, norm_formula(prefix, blocks[:count], weight, norm_weight), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(passed, blocks)


@every_norm_impl
def test_the_normed_mix_rounds_to_bf16_where_the_two_layers_would(impl):
    prefix, blocks, weight, norm_weight, *_ = norm_inputs(jnp.bfloat16)
    y, _ = normed(prefix, blocks, 2, weight, norm_weight, impl=impl)
    h = mix(prefix, blocks, 2, weight, impl="xla").astype(jnp.float32)
    quotient = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + EPS)
    assert y.dtype == jnp.bfloat16
    assert np.mean(y == norm_weight * quotient.astype(jnp.bfloat16)) > 0.99  # the rest sits on a rounding boundary


@every_norm_impl
@pytest.mark.parametrize("count", [0, 2, N])
def test_gradients_of_the_normed_mix_equal_those_of_the_formula_in_double_precision(count, impl):
    *given, dy, dblocks = norm_inputs()
    got = norm_gradients(*given[:2], jnp.int32(count), *given[2:], dy, dblocks, impl=impl)

    *args, dy, dblocks = (np.asarray(x, np.float64) for x in (*given, dy, dblocks))

    def loss(prefix, blocks, weight, norm_weight):
        return np.sum(norm_formula(prefix, blocks[:count], weight, norm_weight) * dy) + np.sum(blocks * dblocks)

    rng, step = np.random.default_rng(2), 1e-5
    for i, gradient in enumerate(got):
        direction = rng.normal(size=args[i].shape)
        plus, minus = (loss(*args[:i], args[i] + s * direction, *args[i + 1 :]) for s in (step, -step))
        along = np.sum(np.asarray(gradient, np.float64) * direction)
        assert along == pytest.approx((plus - minus) / (2 * step), rel=2e-4, abs=1e-6)
    np.testing.assert_array_equal(got[1][count:], dblocks[count:])


@every_norm_impl
@pytest.mark.parametrize("garbage", [-3e38, np.nan])
def test_slots_not_in_use_change_no_bit_of_the_normed_mix_or_its_gradients(garbage, impl):
    prefix, blocks, weight, norm_weight, dy, dblocks = norm_inputs()
    count = jnp.int32(2)
    clean, spoilt = blocks.at[2:].set(0), blocks.at[2:].set(garbage)
    expected, got = (
        [normed(prefix, b, count, weight, norm_weight, impl=impl)[0],
         *norm_gradients(prefix, b, count, weight, norm_weight, dy, dblocks, impl=impl)]
        for b in (clean, spoilt)
    )
    assert all(np.array_equal(x, y) for x, y in zip(expected, got, strict=True))


@pytest.mark.parametrize(
    "tokens, slots, hidden", [(1, 1, 128), (72, 2, 4480), (24, 0, 256), pytest.param(200, 8, 128, marks=pytest.mark.slow)]
)
def test_the_kernel_equals_the_reference_at_any_size(tokens, slots, hidden):
    *given, dy, dblocks = norm_inputs(tokens=tokens, slots=slots, hidden=hidden)
    count = jnp.int32(slots)
    expected = norm_gradients(*given[:2], count, *given[2:], dy, dblocks, impl="reference")
    with target("tpu", interpret=True):
        got = norm_gradients(*given[:2], count, *given[2:], dy, dblocks, impl="tpu")
    for x, y in zip(got, expected, strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y) + 1e-5


def test_gradients_in_bf16_are_those_of_fp32_up_to_the_rounding_of_what_is_stored():
    *given, dy, dblocks = norm_inputs(jnp.bfloat16, tokens=72)
    count = jnp.int32(N)
    exact = [x.astype(jnp.float32) for x in (*given, dy, dblocks)]
    expected = norm_gradients(*exact[:2], count, *exact[2:], impl="reference")
    with target("tpu", interpret=True):
        got = norm_gradients(*given[:2], count, *given[2:], dy, dblocks, impl="tpu")
    for x, y in zip(got, expected, strict=True):
        error = np.asarray(x, np.float64) - np.asarray(y, np.float64)
        # The mix is rounded before its norm, the result once more: 2**-9 at most each, relative to the element.
        assert np.linalg.norm(error) < 2**-8 * np.linalg.norm(y)


def test_the_kernel_says_what_it_cannot_take():
    prefix, blocks, weight, norm_weight, *_ = norm_inputs()
    with target("tpu"):
        narrow = tpu.why_not(prefix[..., :24], blocks[..., :24], 1, weight, norm_weight, eps=EPS)
        mixed = tpu.why_not(prefix, blocks.astype(jnp.bfloat16), 1, weight, norm_weight, eps=EPS)
        row = jax.ShapeDtypeStruct((1, 16, 2**16), jnp.float32)
        stack = jax.ShapeDtypeStruct((8, *row.shape), jnp.float32)
        huge = tpu.why_not(row, stack, 1, weight, norm_weight, eps=EPS)
    assert "multiple of 128, got 24" in narrow
    assert "bf16 or fp32, got float32 and bfloat16" in mixed
    assert "MiB" in huge
    assert "kernel for tpu" in tpu.why_not(prefix, blocks, 1, weight, norm_weight, eps=EPS)


def test_no_fp32_copy_of_the_candidates_is_stored():
    tokens, hidden, slots = 24_576, 64, 8
    x = jax.ShapeDtypeStruct((1, tokens, hidden), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((slots, *x.shape), jnp.bfloat16)
    count, w = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((hidden,), jnp.float32)
    per_candidate = 4 * tokens * (slots + 1)  # one fp32 number per candidate and token
    one_candidate = 4 * tokens * hidden
    forward = mix.lower(x, b, count, w).compile().memory_analysis()
    backward = gradients.lower(x, b, count, w, x, impl=None).compile().memory_analysis()
    assert forward.temp_size_in_bytes < 4 * per_candidate
    assert backward.temp_size_in_bytes < 8 * per_candidate + 2 * one_candidate
