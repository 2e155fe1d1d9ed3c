"""Generation: golden continuations, and the laws that batching, caching, resuming and seeding must keep."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig
from k3jax.linear import LoRAParam
from k3jax.lora import Adapters, LoRAConfig
from k3jax.model import K3
from k3jax.sampling import Sampler, SamplingParams, replay
from k3jax.sampling import sampler as sampler_file
from k3jax.sampling.distribution import Shape, draw, reshape, row_keys
from k3jax.tokenizer import Tokenizer
from k3jax.weights import load

GOLDEN = Path(__file__).parents[1] / "golden"
VOCAB = 512
CONFIG = K3Config(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=32, attention=("kda", "mla"), context_length=64,
    kda=KDAConfig(num_heads=2, head_dim=8, decay_floor=-5.0), init_std=0.3, dtype=jnp.float32, param_dtype=jnp.float32,
    mla=MLAConfig(num_heads=2, q_lora_rank=None, kv_lora_rank=8, nope_dim=8, rope_dim=4, value_dim=8),
    moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16),
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, VOCAB, 64).tolist()

compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **kw: compilations.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
)


LORA = LoRAConfig(rank=2, alpha=4, targets=("attention", "head"))


def new_adapters() -> Adapters:
    """A small model with two adapters, 1 and 2, that change what it says. Made by numpy: nothing is compiled for it."""
    model = nnx.eval_shape(lambda: K3(CONFIG, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, jax.tree.map_with_path(lambda path, a: random(a.shape, 0.3, "norm" in str(path)), state))
    adapters = Adapters(model, columns=4, targets=LORA.targets)
    for seed, name in enumerate(("one", "two")):
        adapters.add(name, LORA, seed=seed)
    randomise_adapters(model, 0.1)
    return adapters


def new_model() -> K3:
    return new_adapters().model


def randomise_adapters(model: K3, std: float) -> None:
    nnx.update(model, jax.tree.map(lambda a: random(a.shape, std), nnx.state(model, LoRAParam)))


def random(shape: tuple[int, ...], std: float, mean: float = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(mean, std, shape).astype(np.float32))


@cache
def shared_model() -> K3:
    return new_model()


def new_sampler(model: K3 | None = None, **settings) -> Sampler:
    settings = {"capacity": 64, "max_batch": 4, "prefill_chunk": 16, "routes": True} | settings
    return Sampler(shared_model() if model is None else model, tokenizer(), **settings)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_ranks({bytes([i]): i for i in range(256)}, {"[BOS]": 256}, bos_token="[BOS]")


@jax.jit
def _forward(graphdef, state, ids, segments, adapters, picks):
    model = nnx.merge(graphdef, state)
    hidden = model(ids, segments, adapters=adapters, picks=picks).hidden
    return model.logits(hidden, model.packing(ids, adapters=adapters))


def trainer_logits(model: K3, rows: list[list[int]], adapters: list[int], routes=None, length: int = 64) -> np.ndarray:
    """Logits [4, length, vocabulary] of one forward over 4 whole rows, without a cache, as a trainer computes them."""
    ids, segments = np.zeros((4, length), np.int32), np.zeros((4, length), np.int32)
    for b, row in enumerate(rows):
        ids[b, : len(row)], segments[b, : len(row)] = row, 1
    graphdef, state = nnx.split(model)
    picks = None if routes is None else replay(routes, length)
    return np.asarray(_forward(graphdef, state, ids, segments, np.array(adapters, np.int32), picks))


def raw_logprobs(logits: np.ndarray, prompt: list[int], ids: list[int]) -> np.ndarray:
    steps = logits[len(prompt) - 1 : len(prompt) - 1 + len(ids)]
    return log_softmax(steps)[np.arange(len(ids)), ids]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_same(a, b, tolerance: float = 1e-5) -> None:
    assert a.ids == b.ids
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance)
    np.testing.assert_allclose(a.raw_logprobs, b.raw_logprobs, atol=tolerance)
    if a.prompt_logprobs is not None and b.prompt_logprobs is not None:
        np.testing.assert_allclose(a.prompt_logprobs, b.prompt_logprobs, atol=tolerance)


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


def test_many_sessions_of_other_lengths_resume_in_one_batch_as_if_cold():
    sampler, adapters = new_sampler(), [0, 1, 2, 0]
    prompts = [IDS[:n] for n in (3, 9, 14, 20)]
    turn = SamplingParams(max_tokens=8, seed=2, prompt_logprobs=True)
    for extra in (1, 2, 17):
        samples = [row[0] for row in sampler.generate(prompts, turn, adapters, keep_sessions=True)]
        kept = [s.session.tokens for s in samples]
        assert kept == [len(p) + len(s.ids) - 1 for p, s in zip(prompts, samples, strict=True)]
        if extra == 17:
            break
        prompts = [p + s.ids + IDS[-extra:] for p, s in zip(prompts, samples, strict=True)]
        resumed = [row[0] for row in sampler.generate(prompts, turn, adapters)]
        cold = [row[0] for row in new_sampler().generate(prompts, turn, adapters)]
        for a, b, tokens in zip(resumed, cold, kept, strict=True):
            assert (a.cached_tokens, b.cached_tokens) == (tokens, 0)
            assert_same(a, b)


def test_a_prefix_serves_prompts_that_add_any_number_of_tokens_and_stays_as_it_was():
    sampler, params = new_sampler(), SamplingParams(max_tokens=6, seed=0, prompt_logprobs=True)
    session = sampler.prefix(IDS[:20], logprobs=True)

    def stored():
        return jax.tree.map(np.asarray, sampler._store.load([session], capacity=64))

    before = stored()
    for added in (1, 2, 0, 1):
        (warm,), (cold,) = (s.generate([IDS[: 20 + added]], params, keep_sessions=True)[0] for s in (sampler, new_sampler()))
        assert warm.cached_tokens == 20 and cold.cached_tokens == 0
        assert_same(warm, cold)
        sampler.flush()
        assert sampler.generate([IDS[: 20 + added]], params)[0][0].cached_tokens == 0
        session = sampler.prefix(IDS[:20], logprobs=True)
        jax.tree.map(np.testing.assert_array_equal, stored(), before)


def test_a_prefix_is_kept_where_the_smallest_batch_has_more_rows_than_one():
    sampler, params = new_sampler(max_batch=8), SamplingParams(max_tokens=4, temperature=0)
    (cold,) = sampler.generate([IDS[:22]], params)[0]
    sampler.prefix(IDS[:20])
    (warm,) = sampler.generate([IDS[:22]], params)[0]
    assert warm.cached_tokens == 20 and warm.ids == cold.ids


def test_a_prefix_without_logprobs_is_not_used_when_they_are_asked_for():
    sampler = new_sampler()
    sampler.prefix(IDS[:20])
    asked = sampler.generate([IDS[:22]], SamplingParams(max_tokens=2, prompt_logprobs=True))[0][0]
    assert asked.cached_tokens == 0 and len(asked.prompt_logprobs) == 21
    assert sampler.generate([IDS[:22]], SamplingParams(max_tokens=2))[0][0].cached_tokens == 20


def test_others_requests_never_write_a_kept_state():
    sampler, params = new_sampler(), SamplingParams(max_tokens=6, seed=0)
    session = sampler.prefix(IDS[:20])
    before = jax.tree.map(np.asarray, sampler._store.load([session], capacity=64))
    sampler.generate([IDS[:21], IDS[:22], IDS[:20], IDS[3:9]], params, keep_sessions=True)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, sampler._store.load([session], capacity=64)), before)


def test_nothing_unwritten_is_ever_read_from_the_store():
    sampler, params = new_sampler(), SamplingParams(max_tokens=6, seed=0)
    sampler.prefix(IDS[:20])
    store = sampler._store
    free = np.array(store._free)
    poison = jax.tree.map(lambda a: a.at[:, free].set(np.nan), store._rows.cache.layers)
    poison = tuple(p if not hasattr(p, "latent") else type(p)(p.latent.at[:, :, 20:].set(np.nan)) for p in poison)
    store._rows = store._rows._replace(cache=type(store._rows.cache)(poison, store._rows.cache.length))
    for ids in (IDS[:25], IDS[5:25]):
        assert_same(sampler.generate([ids], params)[0][0], new_sampler().generate([ids], params)[0][0])


def test_a_prefix_under_one_adapter_does_not_serve_another():
    sampler, params = new_sampler(), SamplingParams(max_tokens=4, seed=0)
    sampler.prefix(IDS[:20], adapter=1)
    cached = [row[0].cached_tokens for row in sampler.generate([IDS[:22]] * 4, params, [0, 1, 2, 1])]
    assert cached == [0, 20, 0, 20]


def test_states_made_by_other_weights_are_dropped():
    model = new_model()
    sampler, params = new_sampler(model), SamplingParams(max_tokens=4, seed=0)
    sampler.prefix(IDS[:20], adapter=0)
    sampler.prefix(IDS[:20], adapter=1)

    def cached():
        return [row[0].cached_tokens for row in sampler.generate([IDS[:22]] * 4, params, [0, 1, 0, 1])]

    assert cached() == [20] * 4
    randomise_adapters(model, 0.2)
    fresh = [row[0] for row in sampler.generate([IDS[:22]] * 4, params, [0, 1, 0, 1])]
    assert [s.cached_tokens for s in fresh] == [20, 0, 20, 0]  # the base model did not change
    other = [row[0] for row in new_sampler(model).generate([IDS[:22]] * 4, params, [0, 1, 0, 1])]
    for a, b in zip(fresh, other, strict=True):
        assert_same(a, b)
    model.lm_head.kernel[...] = model.lm_head.kernel[...] * 0.5
    assert cached() == [0] * 4


def test_an_adapter_in_the_columns_of_a_removed_one_gets_nothing_of_it():
    adapters, params = new_adapters(), SamplingParams(max_tokens=8, seed=0)
    sampler = new_sampler(adapters.model)
    sampler.prefix(IDS[:20], adapter=1)
    before = sampler.generate([IDS[:22]] * 4, params, [0, 1, 2, 1])
    columns = adapters["one"].columns
    adapters.remove("one")
    new = adapters.add("three", LORA)  # its B is zero: it says what the base says
    assert adapters["three"].columns == columns
    after = sampler.generate([IDS[:22]] * 4, params, [0, new, 2, new])
    assert [row[0].cached_tokens for row in after] == [0] * 4
    assert before[1][0].ids != before[0][0].ids
    for row, as_before in zip(after, (0, 0, 2, 0), strict=True):
        assert_same(row[0], before[as_before][0])
    with pytest.raises(ValueError, match="adapter 1, which the model does not have"):
        sampler.generate([IDS[:22]], params, 1)


def test_the_least_recently_used_state_makes_room():
    one = new_sampler()
    one.prefix(IDS[:4])
    size = one.session_bytes // one._store.slots
    sampler, params = new_sampler(session_bytes=3 * size + 10), SamplingParams(max_tokens=2)
    for first in range(3):
        sampler.prefix(IDS[first : first + 14])
    sampler.generate([IDS[0:15]], params)  # used last: stays
    sampler.prefix(IDS[3:17])
    cached = [sampler.generate([IDS[i : i + 15]], params)[0][0].cached_tokens for i in range(4)]
    assert cached == [14, 0, 14, 14]
    samples = sampler.generate([IDS[i : i + 9] for i in range(4)], params, keep_sessions=True)
    assert [row[0].session is None for row in samples] == [True, False, False, False]
    with pytest.raises(ValueError, match="session_bytes=100"):
        new_sampler(session_bytes=100).prefix(IDS[:4])


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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"top_k": -1}, "top_k"), ({"min_p": 2.0}, "min_p"), ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n must"), ({"seed": -1}, "seed"), ({"stop": ("",)}, "stop"), ({"top_logprobs": 21}, "top_logprobs"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(setting, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**({"max_tokens": 4} | setting))


def test_requests_that_cannot_be_served_are_refused_with_the_reason():
    sampler, params = new_sampler(capacity=32), SamplingParams(max_tokens=8)
    for prompts, p, adapters, message in (
        ([[]], params, 0, "Prompt 0 is empty"),
        ([[1], IDS[:25]], params, 0, "Prompt 1 has 25 tokens and max_tokens=8: together more than capacity=32"),
        ([[1, VOCAB]], params, 0, f"token id {VOCAB} is outside"),
        ([[1]], SamplingParams(max_tokens=1, stop_ids=(VOCAB,)), 0, "stop_ids: token id"),
        ([[1]], params, 9, r"adapter 9, which the model does not have; it has \[1, 2\]"),
        ([[1]], [params] * 2, 0, "params must be one for all or one per prompt: got 2 for 1"),
        ([[1]], params, [0, 1], "adapters must be"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.generate(prompts, p, adapters)
    with pytest.raises(ValueError, match="stop strings, which need a tokenizer"):
        Sampler(shared_model()).generate([[1]], SamplingParams(max_tokens=1, stop=("x",)))
    with pytest.raises(ValueError, match="capacity must lie in 2..64"):
        new_sampler(capacity=65)
    with pytest.raises(ValueError, match="max_batch must be a power of two"):
        new_sampler(max_batch=3)


def test_a_model_that_gives_nan_is_an_error_not_a_sample():
    model = new_model()
    model.model.norm.weight[...] = model.model.norm.weight[...] * np.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        new_sampler(model).generate([IDS[:3]] * 4, SamplingParams(max_tokens=8))
