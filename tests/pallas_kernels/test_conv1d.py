"""Laws of the short convolution, for every implementation: the definition in float64, official outputs."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from pallas_kernels.conv1d import conv1d, tpu
from pallas_kernels.target import target

GOLDEN = Path(__file__).parents[1] / "golden"
each_impl = pytest.mark.parametrize("impl", ["xla", "reference"])  # laws of the TPU kernel: at the end
W = 4


@cache
def forward(impl):
    return jax.jit(partial(conv1d, impl=impl))


@cache
def gradients(impl):
    """(inputs, cotangents of y and of the window) -> gradients of x, weight and window."""

    def pulled_back(inputs, cotangents, reset=None, lengths=None):
        return jax.vjp(lambda *x: conv1d(*x, reset=reset, lengths=lengths, impl=impl), *inputs)[1](cotangents)

    return jax.jit(pulled_back)


def draw(B, T, D=8, seed=0):
    r = np.random.default_rng(seed)
    return tuple(r.standard_normal(shape).astype(np.float32) for shape in ((B, T, D), (D, W), (B, W - 1, D)))


def convolve_fp64(x, weight, window):
    """One sequence, [T, D]: y and the pre-activation's taps [T, W, D]."""
    inputs = np.concatenate([window, x]).astype(np.float64)
    taps = np.stack([inputs[t : t + W] for t in range(len(x))])
    z = np.einsum("twd,dw->td", taps, weight.astype(np.float64))
    return z / (1 + np.exp(-z)), inputs[len(x) :]


def assert_close(got, want, tolerance=1e-6):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), got, want)


def assert_same_bits(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@each_impl
def test_outputs_and_windows_are_the_official_ones(impl):
    with safe_open(GOLDEN / "component_ops.safetensors", "np") as file:
        names = ("x", "weight", "out", "final_state", "state_after_2", "state_after_11")
        x, weight, out, final, after_2, after_11 = (file.get_tensor(f"short_conv/{name}") for name in names)
    zeros = np.zeros((x.shape[0], W - 1, x.shape[2]), np.float32)
    for T, state in ((19, final), (2, after_2), (11, after_11)):
        y, window = forward(impl)(x[:, :T], weight[:, 0], zeros)
        assert_close(y, out[:, :T])
        np.testing.assert_array_equal(window, state.swapaxes(1, 2)[:, 1:])


@each_impl
@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (4,), (1, 2, 3, 4, 5), (7,)])
def test_pieces_equal_one_call(impl, cuts):
    x, weight, window = draw(2, 9)
    whole = forward(impl)(x, weight, window)
    ys = []
    for begin, end in zip((0, *cuts), (*cuts, 9), strict=True):
        y, window = forward(impl)(x[:, begin:end], weight, window)
        ys.append(y)
    assert_close((np.concatenate(ys, 1), window), whole)
    np.testing.assert_array_equal(window, whole[1])


@each_impl
def test_prompts_of_1_to_4_tokens_then_5_single_steps_equal_one_call(impl):
    lengths = np.array([1, 2, 3, 4])
    x, weight, window = draw(4, 9)
    zeros = np.zeros_like(window)
    y, window = forward(impl)(x[:, :4], weight, zeros, lengths=lengths)
    for row, length in enumerate(lengths):
        want, _ = convolve_fp64(x[row, : length + 5], weight, zeros[row])
        steps, last = [y[row, :length]], window[row : row + 1]
        for t in range(length, length + 5):
            step, last = forward(impl)(x[row : row + 1, t : t + 1], weight, last)
            steps.append(step[0])
        assert_close(np.concatenate(steps), want)
        np.testing.assert_array_equal(last[0], x[row, length + 2 : length + 5])


@each_impl
def test_short_continuations_of_a_cached_prefix_equal_cold_runs_and_leave_the_snapshot_alone(impl):
    x, weight, window = draw(3, 66)
    x[:, :64] = x[:1, :64]
    zeros = np.zeros_like(window)
    _, snapshot = forward(impl)(x[:, :64], weight, zeros)
    stored = np.array(snapshot)
    lengths = np.array([1, 2, 0])
    cold_y, cold_window = forward(impl)(x, weight, zeros, lengths=64 + lengths)
    for _ in range(2):
        y, last = forward(impl)(x[:, 64:], weight, snapshot, lengths=lengths)
        for row, length in enumerate(lengths):
            assert_close(y[row, :length], cold_y[row, 64 : 64 + length])
        assert_same_bits(last, cold_window)
        assert_same_bits(last[2], stored[2])
        assert_same_bits(snapshot, stored)


