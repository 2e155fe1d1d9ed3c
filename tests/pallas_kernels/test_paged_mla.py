"""Laws of attention over paged latents."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_mla import IMPLS, bench, paged_latent_attention, tpu, xla
from pallas_kernels.paged_mla.items import items
from pallas_kernels.target import target

L, R, H, PAGE, PAGES = 128, 64, 3, 64, 5
SCALE = (L + R) ** -0.5
LENGTHS = np.array([0, 1, 3, 64, 65, 128, 200, 320], np.int32)
each_impl = pytest.mark.parametrize("impl", IMPLS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A sequence has up to three blocks of two pages, a block two chunks."""
    monkeypatch.setattr(xla, "KV_BLOCK", 128)
    monkeypatch.setattr(tpu, "BLOCK", 128)


@pytest.fixture(autouse=True)
def interpreted(request):
    """Kernels for other machines run in Pallas's interpreter."""
    impl = request.node.callspec.params.get("impl") if hasattr(request.node, "callspec") else None
    with target(impl, interpret=True) if impl in ("tpu", "gpu") else nullcontext():
        yield


def attend(*x, impl):
    return jax.jit(partial(paged_latent_attention, value_dim=L, scale=SCALE, impl=impl))(*x)


def draw(T=1, seed=0, dtype=jnp.float32, lengths=LENGTHS):
    """Queries, a pool whose pages lie in any order, its table and the lengths."""
    rng = np.random.default_rng(seed)
    B = len(lengths)
    q = rng.normal(size=(B, T, H, L + R))
    pool = rng.normal(size=(B * PAGES + 3, PAGE, L + R))
    table = rng.permutation(B * PAGES).reshape(B, PAGES).astype(np.int32)
    return jnp.asarray(q, dtype), jnp.asarray(pool, dtype), jnp.asarray(table), jnp.asarray(lengths)


def formula(q, pool, table, lengths):
    """Query by query, in float64."""
    q, pool, table = np.asarray(q, np.float64), np.asarray(pool, np.float64), np.asarray(table)
    out = np.zeros((*q.shape[:3], L))
    for b, t, h in np.ndindex(*out.shape[:3]):
        n = int(lengths[b]) - q.shape[1] + t + 1
        if n > 0:
            latent = pool[table[b]].reshape(-1, L + R)[:n]
            score = SCALE * latent @ q[b, t, h]
            prob = np.exp(score - score.max())
            out[b, t, h] = prob @ latent[:, :L] / prob.sum()
    return out


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@each_impl
@pytest.mark.parametrize("T", [1, 5])
def test_attention_over_ragged_lengths_equals_the_formula(T, impl):
    x = draw(T)
    assert_close(attend(*x, impl=impl), formula(*x))


