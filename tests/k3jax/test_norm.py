"""Norms against official values, in fp32 and bf16."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from k3jax.norm import GatedRMSNorm, RMSNorm, l2_normalize


@pytest.fixture(scope="module")
def tensors(golden):
    with safe_open(golden / "component_ops.safetensors", "np") as f:
        return {key: f.get_tensor(key) for key in f.keys() if key.startswith(("rmsnorm", "o_norm"))}


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_is_the_official_one_in_fp32_and_to_the_bit_in_bf16(eps, tensors):
    x, weight, out, out_bf16 = (tensors[f"rmsnorm/eps{eps}/{key}"] for key in ("x", "weight", "out", "out_bf16"))
    norm = RMSNorm(x.shape[-1], eps=eps, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    norm.weight[...] = jnp.asarray(weight)
    np.testing.assert_allclose(norm(jnp.asarray(x)), out, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(norm(jnp.asarray(x, jnp.bfloat16))), out_bf16)


def test_the_output_norm_is_the_official_one(tensors):
    x, gate, weight, out = (tensors[f"o_norm/{key}"] for key in ("x", "gate", "weight", "out"))
    norm = GatedRMSNorm(x.shape[-1], eps=1e-5, rngs=nnx.Rngs(0))
    norm.weight[...] = weight
    np.testing.assert_allclose(norm(jnp.asarray(x), jnp.asarray(gate)), out, rtol=1e-5, atol=1e-6)


def test_the_output_norm_multiplies_weight_and_gate_in_fp32():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((50, 16)), jnp.float32)
    gate = jnp.asarray(x[::-1], jnp.bfloat16)
    norm = GatedRMSNorm(16, eps=1e-5, rngs=nnx.Rngs(0))
    norm.weight[...] = 1 + jnp.arange(16) / 100
    assert norm.weight[...].dtype == jnp.float32
    np.testing.assert_array_equal(norm(x, gate), norm(x, gate.astype(jnp.float32)).astype(jnp.bfloat16))


def test_unit_vectors_have_length_one_and_zero_stays_zero():
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    x[2] = 0
    y = np.asarray(l2_normalize(jnp.asarray(x)))
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), [1, 1, 0, 1, 1], atol=1e-6)
    np.testing.assert_allclose(y, x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), rtol=1e-6)
