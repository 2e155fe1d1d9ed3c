"""Laws of Kimi Delta Attention, for every implementation: the definition in float64, official outputs."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels.kda import kda, kda_step, kda_transition, shapes
from pallas_kernels.target import target

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "kda_op_cases.json").read_text())
NAMES = ("q", "k", "v", "log_decay", "beta", "state")
# Compiling interpreted kernels takes most of a test's time: test_kda_tpu.py and test_kda_gpu.py have fast tests, of few shapes.
each_impl = pytest.mark.parametrize("impl", [pytest.param("tpu", marks=pytest.mark.slow), "xla", "reference"])


@pytest.fixture(autouse=True)
def interpreted(request):
    """Kernels for other machines run in Pallas's interpreter."""
    impl = request.node.callspec.params.get("impl") if hasattr(request.node, "callspec") else None
    with target(impl, interpret=True) if impl == "tpu" else nullcontext():
        yield


def run(*inputs, impl, **kwargs):
    """`kda`, of heads as large as the implementation takes: their further channels are zeros."""
    K, V = inputs[5].shape[2:]
    more = {"K": -K % 128, "V": -V % 128} if impl == "tpu" else {"K": 0, "V": 0}
    axes = ("K", "K", "V", "K", "", "KV")
    wide = [jnp.pad(x, [(0, 0)] * (x.ndim - len(end)) + [(0, more[a]) for a in end])
            for x, end in zip(inputs, axes, strict=True)]
    o, state = kda(*wide, impl=impl, **kwargs)
    return o[..., :V], state[:, :, :K, :V]


@cache
def forward(impl):
    return jax.jit(partial(run, impl=impl))


@cache
def gradients(impl):
    """(inputs, cotangents of o and of the last state) -> gradients by name of input."""

    def pulled_back(inputs, cotangents, reset=None, start=None):
        _, pull = jax.vjp(lambda *x: run(*x, reset=reset, start=start, impl=impl), *inputs)
        return dict(zip(NAMES, pull(cotangents), strict=True))

    return jax.jit(pulled_back)


def draw(*sizes, **kwargs):
    return shapes.draw(shapes.Shape(*sizes), **kwargs)


def draw_cotangents(inputs, seed=1):
    r = np.random.default_rng(seed)
    return tuple(r.standard_normal(x.shape).astype(np.float32) for x in (inputs[2], inputs[5]))


def recurrence_fp64(inputs, reset=None, cotangents=None):
    """The definition in float64, and its gradients by hand. Returns o, the last state, gradients by name."""
    q, k, v, log_decay, beta, state = (x.astype(np.float64) for x in inputs)
    T = q.shape[1]
    keep = np.ones(q.shape[:2]) if reset is None else 1.0 - reset
    decay = np.exp(log_decay)[..., None] * keep[..., None, None, None]
    before, decayed, error, o = [], [], [], []
    S = state
    for t in range(T):
        before.append(S)
        decayed.append(decay[:, t] * S)
        error.append(v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], decayed[t]))
        S = decayed[t] + np.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error[t])
        o.append(np.einsum("bhk,bhkv->bhv", q[:, t], S))
    o, last = np.stack(o, 1), S
    if cotangents is None:
        return o, last, None
    do, dS = (x.astype(np.float64) for x in cotangents)
    grads = {name: np.zeros_like(x) for name, x in zip(NAMES[:5], (q, k, v, log_decay, beta), strict=True)}
    for t in reversed(range(T)):
        write = beta[:, t, :, None] * error[t]
        after = decayed[t] + np.einsum("bhk,bhv->bhkv", k[:, t], write)
        grads["q"][:, t] = np.einsum("bhkv,bhv->bhk", after, do[:, t])
        dS = dS + np.einsum("bhk,bhv->bhkv", q[:, t], do[:, t])
        dwrite = np.einsum("bhkv,bhk->bhv", dS, k[:, t])
        derror = beta[:, t, :, None] * dwrite
        grads["beta"][:, t] = np.sum(dwrite * error[t], -1)
        grads["v"][:, t] = derror
        grads["k"][:, t] = np.einsum("bhkv,bhv->bhk", dS, write) - np.einsum(
            "bhkv,bhv->bhk", decayed[t], derror
        )
        dS = dS - np.einsum("bhk,bhv->bhkv", k[:, t], derror)
        grads["log_decay"][:, t] = np.sum(dS * decayed[t], -1)
        dS = decay[:, t] * dS
    return o, last, grads | {"state": dS}


