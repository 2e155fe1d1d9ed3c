"""The KDA module: its gates, and what packing, padding and caches may not change."""

import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from k3jax.cache import KDAState
from k3jax.kda import KimiDeltaAttention, log_decay
from k3jax.packing import Packing
from k3jax.sharding import make_mesh
from k3jax.weights import load

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


def test_bounded_and_unbounded_decays_are_their_closed_forms():
    z, a_log = draw((1, 3, 2, 4)) * 3, jnp.array([0.5, -1.0])
    rate = np.exp(a_log)[:, None]
    np.testing.assert_allclose(log_decay(z, a_log, -5.0), -5 / (1 + np.exp(-rate * z)), rtol=1e-5)
    np.testing.assert_allclose(log_decay(z, a_log, None), -rate * np.log1p(np.exp(z)), rtol=1e-5)


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


@pytest.mark.parametrize("floor", [-5.0, None], ids=["bounded", "softplus"])
def test_the_gradients_of_a_decay_are_those_of_its_closed_form_wherever_it_saturates(floor):
    """In float64: d/dz and d/dA_log for logits from -100 to 100 under rates from 1/16 to 16. A gate that is shut to within
    the rounding of fp32 has gradient 0."""
    z = np.linspace(-100, 100, 2001).reshape(1, -1, 1, 1).repeat(3, 2)
    a_log = np.log([1 / 16, 1, 16])
    rate = np.exp(a_log)[:, None]
    with np.errstate(over="ignore"):
        if floor is None:
            dz, da = -rate / (1 + np.exp(-z)), -rate * np.logaddexp(0, z)
        else:
            slope = floor * rate / ((1 + np.exp(-rate * z)) * (1 + np.exp(rate * z)))
            dz, da = slope, slope * z
    weights = 1.0 + (z > 0)  # or A_log's gradient from z would cancel that from -z
    loss = lambda z, a: jnp.sum(jnp.float32(weights) * log_decay(z, a, floor))  # noqa: E731
    got = jax.grad(loss, argnums=(0, 1))(jnp.float32(z), jnp.float32(a_log))
    np.testing.assert_allclose(got[0] / rate, weights * dz / rate, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], np.sum(weights * da, (0, 1, 3)), rtol=2e-5)


BF16 = {"dtype": jnp.dtype("bfloat16"), "param_dtype": jnp.dtype("bfloat16")}


@pytest.fixture(scope="module")
def gated(make_config):
    """(beta logit, log decay, tokens, state | None) -> the state after tokens with these gates, in a bf16 model.

    The first input is 1 and feeds b_proj alone; f_b_proj is 0, so that dt_bias alone makes the decay.
    """
    layer = KimiDeltaAttention(make_config(**BF16), rngs=nnx.Rngs(0))
    layer.f_b_proj.kernel[...] = jnp.zeros((16, 32), jnp.bfloat16)
    call = nnx.jit(lambda layer, x, state: layer(x, cache=state)[1].recurrent)

    def run(logit, decay, tokens, recurrent):
        layer.b_proj.kernel[...] = jnp.zeros((D, 2), jnp.bfloat16).at[0].set(logit)
        layer.dt_bias[...] = jnp.full(32, jax.scipy.special.logit(decay / -5))
        x = jnp.asarray(draw((1, tokens, D)).at[..., 0].set(1), jnp.bfloat16)
        cache = None if recurrent is None else KDAState(recurrent, jnp.zeros((1, 3, 3, 32), jnp.bfloat16))
        return np.asarray(call(layer, x, cache))

    return run


@pytest.mark.parametrize("state", [jnp.zeros((1, 2, 16, 16)), None], ids=["step", "chunk"])
def test_beta_is_never_rounded_to_bf16(gated, state):
    """The first write into an empty state is beta k v': a logit of 0.5 writes 0.62246 of what beta = 1 writes; bf16: 0.62109."""
    share = gated(0.5, -1.0, 1, state) / gated(60.0, -1.0, 1, state)
    np.testing.assert_allclose(share, 1 / (1 + np.exp(-0.5)), rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2], ids=["step", "chunk"])
def test_a_slow_decay_is_never_rounded_to_bf16(gated, tokens):
    """Without writes (beta = 0) the state forgets 8e-5 per token; in bf16, e^-8e-5 is 1 and it would forget nothing."""
    state = 1 + jnp.abs(draw((1, 2, 16, 16)))
    kept = gated(-200.0, np.log(0.99992), tokens, state) / state
    np.testing.assert_allclose(1 - kept, 1 - 0.99992**tokens, rtol=0, atol=3e-7)


def test_in_a_bf16_model_the_parameters_of_the_gates_are_fp32(make_config):
    layer = KimiDeltaAttention(make_config(**BF16), rngs=nnx.Rngs(0))
    assert {p[...].dtype.name for p in (layer.A_log, layer.dt_bias, layer.o_norm.weight, layer.q_conv1d.weight)} == {"float32"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_stored_in_the_dtype_that_the_config_names_whatever_the_model_s(make_config, dtype):
    """fp32 unless named otherwise. A state that is rounded to bf16 at each step still goes on from what it holds."""
    named = {} if dtype == "float32" else {"state_dtype": jnp.dtype(dtype)}
    layer = KimiDeltaAttention(make_config(**BF16, **named), rngs=nnx.Rngs(0))
    run = nnx.jit(lambda m, x, state: m(x, cache=state))
    x = jnp.asarray(draw((1, 4, D)), jnp.bfloat16)
    y, state = nnx.jit(lambda m, x: m(x))(layer, x)
    assert y.dtype == jnp.bfloat16 and state.recurrent.dtype == dtype and state.conv.dtype == jnp.bfloat16
    _, after = run(layer, x[:, :1], state)
    assert jax.tree.map(lambda a: a.dtype, after) == jax.tree.map(lambda a: a.dtype, state)
    wide = KDAState(state.recurrent.astype(jnp.float32), state.conv)
    np.testing.assert_array_equal(after.recurrent, run(layer, x[:, :1], wide)[1].recurrent.astype(dtype))


def test_each_device_of_a_mesh_gets_its_heads_from_a_padded_a_log(golden, tmp_path):
    """A checkpoint may pad A_log with zeros beyond its heads; split over four devices, each holds one of the four heads."""
    source = golden / "k3_text_tiny" / "checkpoint"
    tensors = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    for name in [name for name in tensors if name.endswith("A_log")]:
        rates = tensors[name].reshape(-1)
        tensors[name] = np.pad(np.arange(1, rates.size + 1, dtype=np.float32), (0, 16 - rates.size))
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    model = load(tmp_path, mesh=make_mesh(fsdp=2, tensor=4))
    found = [v.get_value() for path, v in nnx.to_flat_state(nnx.state(model)) if path[-1] == "A_log"]
    assert found
    for a_log in found:
        assert {float(shard.data[0, 0]) for shard in a_log.addressable_shards} == {1, 2, 3, 4}
        assert {shard.data.shape[-1] for shard in a_log.addressable_shards} == {1}
