"""Laws of decode with Kimi Delta Attention, for every implementation: the definition in float64, idle slots, prefill, drafted
windows of any acceptance."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.conv1d import conv1d
from pallas_kernels.kda import kda
from pallas_kernels.kda_decode import IMPLS, VERIFY_IMPLS, Pool, Projected, Weights, kda_decode, kda_verify
from pallas_kernels.kda_decode.shapes import Shape, draw
from pallas_kernels.target import target

each_impl = pytest.mark.parametrize("impl", IMPLS)
each_floor = pytest.mark.parametrize("floor", [-5.0, None], ids=["k3", "kimi_linear"])
K = 128
EPS = 1e-5


@pytest.fixture(autouse=True)
def kernels_run_interpreted(request):
    impl = getattr(request.node, "callspec", None) and request.node.callspec.params.get("impl")
    with target("gpu" if impl == "gpu" else "tpu", interpret=True):
        yield


@cache
def decode(impl, floor=-5.0):
    return jax.jit(partial(kda_decode, decay_floor=floor, eps=EPS, impl=impl))


@cache
def verify(impl, floor=-5.0):
    return jax.jit(partial(kda_verify, decay_floor=floor, eps=EPS, impl=impl))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def decode_fp64(x, weights, pool, slots, floor, narrow=lambda a: a):
    """The definition in float64; `narrow` rounds what leaves the convolution and what is read from the state."""
    x, weights, pool = (type(a)(*(np.array(b, np.float64) for b in a)) for a in (x, weights, pool))
    H = pool.states.shape[1]
    y = np.zeros(x.gate.shape)
    for n, slot in enumerate(slots):
        if slot < 0:
            continue
        taps = np.concatenate([pool.windows[slot], np.stack([x.q[n], x.k[n], x.v[n]])[:, None]], axis=1)
        pool.windows[slot] = taps[:, 1:]
        u = np.sum(taps[:, -weights.conv.shape[1] :] * weights.conv, axis=1)
        q, k, v = narrow(u * sigmoid(u)).reshape(3, H, K)
        q, k = (a / np.sqrt(np.sum(a * a, -1, keepdims=True) + 1e-6) for a in (q, k))
        z = (x.decay[n] + weights.dt_bias).reshape(H, K)
        rate = np.exp(weights.A_log)[:, None]
        log_decay = -rate * np.logaddexp(0, z) if floor is None else floor * sigmoid(rate * z)
        S = np.exp(log_decay)[..., None] * pool.states[slot]
        error = v - np.einsum("hk,hkv->hv", k, S)
        S = S + np.einsum("h,hk,hv->hkv", sigmoid(x.beta[n]), k, error)
        pool.states[slot] = S
        o = narrow(np.einsum("hk,hkv->hv", q * K**-0.5, S))
        o = o / np.sqrt(np.mean(o * o, -1, keepdims=True) + EPS) * weights.o_norm
        y[n] = o.reshape(-1) * sigmoid(x.gate[n])
    return y, pool


def verify_fp64(x, before, accepted, weights, pool, slots, floor):
    """One token at a time: the accepted ones of `before` into the pool, then the drafted ones into a copy of it."""
    token = lambda a, t: Projected(*(np.array(b)[:, t] for b in a))  # noqa: E731
    for t in range(before.q.shape[1]):
        _, pool = decode_fp64(token(before, t), weights, pool, np.where(t < accepted, slots, -1), floor)
    ys, drafted = [], pool
    for t in range(x.q.shape[1]):
        y, drafted = decode_fp64(token(x, t), weights, drafted, slots, floor)
        ys.append(y)
    return np.stack(ys, axis=1), pool


def assert_near(got, want, tolerance=1e-6):
    """Pytrees of arrays, leaf by leaf in the relative L2 norm."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert g.shape == w.shape and np.isfinite(g).all()
        assert np.linalg.norm(g - w) <= tolerance * np.linalg.norm(w) + 1e-30


