"""The GPU kernels of Kimi Delta Attention: interpreted, against the definition in float64; and lowered for CUDA."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda, shapes
from pallas_kernels.target import target
from tests.pallas_kernels.test_kda import NAMES, draw_cotangents, recurrence_fp64

B, T, K = 8, 130, 128
slow = pytest.mark.slow


def draw(rows=B, tokens=T, **kwargs):
    return shapes.draw(shapes.Shape(rows, tokens, 1, K, K), **kwargs)


@cache
def _compiled(decay_floor):
    def everything(inputs, cotangents, reset, start):
        op = partial(kda, reset=reset, start=start, decay_floor=decay_floor, impl="gpu")
        (o, last), pull = jax.vjp(op, *inputs)
        return {"o": o, "last": last} | dict(zip(NAMES, pull(cotangents), strict=True))

    return jax.jit(everything)


def run(inputs, cotangents=None, *, reset=None, start=None, decay_floor=None, dtype=np.float32, whole=True):
    """o, the last state and all gradients by name. whole: always with resets and starts, so that few programs are compiled."""
    inputs = *(jnp.asarray(x, dtype) for x in inputs[:3]), *inputs[3:]
    do, dstate = draw_cotangents(inputs) if cotangents is None else cotangents
    if whole:
        reset = np.zeros(inputs[4].shape[:2], bool) if reset is None else reset
        start = np.zeros(len(inputs[4]), np.int32) if start is None else start
    with target("gpu", interpret=True):
        return jax.device_get(_compiled(decay_floor)(inputs, (jnp.asarray(do, dtype), dstate), reset, start))


def definition(inputs, cotangents=None, reset=None):
    """The recurrence in float64 and its gradients, by the names of `run`."""
    inputs = tuple(map(np.asarray, inputs))
    o, last, grads = recurrence_fp64(inputs, reset, draw_cotangents(inputs) if cotangents is None else cotangents)
    return {"o": o, "last": last} | grads


def assert_near(got, want, tolerance):
    """In the relative L2 norm of each row of the batch; 1e-8 for what e^-20, which kernels take for less, leaves of a state."""
    for name, exact in want.items():
        for row, (g, w) in enumerate(zip(np.asarray(got[name], np.float64), exact, strict=True)):
            error = np.linalg.norm(g - w)
            assert error <= tolerance * np.linalg.norm(w) + 1e-8, f"{name}, row {row}: {error} of {np.linalg.norm(w)}"


def assert_same_bits(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("tokens", [1, 65, *(pytest.param(n, marks=slow) for n in (15, 16, 17, 33, 63, 64, 127))])
def test_any_number_of_tokens(tokens):
    inputs = draw(1, tokens)
    assert_near(run(inputs, decay_floor=-5.0, whole=False), definition(inputs), 2e-6)


@slow
def test_values_twice_as_wide_as_keys():
    inputs = shapes.draw(shapes.Shape(2, 70, 2, K, 2 * K))
    assert_near(run(inputs, decay_floor=-5.0, whole=False), definition(inputs), 2e-6)


@pytest.mark.parametrize("decay_floor", [None, pytest.param(-5.0, marks=slow)])
def test_decays_of_every_size(decay_floor):
    sizes = np.array([-1e-3, -0.5, -2.5, -5.0] * 2 if decay_floor else [-1e-3, -0.5, -2.5, -5.0, -20.0, -80.0, -1e4, 0.0])
    decay = np.broadcast_to(sizes[:, None, None, None], (B, T, 1, K)).copy()
    decay[-1, ::7], decay[-1, 1::7, :, ::2] = sizes.min(), -1.0  # walls between tokens that hardly decay
    inputs = draw(log_decay=decay)
    assert_near(run(inputs, decay_floor=decay_floor), definition(inputs), 5e-6)


def test_resets_and_starts():
    inputs, reset = draw(), np.zeros((B, T), bool)
    for row, at in enumerate([[0], [1, 2], [16, 17, 40], [63], [64], [65, 129], [0, 1, 5, 100], []]):
        reset[row, at] = True
    start = np.array([0, 1, 63, 64, 77, 4096 - 3, 0, 128 + 62], np.int32)
    got = run(inputs, reset=reset, start=start)
    assert_near(got, definition(inputs, reset=reset), 2e-6)
    assert not got["log_decay"][reset].any()


@pytest.mark.parametrize("decay_floor", [None, pytest.param(-5.0, marks=slow)])
def test_bf16_inputs(decay_floor):
    inputs = draw()
    rounded = *(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in inputs[:3]), *inputs[3:]
    do, dstate = draw_cotangents(inputs)
    got = run(inputs, (do, dstate), decay_floor=decay_floor, dtype=jnp.bfloat16)
    assert {name: got[name].dtype for name in ("o", "q", "v", "last", "log_decay")} == {
        "o": jnp.bfloat16, "q": jnp.bfloat16, "v": jnp.bfloat16, "last": np.float32, "log_decay": np.float32,
    }  # fmt: skip
    do = np.asarray(jnp.asarray(do, jnp.bfloat16), np.float64)
    assert_near(got, definition(rounded, (do, dstate)), 2e-2)


def test_later_tokens_change_no_bit_before_them_and_get_no_gradient():
    """Row r shares its first tokens with row 0, and the loss reads o before them only."""
    first_changed = np.array([T, 129, 65, 64, 63, 17, 16, 1])
    early = (np.arange(T) < first_changed[:, None])[..., None, None]
    inputs, other = (tuple(np.repeat(x, B, 0) for x in draw(1, seed=seed)) for seed in (0, 9))
    mixed = [np.where(early[..., 0] if x.ndim == 3 else early, x, y) for x, y in zip(inputs[:5], other[:5], strict=True)]
    do, dstate = draw_cotangents(inputs)
    loss = do * early, 0 * dstate
    got, want = run((*mixed, inputs[5]), loss), run(inputs, loss)
    for name in ("o", *NAMES[:5]):
        before = early[..., 0] if got[name].ndim == 3 else early
        np.testing.assert_array_equal(got[name] * before, want[name] * before)
        assert name == "o" or not np.any(np.where(before, 0, got[name]))
    assert_same_bits(got["state"], want["state"])


def test_packed_sequences_equal_separate_ones():
    lengths = [1, 60, 1, 64, 4]
    ends = np.cumsum(lengths)
    inputs, reset = draw(1), np.zeros((1, T), bool)
    reset[0, ends[:-1]] = True
    packed = run(tuple(np.repeat(x, B, 0) for x in inputs), reset=np.repeat(reset, B, 0))
    rows = [np.zeros((B, *x.shape[1:]), np.float32) for x in inputs]
    for row, (end, n) in enumerate(zip(ends, lengths, strict=True)):
        for separate, whole in zip(rows[:5], inputs[:5], strict=True):
            separate[row, :n] = whole[0, end - n : end]
    rows[5][0] = inputs[5][0]
    alone = run(tuple(rows))
    for row in range(B):
        assert_same_bits(packed["o"][row], packed["o"][0])
    o = np.concatenate([alone["o"][row, :n] for row, n in enumerate(lengths)])
    assert_near({"o": packed["o"][:1], "last": packed["last"][:1]}, {"o": o[None], "last": alone["last"][4:5]}, 1e-6)


def test_what_no_token_may_read_is_not_read():
    """NaN in the state that a row resets at once, and in the rows before and after; noise in the tokens that pad a row."""
    inputs, padding = draw(), [x.copy() for x in draw(seed=5)]
    for i in (1, 3, 4):
        padding[i][:] = 0
    reset = np.zeros((B, T), bool)
    reset[2, 0] = True
    start = np.full(B, 40, np.int32)
    want = run(inputs, reset=reset, start=start)
    poisoned = [np.where(np.arange(B).reshape(-1, *[1] * (x.ndim - 1)) == 2, x, np.nan) for x in inputs]
    poisoned[5][:] = np.nan
    got = run(poisoned, reset=reset, start=start)
    assert_same_bits({n: got[n][2] for n in got}, {n: want[n][2] for n in want})
    end = slice(100, None)
    cut, padded = ([x.copy() for x in inputs] for _ in range(2))
    for x, y, noise in zip(cut[:5], padded[:5], padding[:5], strict=True):
        x[:, end], y[:, end] = 0, noise[:, end]
    do, dstate = draw_cotangents(inputs)
    do[:, end] = 0
    want, got = run(cut, (do, dstate)), run(padded, (do, dstate))
    assert_same_bits(got["last"], want["last"])
    assert_near({n: got[n][:, :100] for n in NAMES[:5]}, {n: want[n][:, :100].astype(np.float64) for n in NAMES[:5]}, 1e-6)
    assert all(np.isfinite(x).all() for x in got.values())


def test_a_sequence_cut_between_chunks_gives_the_same_bits():
    """Rows cut at 0, 64 and 128: the tail alone, with the state and the start of the cut, against one pass."""
    inputs, ends = draw(), np.array([0, 64, 128, 64, 128, 0, 64, 128])
    whole = run(inputs)
    head = np.arange(T) < ends[:, None]
    first = [np.where(head.reshape(head.shape + (1,) * (x.ndim - 2)), x, 0) for x in inputs[:5]]
    state = run((*first, inputs[5]))["last"]
    tail = [np.zeros_like(x) for x in inputs[:5]]
    for row, end in enumerate(ends):
        for part, x in zip(tail, inputs[:5], strict=True):
            part[row, : T - end] = x[row, end:]
    rest = run((*tail, state), start=ends.astype(np.int32))
    for row, end in enumerate(ends):
        assert_same_bits(rest["o"][row, : T - end], whole["o"][row, end:])
    assert_same_bits(rest["last"], whole["last"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernels_lower_for_cuda_at_the_real_sizes(dtype):
    tokens, beta = jax.ShapeDtypeStruct((1, 1000, 12, K), dtype), jax.ShapeDtypeStruct((1, 1000, 12), jnp.float32)
    decay, state = jax.ShapeDtypeStruct((1, 1000, 12, K), jnp.float32), jax.ShapeDtypeStruct((1, 12, K, K), jnp.float32)
    reset, start = jax.ShapeDtypeStruct((1, 1000), jnp.bool_), jax.ShapeDtypeStruct((1,), jnp.int32)

    def pulled_back(inputs, cotangents, reset, start):
        op = partial(kda, reset=reset, start=start, decay_floor=-5.0, impl="gpu")
        outputs, pull = jax.vjp(op, *inputs)
        return outputs, pull(cotangents)

    card = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")  # without one, newer versions of jax look for a real card
    mesh = jax.sharding.AbstractMesh((1,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=card)
    with target("gpu"), jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(pulled_back).trace((tokens, tokens, tokens, decay, beta, state), (tokens, state), reset, start)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = "reads", "writes", "states", "output", "state_gradients", "value_gradients", "key_gradients"
    assert all(f"kda_{name}" in text for name in kernels)


@pytest.mark.parametrize(
    "sizes, dtypes, reason",
    [
        ((64, 128), ("float32",) * 3, "its tiles are for keys of 128 and values of 128 or 256, got K=64 and V=128"),
        ((128, 192), ("float32",) * 3, "its tiles are for keys of 128 and values of 128 or 256, got K=128 and V=192"),
        ((128, 128), ("float32", "float32", "bfloat16"), "must all be float32 or all bfloat16"),
        ((128, 128), ("float16",) * 3, "must all be float32 or all bfloat16"),
    ],
)
def test_other_heads_and_dtypes_are_refused(sizes, dtypes, reason):
    q, k, v, *rest = shapes.draw(shapes.Shape(1, 2, 1, *sizes))
    given = (jnp.asarray(x, dtype) for x, dtype in zip((q, k, v), dtypes, strict=True))
    with target("gpu"), pytest.raises(ValueError, match=reason):
        kda(*given, *rest, impl="gpu")


def test_states_out_of_reach_of_offsets_are_refused():
    tokens = jax.ShapeDtypeStruct((1, 1 << 18, 96, K), jnp.bfloat16)
    beta, state = jax.ShapeDtypeStruct((1, 1 << 18, 96), jnp.float32), jax.ShapeDtypeStruct((1, 96, K, K), jnp.float32)
    with target("gpu"), pytest.raises(ValueError, match="out of reach of 32-bit offsets: split heads"):
        jax.eval_shape(partial(kda, impl="gpu"), tokens, tokens, tokens, tokens, beta, state)
