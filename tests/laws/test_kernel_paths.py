"""The model through the kernels for TPU and GPU, run by Pallas's interpreter: adapters learn there as they do through XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from k3jax.config import KDAConfig, MLAConfig, MoEConfig
from k3jax.linear import LoRAParam
from k3jax.lora import Adapters, LoRAConfig
from pallas_kernels.target import target

# Parts of names of kernels that a gradient must have run.
KERNELS = {
    "tpu": ("kda_forward", "kda_backward", "mla", "grouped_matmul", "attn_res_norm_backward"),
    "gpu": ("kda", "mla", "grouped_matmul"),
}


@pytest.fixture(scope="module")
def adapted(make_small):
    """A model of two layers in sizes that the kernels take, with a new adapter on every projection."""
    model = make_small(
        hidden_size=128,
        attention=("kda", "mla"),
        kda=KDAConfig(num_heads=1, head_dim=128, decay_floor=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=1, q_lora_rank=32, kv_lora_rank=128, nope_dim=128, rope_dim=64, value_dim=128, output_gate=True
        ),
        moe=MoEConfig(
            num_experts=2, experts_per_token=1, intermediate_size=128, num_shared_experts=1, latent_size=128, latent_norm=True
        ),
        attn_res_block=1,
        init_std=0.05,
    ).model
    adapters = Adapters(model, columns=8)
    return model, adapters, adapters.add("law", LoRAConfig(rank=8, alpha=16, targets=("all",)), seed=0)


@pytest.fixture(scope="module")
def program(adapted):
    """(LoRA weights, other weights, ids, adapter; 0: none) -> loss, gradients of the LoRA weights and logits."""
    model, _, _ = adapted
    graphdef, lora, rest = nnx.split(model, LoRAParam, ...)

    def loss(lora, rest, ids, adapter):
        model = nnx.merge(graphdef, lora, rest)
        adapters = jnp.full(len(ids), adapter, jnp.int32)
        packing = model.packing(ids, adapters=adapters)
        logits = model.logits(model(ids, adapters=adapters).hidden, packing)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], -1)
        return -jnp.mean(picked), logits

    return jax.value_and_grad(loss, has_aux=True), lora, rest


def random(lora):
    """Every A and B drawn: a new adapter's product A B is zero."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), lora)


def kernels(jaxpr):
    """Names of all Pallas kernels in it, also in functions that it calls."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            found.add(str(eqn.params.get("name") or eqn.params["name_and_src_info"]).split()[0])
        for sub in jaxprs_in_params(eqn.params):
            found |= kernels(sub)
    return found


@pytest.mark.parametrize("platform", ["tpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_adapters_learn_through_the_kernels_as_through_xla(platform, adapted, program):
    """Every A and B gets a gradient, and the one that XLA computes; a new adapter gives the logits
    of the base, bit for bit."""
    differentiate, lora, rest = program
    adapter = adapted[2]
    ids = jnp.asarray(np.random.default_rng(2).integers(0, 64, (1, 24)), jnp.int32)
    run = jax.jit(differentiate)
    (_, expected), wanted = run(random(lora), rest, ids, adapter)
    with target(platform, interpret=True):
        traced = jax.jit(differentiate).trace(lora, rest, ids, adapter)
        names = kernels(traced.jaxpr.jaxpr)
        assert all(any(part in name for name in names) for part in KERNELS[platform]), names
        (_, base), _ = run(random(lora), rest, ids, 0)
        (_, zero), _ = run(lora, rest, ids, adapter)
        (_, logits), grads = run(random(lora), rest, ids, adapter)
    np.testing.assert_array_equal(zero, base)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    assert np.abs(logits - base).max() > 1e-2
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted), strict=True):
        size = float(jnp.abs(want).max())
        assert size > 0, path
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * size, err_msg=str(path))