def assert_near(got, want, tolerance, absolute=1e-30):
    """got and want: pytrees of arrays; compared leaf by leaf in the relative L2 norm."""
    got, want = jax.tree.leaves_with_path(got), jax.tree.leaves(want)
    for (path, g), w in zip(got, want, strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert g.shape == w.shape and np.isfinite(g).all(), jax.tree_util.keystr(path)
        error = np.linalg.norm(g - w)
        assert error <= tolerance * np.linalg.norm(w) + absolute, f"{jax.tree_util.keystr(path)}: {error}"


def assert_same_bits(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def pad_tokens(inputs, T):
    """Inert tokens on the right, up to T."""
    return (
        tuple(np.pad(x, [(0, 0), (0, T - x.shape[1])] + [(0, 0)] * (x.ndim - 2)) for x in inputs[:5])
        + inputs[5:]
    )


def cut(inputs, begin, end, state=None):
    return tuple(x[:, begin:end] for x in inputs[:5]) + (inputs[5] if state is None else state,)


def by_official_names(case, tensors, impl, shape):
    """The official op around ours: o, last state, log_decay, gradients, from inputs padded to (B, T, H)."""
    B, T, H, _ = tensors["q"].shape
    K, V = tensors["q"].shape[-1], tensors["v"].shape[-1]
    extra = [wide - given for wide, given in zip(shape, (B, T, H), strict=True)]
    token_axes = [(0, n) for n in extra]
    axes = {
        **dict.fromkeys("qkvg", token_axes + [(0, 0)]),
        "beta": token_axes,
        "A_log": [(0, extra[2])],
        "dt_bias": [(0, extra[2] * K)],
        "initial_state": [(0, extra[0]), (0, extra[2]), (0, 0), (0, 0)],
        "cotangent_o": token_axes + [(0, 0)],
    }
    axes["cotangent_state"] = axes["initial_state"]
    given = {"initial_state": np.zeros((B, H, K, V), np.float32), **tensors}
    given = {name: jnp.pad(given[name], widths) for name, widths in axes.items()}
    real = jnp.pad(jnp.ones((B, T, H), bool), token_axes)
    cotangents = given.pop("cotangent_o"), given.pop("cotangent_state")
    gate = partial(official_inputs, real=real, lower_bound=CASES["cases"][case]["lower_bound"])
    inputs, pull = jax.vjp(gate, given)
    o, last = forward(impl)(*inputs)
    by_name = gradients(impl)(inputs, cotangents)
    grads = pull(tuple(by_name[name] for name in NAMES))[0]
    grads = {name: grads[name][tuple(map(slice, x.shape))] for name, x in tensors.items() if name in grads}
    return o[:B, :T, :H], last[:B, :H], inputs[3][:B, :T, :H], grads


@partial(jax.jit, static_argnames="lower_bound")
def official_inputs(x, *, real, lower_bound):
    """From the official op's arguments to those of ours, inert where a token is not real."""
    q, k = (x[n] * jax.lax.rsqrt(jnp.sum(x[n] ** 2, -1, keepdims=True) + 1e-6) for n in "qk")
    z = x["g"] + x["dt_bias"].reshape(x["g"].shape[2:])
    rate = jnp.exp(x["A_log"])[:, None]
    if lower_bound is None:
        log_decay = -rate * jax.nn.softplus(z)
    else:
        log_decay = lower_bound * jax.nn.sigmoid(rate * z)
    log_decay = jnp.where(real[..., None], log_decay, 0)
    beta = jnp.where(real, jax.nn.sigmoid(x["beta"]), 0)
    return q * q.shape[-1] ** -0.5, k, x["v"], log_decay, beta, x["initial_state"]


@cache
def official_tensors(file):
    cases = {}
    for name, x in load_file(GOLDEN / file).items():
        case, tensor = name.split("/")
        cases.setdefault(case, {})[tensor] = x
    return cases


@each_impl
@pytest.mark.parametrize("case", CASES["cases"])
def test_outputs_and_gradients_are_the_official_ones(impl, case):
    facts = CASES["cases"][case]
    tensors = official_tensors(facts["file"])[case]
    shape = {16: (2, 99, 3), 32: (1, 130, 1), 128: (1, 67, 1)}[facts["K"]]
    o, last, log_decay, grads = by_official_names(case, tensors, impl, shape)
    strong = facts["kind"].endswith("extremes") or facts["kind"] in ("softplus_strong", "softplus_mixed")
    assert_near((o, last), (tensors["o"], tensors["final_state"]), 1e-4 if strong else 1e-5)
    assert_near(log_decay, tensors["log_decay"], 1e-6)
    for name, rounding in CASES["measured"][case]["grad_fp32_rel_l2"].items():
        assert_near(
            {name: grads[name]}, {name: tensors[f"grad_{name}"]}, max(1e-4, 20 * rounding), absolute=1e-6
        )


BOUNDS = np.array([-0.5, -1.0, -2.0, -2.5, -3.0, -4.0, -5.0, -50.0, -1e4])


@cache
def constant_decays():
    inputs = draw(len(BOUNDS), 128, 2, 128, 128, log_decay=BOUNDS[:, None, None, None])
    cotangents = draw_cotangents(inputs)
    return inputs, cotangents, recurrence_fp64(inputs, cotangents=cotangents)


@each_impl
def test_any_constant_decay_is_finite_and_exact_in_values_and_gradients(impl):
    inputs, cotangents, want = constant_decays()
    got = (*forward(impl)(*inputs), gradients(impl)(inputs, cotangents))
    for row in range(len(BOUNDS)):
        assert_near(*(jax.tree.map(lambda x: x[row], outputs) for outputs in (got, want)), 5e-6)  # noqa: B023


@each_impl
def test_a_wall_of_decay_between_slow_tokens_costs_no_accuracy(impl):
    decay = np.full((2, 256, 2, 16), -1e-3)
    decay[:, ::7] = -1e4
    decay[1, :, :, ::2] = -80
    inputs = draw(2, 256, 2, 16, 16, log_decay=decay)
    cotangents = draw_cotangents(inputs)
    o, last, grads = recurrence_fp64(inputs, cotangents=cotangents)
    assert_near(forward(impl)(*inputs), (o, last), 2e-6)
    assert_near(gradients(impl)(inputs, cotangents), grads, 5e-6)


@each_impl
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 24, 31, 33, 63, 65])
def test_later_tokens_change_nothing_before_them(impl, T):
    inputs = tuple(np.repeat(x, 4, 0) for x in draw(1, T, 1, 16, 16))
    other = tuple(np.repeat(x, 4, 0) for x in draw(1, T, 1, 16, 16, seed=9))
    first_changed = np.array([T, T - 1, T // 2, T // 3])
    later = np.arange(T) >= first_changed[:, None]
    mixed = tuple(
        np.where(later.reshape(later.shape + (1,) * (x.ndim - 2)), y, x)
        for x, y in zip(inputs[:5], other[:5], strict=True)
    )
    o = forward(impl)(*mixed, inputs[5])[0]
    for row, P in enumerate(first_changed):
        np.testing.assert_array_equal(o[row, :P], o[0, :P])


@each_impl
def test_later_tokens_change_no_gradient_of_what_is_before_them(impl):
    """The loss of row r reads o before token P only: tokens from P on get gradient 0, the others the same, bit for bit."""
    T, first_changed = 65, np.array([65, 64, 33, 31, 17, 16, 15, 1])
    rows = len(first_changed)
    inputs = tuple(np.repeat(x, rows, 0) for x in draw(1, T, 1, 16, 16))
    other = tuple(np.repeat(x, rows, 0) for x in draw(1, T, 1, 16, 16, seed=9))
    do, dstate = draw_cotangents(inputs)
    early = np.arange(T) < first_changed[:, None]
    do, dstate = do * early[..., None, None], 0 * dstate
    mixed = tuple(
        np.where(early.reshape(early.shape + (1,) * (x.ndim - 2)), x, y)
        for x, y in zip(inputs[:5], other[:5], strict=True)
    )
    got = gradients(impl)((*mixed, inputs[5]), (do, dstate))
    assert_same_bits(got, gradients(impl)(inputs, (do, dstate)))
    for name in NAMES[:5]:
        late = np.asarray(got[name])[~early]
        assert not late.any() and np.isfinite(late).all(), name


@each_impl
def test_shifted_gates_stay_near_the_definition(impl):
    shift, bias = (x.ravel()[:, None, None, None] for x in np.meshgrid([-8, -4, 0, 4], [-4, 0, 4]))
    logits = np.random.default_rng(3).standard_normal((12, 128, 2, 16)) + shift + bias
    for log_decay in (-5 / (1 + np.exp(-logits)), -16 * np.logaddexp(0, logits)):
        inputs = draw(12, 128, 2, 16, 16, log_decay=log_decay)
        o, last, _ = recurrence_fp64(inputs)
        got = forward(impl)(*inputs)
        for row in range(12):
            assert_near((got[0][row], got[1][row]), (o[row], last[row]), 2e-6)


SPLITS = np.array([1, 2, 3, 4, 63, 64, 65, 128, 200])


@each_impl
def test_a_sequence_cut_in_two_equals_one_pass(impl):
    rows = len(SPLITS)
    inputs = tuple(np.repeat(x, rows, 0) for x in draw(1, 257, 2, 16, 16))
    o, last = forward(impl)(*inputs)
    padded = pad_tokens(inputs, 257 + 256)
    first = pad_tokens(cut(inputs, 0, 200), 200)
    for x in first[:5]:
        x *= (np.arange(200) < SPLITS[:, None]).reshape(rows, 200, *[1] * (x.ndim - 2))
    o1, state = forward(impl)(*first, start=jnp.zeros(rows, jnp.int32))
    second = [np.stack([row[at : at + 256] for row, at in zip(x, SPLITS, strict=True)]) for x in padded[:5]]
    o2, state = forward(impl)(*second, state, start=jnp.asarray(SPLITS, jnp.int32))
    for row, at in enumerate(SPLITS):
        got = np.concatenate([o1[row, :at], o2[row, : 257 - at]]), state[row]
        assert_near(got, (o[row], last[row]), 1e-6)
        if at % 64 == 0:
            assert_same_bits(got, (o[row], last[row]))


@each_impl
@pytest.mark.parametrize("at", [64, 256])
def test_a_cut_between_chunks_gives_the_same_bits(impl, at):
    inputs = draw(1, 257, 2, 16, 16)
    o, last = forward(impl)(*inputs)
    o1, state = forward(impl)(*cut(inputs, 0, at))
    o2, state = forward(impl)(*cut(inputs, at, 257, state), start=jnp.array([at]))
    assert_same_bits((np.concatenate([o1, o2], 1), state), (o, last))


@each_impl
def test_gradients_with_resets_and_starts_are_those_of_the_definition(impl):
    inputs = draw(3, 130, 2, 16, 32)
    cotangents = draw_cotangents(inputs)
    reset = np.zeros((3, 130), bool)
    reset[0, [0, 1, 5, 64, 100]] = reset[1, [127, 129]] = True
    o, last, grads = recurrence_fp64(inputs, reset, cotangents)
    start = jnp.array([0, 77, 4096 - 3])
    assert_near(forward(impl)(*inputs, reset=reset, start=start), (o, last), 1e-6)
    assert_near(gradients(impl)(inputs, cotangents, reset, start), grads, 2e-6)


@each_impl
def test_packed_sequences_equal_separate_ones_every_time(impl):
    lengths = [1, 130, 1, 64, 1]
    ends = np.cumsum(lengths)
    inputs = draw(1, 197, 2, 16, 16)
    reset = np.zeros((1, 197), bool)
    reset[0, ends[:-1]] = True
    rows = [pad_tokens(cut(inputs, end - n, end), 130) for n, end in zip(lengths, ends, strict=True)]
    state = np.zeros((5, 2, 16, 16), np.float32)
    state[0] = inputs[5]
    o, last = forward(impl)(*(np.concatenate(x) for x in zip(*(row[:5] for row in rows), strict=True)), state)
    packed = forward(impl)(*inputs, reset=reset)
    separate = np.concatenate([o[row, :n] for row, n in enumerate(lengths)])[None], last[-1:]
    assert_near(packed, separate, 1e-6)
    for _ in range(20):
        assert_same_bits(forward(impl)(*inputs, reset=reset), packed)


@each_impl
def test_a_reset_row_does_not_read_its_state(impl):
    inputs = draw(1, 20, 2, 16, 16)
    poisoned = (*inputs[:5], np.full_like(inputs[5], np.nan))
    reset = np.arange(20)[None] == 0
    assert_same_bits(
        forward(impl)(*poisoned, reset=reset), forward(impl)(*inputs[:5], 0 * inputs[5], reset=reset)
    )


@each_impl
def test_inert_tokens_leave_the_state_bit_for_bit(impl):
    q, k, v, log_decay, beta, state = draw(2, 70, 2, 16, 16)
    _, last = forward(impl)(q, 0 * k, v, 0 * log_decay, 0 * beta, state)
    np.testing.assert_array_equal(last, state)
    inputs = (q, k, v, log_decay, beta, state)
    np.testing.assert_array_equal(forward(impl)(*pad_tokens(inputs, 190))[1], forward(impl)(*inputs)[1])


@each_impl
def test_gradients_of_a_padded_batch_are_those_of_the_unpadded(impl):
    inputs = draw(2, 200, 2, 16, 16)
    do, dstate = draw_cotangents(inputs)
    padded = list(pad_tokens(inputs, 256))
    for i in (0, 2):
        padded[i][:, 200:] = draw(2, 56, 2, 16, 16, seed=5)[i]
    want = gradients(impl)(inputs, (do, dstate))
    got = gradients(impl)(tuple(padded), (np.pad(do, [(0, 0), (0, 56), (0, 0), (0, 0)]), dstate))
    assert_near({**{n: got[n][:, :200] for n in NAMES[:5]}, "state": got["state"]}, want, 1e-6)
    assert all(np.isfinite(got[n]).all() for n in NAMES)


@cache
def long_sequences():
    """4096 tokens: a row with decays of all sizes and two that hardly forget."""
    decay = np.full((3, 4096, 2, 16), -1e-4)
    decay[0], decay[1] = draw(1, 4096, 2, 16, 16)[3][0], np.log(0.99992)
    inputs = draw(3, 4096, 2, 16, 16, log_decay=decay)
    return inputs, recurrence_fp64(inputs)[1]


@each_impl
def test_4096_decode_steps_end_in_the_state_of_one_prefill_and_of_8_pieces(impl):
    inputs, exact = long_sequences()
    o, last = forward(impl)(*inputs)
    o_steps, last_steps = decode_all(*inputs)
    state, pieces = inputs[5], []
    for i in range(0, 4096, 512):
        piece, state = forward(impl)(*cut(inputs, i, i + 512, state))
        pieces.append(piece)
    for row in range(3):
        assert_near((last_steps[row], last_steps[row]), (last[row], exact[row]), 1e-5)
        assert_near((o_steps[row], last[row]), (o[row], exact[row]), 1e-5)
    assert_same_bits((np.concatenate(pieces, 1), state), (o, last))


@jax.jit
def decode_all(q, k, v, log_decay, beta, state):
    def token(state, x):
        o, state = kda_step(*x, state)
        return state, o

    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta)]
    state, o = jax.lax.scan(token, state, tokens)
    return jnp.moveaxis(o, 0, 1), state


