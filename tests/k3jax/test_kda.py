"""The KDA module: its gates, and what packing, padding and caches may not change."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.cache import KDAState
from k3jax.kda import KimiDeltaAttention, log_decay
from k3jax.packing import Packing

B, T, D = 2, 256, 32
PIECES = (1, 130, 1, 64, 1)
CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(scope="module")
def split(make_config):
    return nnx.split(nnx.jit(lambda: KimiDeltaAttention(make_config(), rngs=nnx.Rngs(0)))())


@pytest.fixture(scope="module")
def run(split):
    @jax.jit
    def run(state, x, segments, cache, start):
        return nnx.merge(split[0], state)(x, Packing.of(segments, start), cache)

    return lambda *args: run(split[1], *args)


@pytest.fixture(scope="module")
def gradients(split):
    @jax.jit
    def gradients(state, x, segments, cotangent):
        def loss(state, x):
            y = nnx.merge(split[0], state)(x, Packing.of(segments))[0]
            return jnp.sum(jnp.where((segments > 0)[..., None], y, 0) * cotangent)

        return jax.grad(loss, argnums=(0, 1))(state, x)

    return partial(gradients, split[1])


def draw(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def states(batch, seed=1):
    """Non-zero states of sequences that were begun before."""
    return KDAState(draw((batch, 2, 16, 16), seed), draw((batch, 3, 3, 32), seed + 1))


def test_bounded_unbounded_and_rateless_decays_are_their_closed_forms():
    z, a_log = draw((1, 3, 2, 4)) * 3, jnp.array([0.5, -1.0])
    rate = np.exp(a_log)[:, None]
    np.testing.assert_allclose(log_decay(z, a_log, -5.0), -5 / (1 + np.exp(-rate * z)), rtol=1e-5)
    np.testing.assert_allclose(log_decay(z, None, -5.0), -5 / (1 + np.exp(-z)), rtol=1e-5)
    np.testing.assert_allclose(log_decay(z, a_log, None), -rate * np.log1p(np.exp(z)), rtol=1e-5)
    with pytest.raises(ValueError, match="only with a decay floor"):
        log_decay(z, None, None)


def test_rows_of_length_one_beside_long_ones_equal_the_rows_alone_with_their_states(run):
    """Rows of 1, 130, 1, 64 and 1 tokens with states of their own, in one batch and one by one; repeats are equal bitwise."""
    n, longest = len(PIECES), 130
    x, state, start = draw((n, longest, D)), states(n), jnp.array([3, 64, 100, 5, 63])
    segments = (np.arange(longest) < np.array(PIECES)[:, None]).astype(np.int32)
    y, after = run(x, segments, state, start)
    for _ in range(3):
        again, after_again = run(x, segments, state, start)
        np.testing.assert_array_equal(again, y)
        np.testing.assert_array_equal(after_again.recurrent, after.recurrent)
    roll = np.array([4, 0, 1, 2, 3])
    moved, after_moved = run(x[roll], segments[roll], jax.tree.map(lambda a: a[roll], state), start[roll])
    for r, size in enumerate(PIECES):
        if size == 1:
            one = jax.tree.map(lambda a, r=r: a[r : r + 1], state)
            alone, after_alone = run(x[r : r + 1, :1], segments[r : r + 1, :1], one, start[r : r + 1])
            np.testing.assert_allclose(y[r, :1], alone[0], **CLOSE)
            np.testing.assert_allclose(after.recurrent[r], after_alone.recurrent[0], **CLOSE)
            np.testing.assert_allclose(after.conv[r], after_alone.conv[0], **CLOSE)
    np.testing.assert_allclose(after_moved.recurrent, after.recurrent[roll], **CLOSE)
    for r, size in enumerate(np.array(PIECES)[roll]):
        np.testing.assert_allclose(moved[r, :size], y[roll[r], :size], **CLOSE)
    assert np.isfinite(after.recurrent).all()


def test_slack_after_the_last_token_changes_no_gradient(gradients):
    """200 tokens and 56 of slack holding huge values: gradients are those of slack holding zeros, bit for bit."""
    x, cotangent = draw((B, T, D)), draw((B, T, D), 5)
    segments = np.repeat([[1, 2, 0]], [130, 70, 56], 1).repeat(B, 0).astype(np.int32)
    zeros = jnp.where(segments[..., None] > 0, x, 0)
    huge = jnp.where(segments[..., None] > 0, x, 1e15)
    for clean, dirty in zip(*(jax.tree.leaves(gradients(v, segments, cotangent)) for v in (zeros, huge)), strict=True):
        assert np.isfinite(dirty).all()
        np.testing.assert_array_equal(dirty, clean)


def test_the_weight_gradients_of_packed_rows_are_those_of_the_rows_in_one(gradients):
    """Two rows of two sequences each against one row that holds all four: the convolution's weights above all."""
    x, cotangent = draw((2, 128, D)), draw((2, 128, D), 5)
    segments = np.repeat([[1, 2]], [50, 78], 1).repeat(2, 0).astype(np.int32)
    apart, _ = gradients(x, segments, cotangent)
    flat = np.concatenate([segments[:1], segments[1:] + 2], 1)
    together, _ = gradients(x.reshape(1, 256, D), flat, cotangent.reshape(1, 256, D))
    for (path, a), (_, b) in zip(nnx.to_flat_state(apart), nnx.to_flat_state(together), strict=True):
        a, b = np.asarray(a.get_value()), np.asarray(b.get_value())
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) + 1e-6, path


@pytest.mark.parametrize("floor", [-5.0, None], ids=["bounded", "softplus"])
def test_one_key_makes_one_model_with_decays_in_their_range(make_config, floor):
    """At rate 1 a zero input decays by dt nats, 0.001 <= dt <= 0.1."""
    config = make_config(kda=make_config().kda.__class__(num_heads=4, head_dim=64, decay_floor=floor))
    make = nnx.jit(lambda: KimiDeltaAttention(config, rngs=nnx.Rngs(7)))
    a, b = make(), make()
    for x, y in zip(jax.tree.leaves(nnx.state(a)), jax.tree.leaves(nnx.state(b)), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x, y)
    dt = -log_decay(a.dt_bias[...].reshape(1, 1, 4, 64), jnp.zeros(4), floor)
    assert 0.9e-3 < dt.min() < 3e-3 and 3e-2 < dt.max() < 0.101
    assert (np.asarray(a.A_log[...]) >= 0).all() and (np.asarray(a.A_log[...]) <= np.log(16)).all()


def test_a_dtype_below_fp32_rounds_no_decay_and_no_beta(make_config):
    """In a bf16 model the gate parameters and the state stay fp32."""
    layer = KimiDeltaAttention(make_config(dtype=jnp.dtype("bfloat16"), param_dtype=jnp.dtype("bfloat16")), rngs=nnx.Rngs(0))
    assert {p[...].dtype.name for p in (layer.A_log, layer.dt_bias, layer.o_norm.weight, layer.q_conv1d.weight)} == {"float32"}
    y, state = nnx.jit(lambda m, x: m(x))(layer, jnp.ones((1, 4, D), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and state.recurrent.dtype == jnp.float32