def assert_same_bits(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def cast(x, pool, dtype):
    """Activations and windows in another dtype; the state and the weights stay in fp32."""
    narrow = partial(jnp.asarray, dtype=dtype)
    return Projected(*map(narrow, x)), Pool(pool.states, narrow(pool.windows))


SLOTS = np.array([-1, 7, 3, 12, -1, -1, 0, 5, 11, -1, 2], np.int32)


@each_impl
@each_floor
def test_every_row_takes_one_step_of_the_definition(impl, floor):
    x, weights, pool = draw(Shape(N=11, H=2, slots=13))
    got = decode(impl, floor)(x, weights, pool, SLOTS)
    assert_near(got, decode_fp64(x, weights, pool, SLOTS, floor))


@each_impl
@pytest.mark.parametrize("shape", [Shape(N=1, H=1, slots=1), Shape(N=8, H=3, slots=8), Shape(N=17, H=4, slots=20, W=3)])
def test_any_number_of_rows_and_heads(impl, shape):
    x, weights, pool = draw(shape)
    slots = np.random.default_rng(1).permutation(shape.slots)[: shape.N].astype(np.int32)
    got = decode(impl)(x, weights, pool, slots)
    assert_near(got, decode_fp64(x, weights, pool, slots, -5.0))


@each_impl
def test_bf16_rounds_what_leaves_the_convolution_and_the_state_and_nothing_else(impl):
    x, weights, pool = draw(Shape(N=11, H=2, slots=13))
    x, pool = cast(x, pool, jnp.bfloat16)
    y, new = decode(impl)(x, weights, pool, SLOTS)
    narrow = lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)  # noqa: E731
    want_y, want = decode_fp64(x, weights, pool, SLOTS, -5.0, narrow)
    assert y.dtype == new.windows.dtype == jnp.bfloat16 and new.states.dtype == jnp.float32
    assert_near(y, want_y, 3e-3)
    assert_near(new.states, want.states, 1e-5)  # a convolution that lies between two numbers of bf16 may round to either
    assert_same_bits(np.asarray(new.windows, np.float64), want.windows)


@each_impl
@pytest.mark.parametrize("shift", [-8, -4, 0, 4])
@pytest.mark.parametrize("bias", [-4, 0, 4])
def test_saturated_decays(impl, shift, bias):
    x, weights, pool = draw(Shape(N=11, H=2, slots=13))
    x, weights = x._replace(decay=x.decay + shift), weights._replace(dt_bias=weights.dt_bias + bias)
    for floor in (-5.0, None):
        got = decode(impl, floor)(x, weights, pool, SLOTS)
        assert_near(got, decode_fp64(x, weights, pool, SLOTS, floor))


@each_impl
def test_idle_rows_and_slots_without_a_row_are_untouched_and_leak_nothing(impl):
    x, weights, pool = draw(Shape(N=11, H=2, slots=13))
    idle = SLOTS < 0
    unused = np.setdiff1d(np.arange(13), SLOTS)
    clean = decode(impl)(x, weights, pool, SLOTS)
    for a in x:
        a[idle] = np.nan
    for a in pool:
        a[unused] = np.nan
    y, new = decode(impl)(x, weights, pool, SLOTS)
    assert_same_bits(y, clean[0])
    assert not np.any(np.asarray(y)[idle])
    used = SLOTS[~idle]
    for a, before, want in zip(new, pool, clean[1], strict=True):
        assert_same_bits(np.asarray(a)[unused], before[unused])
        assert_same_bits(np.asarray(a)[used], np.asarray(want)[used])


@each_impl
def test_nothing_happens_when_all_rows_are_idle(impl):
    x, weights, pool = draw(Shape(N=11, H=2, slots=13))
    y, new = decode(impl)(x, weights, pool, np.full(11, -1, np.int32))
    assert not np.any(y)
    assert_same_bits(new, pool)


