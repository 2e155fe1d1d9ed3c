"""The check for machines with a GPU, as far as a machine without one can tell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu_check
from pallas_kernels.target import target

NAMES = list(gpu_check.parity(np.random.default_rng(0)))


@pytest.mark.parametrize("name", NAMES)
def test_every_use_goes_through_the_gpu_kernels_and_is_finite_in_the_reference(name):
    use = gpu_check.parity(np.random.default_rng(0))[name](jnp.bfloat16)
    with target("gpu"):
        jax.eval_shape(gpu_check.forward(use, "gpu"), *use.inputs)
        if use.free:
            jax.eval_shape(gpu_check.gradients(use, "gpu"), *use.inputs)
    values = jax.jit(gpu_check.forward(use, "reference"))(*use.inputs)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(values))


def test_a_difference_is_relative_to_the_largest_number_and_sees_what_is_not_finite():
    assert gpu_check.difference([np.ones(3), np.array([10.0, 11])], [np.ones(3), np.array([10.0, 10])]) == pytest.approx(0.1)
    assert gpu_check.difference([np.array([np.nan])], [np.ones(1)]) == float("inf")


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    with pytest.raises(SystemExit, match="needs a machine with an NVIDIA GPU"):
        gpu_check.main()
