"""Spread over eight devices, the model computes what it computes on one: logits, loss and gradients."""

import jax
import numpy as np
import pytest
from flax import nnx

from k3jax.sharding import TRAIN, make_mesh, shard_batch, shardings

B, T = 8, 36
MESHES = [{"fsdp": 2, "expert": 2, "tensor": 2}, {"fsdp": 2, "context": 4}, {"data": 2, "fsdp": 4}, {"expert": 4, "tensor": 2}]


@pytest.fixture(scope="module")
def batch(small):
    ids = np.random.default_rng(0).integers(0, small.config.vocab_size, (B, T)).astype(np.int32)
    segments = np.repeat([[1, 2, 0]], [20, 12, 4], 1).repeat(B, 0).astype(np.int32)
    return ids, segments, (segments > 0).astype(np.float32)


@pytest.fixture(scope="module")
def one_device(small, batch):
    return small.gradients(small.state, *batch)


@pytest.mark.parametrize("sizes", [MESHES[0], *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES[1:])], ids=str)
def test_eight_devices_give_the_logits_and_gradients_of_one(small, batch, one_device, sizes):
    mesh = make_mesh(**sizes)
    state = jax.device_put(small.state, shardings(small.state, mesh, TRAIN))
    assert any(len(leaf.sharding.device_set) == 8 and not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    with jax.set_mesh(mesh):
        loss, grads, logits = small.gradients(state, *shard_batch(batch, mesh, TRAIN))
    valid = batch[1] > 0
    np.testing.assert_allclose(np.asarray(logits)[valid], np.asarray(one_device[2])[valid], rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, one_device[0], rtol=1e-5)
    for (path, a), (_, b) in zip(nnx.to_flat_state(grads), nnx.to_flat_state(one_device[1]), strict=True):
        a, b = np.asarray(a.get_value()), np.asarray(b.get_value())
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) + 1e-6, path