@each_impl
def test_a_row_does_not_depend_on_its_slot_nor_on_the_rows_beside_it(impl):
    x, weights, pool = draw(Shape(N=11, H=2, slots=13))
    y, new = decode(impl)(x, weights, pool, SLOTS)
    order = np.random.default_rng(2).permutation(11)
    moved = np.random.default_rng(3).permutation(13)  # slot s lies at moved[s]
    away = Pool(*(a[np.argsort(moved)] for a in pool))
    slots = np.where(SLOTS < 0, -1, moved[SLOTS])[order].astype(np.int32)
    y2, new2 = decode(impl)(Projected(*(a[order] for a in x)), weights, away, slots)
    assert_same_bits(y2, np.asarray(y)[order])
    assert_same_bits(Pool(*(np.asarray(a)[moved] for a in new2)), new)


@each_impl
@each_floor
def test_steps_from_nothing_equal_the_prefill_of_the_sequence(impl, floor):
    """Prompts of 0 to 3 tokens before: the first taps reach behind the begin of the sequence."""
    T, H = 9, 2
    x, weights, _ = draw(Shape(N=11, H=H, slots=13), T)
    pool = Pool(np.zeros((13, H, K, K), np.float32), np.zeros((13, 3, 3, H * K), np.float32))
    want_y, want = prefill(x, weights, floor)
    step = decode(impl, floor)
    for t in range(T):
        y, pool = step(Projected(*(a[:, t] for a in x)), weights, pool, SLOTS)
        rows = SLOTS >= 0
        assert_near(np.asarray(y)[rows], np.asarray(want_y)[rows, t], 3e-6)
    got = Pool(*(np.asarray(a)[SLOTS[rows]] for a in pool))
    assert_near(got, Pool(*(np.asarray(a)[rows] for a in want)), 2e-6)


@partial(jax.jit, static_argnums=2)
def prefill(x: Projected, weights: Weights, floor: float | None):
    """The layer's ops over whole sequences: [N, T, ...] -> y, the last states and windows."""
    N, T, HK = x.q.shape
    H = HK // K
    zeros = jnp.zeros((N, weights.conv.shape[1] - 1, HK), x.q.dtype)
    mixed = [conv1d(u, w.T, zeros, impl="xla") for u, w in zip(x[:3], weights.conv, strict=True)]
    # XLA may leave out a rounding that a widening follows, but not this one.
    bits = jnp.finfo(x.q.dtype)
    q, k, v = (jax.lax.reduce_precision(u.astype(jnp.float32), bits.nexp, bits.nmant).reshape(N, T, H, K) for u, _ in mixed)
    q, k = (a * jax.lax.rsqrt(jnp.sum(a * a, -1, keepdims=True) + 1e-6) for a in (q, k))
    z = (x.decay.astype(jnp.float32) + weights.dt_bias).reshape(N, T, H, K)
    rate = jnp.exp(weights.A_log)[:, None]
    log_decay = -rate * jax.nn.softplus(z) if floor is None else floor * jax.nn.sigmoid(rate * z)
    beta = jax.nn.sigmoid(x.beta.astype(jnp.float32))
    o, states = kda(q * K**-0.5, k, v, log_decay, beta, jnp.zeros((N, H, K, K)), impl="xla")
    o = o.astype(jnp.float32)
    o = o * jax.lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + EPS) * weights.o_norm
    y = o.reshape(N, T, HK) * jax.nn.sigmoid(x.gate.astype(jnp.float32))
    return y.astype(x.gate.dtype), Pool(states, jnp.stack([window for _, window in mixed], axis=1))


