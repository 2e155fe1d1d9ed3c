"""The gated feed-forward's activations."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from k3jax.mlp import MLP, gated_activation, situ


@pytest.mark.parametrize("case", ["k3", "no_linear_beta", "strong"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_situ_is_the_official_one(case, dtype, golden):
    betas = json.loads((golden / "component_ops.json").read_text())[f"situ_{case}"]
    with safe_open(golden / "component_ops.safetensors", "np") as f:
        gate, up = np.split(f.get_tensor(f"situ/{case}/gate_up"), 2, -1)
        expected = f.get_tensor(f"situ/{case}/" + ("out" if dtype == jnp.float32 else "out_bf16_in"))
    got = situ(jnp.asarray(gate, dtype), jnp.asarray(up, dtype), **betas)
    assert got.dtype == dtype
    if dtype == jnp.float32:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    else:
        expected = expected.astype(np.float32)
        np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=2**-7, atol=1e-6)


def test_situ_bounds_both_branches_with_finite_gradients():
    big = jnp.array([1e3, -1e3, 3e38, -3e38, 0.0])

    def act(gate, up):
        return situ(gate, up, beta=4.0, linear_beta=25.0)

    gate, up = (a.ravel() for a in jnp.meshgrid(big, big))
    y = act(gate, up)
    np.testing.assert_allclose(act(jnp.float32(1e3)[None], jnp.float32(1e3)[None]), [100.0])
    assert np.abs(y).max() <= 100
    grads = jax.grad(lambda g, u: act(g, u).sum(), argnums=(0, 1))(gate, up)
    assert all(np.isfinite(g).all() for g in grads)


def test_situ_of_bf16_is_the_rounded_situ_of_fp32():
    x = jnp.asarray(np.random.default_rng(0).normal(0, 3, (2, 64)), jnp.bfloat16)
    wide = situ(*x.astype(jnp.float32), beta=4.0, linear_beta=25.0)
    np.testing.assert_array_equal(situ(*x, beta=4.0, linear_beta=25.0), wide.astype(jnp.bfloat16))


def test_the_mlp_is_down_of_the_activation_of_gate_and_up(make_config):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 32)), jnp.float32)
    for config in (make_config(), make_config(hidden_act="silu", situ_linear_beta=None)):
        mlp = MLP(config, 24, rngs=nnx.Rngs(0))
        gate, up = (jnp.asarray(np.asarray(x) @ np.asarray(p.kernel[...])) for p in (mlp.gate_proj, mlp.up_proj))
        expected = np.asarray(gated_activation(config, gate, up)) @ np.asarray(mlp.down_proj.kernel[...])
        np.testing.assert_allclose(mlp(x), expected, rtol=0, atol=1e-5)
