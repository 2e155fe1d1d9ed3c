"""Laws of MXFP4 weights: bytes of official tools, the format's definition, rounding."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels.mxfp4 import IMPLS, dequantize, quantize

GOLDEN = Path(__file__).parents[1] / "golden"
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
every_impl = pytest.mark.parametrize("impl", IMPLS)
decode = jax.jit(dequantize, static_argnums=2, static_argnames="impl")
encode = jax.jit(quantize, static_argnames="impl")


@cache
def golden():
    return load_file(GOLDEN / "mxfp4_experts_packed.safetensors") | load_file(
        GOLDEN / "mxfp4_experts_dequantized.safetensors"
    )


def names(suffix):
    found = [k.removesuffix(suffix) for k in golden() if k.endswith(suffix)]
    assert found
    return found


def bits(x):
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


@every_impl
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_experts_decode_to_the_official_numbers(dtype, impl):
    for name in names(".weight"):
        expected = golden()[name + ".weight"].astype(dtype)
        out = decode(golden()[name + ".weight_packed"], golden()[name + ".weight_scale"], dtype, impl=impl)
        exact = np.ones(expected.shape, bool)
        if impl == "reference":  # XLA on CPU flushes the subnormal products that it takes
            exact = (abs(expected) >= 2.0**-126) | (expected == 0)
        assert np.array_equal(bits(out)[exact], bits(expected)[exact]), name


@every_impl
def test_encoding_the_originals_gives_the_official_bytes(impl):
    for name in names(".original_bf16"):
        packed, scale = encode(golden()[name + ".original_bf16"], impl=impl)
        assert np.array_equal(scale, golden()[name + ".weight_scale"]), name
        assert np.array_equal(packed, golden()[name + ".weight_packed"]), name


@every_impl
def test_every_byte_under_every_scale_is_its_two_codes_times_the_scale(impl):
    pairs = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    packed = np.repeat(pairs, 255, axis=0)
    scale = np.broadcast_to(np.arange(255, dtype=np.uint8)[:, None, None], (255, 16, 1))
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(255, 16, 32)
    value = np.where(nibbles & 8, -1.0, 1.0) * MAGNITUDES[nibbles & 7] * 2.0 ** (scale.astype(float) - 127)
    out = np.asarray(decode(packed, scale, jnp.float32, impl=impl))
    normal = (abs(value) >= 2.0**-126) | (value == 0)
    with np.errstate(over="ignore"):
        assert np.array_equal(out[normal], value.astype(np.float32)[normal])
    assert np.all((out[~normal] == value[~normal]) | (out[~normal] == 0))
    assert np.array_equal(np.signbit(out), np.signbit(value))


@every_impl
def test_the_low_nibble_is_the_even_column_and_127_is_one(impl):
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :9] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, 0x10]
    one = np.concatenate([MAGNITUDES, -MAGNITUDES, [0, 0.5], np.zeros(14)])[None].astype(np.float32)
    for byte, factor in [(127, 1), (128, 2), (126, 0.5)]:
        assert np.array_equal(decode(packed, np.full((1, 1), byte, np.uint8), impl=impl), factor * one)


@every_impl
def test_scales_typed_e8m0_and_scales_as_bytes_decode_alike(impl):
    name = names(".original_bf16")[0]
    packed, scale = golden()[name + ".weight_packed"], golden()[name + ".weight_scale"]
    typed = decode(packed, scale.view(ml_dtypes.float8_e8m0fnu), impl=impl)
    assert np.array_equal(typed, decode(packed, scale, impl=impl))
    assert 0 < np.mean(np.abs(golden()[name + ".weight"][:, :32])) < 1


@every_impl
def test_a_nan_scale_gives_nan(impl):
    assert np.all(np.isnan(decode(np.zeros((1, 16), np.uint8), np.full((1, 1), 255, np.uint8), impl=impl)))


@every_impl
@pytest.mark.parametrize(
    ("top", "scale"),
    [(0.3, -2), (0.5, -1), (0.75, -1), (1.5, 0), (1.74, 0), (1.75, 1), (2, 1), (6, 2), (7, 3), (2**-99, -99)],
)
def test_the_scale_is_the_floor_of_the_exponent_or_the_next_from_seven_quarters_on(top, scale, impl):
    weight = np.zeros((1, 32), np.float32)
    weight[0, 5] = -top
    assert int(encode(weight, impl=impl)[1][0, 0]) - 127 == scale - 2


@every_impl
def test_ties_round_to_the_even_code_and_large_values_saturate(impl):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.9]
    to = [0, 1, 1, 2, 2, 4, 4, 6]
    weight = np.zeros((1, 32), np.float32)
    weight[0, :8], weight[0, 8:16] = ties, -np.array(ties)
    out = decode(*encode(weight, impl=impl), jnp.float32, impl=impl)
    assert np.array_equal(out[0, :16], [*to, *(-x for x in to)])


@every_impl
def test_a_group_of_zeros_decodes_to_zeros(impl):
    packed, scale = encode(np.zeros((2, 64), np.float32), impl=impl)
    assert not packed.any() and np.all(scale == 127)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_implementations_agree_on_any_weights(dtype):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(3, 8, 128)) * 2.0 ** rng.integers(-20, 20, size=(3, 8, 1)), dtype)
    for a, b in zip(encode(weight, impl="xla"), encode(weight, impl="reference"), strict=True):
        assert np.array_equal(a, b)


@every_impl
def test_decoded_weights_encode_to_the_same_numbers(impl):
    for name in names(".original_bf16"):
        weight = golden()[name + ".weight"]
        assert np.array_equal(decode(*encode(weight, impl=impl), jnp.float32, impl=impl), weight), name


@every_impl
def test_gate_and_up_stacked_equal_each_alone(impl):
    """A scale belongs to its 32 inputs alone: a matrix beside another, however large that is, keeps its bytes."""
    first = "language_model.model.layers.1.block_sparse_moe.experts.0"
    gate, up = (golden()[f"{first}.{name}.original_bf16"] for name in ("w1", "w3"))
    up = up * up.dtype.type(2.0**-6)
    together = encode(np.concatenate([gate, up]), impl=impl)
    for whole, *parts in zip(together, encode(gate, impl=impl), encode(up, impl=impl), strict=True):
        assert np.array_equal(whole, np.concatenate(parts))


def test_wrong_shapes_and_dtypes_are_refused():
    packed, scale = np.zeros((4, 16), np.uint8), np.zeros((4, 1), np.uint8)
    with pytest.raises(ValueError, match=r"packed \(4, 16\) and scale \(4, 2\) do not belong together"):
        dequantize(packed, np.zeros((4, 2), np.uint8))
    with pytest.raises(ValueError, match="are bytes"):
        dequantize(packed, scale.astype(np.float32))
    with pytest.raises(ValueError, match="A scale serves 32 inputs"):
        quantize(np.zeros((4, 40), np.float32))
