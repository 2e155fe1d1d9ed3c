"""A model with a pool of adapters attached, where no adapter is chosen, is the model without one."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx

from k3jax.lora import Adapters, LoRAConfig
from k3jax.weights import load

NANO = Path(__file__).parents[2] / "configs" / "nano"


def test_adapter_zero_beside_a_pool_is_the_bare_model_bit_for_bit():
    """Both compiled, on shipped weights. A projection with a pool adds to its product, which is computed as without one, the
    rank columns of the token's adapter; adapter 0 owns none, so a zero is added, which changes no number."""
    model = load(NANO, dtype="float32")
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 24)).astype(np.int32)

    @nnx.jit
    def logits(model, adapters):
        packing = model.packing(ids, adapters=adapters)
        return model.logits(model(ids, adapters=adapters).hidden, packing)

    bare = np.asarray(logits(model, None))
    pool = Adapters(model, columns=4)
    name = pool.add("other", LoRAConfig(rank=4, alpha=8), seed=0)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if path[-1] == "b" and "lora" in path:
            variable.set_value(jax.numpy.ones_like(variable.get_value()))
    chosen = np.asarray(logits(model, np.array([0, name], np.int32)))
    np.testing.assert_array_equal(chosen[0], bare[0])
    assert np.abs(chosen[1] - bare[1]).max() > 1e-3