@each_impl
def test_packed_sequences_equal_separate_ones_in_values_and_window(impl):
    sequences = [1, 2, 6, 1, 3, 2]
    ends = np.cumsum(sequences)
    x, weight, window = draw(1, 15)
    reset = np.zeros((1, 15), bool)
    reset[0, ends[:-1]] = True
    y, last = forward(impl)(x, weight, window, reset=reset)
    want = []
    for n, end in zip(sequences, ends, strict=True):
        rows = convolve_fp64(x[0, end - n : end], weight, window[0] if end == n else np.zeros_like(window[0]))
        want.append(rows[0])
    assert_close((y[0], last[0]), (np.concatenate(want), rows[1]))


@each_impl
@pytest.mark.parametrize("lengths", [(0, 1, 2, 3, 9)])
def test_a_reset_in_the_padding_counts_for_nothing(impl, lengths):
    x, weight, window = draw(5, 9)
    reset = np.arange(9) >= np.array(lengths)[:, None]
    _, last = forward(impl)(x, weight, window, reset=reset, lengths=np.array(lengths))
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(
            last[row], np.concatenate([window[row], x[row]])[length : length + W - 1]
        )


@each_impl
def test_nothing_leaks_over_a_reset(impl):
    x, weight, window = draw(1, 9)
    x[:, :5] = window[:] = np.nan
    reset = np.arange(9)[None] == 5
    y, last = forward(impl)(x, weight, window, reset=reset)
    assert np.isfinite(y[:, 5:]).all() and np.isfinite(last).all()


@each_impl
def test_gradients_are_those_of_finite_differences_with_resets_and_lengths(impl):
    inputs = draw(2, 11)
    r = np.random.default_rng(2)
    dy, dwindow = (r.standard_normal(a.shape).astype(np.float32) for a in (inputs[0], inputs[2]))
    lengths, reset = np.array([11, 2]), np.zeros((2, 11), bool)
    reset[0, [0, 4, 5, 10]] = True
    dy[1, 2:] = 0

    def value(x, weight, window):
        total = 0.0
        for row, length in enumerate(lengths):
            begins = sorted({0, *np.flatnonzero(reset[row, :length]), length})
            for begin, end in zip(begins[:-1], begins[1:], strict=True):
                before = np.zeros_like(window[row]) if reset[row, begin] else window[row]
                y, last = convolve_fp64(x[row, begin:end], weight, before)
                total += np.sum(y * dy[row, begin:end])
            total += np.sum(last * dwindow[row])
        return total

    got = gradients(impl)(inputs, (dy, dwindow), reset, lengths)
    for n, array in enumerate(inputs):
        want = np.zeros(array.shape)
        for at in np.ndindex(array.shape):
            moved = [np.array(a, np.float64) for a in inputs]
            moved[n][at] += 1e-5
            above = value(*moved)
            moved[n][at] -= 2e-5
            want[at] = (above - value(*moved)) / 2e-5
        assert_close(got[n], want, 2e-5)


@each_impl
def test_the_weight_gradient_of_a_batch_is_that_of_its_rows_packed(impl):
    x, weight, window = draw(2, 10)
    dy, dwindow = np.ones_like(x), np.zeros_like(window)
    rows = gradients(impl)((x, weight, 0 * window), (dy, dwindow), None, None)
    reset = (np.arange(20) == 10)[None]
    flat = (x.reshape(1, 20, -1), weight, 0 * window[:1])
    packed = gradients(impl)(flat, (dy.reshape(1, 20, -1), dwindow[:1]), reset, None)
    assert_close(rows[1], packed[1], 1e-5)
    assert_close(rows[0], packed[0].reshape(x.shape), 1e-5)


