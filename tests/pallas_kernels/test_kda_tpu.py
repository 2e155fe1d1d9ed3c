"""Laws of the TPU kernels of Kimi Delta Attention, interpreted: rows of one compiled shape, values and gradients together."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda, tpu_backward, tpu_forward
from pallas_kernels.target import target
from tests.pallas_kernels.test_kda import NAMES, assert_near, assert_same_bits, draw, draw_cotangents, recurrence_fp64

ROWS, T, SIZE = 14, 384, 128
LENGTHS = np.array([1, 2, 15, 16, 17, 24, 31, 33, 63, 64, 65, 127, 257, 384])


@pytest.fixture(autouse=True)
def interpreted(request, monkeypatch):
    """One chunk at a time, which is faster to compile, but for the slow tests."""
    if "slow" not in request.keywords:
        for kernel in (tpu_forward, tpu_backward):
            monkeypatch.setattr(kernel, "ABREAST", 1)
    with target("tpu", interpret=True):
        yield


@partial(jax.jit, static_argnames=("decay_floor",))
def pulled_back(inputs, cotangents, reset, start, *, decay_floor):
    outputs, pull = jax.vjp(lambda *x: kda(*x, reset=reset, start=start, decay_floor=decay_floor, impl="tpu"), *inputs)
    return (*outputs, dict(zip(NAMES, pull(cotangents), strict=True)))


def run(inputs, cotangents=None, reset=None, start=None, decay_floor=-5.0):
    """(o, last state, gradients by name); all absent arguments are given, so that everything here is one program."""
    inputs = tuple(map(jnp.asarray, inputs))
    cotangents = draw_cotangents(inputs) if cotangents is None else cotangents
    reset = jnp.zeros((ROWS, T), bool) if reset is None else jnp.asarray(reset)
    start = jnp.zeros(ROWS, jnp.int32) if start is None else jnp.asarray(start, jnp.int32)
    return pulled_back(inputs, cotangents, reset, start, decay_floor=decay_floor)


@cache
def rows(seed=0):
    return draw(ROWS, T, 1, SIZE, SIZE, seed=seed)


def where_tokens(mask, a, b):
    """Tokens of `a` where mask [ROWS, T], else of `b`; the state of `a`."""
    pairs = zip(a[:5], b[:5], strict=True)
    return (*(np.where(mask.reshape(mask.shape + (1,) * (x.ndim - 2)), x, y) for x, y in pairs), a[5])


def inert(v=0.0):
    q, k, _, log_decay, beta, state = (np.zeros_like(x) for x in rows())
    return q + v, k, np.full_like(rows()[2], v), log_decay, beta, state


def assert_recurrence(inputs, lengths, tolerance, reset=None, decay_floor=-5.0):
    """Row r ends after lengths[r] tokens, and rows of length 0 are left out. Returns (o, last state, gradients by name)."""
    real = np.arange(T) < lengths[:, None]
    do, dstate = draw_cotangents(inputs)
    do = np.where(real[..., None, None], do, 0)
    reset = np.zeros_like(real) if reset is None else reset & real
    got = run(where_tokens(real, inputs, inert(1e4)), (do, dstate), reset, decay_floor=decay_floor)
    for row, length in enumerate(lengths):
        if length:
            at = slice(row, row + 1), slice(length)
            alone = *(x[at] for x in inputs[:5]), inputs[5][at[:1]]
            want = recurrence_fp64(alone, reset[at], (do[at], dstate[at[:1]]))
            grads = {name: got[2][name][at] for name in NAMES[:5]} | {"state": got[2]["state"][at[:1]]}
            assert_near((got[0][at], got[1][at[:1]], grads), want, tolerance, absolute=1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    return got


def test_any_length_gives_values_and_gradients_of_the_recurrence_whatever_the_padding_holds():
    assert_recurrence(rows(), LENGTHS, 5e-6)


BOUNDED = [-0.5, -1.0, -2.0, -2.5, -3.0, -4.0, -5.0]
UNBOUNDED = [*BOUNDED, -8.0, -20.0, -40.0, -60.0]


@pytest.mark.parametrize(
    ("sizes", "decay_floor"),
    [pytest.param(BOUNDED, -5.0, id="bounded"), pytest.param(UNBOUNDED, None, id="unbounded", marks=pytest.mark.slow)],
)
def test_decays_of_any_size_in_values_and_gradients(sizes, decay_floor):
    """Rows of one decay; of walls of it between slow tokens; of fast and slow channels; of decays of all sizes at random."""
    log_decay = np.zeros(rows()[3].shape, np.float32)
    for row, size in enumerate(sizes):
        log_decay[row] = size
    log_decay[-3, ::7] = sizes[-1]
    log_decay[-2, ..., ::2] = sizes[-1]
    log_decay[-1] = sizes[-1] * np.random.default_rng(5).random(log_decay.shape[1:]) ** 4
    inputs = (*rows()[:3], log_decay, *rows()[4:])
    assert_recurrence(inputs, np.full(ROWS, 131), 1e-5, decay_floor=decay_floor)


@pytest.mark.parametrize("decay_floor", [-5.0, None])
def test_slow_decays_add_up_over_tiles(decay_floor):
    """Of a state that nothing is written to: relative to its size, for a long memory multiplies such errors by its length."""
    *tokens, beta, state = inert()
    rates = np.geomspace(1e-8, 1e-2, ROWS).astype(np.float32)
    tokens[3] -= rates[:, None, None, None]
    _, last, _ = run((*tokens, beta, rows()[5]), decay_floor=decay_floor)
    left = rows()[5] * np.exp(-T * rates.astype(np.float64))[:, None, None, None]
    np.testing.assert_allclose(last, left, rtol=1e-5, atol=0)


def test_saturated_gates_and_repeated_keys():
    q, k, v, log_decay, beta, state = (x.copy() for x in rows())
    log_decay[:3] = 0
    beta[:6] = 1
    k[1, 1::2] = k[1, :-1:2]
    k[2:4] = k[2:4, :1]
    assert_recurrence((q, k, v, log_decay, beta, state), np.where(np.arange(ROWS) < 6, 131, 0), 2e-5)


def test_packed_rows_equal_the_recurrence_and_a_row_that_begins_anew_does_not_read_its_state():
    reset = np.random.default_rng(2).random((ROWS, T)) < np.geomspace(0.003, 0.9, ROWS)[:, None]
    reset[0], reset[1] = np.isin(np.arange(T), [1, 131, 132, 196]), False
    reset[2:5, 0] = True
    lengths = np.where(np.arange(ROWS) % 2 == 0, 200, 0)
    got = assert_recurrence(rows(), lengths, 5e-6, reset)
    real = np.arange(T) < lengths[:, None]
    poisoned = (*rows()[:5], np.where((reset & real)[:, 0, None, None, None], np.nan, rows()[5]))
    assert_same_bits(run(where_tokens(real, poisoned, inert(1e4)), reset=reset & real)[:2], got[:2])


def test_later_tokens_change_no_bit_before_them_and_get_no_gradient_from_there():
    first_changed = np.array([1, 2, 15, 16, 17, 24, 31, 33, 63, 64, 65, 127, 257, 384])
    early = np.arange(T) < first_changed[:, None]
    same = tuple(np.repeat(x[:1], ROWS, 0) for x in rows())
    do, dstate = (np.repeat(x[:1], ROWS, 0) for x in draw_cotangents(rows()))
    cotangents = np.where(early[..., None, None], do, 0), 0 * dstate
    a, b = run(same, cotangents), run(where_tokens(early, same, rows(seed=9)), cotangents)
    np.testing.assert_array_equal(np.asarray(a[0])[early], np.asarray(b[0])[early])
    assert_same_bits(a[2], b[2])
    assert not any(np.asarray(b[2][name])[~early].any() for name in NAMES[:5])


def test_a_sequence_cut_anywhere_equals_one_pass_and_between_chunks_bit_for_bit():
    cuts = np.array([1, 2, 3, 4, 16, 63, 64, 65, 127, 128, 129, 200, 256, 383])
    same = tuple(np.repeat(x[:1], ROWS, 0) for x in rows())
    o, last, _ = run(same)
    first = np.arange(T) < cuts[:, None]
    o1, state, _ = run(where_tokens(first, same, inert()))
    moved = [np.stack([np.roll(row, -at, 0) for row, at in zip(x, cuts, strict=True)]) for x in same[:5]]
    second = np.arange(T) < T - cuts[:, None]
    o2, state, _ = run(where_tokens(second, (*moved, state), inert()), start=cuts)
    for row, at in enumerate(cuts):
        got = np.concatenate([o1[row, :at], o2[row, : T - at]]), state[row]
        (assert_same_bits if at % 128 == 0 else partial(assert_near, tolerance=2e-6))(got, (o[row], last[row]))


def test_inert_tokens_leave_the_state_bit_for_bit():
    q, k, v, log_decay, beta, state = rows()
    np.testing.assert_array_equal(run((q, 0 * k, v, 0 * log_decay, 0 * beta, state))[1], state)


@pytest.mark.slow
@pytest.mark.parametrize("decay_floor", [-5.0, None])
@pytest.mark.parametrize("H", [1, 2, 3, 4, 12])
def test_bf16_inputs_and_many_heads_stay_near_the_recurrence(H, decay_floor):
    inputs = draw(2, 200, H, SIZE, SIZE)
    inputs = tuple(jnp.asarray(x, jnp.bfloat16 if i < 3 else jnp.float32) for i, x in enumerate(inputs))
    wide = tuple(np.asarray(x, np.float32) for x in inputs)
    do, dstate = draw_cotangents(wide)
    do = jnp.asarray(do, jnp.bfloat16)
    o, last, grads = pulled_back(inputs, (do, dstate), None, None, decay_floor=decay_floor)
    assert_near((o, last, grads), recurrence_fp64(wide, None, (np.asarray(do, np.float32), dstate)), 6e-3)
    assert last.dtype == grads["log_decay"].dtype == jnp.float32 and o.dtype == grads["q"].dtype == jnp.bfloat16


def test_refused_sizes_are_named():
    with pytest.raises(ValueError, match="head sizes must be multiples of 128, got K=16, V=16"):
        kda(*draw(1, 2, 1, 16, 16), impl="tpu")
    with pytest.raises(ValueError, match="exceed VMEM"):
        kda(*draw(1, 2, 1, 384, 384), impl="tpu")
    with pytest.raises(ValueError, match="all be float32 or all bfloat16"):
        q, k, v, *rest = draw(1, 2, 1, 128, 128)
        kda(jnp.asarray(q, jnp.bfloat16), k, v, *rest, impl="tpu")