@each_impl
def test_4096_steps_with_slow_decay_and_bf16_activations_equal_one_prefill(impl):
    """Neither beta nor a decay of 0.9999 is rounded on its way into the state."""
    T, shape = 4096, Shape(N=1, H=1, slots=2)
    x, weights, pool = draw(shape, T)
    x = x._replace(decay=np.full_like(x.decay, -11), beta=0.5 + 0 * x.beta)  # -5 sigmoid(-11) = -8e-5
    weights = weights._replace(A_log=np.zeros(1, np.float32), dt_bias=0 * weights.dt_bias)
    x, pool = cast(x, Pool(*(0 * a for a in pool)), jnp.bfloat16)
    _, want = prefill(x, weights, -5.0)

    @jax.jit
    def steps(x, pool):
        def step(pool, token):
            return kda_decode(token, weights, pool, jnp.ones(1, jnp.int32), decay_floor=-5.0, eps=EPS, impl=impl)[::-1]

        return jax.lax.scan(step, pool, Projected(*(jnp.moveaxis(a, 1, 0) for a in x)))[0]

    got = steps(x, pool)
    assert_near(got.states[1:], want.states, 1e-5)
    assert_same_bits(got.windows[1:], want.windows)


@each_impl
def test_a_pool_may_keep_one_input_more_than_the_convolution_needs(impl):
    x, weights, pool = draw(Shape(N=8, H=3, slots=8))
    longer = pool._replace(windows=np.concatenate([pool.windows[:, :, :1], pool.windows], axis=2))
    slots = np.arange(8, dtype=np.int32)
    y, new = decode(impl)(x, weights, longer, slots)
    assert_near((y, new), decode_fp64(x, weights, longer, slots, -5.0))


@pytest.mark.slow
def test_rows_that_come_in_parts_on_tpu():
    """The second part, and the end of the first, are idle but for one row."""
    x, weights, pool = draw(Shape(N=70, H=1, slots=70))
    slots = np.where((np.arange(70) < 40) | (np.arange(70) == 67), np.arange(70)[::-1], -1).astype(np.int32)
    assert_near(decode("tpu")(x, weights, pool, slots), decode_fp64(x, weights, pool, slots, -5.0))


DRAFTED = Shape(N=5, H=2, slots=7)
ROWS = np.array([-1, 6, 0, 3, 1], np.int32)


@each_impl
@each_floor
def test_drafted_windows_of_any_acceptance_equal_one_token_at_a_time(impl, floor):
    """Rows accept none to all of three tokens, in four calls; a token that is not accepted may be any number."""
    x, weights, pool = draw(DRAFTED, 3)
    pool = pool._replace(windows=np.concatenate([pool.windows[:, :, :1], pool.windows], axis=2))
    before, accepted = Projected(*(0 * a for a in x)), np.zeros(5, np.int32)
    want = pool
    for call in range(4):
        y, pool = verify(impl, floor)(x, before, accepted, weights, pool, ROWS)
        want_y, want = verify_fp64(x, before, accepted, weights, want, ROWS, floor)
        assert_near(y, want_y)
        assert_near(pool, want)
        accepted = ((np.arange(5) + call) % 4).astype(np.int32)
        rejected = np.arange(3) >= accepted[:, None]
        before = Projected(*(np.where(rejected[..., None], 1e3 * a, a) for a in x))
        x = draw(DRAFTED, 3, seed=call + 1)[0]


@each_impl
@pytest.mark.parametrize("T, R", [(1, 8), pytest.param(8, 1, marks=pytest.mark.slow)])
def test_windows_of_different_lengths(impl, T, R):
    x, weights, pool = draw(Shape(N=2, H=1, slots=2), T)
    before = draw(Shape(N=2, H=1, slots=2), R, seed=1)[0]
    accepted, slots = np.array([R, 0], np.int32), np.array([1, 0], np.int32)
    got = verify(impl)(x, before, accepted, weights, pool, slots)
    assert_near(got, verify_fp64(x, before, accepted, weights, pool, slots, -5.0))


