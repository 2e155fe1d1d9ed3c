"""Quantile Balancing: an even load after it, from the tokens that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.router import HISTOGRAM_BINS, margin_histogram
from train.balance import next_bias

N, E, K = 4096, 16, 4


@pytest.fixture(scope="module")
def scores():
    rng = np.random.default_rng(0)
    return jax.nn.sigmoid(jnp.asarray(rng.standard_normal((N, E)) + 1.5 * rng.standard_normal(E), jnp.float32))


ALL = jnp.ones(N, bool)
balanced = jax.jit(lambda scores, bias, valid: next_bias(margin_histogram(scores, bias, valid, K), bias, K))


def load(scores, bias):
    picks = jax.lax.top_k(scores + bias, K)[1]
    return np.bincount(np.asarray(picks).ravel(), minlength=E) / (N * K / E)


def test_the_load_is_nearly_even_after_balancing_on_the_same_batch(scores):
    bias = jnp.zeros(E)
    assert load(scores, bias).max() > 2
    for _ in range(8):
        bias = balanced(scores, bias, ALL)
    # Up to the width of a bin: saturated scores put a tenth of an expert's tokens into one.
    assert load(scores, bias).max() < 1.1
    assert load(scores, bias).min() > 0.85


def test_one_update_is_the_centred_quantile_of_the_margins(scores):
    """Within the width of a bin, against sorting."""
    bias = jnp.linspace(-0.2, 0.2, E)
    margins = jax.lax.top_k(scores + bias, K + 1)[0][:, -1:] - scores
    exact = np.quantile(np.asarray(margins), K / E, axis=0)
    width = (float(bias.max() - bias.min()) + 2) / HISTOGRAM_BINS
    np.testing.assert_allclose(balanced(scores, bias, ALL), exact - exact.mean(), atol=width)


def test_inside_a_bin_the_quantile_is_interpolated():
    counts = jnp.zeros((2, HISTOGRAM_BINS), jnp.int32).at[0, 500].set(8).at[1, 400].set(8)
    bias = next_bias(counts, jnp.zeros(2), 1)  # half of 8: in the middle of the bins, which are 2 / HISTOGRAM_BINS wide
    middle = np.array([-1 + 500.5 * 2 / HISTOGRAM_BINS, -1 + 400.5 * 2 / HISTOGRAM_BINS])
    np.testing.assert_allclose(bias, middle - middle.mean(), atol=1e-6)


def test_padding_does_not_count(scores):
    padded = jnp.concatenate([scores, jnp.full_like(scores, 0.999)])
    valid = jnp.arange(2 * N) < N
    np.testing.assert_array_equal(balanced(padded, jnp.zeros(E), valid), balanced(scores, jnp.zeros(E), ALL))


def test_counts_of_micro_batches_add_up(scores):
    bias = jnp.zeros(E)
    halves = [margin_histogram(part, bias, ALL[: N // 2], K) for part in jnp.split(scores, 2)]
    np.testing.assert_array_equal(halves[0] + halves[1], margin_histogram(scores, bias, ALL, K))


def test_without_tokens_the_bias_stays(scores):
    bias = jnp.linspace(-0.3, 0.5, E)
    np.testing.assert_array_equal(balanced(scores, bias, ~ALL), bias)


def test_stacked_layers_are_balanced_each_by_itself(scores):
    biases = jnp.stack([jnp.zeros(E), jnp.linspace(-0.1, 0.1, E)])
    counts = jnp.stack([margin_histogram(scores, bias, ALL, K) for bias in biases])
    for layer in range(2):
        np.testing.assert_allclose(
            next_bias(counts, biases, K)[layer], next_bias(counts[layer], biases[layer], K), atol=1e-6
        )