def transition(impl, inputs, reset=None, start=None):
    """`kda_transition`, of heads as large as the implementation takes."""
    k, v, log_decay, beta = inputs[1:5]
    K, V = inputs[5].shape[2:]
    more = {"K": -K % 128, "V": -V % 128} if impl == "tpu" else {"K": 0, "V": 0}
    k, v, log_decay = (jnp.pad(x, [(0, 0)] * 3 + [(0, more[a])]) for x, a in ((k, "K"), (v, "V"), (log_decay, "K")))
    M, S = kda_transition(k, v, log_decay, beta, reset=reset, start=start, impl=impl)
    return M[:, :, :K, :K], S[:, :, :K, :V]


@each_impl
def test_transitions_of_segments_compose_to_one_pass_in_values_and_gradients(impl):
    inputs = draw(2, 150, 2, 16, 32)
    reset = np.zeros((2, 150), bool)
    reset[1, 97] = True
    cotangents = draw_cotangents(inputs)
    cotangents = 0 * cotangents[0], cotangents[1]
    _, last, want = recurrence_fp64(inputs, reset, cotangents)

    @jax.jit
    def composed(inputs):
        state = inputs[5]
        for begin, end in ((0, 70), (70, 71), (71, 150)):
            M, S = transition(impl, cut(inputs, begin, end), reset[:, begin:end], jnp.full(2, begin))
            state = M @ state + S
        return state

    got, pull = jax.vjp(composed, inputs)
    grads = dict(zip(NAMES, pull(cotangents[1])[0], strict=True))
    assert_near((got, grads), (last, want), 5e-6)