@each_impl
def test_a_window_leaves_no_trace_of_idle_rows_of_slots_without_a_row_and_of_rejected_tokens(impl):
    x, weights, pool = draw(DRAFTED, 3)
    pool = pool._replace(windows=np.concatenate([pool.windows[:, :, :1], pool.windows], axis=2))
    before = draw(DRAFTED, 3, seed=1)[0]
    accepted = np.array([2, 0, 1, 2, 3], np.int32)
    clean = verify(impl)(x, before, accepted, weights, pool, ROWS)
    unused = np.setdiff1d(np.arange(7), ROWS)
    for a in x:
        a[0] = np.nan
    for a in before:
        a[0] = np.nan
        a[np.arange(3) >= accepted[:, None]] = 1e3
    for a in pool:
        a[unused] = np.nan
    y, new = verify(impl)(x, before, accepted, weights, pool, ROWS)
    assert_same_bits(y, clean[0])
    assert not np.any(np.asarray(y)[0])
    for a, poisoned, want in zip(new, pool, clean[1], strict=True):
        assert_same_bits(np.asarray(a)[unused], poisoned[unused])
        assert_same_bits(np.asarray(a)[ROWS[1:]], np.asarray(want)[ROWS[1:]])
    assert_same_bits(np.asarray(new.states)[ROWS[1]], pool.states[ROWS[1]])  # nothing accepted


@pytest.mark.slow
@each_impl
def test_bf16_windows_equal_bf16_tokens_one_at_a_time(impl):
    """Up to where a number that lies between two of bf16 is rounded."""
    x, weights, pool = draw(DRAFTED, 3)
    x, pool = cast(x, pool._replace(windows=np.concatenate([pool.windows[:, :, :1], pool.windows], axis=2)), jnp.bfloat16)
    before, _ = cast(draw(DRAFTED, 3, seed=1)[0], pool, jnp.bfloat16)
    accepted = np.array([0, 3, 2, 1, 0], np.int32)
    y, new = verify(impl)(x, before, accepted, weights, pool, ROWS)
    token = lambda a, t: Projected(*(b[:, t] for b in a))  # noqa: E731
    for t in range(3):
        _, pool = decode("reference")(token(before, t), weights, pool, np.where(t < accepted, ROWS, -1))
    want, drafted = [], pool
    for t in range(3):
        out, drafted = decode("reference")(token(x, t), weights, drafted, ROWS)
        want.append(out)
    assert y.dtype == new.windows.dtype == jnp.bfloat16
    assert_near(y, np.stack(want, axis=1), 4e-3)
    assert_near(new.states, pool.states, 1e-4)
    assert_same_bits(np.asarray(new.windows, np.float32), np.asarray(pool.windows, np.float32))


@each_impl
def test_beta_is_a_sigmoid_in_fp32(impl):
    x, weights, pool = draw(Shape(N=1, H=1, slots=1))
    x, pool = cast(x._replace(beta=np.full((1, 1), 0.5)), Pool(*(0 * a for a in pool)), jnp.bfloat16)
    _, new = decode(impl)(x, weights, pool, np.zeros(1, np.int32))
    mixed = jax.nn.silu(jnp.stack([x.k, x.v]).astype(jnp.float32) * weights.conv[1:, -1:]).astype(jnp.bfloat16)
    k, v = np.asarray(mixed, np.float64)[:, 0]
    k /= np.sqrt(np.sum(k * k) + 1e-6)
    written = np.vdot(np.outer(k, v), np.asarray(new.states, np.float64)[0, 0]) / np.vdot(np.outer(k, v), np.outer(k, v))
    assert written == pytest.approx(0.6224593, abs=1e-6)


def test_sizes_that_the_kernel_cannot_take_are_named():
    x, weights, pool = draw(Shape(N=1, H=1, slots=1, K=64))
    with pytest.raises(ValueError, match="128 channels, got 64"):
        decode("tpu")(x, weights, pool, np.zeros(1, np.int32))
    with target("cpu"), pytest.raises(ValueError, match="kernel for tpu"):
        decode("tpu")(x, weights, pool, np.zeros(1, np.int32))
    x, weights, pool = draw(Shape(N=1, H=1, slots=1), 9)
    with pytest.raises(ValueError, match="1 to 8 tokens, got 9 and 9"):
        verify("tpu")(x, x, np.zeros(1, np.int32), weights, pool, np.zeros(1, np.int32))


def test_both_ops_have_the_same_implementations():
    assert list(IMPLS) == list(VERIFY_IMPLS)
