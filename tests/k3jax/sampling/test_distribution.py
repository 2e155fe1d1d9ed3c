"""Drawing: filters, reported logprobs and frequencies are those of the distribution that is defined."""

import jax
import numpy as np
import pytest

from k3jax.sampling import SamplingParams
from k3jax.sampling.distribution import Shape, draw, reshape, row_keys
from tests.k3jax.sampling.lab import IDS, log_softmax, new_sampler, shared_model, trainer_logits


def test_reported_logprobs_are_those_of_the_distribution_that_was_drawn_from():
    kinds = [{"temperature": 0.6, "top_p": 0.9}, {"top_p": 0.9}, {"temperature": 1.3, "top_p": 0.9},
             {"top_k": 30, "min_p": 0.2, "temperature": 0.8}]  # fmt: skip
    params = [SamplingParams(max_tokens=24, seed=i, top_logprobs=5, **kind) for i, kind in enumerate(kinds)]
    prompts = [IDS[i : i + 8] for i in range(4)]
    samples = [row[0] for row in new_sampler().generate(prompts, params)]
    rows = [p + s.ids for p, s in zip(prompts, samples, strict=True)]
    logits = trainer_logits(shared_model(), rows, [0] * 4, [s.routes for s in samples])
    for b, (p, s) in enumerate(zip(params, samples, strict=True)):
        steps = logits[b, 7 : 7 + 24]
        shape = Shape(*(np.full(24, x, t) for x, t in ((p.temperature, "f4"), (p.top_k, "i4"), (p.top_p, "f4"), (p.min_p, "f4"))))
        expected = np.asarray(reshape(steps, shape))[np.arange(24), s.ids]
        np.testing.assert_allclose(s.logprobs, expected, atol=1e-4)  # so a trainer's ratio is 1 at every token
        raw = log_softmax(steps)
        assert np.abs(raw[np.arange(24), s.ids] - s.logprobs).max() > 0.01
        best = np.argsort(-raw, 1)[:, :5]
        assert [[i for i, _ in top] for top in s.top_logprobs] == best.tolist()
        np.testing.assert_allclose([[v for _, v in top] for top in s.top_logprobs], np.take_along_axis(raw, best, 1), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_the_mean_ratio_of_trainer_to_sampler_is_1_under_the_distribution_drawn_from(temperature):
    """Of 400 first tokens after one prompt. What the trainer has without temperature and filter is off by what they change."""
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.9, n=400, seed=0)
    samples = new_sampler().generate([IDS[:8]], params)[0]
    rows, routes = [IDS[:8] + s.ids for s in samples[:4]], [s.routes for s in samples[:4]]
    logits = trainer_logits(shared_model(), rows, [0] * 4, routes)[0, 7]
    tokens, sampled = np.array([s.ids[0] for s in samples]), np.array([s.logprobs[0] for s in samples])
    trained, raw = kept_by_definition(logits, temperature, 0, 0.9, 0), log_softmax(logits[None])[0]
    assert abs(np.exp(trained[tokens] - sampled).mean() - 1) < 0.02
    assert abs(np.exp(raw[tokens] - sampled).mean() - 1) > 0.05


def kept_by_definition(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    p = np.exp(logits.astype(np.float64) / (temperature or 1.0))
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -logits))[: top_k or None]
    if top_p < 1:
        ahead = np.cumsum(p[order]) - p[order]
        order = order[ahead < top_p * p[order].sum()]
    order = order[p[order] >= min_p * p.max() * (1 - 1e-6)]
    log = np.full(len(p), -np.inf)
    log[order] = np.log(p[order] / p[order].sum())
    return log


def test_filters_keep_what_their_definition_keeps_with_ties_and_in_any_mixture():
    rng = np.random.default_rng(1)
    logits = np.round(2 * rng.normal(size=(200, 60)), 1).astype(np.float32)  # rounding makes ties
    shape = Shape(*(rng.choice(options, 200).astype(dtype) for options, dtype in (
        ([0, 0.5, 1, 2], np.float32), ([0, 1, 2, 7, 60, 99], np.int32), ([1, 0.07, 0.5, 0.93], np.float32),
        ([0, 0.03, 0.5, 1], np.float32),
    )))  # fmt: skip
    expected = np.stack([kept_by_definition(row, *s) for row, *s in zip(logits, *map(np.ndarray.tolist, shape), strict=True)])
    np.testing.assert_allclose(np.asarray(jax.jit(reshape)(logits, shape)), expected, atol=1e-5)


def test_draws_follow_the_distribution_and_depend_on_key_and_position_only():
    n, logits = 20_000, np.array([2.0, 1.0, 0.0, -1.0, -9.0], np.float32)
    shape = Shape(np.full(n, 0.7, np.float32), np.zeros(n, np.int32), np.full(n, 0.95, np.float32), np.zeros(n, np.float32))
    keys, positions = row_keys(np.zeros((n, 2), np.uint32), np.arange(n) // 2), np.arange(n) % 2
    drawn_by = jax.jit(draw)
    drawn = drawn_by(np.tile(logits, (n, 1)), shape, keys, positions)
    p = np.exp(kept_by_definition(logits, 0.7, 0, 0.95, 0))
    np.testing.assert_allclose(np.bincount(drawn.token, minlength=5) / n, p, atol=5 * (0.25 / n) ** 0.5)
    np.testing.assert_allclose(np.exp(drawn.logprob), p[drawn.token], rtol=1e-5)
    again = drawn_by(np.tile(logits, (n, 1)), shape, keys[::-1], positions[::-1])
    np.testing.assert_array_equal(again.token[::-1], drawn.token)
    assert abs(np.corrcoef(drawn.token[::2], drawn.token[1::2])[0, 1]) < 5 / (n / 2) ** 0.5


@pytest.mark.parametrize("top_p", [1e-20, 1e-40, 1e-46])
def test_however_small_top_p_is_the_most_likely_token_stays(top_p):
    logits = np.random.default_rng(0).normal(0, 3, (1, 64)).astype(np.float32)
    shape = Shape(np.float32([1]), np.int32([0]), np.float32([top_p]), np.float32([0]))
    logprobs = np.asarray(reshape(logits, shape))[0]
    assert logprobs[logits[0].argmax()] == 0 and np.isneginf(np.delete(logprobs, logits[0].argmax())).all()