@each_impl
def test_what_unused_pages_and_the_rest_of_a_last_page_hold_changes_no_bit(impl):
    q, pool, table, lengths = draw(T=2)
    used = np.zeros(pool.shape[:2], bool)
    pointed = np.full_like(table, 10**6)
    for b, n in enumerate(LENGTHS):
        pages = -(-n // PAGE)
        pointed[b, :pages] = table[b, :pages]
        for s in range(n):
            used[table[b, s // PAGE], s % PAGE] = True
    poisoned = jnp.where(used[..., None], pool, jnp.nan)
    out = attend(q, poisoned, table, lengths, impl=impl)
    assert np.array_equal(out, attend(q, jnp.where(used[..., None], pool, 0), table, lengths, impl=impl))
    assert np.array_equal(out, attend(q, poisoned, jnp.asarray(pointed), lengths, impl=impl))
    assert np.all(np.isfinite(out)) and not np.any(out[0])


@each_impl
def test_where_pages_lie_in_the_pool_changes_no_bit(impl):
    q, pool, table, lengths = draw()
    order = np.random.default_rng(1).permutation(pool.shape[0])
    where = jnp.asarray(np.argsort(order), jnp.int32)
    assert np.array_equal(
        attend(q, pool[order], where[table], lengths, impl=impl), attend(q, pool, table, lengths, impl=impl)
    )


@each_impl
def test_a_window_equals_its_tokens_one_at_a_time(impl):
    T = 4
    q, pool, table, lengths = draw(T)
    whole = attend(q, pool, table, lengths, impl=impl)
    for t in range(T):
        one = attend(q[:, t : t + 1], pool, table, jnp.maximum(lengths - T + t + 1, 0), impl=impl)
        assert_close(whole[:, t : t + 1], one)


@pytest.mark.parametrize("impl", ["tpu"])
@pytest.mark.parametrize("lengths", [LENGTHS, np.array([320], np.int32), np.array([0], np.int32)], ids=["many", "one", "none"])
def test_split_over_cores_equals_unsplit(lengths, impl, monkeypatch):
    x = draw(T=2, lengths=lengths)
    for cores in (1, 2, 3):
        monkeypatch.setattr(tpu, "_cores", lambda cores=cores: cores)
        assert_close(attend(*x, impl=impl), formula(*x))


@pytest.mark.parametrize("impl", ["tpu"])
def test_lengths_that_are_known_when_traced_give_the_same(impl):
    q, pool, table, lengths = draw()
    known = partial(paged_latent_attention, lengths=LENGTHS, value_dim=L, scale=SCALE, impl=impl)
    assert np.array_equal(jax.jit(known)(q, pool, table), attend(q, pool, table, lengths, impl=impl))


@each_impl
def test_zeros_behind_the_latents_change_nothing(impl):
    q, pool, table, lengths = draw()
    wide = jnp.pad(pool, ((0, 0), (0, 0), (0, 64)))
    assert_close(attend(q, wide, table, lengths, impl=impl), formula(q, pool, table, lengths))


@each_impl
def test_bf16_is_weighed_and_summed_in_fp32(impl):
    x = draw(dtype=jnp.bfloat16)
    out = attend(*x, impl=impl)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), formula(*x), rtol=2**-7, atol=2**-7)


def test_every_token_is_read_once_in_chunks():
    block, queries = 128, 2
    for cores in (1, 2, 3):
        work = items(LENGTHS, queries=queries, block=block, capacity=320, cores=cores)
        left = block + queries - 1 - work.short
        read = {(s, b): min(block, n) for s, b, n in zip(work.sequence, work.block, left, strict=True) if n > 0}
        assert sum(left > 0) == len(read)
        for sequence, length in enumerate(LENGTHS):
            assert sum(n for (s, _), n in read.items() if s == sequence) == length


@pytest.mark.parametrize("name", bench.SIZES)
def test_the_bytes_moved_are_within_the_target_of_the_least(name):
    lengths, queries, heads, page = bench.SIZES[name]
    assert bench.moved(lengths, queries, heads, page) <= 1.15 * bench.least(lengths, queries, heads)[1]


def test_sizes_that_do_not_fit_are_refused_before_mosaic_sees_them():
    q, pool, table, lengths = draw()
    call = partial(paged_latent_attention, value_dim=L, scale=SCALE, impl="tpu")
    with target("tpu"):
        with pytest.raises(ValueError, match="multiple of 64 tokens, got 48"):
            call(q, pool[:, :48], table, lengths)
        with pytest.raises(ValueError, match="multiple of 64 and values a multiple of 128 numbers, got 190 and 128"):
            call(q[..., :190], pool[..., :190], table, lengths)
        with pytest.raises(ValueError, match="1024 at most to fit into VMEM, got 400 x 3"):
            call(jnp.repeat(q, 400, 1), pool, table, lengths)
        with pytest.raises(ValueError, match="must fit into scalar memory"):
            call(q, pool, jnp.tile(table, (1, 10**4)), lengths)
    with pytest.raises(ValueError, match="it is a kernel for tpu, and programs are compiled for cpu here"):
        call(q, pool, table, lengths)
    with pytest.raises(ValueError, match="value_dim=193 must be between 1 and 192, the latent size, and that at most 192"):
        paged_latent_attention(q, pool, table, lengths, value_dim=193, scale=SCALE)


@each_impl
def test_under_vmap_it_is_each_call_alone_whatever_free_pages_hold(impl):
    q, pool, table, lengths = draw(lengths=np.array([65, 1, 2], np.int32))
    pool = pool.at[len(lengths) * PAGES :].set(jnp.nan)
    queries = jnp.stack([q, 2 * q])
    got = jax.vmap(lambda q: attend(q, pool, table, lengths, impl=impl))(queries)
    alone = jnp.stack([attend(q, pool, table, lengths, impl=impl) for q in queries])
    np.testing.assert_allclose(got, alone, rtol=1e-6, atol=1e-6)
