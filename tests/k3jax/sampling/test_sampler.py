"""Generation: golden continuations, and the laws that batching, forking, seeding and stopping must keep."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from k3jax.lora import Adapters, LoRAConfig
from k3jax.sampling import Sampler, SamplingParams
from k3jax.sampling import sampler as sampler_file
from k3jax.sharding import TRAIN, make_mesh, shardings
from k3jax.weights import load
from tests.k3jax.sampling.lab import (
    IDS,
    assert_same,
    log_softmax,
    new_model,
    new_sampler,
    randomise_adapters,
    raw_logprobs,
    shared_model,
    tokenizer,
    trainer_logits,
)

GOLDEN = Path(__file__).parents[2] / "golden"

compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **kw: compilations.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
)


def test_k3_greedy_tokens_are_official_and_sampled_logprobs_are_the_trainers_under_mixed_adapters():
    golden = json.loads((GOLDEN / "k3_text_tiny/greedy.json").read_text())
    model = load(GOLDEN / "k3_text_tiny/checkpoint", dtype="float32")
    adapter = Adapters(model, columns=4, targets=("latent",)).add("a", LoRAConfig(rank=4, alpha=8, targets=("latent",)))
    randomise_adapters(model, 0.05)
    prompts, adapters = golden["prompt_ids"] * 2, [0, 0, adapter, adapter]
    drawn = SamplingParams(max_tokens=20, seed=1)
    params = [SamplingParams(max_tokens=20, temperature=0)] * 2 + [drawn] * 2
    samples = [row[0] for row in Sampler(model, capacity=64, max_batch=4, prefill_chunk=16).generate(prompts, params, adapters)]
    assert [s.ids for s in samples[:2]] == golden["continuation_ids"]
    steps = load_file(GOLDEN / "k3_text_tiny/greedy_logits.safetensors")["step_logits"]
    rows = [p + s.ids for p, s in zip(prompts, samples, strict=True)]
    trainer = trainer_logits(model, rows, adapters, length=35)
    for b, sample in enumerate(samples):
        np.testing.assert_allclose(sample.raw_logprobs, raw_logprobs(trainer[b], prompts[b], sample.ids), atol=1e-4)
        np.testing.assert_allclose(sample.logprobs, sample.raw_logprobs if b >= 2 else 0, atol=1e-6)
        if b < 2:
            official = log_softmax(steps[b])[np.arange(20), sample.ids]
            np.testing.assert_allclose(sample.raw_logprobs, official, atol=3e-4)


def test_kimi_linear_greedy_tokens_are_official():
    golden = json.loads((GOLDEN / "kimi_linear_tiny/greedy.json").read_text())
    model = load(GOLDEN / "kimi_linear_tiny/checkpoint", dtype="float32")
    sampler = Sampler(model, capacity=64, prefill_chunk=64)
    samples = sampler.generate(golden["prompt_ids"], SamplingParams(max_tokens=20, temperature=0))
    assert [row[0].ids for row in samples] == golden["continuation_ids"]
    steps = load_file(GOLDEN / "kimi_linear_tiny/greedy_logits.safetensors")["step_logits"]
    for b, (sample,) in enumerate(samples):
        official = log_softmax(steps[b])[np.arange(20), sample.ids]
        np.testing.assert_allclose(sample.raw_logprobs, official, atol=5e-5)


@pytest.mark.parametrize("lengths", [(1, 2, 3, 4), (5, 16, 17, 40)])
def test_decoding_rows_of_any_lengths_equals_a_forward_over_the_whole_rows(lengths):
    prompts, adapters = [IDS[:n] for n in lengths], [0, 1, 2, 0]
    params = SamplingParams(max_tokens=20, seed=3, prompt_logprobs=True)
    samples = [row[0] for row in new_sampler().generate(prompts, params, adapters)]
    rows = [p + s.ids for p, s in zip(prompts, samples, strict=True)]
    logits = trainer_logits(shared_model(), rows, adapters, [s.routes for s in samples])
    for b, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        assert len(sample.ids) == 20 and sample.finish_reason == "length" and sample.prompt_tokens == len(prompt)
        np.testing.assert_allclose(sample.raw_logprobs, raw_logprobs(logits[b], prompt, sample.ids), atol=1e-4)
        assert len(sample.prompt_logprobs) == len(prompt) - 1
        np.testing.assert_allclose(sample.prompt_logprobs, raw_logprobs(logits[b], prompt[:1], prompt[1:]), atol=1e-4)


def test_samples_of_a_request_do_not_depend_on_its_neighbours():
    prompts = [IDS[:n] for n in (3, 9, 14, 20)]
    params = [SamplingParams(max_tokens=12, seed=i, temperature=1 + i / 4) for i in range(4)]
    many = new_sampler().generate(prompts, params, [0, 1, 2, 1])
    for i in (0, 3):
        alone = new_sampler().generate([prompts[i]], params[i], [0, 1, 2, 1][i])
        assert_same(alone[0][0], many[i][0])


def test_n_samples_share_one_prefill_and_each_has_its_own_seed(monkeypatch):
    shapes, real = [], sampler_file.prefill

    def spy(graphdef, state, rows, ids, *args, **settings):
        shapes.append(ids.shape)
        return real(graphdef, state, rows, ids, *args, **settings)

    monkeypatch.setattr(sampler_file, "prefill", spy)
    sampler = new_sampler()
    (four,) = sampler.generate([IDS[:14]], SamplingParams(max_tokens=12, seed=7, n=4))
    assert shapes == [(1, 16)]
    assert len({tuple(s.ids) for s in four}) == 4
    (one,) = sampler.generate([IDS[:14]], SamplingParams(max_tokens=12, seed=7, n=1))
    assert_same(one[0], four[0])
    six = sampler.generate([IDS[:14]], SamplingParams(max_tokens=12, seed=7, n=6))[0]  # two batches
    assert [s.ids for s in six[:4]] == [s.ids for s in four] and len({tuple(s.ids) for s in six}) == 6


def test_seeds_are_drawn_anew_for_requests_without_one_and_repeat_with_the_sampler():
    params = SamplingParams(max_tokens=12)
    first, second = (new_sampler(seed=1) for _ in range(2))
    a, b = (first.generate([IDS[:14]], params)[0][0].ids for _ in range(2))
    assert a != b and second.generate([IDS[:14]], params)[0][0].ids == a


def test_stop_ids_end_a_sample_with_the_id_drawn():
    free = new_sampler().generate([IDS[:14]], SamplingParams(max_tokens=12, seed=0))[0][0]
    stop = free.ids[5]
    sample = new_sampler().generate([IDS[:14]], SamplingParams(max_tokens=12, seed=0, stop_ids=(stop, 3)))[0][0]
    at = free.ids.index(stop) + 1
    assert sample.ids == free.ids[:at] and sample.finish_reason == "stop" and len(sample.logprobs) == at
    assert sample.text == tokenizer().decode(free.ids[: at - 1])


@pytest.mark.parametrize("keep_sessions", [False, True])
def test_stop_strings_cut_text_before_them_and_ids_after_the_token_that_completes_them(keep_sessions):
    params = SamplingParams(max_tokens=12, seed=0)
    free = new_sampler().generate([IDS[:14]], params)[0][0]
    pieces = [tokenizer().decode([i]) for i in free.ids]
    stop = pieces[4][-1] + pieces[5][:2]
    text = tokenizer().decode(free.ids)
    sampler = new_sampler()
    stopping = SamplingParams(max_tokens=12, seed=0, stop=(stop, "never"))
    sample = sampler.generate([IDS[:14]], stopping, keep_sessions=keep_sessions)[0][0]
    assert sample.finish_reason == "stop" and sample.text == text[: text.find(stop)]
    n = len(sample.ids)
    assert sample.ids == free.ids[:n] and stop in tokenizer().decode(sample.ids)
    assert stop not in tokenizer().decode(sample.ids[:-1])
    if keep_sessions:
        longer = IDS[:14] + sample.ids + [9, 8]
        resumed = sampler.generate([longer], params)[0][0]
        assert resumed.cached_tokens >= 14 + n - 1
        assert_same(resumed, new_sampler().generate([longer], params)[0][0])


def test_routes_are_kept_by_position_across_resumes_and_replayed_by_a_trainer():
    sampler, params = new_sampler(), SamplingParams(max_tokens=8, seed=4)
    prompts = [IDS[:n] for n in (3, 9, 14, 20)]
    first = [row[0] for row in sampler.generate(prompts, params, keep_sessions=True)]
    prompts = [p + s.ids + IDS[-3:] for p, s in zip(prompts, first, strict=True)]
    second = [row[0] for row in sampler.generate(prompts, params)]
    assert all(s.cached_tokens for s in second)
    rows = [p + s.ids for p, s in zip(prompts, second, strict=True)]
    for row, sample in zip(rows, second, strict=True):
        assert [None if r is None else r.shape for r in sample.routes] == [None, (1, len(row) - 1, 2)]
    routes = [s.routes for s in second]
    logits = trainer_logits(shared_model(), rows, [0] * 4, routes)
    wrong = [tuple(None if r is None else (r + 1) % 4 for r in sample) for sample in routes]
    misrouted = trainer_logits(shared_model(), rows, [0] * 4, wrong)
    for b, (prompt, sample) in enumerate(zip(prompts, second, strict=True)):
        np.testing.assert_allclose(sample.raw_logprobs, raw_logprobs(logits[b], prompt, sample.ids), atol=1e-4)
        assert np.abs(sample.raw_logprobs - raw_logprobs(misrouted[b], prompt, sample.ids)).max() > 1e-2


def test_requests_with_other_settings_lengths_and_contents_compile_nothing():
    sampler = new_sampler()
    params = [SamplingParams(max_tokens=8, seed=i) for i in range(4)]
    for _ in range(2):  # cold, then resumed
        sampler.generate([IDS[i : i + 10] for i in range(4)], params, keep_sessions=True)
        sampler.prefix(IDS[:9])
        sampler.generate([IDS[i : i + 10] for i in range(4)], params, keep_sessions=True)
    compilations.clear()
    other = [
        SamplingParams(max_tokens=3 + 9 * i, temperature=i, top_k=i, top_p=1 - i / 9, min_p=i / 9, stop_ids=(i,))
        for i in range(4)
    ]
    sampler.generate([IDS[i + 5 : 2 * i + 12] for i in range(4)], other, [0, 1, 2, 0], keep_sessions=True)
    sampler.generate([IDS[: 12 + i] for i in range(3)], other[1:], keep_sessions=True)
    assert compilations == []


def test_texts_in_texts_out():
    sampler, prompts, params = new_sampler(), ["abc", "hello", "x", "yz"], SamplingParams(max_tokens=8, seed=0)
    ids = sampler.generate([[*prompt.encode()] for prompt in prompts], params)
    assert sampler.generate_text(prompts, params) == [[tokenizer().decode(s.ids) for s in row] for row in ids]


def test_a_model_that_gives_nan_is_an_error_not_a_sample():
    model = new_model()
    model.model.norm.weight[...] = model.model.norm.weight[...] * np.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        new_sampler(model).generate([IDS[:3]] * 4, SamplingParams(max_tokens=8))


def test_eight_devices_give_the_tokens_of_one():
    """Under mixed adapters, cold, then resumed after the answer and from the same prompt."""
    adapters, params = [0, 1, 2, 0], SamplingParams(max_tokens=8, seed=5, prompt_logprobs=True)
    prompts = [IDS[:n] for n in (20, 9, 14, 3)]
    model, mesh = new_model(), make_mesh(fsdp=2, expert=2, tensor=2)
    state = nnx.state(model)
    nnx.update(model, jax.device_put(state, shardings(state, mesh, TRAIN)))
    kernel = model.lm_head.kernel[...]
    assert len(kernel.sharding.device_set) == 8 and not kernel.sharding.is_fully_replicated
    one, eight = new_sampler(), new_sampler(model)
    with jax.set_mesh(mesh):
        first = [row[0] for row in eight.generate(prompts, params, adapters, keep_sessions=True)]
        again = [row[0] for row in eight.generate(prompts, params, adapters)]
        longer = [p + s.ids + IDS[:5] for p, s in zip(prompts, first, strict=True)]
        resumed = [row[0] for row in eight.generate(longer, params, adapters)]
    assert [s.cached_tokens for s in again] == list(map(len, prompts))
    assert all(s.cached_tokens >= len(p) + 7 for s, p in zip(resumed, prompts, strict=True))
    for rows, samples in ((prompts, first), (prompts, again), (longer, resumed)):
        for expected, sample in zip(one.generate(rows, params, adapters), samples, strict=True):
            assert_same(sample, expected[0], 1e-4)
