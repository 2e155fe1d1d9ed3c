"""The table from logical axes to mesh axes, and its errors."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from configs.k3 import config as k3_config
from k3jax.model import K3
from k3jax.sharding import SERVE, TRAIN, create, make_mesh, partition_spec, shard_batch, shardings
from k3jax.weights import abstract


def test_a_mesh_must_use_every_device():
    assert make_mesh(fsdp=4, expert=2).size == 8
    with pytest.raises(ValueError, match="fsdp=3 needs 3 devices, but there are 8"):
        make_mesh(fsdp=3)


def test_misspelt_axes_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="mesh axis 'expertt'.*'expert'"):
        make_mesh(expertt=8)
    with pytest.raises(ValueError, match="logical axis 'embd'.*'embed'"):
        partition_spec(("embd",), TRAIN)


def test_serving_keeps_the_hidden_size_whole():
    assert partition_spec(("embed", "heads"), TRAIN) == PartitionSpec("fsdp", "tensor")
    assert partition_spec(("embed", "heads"), SERVE) == PartitionSpec(None, "tensor")


def test_a_size_that_does_not_divide_is_refused_by_name(make_config):
    state = nnx.state(abstract(make_config(hidden_size=36)))
    with pytest.raises(ValueError, match="axis 'embed' of size 36 cannot be split over fsdp=8 devices"):
        shardings(state, make_mesh(fsdp=8), TRAIN)
    with pytest.raises(ValueError, match="batch size of 6 cannot be split over .*=8 devices. Use a multiple of 8"):
        shard_batch(np.zeros((6, 4)), make_mesh(fsdp=4, data=2), TRAIN)


def test_every_weight_of_k3_splits_over_a_pod_of_names():
    """All dimensions of the release divide over 8 x 8 x 4 devices, and the routed experts are split over all of them."""
    state = nnx.state(abstract(replace(k3_config(), vision=None)))
    mesh = jax.sharding.AbstractMesh((1, 8, 8, 4, 1), ("data", "fsdp", "expert", "tensor", "context"))
    places = shardings(state, mesh, TRAIN)
    for (path, weight), (_, place) in zip(nnx.to_flat_state(state), nnx.to_flat_state(places), strict=True):
        value, sharding = weight.get_value(), place.get_value()
        parts = value.size / np.prod(sharding.shard_shape(value.shape))
        if "experts" in path:
            assert parts == 256, path


def test_a_model_is_created_in_place_and_equals_the_one_of_a_single_device(make_config):
    config = make_config(attention=("kda", "mla"), moe=None, attn_res_block=None)
    mesh = make_mesh(fsdp=4, tensor=2)
    placed = create(lambda: K3(config, rngs=nnx.Rngs(3)), mesh, TRAIN)
    kernel = placed.model.layers.stacks[0].self_attn.q_proj.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (1, kernel.shape[1] // 4, kernel.shape[2] // 2)
    alone = jax.jit(lambda: nnx.state(K3(config, rngs=nnx.Rngs(3))))()
    for (path, a), (_, b) in zip(nnx.to_flat_state(nnx.state(placed)), nnx.to_flat_state(alone), strict=True):
        np.testing.assert_allclose(a.get_value(), b.get_value(), rtol=1e-6, err_msg=str(path))
