"""Packing experts in memory: what is representable survives, the rest moves by less than half a step."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from k3jax.weights.quant import pack, unpack

GOLDEN = Path(__file__).parents[1] / "golden"


def test_a_checkpoints_experts_unpack_to_the_official_numbers_transposed_and_pack_back():
    packed = load_file(GOLDEN / "mxfp4_experts_packed.safetensors")
    official = load_file(GOLDEN / "mxfp4_experts_dequantized.safetensors")
    cases = [name.removesuffix(".weight_packed") for name in packed if name.endswith(".weight_packed")]
    assert cases
    for case in cases:
        codes, scale = packed[f"{case}.weight_packed"], packed[f"{case}.weight_scale"]
        value = next(v for name, v in official.items() if name.startswith(f"{case}.") or name == case)
        assert np.array_equal(unpack(codes, scale, jnp.float32).T, value.astype(np.float32)), case


def test_packing_what_was_unpacked_changes_nothing():
    kernel = jax.random.normal(jax.random.key(0), (2, 3, 64, 8))
    once = unpack(*pack(kernel), jnp.bfloat16)
    assert once.shape == kernel.shape and once.dtype == jnp.bfloat16
    assert np.array_equal(unpack(*pack(once), jnp.bfloat16), once)


def test_packing_moves_a_number_by_half_a_step_of_its_group_or_clips_the_largest():
    kernel = np.asarray(jax.random.normal(jax.random.key(1), (64, 32)))
    packed, scale = pack(jnp.asarray(kernel))
    unit = np.repeat(2.0 ** (np.asarray(scale, float).T - 127), 32, axis=0)
    size = np.abs(kernel) / unit
    step = np.where(size < 2, 0.5, np.where(size < 4, 1, 2))  # E2M1: 0 0.5 1 1.5 2 3 4 6
    moved = np.abs(np.asarray(unpack(packed, scale, jnp.float32)) - kernel) / unit
    assert np.all(moved <= np.where(size > 6, size - 6, step / 2) + 1e-6)
    assert np.all(size < 8)


def test_inputs_that_do_not_split_into_groups_are_refused():
    with pytest.raises(ValueError, match="48 inputs"):
        pack(jnp.ones((2, 48, 8)))
