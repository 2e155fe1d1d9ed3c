"""The cache: its sizes, its dtypes, forking."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.k3 import config as k3_config
from k3jax.cache import KDAState, MLAState, bytes_per_sequence
from k3jax.weights import abstract


def test_a_sequence_of_k3_takes_the_bytes_of_the_report():
    """434 MB of fp32 states and 15 MB of bf16 windows, and 27.6 KB per token (24 x 576 bf16)."""
    fixed, per_token = bytes_per_sequence(k3_config())
    assert fixed == 69 * 96 * 128 * 128 * 4 + 69 * 3 * 3 * 96 * 128 * 2
    assert per_token == 24 * 576 * 2 == 27_648


def test_the_counted_bytes_are_those_of_the_arrays(small):
    one, two = (sum(a.nbytes for a in jax.tree.leaves(small.empty_cache(1, n).layers)) for n in (100, 101))
    fixed, per_token = bytes_per_sequence(small.config)
    assert (two - one, one - 100 * per_token) == (per_token, fixed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_of_states_is_the_config_s_and_survives_steps(make_small, dtype):
    model = make_small(attention=("kda", "mla"), moe=None, attn_res_block=None, state_dtype=jnp.dtype(dtype))
    cache = model.empty_cache(2, 8)
    ids = np.ones((2, 1), np.int32)
    for _ in range(2):
        kinds = {type(entry): entry for entry in cache.layers}
        assert kinds[KDAState].recurrent.dtype == dtype
        assert kinds[MLAState].latent.dtype == model.config.dtype
        _, cache = model.extend(model.state, ids, ids, cache)
    assert (cache.length.tolist(), cache.capacity) == ([2, 2], 8)


def test_forks_of_a_prefix_go_on_as_it_would(make_small):
    model = make_small(attention=("kda", "mla"), moe=None, attn_res_block=None)
    ids = np.random.default_rng(0).integers(0, 64, (2, 1)).astype(np.int32)
    one = np.ones((2, 1), np.int32)
    _, cache = model.extend(model.state, ids, one, model.empty_cache(2, 8))
    kept = jax.tree.map(np.array, cache)
    forks = cache.take(jnp.array([1, 1]))
    assert forks.length.tolist() == [1, 1]
    a, _ = model.extend(model.state, ids[::-1].copy(), one, forks)
    b, _ = model.extend(model.state, ids[[0, 0]], one, cache)
    np.testing.assert_array_equal(a[1], np.asarray(model.extend(model.state, ids[[0, 0]], one, forks)[0])[0])
    np.testing.assert_array_equal(np.asarray(b)[1], np.asarray(a)[1])
    for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_model_called_outside_jit_refuses_tokens_beyond_its_cache(small):
    ids = jnp.ones((2, 5), jnp.int32)
    cache = replace(small.empty_cache(2, 8), length=jnp.array([3, 4]))
    with pytest.raises(ValueError, match="A row goes on to 9 tokens, but its cache holds 8"):
        small.model(ids, cache=cache)
    with pytest.raises(ValueError, match="5 tokens per row do not fit a cache of 4"):
        small.model(ids, cache=small.empty_cache(2, 4))


def test_a_model_without_latents_has_no_capacity(make_config):
    model = abstract(replace(make_config(), attention=("kda", "kda")))
    assert model.empty_cache(1, 5).capacity is None
