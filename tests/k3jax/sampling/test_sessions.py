"""Sessions: what is kept saves work and changes nothing, whatever the adapter, the weights and the room."""

from dataclasses import replace
from os.path import commonprefix

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.cache import Cache, MLAState
from k3jax.model import K3
from k3jax.sampling import Sampler, SamplingParams
from k3jax.sampling.sessions import Session, SessionStore, state_bytes
from k3jax.sampling.steps import Rows, start
from tests.k3jax.sampling.lab import (
    CONFIG,
    IDS,
    LORA,
    assert_same,
    new_adapters,
    new_model,
    new_sampler,
    randomise_adapters,
    shared_model,
)  # fmt: skip


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
        return jax.tree.map(np.asarray, sampler._store._kept[session.key].row)

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
    before = jax.tree.map(np.array, sampler._store._kept[session.key].row)
    sampler.generate([IDS[:21], IDS[:22], IDS[:20], IDS[3:9]], params, keep_sessions=True)
    jax.tree.map(np.testing.assert_array_equal, sampler._store._kept[session.key].row, before)


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


def test_replaced_and_retrained_adapters_get_nothing_of_prompts_that_were_kept():
    adapters, params = new_adapters(), SamplingParams(max_tokens=4, seed=0)
    sampler = new_sampler(adapters.model)

    def cached(adapter):
        samples = sampler.generate([IDS[:30]] * 4, params, [0, adapter, 0, adapter], keep_sessions=True)
        return [row[0].cached_tokens for row in samples]

    assert cached(1) == [0] * 4 and cached(1) == [30] * 4
    randomise_adapters(adapters.model, 0.2)
    assert cached(1) == [30, 0, 30, 0] and cached(1) == [30] * 4
    adapters.remove("one")
    new = adapters.add("one", LORA, seed=7)
    assert cached(new) == [30, 0, 30, 0] and cached(new) == [30] * 4
    assert {(s.adapter, s.version) for s in sampler._store} == {(a, sampler._weights.version(a)) for a in (0, new)}


def test_the_same_prompt_again_is_not_computed_again():
    sampler, params = new_sampler(), SamplingParams(max_tokens=6, seed=0, n=2, prompt_logprobs=True)
    cold = sampler.generate([IDS[:30]], params, keep_sessions=True)[0]
    warm = sampler.generate([IDS[:30]], params)[0]
    assert [s.cached_tokens for s in (*cold, *warm)] == [0, 0, 30, 30]
    for a, b in zip(warm, cold, strict=True):
        assert_same(a, b)
        assert a.prompt_logprobs is not None
    rerouted = [None if r is None else r.shape for r in warm[0].routes or ()]
    assert rerouted == [None if r is None else r.shape for r in cold[0].routes or ()]


@pytest.mark.parametrize("shared", [16, 30, 37])  # in one piece; in two; in three
def test_of_prompts_with_one_beginning_all_but_the_first_two_resume_at_its_end(shared):
    sampler, params = new_sampler(), SamplingParams(max_tokens=6, seed=0, prompt_logprobs=True)
    cached = []
    for tail in range(1, 5):
        prompt = [*IDS[:shared], tail, *IDS[shared : shared + tail]]
        (warm,), (cold,) = (s.generate([prompt], params, keep_sessions=True)[0] for s in (sampler, new_sampler()))
        assert_same(warm, cold)
        cached.append(warm.cached_tokens)
    assert cached == [0, 0, shared, shared]


def test_prompts_of_one_batch_branch_each_at_its_own_place():
    sampler, params = new_sampler(), SamplingParams(max_tokens=4, seed=0)
    sampler.generate([IDS[:50], IDS[4:50]], params, keep_sessions=True)
    prompts = [[*IDS[:20], 1], [*IDS[4:44], 2, 3], [*IDS[:40], 4], [*IDS[:8], 5]]
    cold = sampler.generate(prompts, params, keep_sessions=True)
    branches = sorted(s.tokens for s in sampler._store if s.ids.tolist() in (IDS[:20], IDS[4:44], IDS[:40], IDS[:8]))
    assert branches == [20, 40, 40]  # 8 tokens would save no work
    warm = sampler.generate([[*IDS[:20], 9], [*IDS[4:44], 9], [*IDS[:40], 9], [*IDS[:8], 9]], params)
    assert [row[0].cached_tokens for row in (*cold, *warm)] == [0] * 4 + [20, 40, 40, 0]
    again = new_sampler().generate([[*IDS[:20], 9], [*IDS[4:44], 9], [*IDS[:40], 9], [*IDS[:8], 9]], params)
    for a, b in zip(warm, again, strict=True):
        assert_same(a[0], b[0])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1), st.integers(1, 12)), min_size=3, max_size=6))
