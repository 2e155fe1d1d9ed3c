"""Laws of depth: program size does not grow with it, training memory grows by one array per layer."""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs.k3 import config as k3_config
from k3jax.weights import abstract


def trainable(path, variable):
    """A part of K3 small enough to train without adapters: norms."""
    return isinstance(variable, nnx.Param) and any("norm" in str(part) for part in path)


def lowered(config, batch, tokens, gradient):
    """The lowered forward (last token's logits) or gradient with respect to the norms, on abstract weights."""
    graphdef, train, rest = nnx.split(abstract(config), trainable, ...)
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)

    def forward(train, rest, ids):
        model = nnx.merge(graphdef, train, rest)
        return model.logits(model(ids).hidden[:, -1:])

    def loss(train, rest, ids):
        return forward(train, rest, ids).mean()

    return jax.jit(jax.grad(loss) if gradient else forward).lower(train, rest, ids)


def text_only(layers):
    config = replace(k3_config(), vision=None)
    return replace(config, attention=config.attention[: layers - 1] + config.attention[-1:])


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_lowering_all_93_layers_of_k3_takes_less_than_a_minute(gradient):
    start = time.process_time()
    deep = lowered(text_only(93), 1, 128, gradient)
    assert time.process_time() - start < 60
    shallow = lowered(text_only(13), 1, 128, gradient)
    assert len(deep.as_text()) < 1.1 * len(shallow.as_text())


def gradient_arrays(make_config, layers, remat):
    """Temporary memory of the gradient in arrays of [B, T, D], for dense MLA layers in four Attention Residuals blocks."""
    config = make_config(attention=("mla",) * layers, moe=None, attn_res_block=layers // 4, hidden_size=64, remat=remat)
    batch, tokens = 4, 64
    compiled = lowered(config, batch, tokens, gradient=True).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (4 * batch * tokens * config.hidden_size)


def test_a_layer_adds_one_activation_to_the_memory_of_training(make_config):
    """Autodiff through the scan would keep every snapshot slot for every layer: slots + 1 = 5 arrays."""
    few, many = 8, 40
    per_layer = (gradient_arrays(make_config, many, "layer") - gradient_arrays(make_config, few, "layer")) / (many - few)
    assert per_layer < 1.25, f"{per_layer:.2f} arrays of [B, T, D] per layer"
