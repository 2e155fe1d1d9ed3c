import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.logprobs import logprobs_by_chunk, token_logprobs


def inputs(B=2, T=11, D=8, V=37, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (B, T, D)).astype(dtype)
    head = jax.random.normal(keys[1], (D, V)).astype(dtype)
    return hidden, head, jax.random.randint(keys[2], (B, T), 0, V)


def chunked_logprobs(hidden, head, targets, chunk):
    return logprobs_by_chunk(lambda h: h @ head, hidden, targets, chunk)


def test_logprobs_are_the_log_of_the_softmax():
    logits = np.array([[1.0, 2.0, 4.0], [1000.0, 0.0, -1000.0]])
    expected = [4 - np.log(np.exp([1.0, 2.0, 4.0]).sum()), -1000.0]
    np.testing.assert_allclose(token_logprobs(jnp.array(logits), jnp.array([2, 1])), expected, rtol=1e-6)


def test_bf16_logits_are_normalised_in_fp32():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (4, 1000)), jnp.bfloat16)
    targets = jnp.arange(4)
    logprobs = token_logprobs(logits, targets)
    assert logprobs.dtype == jnp.float32
    np.testing.assert_array_equal(logprobs, token_logprobs(logits.astype(jnp.float32), targets))


@pytest.mark.parametrize("target", [3, -1, -100])
def test_a_target_outside_the_vocabulary_gives_nan(target):
    assert jnp.isnan(token_logprobs(jnp.zeros((1, 3)), jnp.array([target])))[0]


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
def test_chunked_equals_plain_in_values_and_gradients(chunk):
    hidden, head, targets = inputs()
    weights = jnp.linspace(-1, 2, targets.size).reshape(targets.shape)

    def plain(hidden, head):
        logprobs = token_logprobs(hidden @ head, targets)
        return jnp.sum(weights * logprobs), logprobs

    def chunked(hidden, head):
        logprobs = chunked_logprobs(hidden, head, targets, chunk)
        return jnp.sum(weights * logprobs), logprobs

    run = [jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(hidden, head) for f in (plain, chunked)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), *run)


def test_a_head_may_read_more_than_the_hidden_states_per_token():
    hidden, head, targets = inputs()
    scale = jnp.linspace(0.5, 2, targets.size).reshape(targets.shape)
    chunked = logprobs_by_chunk(lambda x: (x[0] @ head) * x[1][..., None], (hidden, scale), targets, 4)
    plain = token_logprobs((hidden @ head) * scale[..., None], targets)
    np.testing.assert_allclose(chunked, plain, rtol=2e-5, atol=2e-6)


def test_all_logits_are_never_held():
    """Temporary memory of value and gradient, as XLA plans it, does not grow by [T, V] logits."""

    def temporary(T, chunk):
        shapes = [(1, T, 16), (16, 8192)]
        hidden, head = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        targets = jax.ShapeDtypeStruct((1, T), jnp.int32)
        loss = jax.grad(lambda hidden, head, targets: chunked_logprobs(hidden, head, targets, chunk).sum())
        return jax.jit(loss).lower(hidden, head, targets).compile().memory_analysis().temp_size_in_bytes

    T, chunk, row = 512, 16, 8192 * 4
    assert temporary(T, T) > T * row
    assert temporary(T, chunk) < 4 * chunk * row + T * 16 * 4 * 8


def test_a_chunk_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="chunk=0"):
        chunked_logprobs(*inputs(), chunk=0)
