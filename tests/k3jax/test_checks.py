"""Modules used alone: wrong shapes are one clear error each, and the docstrings' examples of a cache hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.cache import KDAState, MLAState
from k3jax.kda import KimiDeltaAttention
from k3jax.mla import MultiHeadLatentAttention
from k3jax.packing import Packing

T, CUT = 24, 16
LAYERS = [KimiDeltaAttention, MultiHeadLatentAttention]
x = np.random.default_rng(0).standard_normal((2, T, 32)).astype(np.float32)
ones = np.ones((2, T), np.int32)


@pytest.fixture(scope="module", params=LAYERS, ids=lambda layer: layer.__name__)
def layer(request, make_config):
    return nnx.jit(lambda: request.param(make_config(), rngs=nnx.Rngs(0)))()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (x[..., :31], r"takes hidden states \[batch, tokens, 32\], got an array of shape \[2, 24, 31\]"),
        (x[0], r"takes hidden states \[batch, tokens, 32\], got an array of shape \[24, 32\]"),
        ([1, 2], r"takes hidden states \[batch, tokens, 32\], got list"),
    ],
)
def test_what_is_no_hidden_state_is_refused_with_its_shape(layer, given, message):
    with pytest.raises(ValueError, match=type(layer).__name__ + " " + message):
        layer(given)


def test_a_packing_of_another_shape_is_refused(layer):
    message = r"x has \[batch, tokens\] = \[2, 24\], but its packing \[2, 16\]. Make it with Packing.of"
    with pytest.raises(ValueError, match=message):
        layer(x, Packing.of(jnp.asarray(ones[:, :CUT])))


@nnx.jit
def run(layer, x, packing, cache):
    return layer(x, packing, cache)


def test_a_sequence_in_two_calls_with_a_cache_is_the_sequence_in_one(layer):
    """The examples in the docstrings of KDA and MLA."""
    whole, _ = run(layer, x, None, None)
    if isinstance(layer, KimiDeltaAttention):
        first, state = run(layer, x[:, :CUT], None, None)
        rest, state = run(layer, x[:, CUT:], None, state)
    else:
        state = MLAState.empty(layer.config, 2, T)
        first, state = run(layer, x[:, :CUT], Packing.of(ones[:, :CUT]), state)
        rest, state = run(layer, x[:, CUT:], Packing.of(ones[:, CUT:], start=CUT), state)
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), whole, rtol=0, atol=2e-5)


def test_empty_states_of_a_stack_are_those_of_one_layer_stacked(make_config):
    config = make_config()
    one, stack = KDAState.empty(config, 2), KDAState.empty(config, 2, 5)
    assert (stack.recurrent.shape, stack.conv.shape) == ((5, *one.recurrent.shape), (5, *one.conv.shape))
    assert MLAState.empty(config, 2, 7, 5).latent.shape == (5, *MLAState.empty(config, 2, 7).latent.shape)


def test_a_packing_made_outside_jit_serves_inside(make_config):
    """Its values are known while the program is traced: a cache that is too small is refused then, as outside."""
    layer = nnx.jit(lambda: MultiHeadLatentAttention(make_config(), rngs=nnx.Rngs(0)))()
    graphdef, weights = nnx.split(layer)
    packing = Packing.of(ones[:, :CUT], start=4)
    call = jax.jit(lambda weights, state: nnx.merge(graphdef, weights)(x[:, :CUT], packing, state))
    outside, _ = run(layer, x[:, :CUT], packing, MLAState.empty(layer.config, 2, CUT + 4))
    np.testing.assert_allclose(call(weights, MLAState.empty(layer.config, 2, CUT + 4))[0], outside, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="goes on to 20 tokens, but its cache holds 19"):
        call(weights, MLAState.empty(layer.config, 2, CUT + 3))