@each_impl
def test_one_step_equals_a_call_with_one_token(impl):
    inputs = draw(3, 1, 2, 16, 32)
    o, last = kda_step(*(x[:, 0] for x in inputs[:5]), inputs[5])
    assert_near((o[:, None], last), forward(impl)(*inputs), 1e-6)


@each_impl
def test_bf16_inputs_are_computed_in_fp32(impl):
    q, k, v, *rest = draw(1, 70, 2, 16, 16)
    narrow = tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    o, last = forward(impl)(*narrow, *rest)
    wide = forward(impl)(*(x.astype(jnp.float32) for x in narrow), *rest)
    assert o.dtype == jnp.bfloat16 and last.dtype == jnp.float32
    assert_near((o, last), (wide[0].astype(jnp.bfloat16), wide[1]), 1e-6)
    step = kda_step(*(x[:, 0] for x in (*narrow, *rest[:2])), rest[2])
    assert step[0].dtype == jnp.bfloat16 and step[1].dtype == jnp.float32


@each_impl
def test_vmap_equals_calls_one_by_one(impl):
    inputs = draw(3, 20, 2, 16, 16)
    got = jax.jit(jax.vmap(partial(run, impl=impl)))(*(x[:, None] for x in inputs))
    assert_near(jax.tree.map(lambda x: x[:, 0], got), forward(impl)(*inputs), 1e-6)


def test_values_and_gradients_need_a_tenth_of_the_memory_of_the_recurrence():
    inputs = draw(1, 1024, 2, 128, 128)
    compiled = [
        gradients(impl).lower(inputs, draw_cotangents(inputs)).compile() for impl in ("xla", "reference")
    ]
    chunked, recurrence = (c.memory_analysis().temp_size_in_bytes for c in compiled)
    assert chunked <= recurrence / 10


def test_batch_and_heads_split_over_devices_without_communication():
    program = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pallas_kernels.kda import kda

def pulled_back(inputs, cotangents):
    return jax.vjp(kda, *inputs)[1](cotangents)

for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (kind, kind))
    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    token = array(2, 80, 4, 16, spec=P("data", None, "tensor"))
    beta, state = array(2, 80, 4, spec=token.sharding.spec), array(2, 4, 16, 16, spec=P("data", "tensor"))
    inputs = token, token, token, token, beta, state
    with jax.set_mesh(mesh):
        text = jax.jit(pulled_back).lower(inputs, (token, state)).compile().as_text()
    found = [op for op in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if op in text]
    assert not found, (kind, found)
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="Choose one of tpu, gpu, xla, reference"):
        kda(*draw(1, 2, 1, 4, 4), impl="cuda")
