"""Laws of the whole model over tokens: cuts, packing, padding, the future and the cache change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

B, T = 8, 257
CUTS = (1, 2, 3, 63, 64, 65, 200)
PIECES = (1, 130, 1, 64, 1)  # sequences of one packed row
CLOSE = {"rtol": 0, "atol": 1e-4}  # one program compiled by two versions of jax differs by up to 9.5e-5, logits up to 3.7


@pytest.fixture(scope="module")
def tokens(small):
    """One sequence of T tokens, eight times."""
    ids = np.random.default_rng(0).integers(0, small.config.vocab_size - 1, T)
    return np.tile(ids, (B, 1)).astype(np.int32)


@pytest.fixture(scope="module")
def whole(small, tokens):
    return np.asarray(small.forward(small.state, tokens, np.ones_like(tokens)))


def test_a_sequence_cut_anywhere_gives_the_logits_and_states_of_one_pass(small, tokens, whole):
    """Row r is cut at CUTS[r]; the last row is not cut. Each piece is a call, filled up with padding."""
    cuts = np.array([*CUTS, T])[:, None]
    t = np.arange(T)
    first = (t < cuts).astype(np.int32)
    second = (t < T - cuts).astype(np.int32)
    moved = np.take_along_axis(tokens, np.minimum(t + cuts, T - 1), 1)
    a, cache = small.extend(small.state, tokens, first, small.empty_cache(B, T))
    np.testing.assert_array_equal(cache.length, cuts[:, 0])
    b, cache = small.extend(small.state, moved, second, cache)
    np.testing.assert_array_equal(cache.length, [T] * B)
    logits = np.where(first[..., None], a, np.take_along_axis(np.asarray(b), np.maximum(t - cuts, 0)[..., None], 1))
    np.testing.assert_allclose(logits, whole, **CLOSE)
    for leaf in jax.tree.leaves(cache.layers):
        np.testing.assert_allclose(leaf, np.repeat(np.asarray(leaf)[:, -1:], B, 1), **CLOSE)


def test_decoding_one_by_one_equals_a_prefill_over_2000_tokens(small):
    """The logits of 2000 decode steps, scanned in one program, are those of one pass."""
    N = 2000
    ids = np.random.default_rng(1).integers(0, small.config.vocab_size, (1, N)).astype(np.int32)

    @jax.jit
    def decode(state, ids, cache):
        model = nnx.merge(small.graphdef, state)

        def step(cache, token):
            out = model(token[:, None], cache=cache)
            return out.cache, model.logits(out.hidden)[0, 0]

        return jax.lax.scan(step, cache, ids.T)

    cache, logits = decode(small.state, ids, small.empty_cache(1, N))
    assert cache.length.item() == N
    np.testing.assert_allclose(logits, small.forward(small.state, ids, np.ones_like(ids))[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_prompt_shorter_than_the_convolution_decodes(small, whole, tokens, size):
    """Prompts of fewer tokens than the window holds, then steps of one token."""
    segments = np.tile((np.arange(T) < size).astype(np.int32), (B, 1))
    logits, cache = small.extend(small.state, tokens, segments, small.empty_cache(B, T))
    np.testing.assert_allclose(logits[:, :size], whole[:, :size], **CLOSE)
    one = np.ones((B, 1), np.int32)
    for t in range(size, size + 5):
        logits, cache = small.extend(small.state, tokens[:, t : t + 1], one, cache)
        np.testing.assert_allclose(logits[:, 0], whole[:, t], **CLOSE)


def test_a_call_without_new_tokens_for_a_row_leaves_that_row_as_it_was(small, tokens):
    """Rows that wait while others go on keep their cache bit for bit."""
    segments = np.ones_like(tokens)
    segments[::2, 100:] = 0
    _, before = small.extend(small.state, tokens, segments, small.empty_cache(B, T))
    only_odd = (np.arange(B)[:, None] % 2).astype(np.int32)
    _, after = small.extend(small.state, tokens[:, :1], only_odd, before)
    for a, b in zip(jax.tree.leaves(before.layers), jax.tree.leaves(after.layers), strict=True):
        np.testing.assert_array_equal(a[:, ::2], b[:, ::2])
    np.testing.assert_array_equal(after.length, before.length + only_odd[:, 0])


@pytest.fixture(scope="module")
def packed(small):
    """Row 0 packs the PIECES, rows 1..5 hold one each; (ids, segments, spans of row 0)."""
    rng = np.random.default_rng(2)
    ids = np.full((B, T), 5, np.int32)
    segments = np.zeros((B, T), np.int32)
    spans, start = [], 0
    for i, size in enumerate(PIECES):
        piece = rng.integers(0, small.config.vocab_size - 1, size)
        ids[0, start : start + size] = ids[i + 1, :size] = piece
        segments[0, start : start + size] = i + 1
        segments[i + 1, :size] = 1
        spans.append(slice(start, start + size))
        start += size
    return ids, segments, spans


def predictions(segments, rows):
    """1 where a token of these rows predicts another of its sequence."""
    same = (segments > 0) & (segments == np.pad(segments, ((0, 0), (0, 1)))[:, 1:])
    return (same & np.isin(np.arange(B), rows)[:, None]).astype(np.float32)


def assert_equal_gradients(a, b, tolerance=1e-4):
    for (path, x), (_, y) in zip(nnx.to_flat_state(a), nnx.to_flat_state(b), strict=True):
        x, y = np.asarray(x.get_value()), np.asarray(y.get_value())
        assert np.isfinite(x).all(), path
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y) + 1e-6, path


def test_sequences_packed_in_a_row_give_the_logits_and_gradients_of_each_alone(small, packed):
    ids, segments, spans = packed
    together, together_grads, logits = small.gradients(small.state, ids, segments, predictions(segments, [0]))
    apart, apart_grads, _ = small.gradients(small.state, ids, segments, predictions(segments, range(1, B)))
    for i, span in enumerate(spans):
        np.testing.assert_allclose(logits[0, span], logits[i + 1, : span.stop - span.start], **CLOSE)
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    assert_equal_gradients(together_grads, apart_grads)


def test_what_padding_holds_reaches_no_output_and_no_gradient(small, packed):
    """Padding of a token whose embedding is NaN: outputs, loss and gradients stay as they are, bit for bit."""
    ids, segments, _ = packed
    weights = predictions(segments, range(B))
    last = small.config.vocab_size - 1
    poisoned = nnx.merge(small.graphdef, jax.tree.map(jnp.copy, small.state))
    table = poisoned.model.embed_tokens.weight
    table[...] = table[...].at[last].set(jnp.nan)
    clean = small.gradients(small.state, ids, segments, weights)
    dirty = small.gradients(nnx.state(poisoned), np.where(segments > 0, ids, last), segments, weights)
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(np.asarray(dirty[2])[segments > 0], np.asarray(clean[2])[segments > 0])
    for (path, x), (_, y) in zip(nnx.to_flat_state(dirty[1]), nnx.to_flat_state(clean[1]), strict=True):
        np.testing.assert_array_equal(x.get_value(), y.get_value(), err_msg=str(path))


def test_the_future_never_changes_the_past(small, tokens, whole):
    """Row r gets other tokens from FROM[r] on; what came before is the same bit for bit."""
    begin = np.array([1, 2, 15, 16, 17, 64, 65, 200])[:, None]
    changed = np.where(np.arange(T) >= begin, (tokens + 7) % (small.config.vocab_size - 1), tokens)
    logits = np.asarray(small.forward(small.state, changed, np.ones_like(changed)))
    for r, start in enumerate(begin[:, 0]):
        np.testing.assert_array_equal(logits[r, :start], whole[r, :start], err_msg=f"from {start}")
        assert np.abs(logits[r, start:] - whole[r, start:]).max() > 1e-2


@pytest.mark.parametrize("remat", ["group", pytest.param("none", marks=pytest.mark.slow)])
def test_every_remat_policy_gives_the_same_gradients(small, packed, remat):
    ids, segments, _ = packed
    weights = predictions(segments, range(B))
    assert small.config.remat == "layer"
    loss, grads, logits = small.gradients(small.state, ids, segments, weights)
    other_loss, other_grads, other_logits = small.with_remat(remat).gradients(small.state, ids, segments, weights)
    np.testing.assert_allclose(other_logits, logits, **CLOSE)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    assert_equal_gradients(other_grads, grads)