@settings(max_examples=10)
def test_whatever_came_before_tokens_are_those_of_a_cold_start(requests):
    sampler, params = new_sampler(), SamplingParams(max_tokens=3, temperature=0)
    for shared, other, more in requests:
        prompt = [*IDS[:shared], *IDS[60 - 12 * other - more : 60 - 12 * other]]
        (sample,) = sampler.generate([prompt], params, keep_sessions=True)[0]
        assert_same(sample, new_sampler().generate([prompt], params)[0][0])


short = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@given(st.lists(st.tuples(short, st.booleans()), max_size=12), short, st.booleans())
@settings(max_examples=60)
def test_the_longest_session_and_the_longest_shared_beginning_are_found(kept, query, logprobs):
    store = SessionStore(100)
    rows = Rows(Cache((), np.zeros(1, np.int32)), np.zeros((1, 1), np.float32))
    sessions = {}
    for adapter in (0, 1):
        for ids, knows in kept[:: adapter + 1]:
            known = np.zeros(len(ids) - 1, np.float32) if knows else None
            session = Session(ids=np.array(ids, np.int32), adapter=adapter, version=3, logprobs=known)
            store.put(session, rows, 0, capacity=1, size=1)
            sessions[adapter, tuple(ids)] = knows or sessions.get((adapter, tuple(ids)), False)
    assert len(store) == store.used == len(sessions)
    ids = np.array(query, np.int32)
    for adapter in (0, 1):
        of = [(i, knows) for (a, i), knows in sessions.items() if a == adapter]
        expected = max((len(i) for i, knows in of if tuple(query[: len(i)]) == i and (knows or not logprobs)), default=0)
        found = store.find(ids, adapter, 3, logprobs)
        assert (found.tokens if found else 0) == expected
        assert store.shared(ids, adapter, 3) == max((len(commonprefix([i, tuple(query)])) for i, _ in of), default=0)
        assert store.find(ids, adapter, 4, False) is None and store.shared(ids, adapter, 4) == 0


def test_nothing_past_its_length_is_kept_of_a_state_whatever_the_room():
    graphdef, state = nnx.split(shared_model())
    rows = jax.tree.map(lambda a: jnp.full(a.shape, 7, a.dtype), start(graphdef, state, batch=2, capacity=64))
    poison = tuple(MLAState(e.latent.at[:, :, 20:].set(np.nan)) if isinstance(e, MLAState) else e for e in rows.cache.layers)
    rows = rows._replace(cache=Cache(poison, jnp.array([5, 20], jnp.int32)))
    store = SessionStore(2**20)
    session = Session(ids=np.zeros(20, np.int32), adapter=0, version=1)
    store.put(session, rows, 1, capacity=32, size=state_bytes(CONFIG, 32))
    assert sum(a.nbytes for a in jax.tree.leaves(store._kept[session.key].row)) == state_bytes(CONFIG, 32) == store.used
    loaded = store.load(session, start(graphdef, state, batch=4, capacity=64), 2)
    assert loaded.cache.length.tolist() == [0, 0, 20, 0] and (np.asarray(loaded.hidden) == [[0], [0], [7], [0]]).all()
    for entry in loaded.cache.layers:
        for a in map(np.asarray, jax.tree.leaves(entry)):
            full = np.moveaxis(a, 1, 0)
            tokens = full[:, :, :20] if isinstance(entry, MLAState) else full
            assert (tokens[2] == 7).all() and (full != 0).sum() == (tokens[2] != 0).sum()


def test_the_least_recently_used_state_makes_room():
    size, params = state_bytes(CONFIG, 64), SamplingParams(max_tokens=2)
    sampler = new_sampler(session_bytes=3 * size + 10)
    for first in range(3):
        sampler.prefix(IDS[first : first + 14])
    sampler.generate([IDS[0:15]], params)  # used last: stays
    sampler.prefix(IDS[3:17])
    cached = [sampler.generate([IDS[i : i + 15]], params)[0][0].cached_tokens for i in range(4)]
    assert cached == [14, 0, 14, 14]
    samples = sampler.generate([IDS[i : i + 9] for i in range(4)], params, keep_sessions=True)
    assert [row[0].session is None for row in samples] == [True, False, False, False]
    held = [a.nbytes for kept in sampler._store._kept.values() for a in jax.tree.leaves(kept.row)]
    assert sum(held) == sampler._store.used == 3 * size


def test_by_default_there_is_room_for_states_of_full_capacity_and_none_is_taken_in_advance():
    sampler = new_sampler()
    assert sampler.session_bytes == 2**27 and sampler._store.used == 0
    config = replace(CONFIG, kda=replace(CONFIG.kda, num_heads=96, head_dim=128), attention=("kda",) * 69 + ("mla",) * 24)
    model = nnx.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0)))
    assert Sampler(model).session_bytes == 8 * state_bytes(config, 64) > 8 * 4.4e8
    for call in (lambda s: s.prefix(IDS[:4]), lambda s: s.generate([IDS[:4]], SamplingParams(max_tokens=1), keep_sessions=True)):
        with pytest.raises(ValueError, match="bytes, more than session_bytes=100. Raise session_bytes"):
            call(new_sampler(session_bytes=100))
