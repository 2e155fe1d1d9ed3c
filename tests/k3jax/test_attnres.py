"""Attention Residuals: the official mix, and slots that are written once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from k3jax.attnres import AttentionResidual, snapshot


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_the_mix_is_the_official_one(blocks, golden, make_config):
    tensors = load_file(golden / "component_ops.safetensors")
    prefix, stored, norm, proj, out = (
        tensors[f"attn_res/{blocks}blocks/{k}"] for k in ("prefix_sum", "block_residual", "norm_weight", "proj_weight", "out")
    )
    module = AttentionResidual(make_config(hidden_size=prefix.shape[-1]), rngs=nnx.Rngs(0))
    module.norm.weight[...], module.proj.weight[...] = norm, proj[0]
    slots = np.zeros((blocks + 2, 1, *prefix.shape), np.float32)
    slots[:blocks, 0] = np.moveaxis(stored, 1, 0)
    slots[blocks:] = np.nan  # not written yet: never read
    mixed = nnx.jit(lambda m, *args: m(*args))(module, prefix[None], slots, jnp.int32(blocks))
    np.testing.assert_allclose(mixed[0], out, rtol=0, atol=1e-5)


def test_without_a_snapshot_the_mix_is_the_sum_itself(make_config):
    module = AttentionResidual(make_config(), rngs=nnx.Rngs(0))
    prefix = jax.random.normal(jax.random.key(0), (1, 3, 32))
    np.testing.assert_array_equal(module(prefix, jnp.zeros((2, 1, 3, 32)), 0), prefix)


def test_93_layers_of_block_12_write_eight_slots_once_each():
    """Slots are written by layers 0, 12, ..., 84 with the sum that came into them, and by no other layer."""

    @jax.jit
    def run():
        def layer(blocks, i):
            return snapshot(blocks, jnp.full((1, 1, 1), i + 1.0), i, 12), blocks

        return jax.lax.scan(layer, jnp.zeros((8, 1, 1, 1)), jnp.arange(93))

    last, before = run()
    np.testing.assert_array_equal(last.ravel(), np.arange(0, 93, 12) + 1)
    for i, slots in enumerate(np.asarray(before).reshape(93, 8)):
        np.testing.assert_array_equal(slots, [b * 12 + 1 if b * 12 < i else 0 for b in range(8)])