@each_impl
def test_bf16_sums_in_fp32_and_returns_bf16(impl):
    x, weight, window = draw(2, 9)
    narrow = jnp.asarray(x, jnp.bfloat16), weight, jnp.asarray(window, jnp.bfloat16)
    y, last = forward(impl)(*narrow)
    wide, _ = forward(impl)(*(jnp.asarray(a, jnp.float32) for a in narrow))
    assert y.dtype == last.dtype == jnp.bfloat16
    assert_same_bits(y, wide.astype(jnp.bfloat16))


@each_impl
def test_a_narrow_window_does_not_round_the_row_s_own_taps(impl):
    x, weight, window = draw(1, 9)
    y, last = forward(impl)(x, weight, jnp.asarray(0 * window, jnp.bfloat16))
    assert last.dtype == jnp.bfloat16
    assert_close(y, forward(impl)(x, weight, 0 * window)[0])


def sequences(reset, length):
    """Begin and end of each sequence in a row."""
    begins = sorted({0, *np.flatnonzero(reset[:length]), length})
    return zip(begins[:-1], begins[1:], strict=True)


def packed(T, B=2, D=128):
    """Inputs, and resets in the first tokens, around the border of two tiles and elsewhere."""
    reset = np.random.default_rng(4).random((B, T)) < 0.05
    reset[:, 0], reset[0, [1, 2]] = [True, False], True
    reset[1, 126:130:2] = True
    return draw(B, T, D), reset


@pytest.mark.parametrize("T", [64, 128, 131, 300])
def test_the_tpu_kernel_equals_the_definition_over_packed_rows(T):
    (x, weight, window), reset = packed(T)
    lengths = np.array([T, T - 5])
    with target("tpu", interpret=True):
        y, last = forward("tpu")(x, weight, window, reset=reset, lengths=lengths)
    for row, length in enumerate(lengths):
        for begin, end in sequences(reset[row], length):
            before = np.zeros_like(window[row]) if reset[row, begin] else window[row]
            want, state = convolve_fp64(x[row, begin:end], weight, before)
            assert_close(y[row, begin:end], want, 2e-6)
        np.testing.assert_array_equal(last[row], state.astype(np.float32))


@pytest.mark.parametrize("T", [64, 131])
@pytest.mark.parametrize("with_resets", [True, False])
def test_gradients_of_the_tpu_kernel_are_those_of_the_reference(T, with_resets):
    inputs, reset = packed(T)
    reset = reset if with_resets else None
    r = np.random.default_rng(5)
    cotangents = tuple(r.standard_normal(a.shape).astype(np.float32) for a in (inputs[0], inputs[2]))
    want = gradients("reference")(inputs, cotangents, reset)
    with target("tpu", interpret=True):
        got = gradients("tpu")(inputs, cotangents, reset)
    assert_close(got[0], want[0], 5e-6)
    assert_close(got[1], want[1], 1e-4)  # a sum over all tokens
    assert_close(got[2], want[2], 5e-6)


def test_the_tpu_kernel_sums_in_fp32_and_lets_nothing_over_a_reset():
    (x, weight, window), _ = packed(150)
    reset = np.arange(150)[None] == np.array([[129], [2]])
    x[0, :129] = x[1, :2] = window[:] = np.nan
    narrow = jnp.asarray(x, jnp.bfloat16), weight, jnp.asarray(window, jnp.bfloat16)
    with target("tpu", interpret=True):
        y, last = forward("tpu")(*narrow, reset=reset)
    wide, _ = forward("reference")(*(jnp.asarray(a, jnp.float32) for a in narrow), reset=reset)
    assert y.dtype == last.dtype == jnp.bfloat16
    for row, begin in ((0, 129), (1, 2)):
        got, want = (np.asarray(a[row, begin:], np.float32) for a in (y, wide))
        np.testing.assert_allclose(got, want, rtol=2**-8)


def test_the_tpu_kernel_says_what_it_cannot_take():
    x, weight, window = draw(1, 128, D=128)
    assert "kernel for tpu" in tpu.why_not(x, weight, window)
    with target("tpu"):
        assert tpu.why_not(x, weight, window) is None
        assert "multiple of 128" in tpu.why_not(x[..., :8], weight[:8], window[..., :8])
        assert "mostly padding with T=1" in tpu.why_not(x[:, :1], weight, window)
        assert "bf16 or fp32" in tpu.why_not(x, weight, jnp.asarray(window, jnp.bfloat16))
