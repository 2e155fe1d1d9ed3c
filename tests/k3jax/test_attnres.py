"""Attention Residuals: the official mix, and slots that are written once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from k3jax.attnres import AttentionResidual, snapshot
from k3jax.config import MLAConfig
from k3jax.packing import Packing
from k3jax.stack import Layers


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


def test_93_layers_of_block_12_equal_a_list_of_snapshots_in_values_and_gradients(make_config):
    """The stack's fixed slots against a list that grows: the running sum, all 8 snapshots, and the gradients of every weight."""
    small = {"num_heads": 1, "q_lora_rank": None, "kv_lora_rank": 4, "nope_dim": 4, "rope_dim": 4, "value_dim": 4}
    config = make_config(
        hidden_size=8, intermediate_size=8, attention=("mla",) * 93, moe=None, attn_res_block=12, mla=MLAConfig(**small)
    )
    layers = nnx.jit(lambda: Layers(config, rngs=nnx.Rngs(0)))()
    graphdef, stacked = nnx.split(layers.stacks[0])
    whole, weights = nnx.split(layers)
    x, g = jax.random.normal(jax.random.key(0), (1, 3, 8)), jax.random.normal(jax.random.key(1), (9, 1, 3, 8))
    packing = Packing.of(jnp.ones((1, 3), jnp.int32))

    @jax.jit
    def scanned(weights, x):
        def loss(weights, x):
            stream = nnx.merge(whole, weights)(x, packing)[0]
            outputs = jnp.concatenate([stream.blocks, stream.prefix[None]])
            return jnp.sum(outputs * g), outputs

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, x)

    part = jax.jit(lambda name, state, *args: getattr(nnx.merge(graphdef, state), name)(*args), static_argnums=0)

    @partial(jax.jit, static_argnums=0)
    def mix(name, state, *candidates):
        module = getattr(nnx.merge(graphdef, state), name)
        v, row = jnp.stack(candidates), module.norm.weight[...] * module.proj.weight[...]
        score = jnp.sum(v * jax.lax.rsqrt(jnp.mean(v * v, -1, keepdims=True) + config.norm_eps) * row, -1)
        return jnp.sum(jax.nn.softmax(score, 0)[..., None] * v, 0)

    def listed(states, x):
        total, snapshots = x, []
        for i, state in enumerate(states):
            h = mix("self_attention_res", state, *snapshots, total) if snapshots else total
            if i % 12 == 0:
                snapshots.append(total)
            a = part("self_attn", state, part("input_layernorm", state, h), packing)[0]
            total = a if i % 12 == 0 else total + a
            h = mix("mlp_res", state, *snapshots, total)
            total = total + part("mlp", state, part("post_attention_layernorm", state, h), packing)
        outputs = jnp.stack([*snapshots, total])
        return jnp.sum(outputs * g), outputs

    states = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(93)]
    (d_states, dx), outputs = jax.grad(listed, argnums=(0, 1), has_aux=True)(states, x)
    assert outputs.shape == (9, 1, 3, 8)
    (d_weights, got_dx), got = scanned(weights, x)
    np.testing.assert_allclose(got, outputs, rtol=0, atol=2e-4)
    np.testing.assert_allclose(got_dx, dx, rtol=0, atol=1e-3 * np.abs(dx).max())
    expected = jax.tree.map(lambda *a: np.stack(a), *d_states)
    for (path, a), (_, b) in zip(nnx.to_flat_state(d_weights), nnx.to_flat_state(expected), strict=True):
        a, b = np.asarray(a.get_value()), np.asarray(b.get_value())
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b) + 1e-6, path
