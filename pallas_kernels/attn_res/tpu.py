"""The Attention Residuals mix on TPU: one pass over the sources in use, the norm that follows included.

A grid step holds `rows` tokens of every source in VMEM. Each slot is an operand of its own, so that the index map of one that
is not in use can stay at one place: it is copied once in all, and no work is done for it. In the notation of `xla.py`, with
h the mix rounded to the dtype of the stream, u its norm weight, dy the gradient of y = u h s, s = rsqrt(mean_d h**2 + eps):

    g = s (dy u - h s**2 mean_d(dy u h))          gradient of the mix, from which `xla.py` goes on
    du = sum over tokens of dy h s

The backward computes scores and mix again: it holds the sources anyway, so this moves no byte. The gradient of the blocks
is added in place to that of their later readers, slot by slot, and slots that are not in use are left alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.target import current, why_not_on

LANES = 128
GROUP = 16  # tokens that the inner loops take at once: those of one packed bf16 register
VMEM = 40 * 2**20  # bytes that a kernel may take; every generation has 64 MiB or more


def why_not(
    prefix: Array, blocks: Array, count: Any, weight: Array, norm_weight: Array | None = None, *, eps: float
) -> str | None:
    if reason := why_not_on("tpu"):
        return reason
    if prefix.dtype != blocks.dtype or prefix.dtype not in (jnp.bfloat16, jnp.float32):
        return f"prefix and blocks must both be bf16 or fp32, got {prefix.dtype} and {blocks.dtype}"
    if prefix.shape[-1] % LANES:
        return f"D must be a multiple of {LANES}, got {prefix.shape[-1]}"
    need = _bytes_per_token(blocks.shape[0], prefix.shape[-1], prefix.dtype.itemsize) * GROUP
    if need > VMEM // 2:
        return f"{GROUP} tokens of {blocks.shape[0] + 1} sources of {prefix.shape[-1]} take {need >> 20} MiB of {VMEM >> 20} in VMEM"
    return None


def attn_res(
    prefix: Float[Array, "B T D"],
    blocks: Float[Array, "N B T D"],
    count: int | Int32[Array, ""],
    weight: Float32[Array, " D"],
    *,
    eps: float,
) -> Float[Array, "B T D"]:
    return _mix(eps, prefix, blocks, jnp.asarray(count, jnp.int32), weight, None)[0]


def attn_res_norm(
    prefix: Float[Array, "B T D"],
    blocks: Float[Array, "N B T D"],
    count: int | Int32[Array, ""],
    weight: Float32[Array, " D"],
    norm_weight: Float[Array, " D"],
    *,
    eps: float,
) -> tuple[Float[Array, "B T D"], Float[Array, "N B T D"]]:
    norm_weight = norm_weight.astype(prefix.dtype).astype(jnp.float32)
    return _mix(eps, prefix, blocks, jnp.asarray(count, jnp.int32), weight, norm_weight)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(
    eps: float, prefix: Array, blocks: Array, count: Array, weight: Array, norm_weight: Array | None
) -> tuple[Array, Array]:
    return _forward(eps, prefix, blocks, count, weight, norm_weight), blocks


def _mix_forward(eps: float, *inputs: Any) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    return _mix(eps, *inputs), inputs


def _mix_backward(eps: float, inputs: tuple[Any, ...], grads: tuple[Array, Array]) -> tuple[Any, ...]:
    prefix, blocks, count, weight, norm_weight = inputs
    dprefix, dblocks, dweights = _backward(eps, prefix, blocks, count, weight, norm_weight, *grads)
    return dprefix, dblocks, None, dweights[0], None if norm_weight is None else dweights[1]


_mix.defvjp(_mix_forward, _mix_backward)


def _forward(
    eps: float, prefix: Array, blocks: Array, count: Array, weight: Array, norm_weight: Array | None
) -> Float[Array, "B T D"]:
    N, D = blocks.shape[0], prefix.shape[-1]
    (x,), sources, tokens, rows = _as_rows(prefix, [prefix], blocks)
    weights = [w.reshape(1, D) for w in (weight, norm_weight) if w is not None]
    out = pl.pallas_call(
        partial(_forward_kernel, eps, N, norm_weight is not None),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.shape[0] // rows,),
            in_specs=[*_source_specs(N, rows, D), *(_whole(1, D) for _ in weights)],
            out_specs=_tokens(rows, D),
            scratch_shapes=[_scratch(GROUP, D), *(_scratch(N + 1, GROUP, LANES) for _ in range(3))],
        ),
        compiler_params=_params(N, D, rows, x.dtype),
        interpret=current().interpret,
        name="attn_res_forward" if norm_weight is None else "attn_res_norm_forward",
    )(count.reshape(1), *([sources] * N), x, *weights)
    return out[:tokens].reshape(prefix.shape)


def _backward(
    eps: float, prefix: Array, blocks: Array, count: Array, weight: Array, norm_weight: Array | None, dy: Array, dblocks: Array
) -> tuple[Array, Array, list[Float32[Array, " D"]]]:
    """Gradients of prefix, of blocks added to `dblocks`, and of each weight."""
    N, D = blocks.shape[0], prefix.shape[-1]
    (x, dy), sources, tokens, rows = _as_rows(prefix, [prefix, dy], blocks)
    steps = x.shape[0] // rows
    weights = [w.reshape(1, D) for w in (weight, norm_weight) if w is not None]
    in_slots = [pl.BlockSpec(memory_space=pl.ANY)] * bool(N)
    dprefix, *dweights_dsources = pl.pallas_call(
        partial(_backward_kernel, eps, N, norm_weight is not None),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            *(jax.ShapeDtypeStruct((steps, 1, D), jnp.float32) for _ in weights),
            *[jax.ShapeDtypeStruct(sources.shape, x.dtype)] * bool(N),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[*_source_specs(N, rows, D), *(_whole(1, D) for _ in weights), _tokens(rows, D), *in_slots],
            out_specs=[_tokens(rows, D), *(pl.BlockSpec((None, 1, D), lambda i, count: (i, 0, 0)) for _ in weights), *in_slots],
            scratch_shapes=[
                _scratch(GROUP, D),
                *(_scratch(N + 1, GROUP, LANES) for _ in range(3)),
                *(_scratch(GROUP, D) for _ in weights),
                *[pltpu.VMEM((N, rows, D), x.dtype), pltpu.SemaphoreType.DMA((N, 2))] * bool(N),
            ],
        ),
        input_output_aliases={N + len(weights) + 3: len(weights) + 1} if N else {},
        compiler_params=_params(N, D, rows, x.dtype),
        interpret=current().interpret,
        name="attn_res_backward" if norm_weight is None else "attn_res_norm_backward",
    )(count.reshape(1), *([sources] * N), x, *weights, dy, *[_padded(_flat(dblocks), x.shape[0])] * bool(N))
    dweights = [jnp.sum(dw, (0, 1)) for dw in dweights_dsources[: len(weights)]]
    if N:
        dblocks = dweights_dsources[-1][:, :tokens].reshape(blocks.shape)
    return dprefix[:tokens].reshape(prefix.shape), dblocks, dweights


def _forward_kernel(eps: float, N: int, norm: bool, count_ref: Any, *refs: Any) -> None:
    sources, (weight, *rest) = refs[: N + 1], refs[N + 1 :]
    norm_weight = rest.pop(0) if norm else None
    out, mix, dot, square, prob = rest
    rows, D = out.shape
    count = count_ref[0]

    def group(at: Any) -> None:
        _scores(count, sources, at, weight, dot, square)
        for n, p in enumerate(_softmax(eps, D, count, dot, square)[0]):
            prob[n] = _spread(p)
        _weighted_sum(count, sources, at, prob, mix)
        if norm_weight is None:
            for j in _lanes(D):
                out[at, j] = mix[:, j].astype(out.dtype)
            return
        total = _zeros()
        for j in _lanes(D):
            out[at, j] = mix[:, j].astype(out.dtype)
            h = out[at, j].astype(jnp.float32)
            total += h * h
        s = _spread(jax.lax.rsqrt(_row_sum(total) / D + eps))
        for j in _lanes(D):
            out[at, j] = (_round(out[at, j].astype(jnp.float32) * s, out.dtype) * norm_weight[:, j]).astype(out.dtype)

    _each_group(rows, group)


def _backward_kernel(eps: float, N: int, norm: bool, count_ref: Any, *refs: Any) -> None:
    sources, (weight, *rest) = refs[: N + 1], refs[N + 1 :]
    norm_weight = rest.pop(0) if norm else None
    dy = rest.pop(0)
    slots = rest.pop(0) if N else None
    dprefix, dweight = rest.pop(0), rest.pop(0)
    dnorm_weight = rest.pop(0) if norm else None
    if N:
        slots = rest.pop(0)
    g, dot, square, third, dweight_sum, *rest = rest
    dnorm_weight_sum = rest.pop(0) if norm else None
    buffer, semaphores = rest if N else (None, None)
    rows, D = dprefix.shape
    count = count_ref[0]
    at_tokens = pl.ds(pl.multiple_of(pl.program_id(0) * rows, GROUP), rows)

    def fetch(n: int) -> Any:
        return pltpu.make_async_copy(slots.at[n, at_tokens], buffer.at[n], semaphores.at[n, 0])

    def put(n: int) -> Any:
        return pltpu.make_async_copy(buffer.at[n], slots.at[n, at_tokens], semaphores.at[n, 1])

    def group(at: Any) -> None:
        _scores(count, sources, at, weight, dot, square)
        prob, r = _softmax(eps, D, count, dot, square)
        score = [_row_sum(dot[n]) * r[n] for n in range(N + 1)]
        if norm_weight is None:
            for j in _lanes(D):
                g[:, j] = dy[at, j].astype(jnp.float32)
        else:
            for n, p in enumerate(prob):
                third[n] = _spread(p)
            _weighted_sum(count, sources, at, third, g)
            _norm_gradient(eps, g, dy, at, norm_weight, dnorm_weight_sum)

        def dprob(n: int, source: Any) -> None:
            total = _zeros()
            for j in _lanes(D):
                total += g[:, j] * source[at, j].astype(jnp.float32)
            square[n] = total

        _each_source(count, sources, dprob)
        dp = [jnp.where(n < count, _row_sum(square[n]), 0.0) for n in range(N)] + [_row_sum(square[N])]
        mean = sum((p * d for p, d in zip(prob, dp, strict=True)), jnp.zeros((GROUP, 1), jnp.float32))
        for n in range(N + 1):
            along_weight = prob[n] * (dp[n] - mean) * r[n]
            dot[n], square[n] = _spread(prob[n]), _spread(along_weight)
            third[n] = _spread(along_weight * score[n] * r[n] / D)

        def dsource(n: int, source: Any, out: Any, add: bool) -> None:
            p, along_weight, along_v = dot[n], square[n], third[n]
            for j in _lanes(D):
                v = source[at, j].astype(jnp.float32)
                dv = p * g[:, j] + along_weight * weight[:, j] - along_v * v
                dweight_sum[:, j] += along_weight * v
                out[at, j] = (dv + out[at, j].astype(jnp.float32) if add else dv).astype(out.dtype)

        dsource(N, sources[N], dprefix, False)

        def slot(n: int) -> None:
            dsource(n, sources[n], buffer.at[n], True)

        _each_slot(N, count, slot)

    _each_slot(N, count, lambda n: fetch(n).start())
    dweight_sum[...] = jnp.zeros_like(dweight_sum)
    if norm:
        dnorm_weight_sum[...] = jnp.zeros_like(dnorm_weight_sum)
    _each_slot(N, count, lambda n: fetch(n).wait())
    _each_group(rows, group)
    _each_slot(N, count, lambda n: put(n).start())
    dweight[...] = jnp.sum(dweight_sum[...], 0, keepdims=True)
    if norm:
        dnorm_weight[...] = jnp.sum(dnorm_weight_sum[...], 0, keepdims=True)
    _each_slot(N, count, lambda n: put(n).wait())


def _scores(count: Array, sources: Sequence[Any], at: Any, weight: Any, dot: Any, square: Any) -> None:
    """Sums over D of v weight and v**2, 128 partial ones each."""

    def sums(n: int, source: Any) -> None:
        a = s = _zeros()
        for j in _lanes(source.shape[-1]):
            v = source[at, j].astype(jnp.float32)
            a += v * weight[:, j]
            s += v * v
        dot[n], square[n] = a, s

    _each_source(count, sources, sums)


def _softmax(
    eps: float, D: int, count: Array, dot: Any, square: Any
) -> tuple[list[Float32[Array, "rows 1"]], list[Float32[Array, "rows 1"]]]:
    """Probabilities, 0 for slots not in use, and r."""
    N = dot.shape[0] - 1
    r = [jax.lax.rsqrt(_row_sum(square[n]) / D + eps) for n in range(N + 1)]
    score = [_row_sum(dot[n]) * r[n] for n in range(N + 1)]
    score = [jnp.where(n < count, s, -jnp.inf) if n < N else s for n, s in enumerate(score)]
    r = [jnp.where(n < count, x, 0.0) if n < N else x for n, x in enumerate(r)]
    top = score[N]
    for s in score[:N]:
        top = jnp.maximum(top, s)
    weight = [jnp.exp(s - top) for s in score]
    total = sum(weight[:N], weight[N])
    return [w / total for w in weight], r


def _weighted_sum(count: Array, sources: Sequence[Any], at: Any, prob: Any, mix: Any) -> None:
    """mix = sum_n prob_n v_n."""
    D = mix.shape[-1]
    N = len(sources) - 1

    def add(n: int, first: bool) -> None:
        p = prob[n]
        for j in _lanes(D):
            term = p * sources[n][at, j].astype(jnp.float32)
            mix[:, j] = term if first else mix[:, j] + term

    add(N, True)
    _each_slot(N, count, lambda n: add(n, False))


def _norm_gradient(eps: float, mix: Any, dy: Any, at: Any, norm_weight: Any, dnorm_weight: Any) -> None:
    """Replaces the mix by its gradient, and adds that of norm_weight, in GROUP parts."""
    D = mix.shape[-1]
    square = along = _zeros()
    for j in _lanes(D):
        h = _round(mix[:, j], dy.dtype)
        square += h * h
        along += dy[at, j].astype(jnp.float32) * norm_weight[:, j] * h
    s = _spread(jax.lax.rsqrt(_row_sum(square) / D + eps))
    along = _spread(_row_sum(along) / D) * s * s
    for j in _lanes(D):
        d, h = dy[at, j].astype(jnp.float32), _round(mix[:, j], dy.dtype)
        dnorm_weight[:, j] += d * _round(h * s, dy.dtype)
        mix[:, j] = s * (d * norm_weight[:, j] - h * along)


def _row_sum(x: Float32[Array, "rows lanes"]) -> Float32[Array, "rows 1"]:
    return jnp.sum(x, -1, keepdims=True)


def _spread(x: Float32[Array, "rows 1"]) -> Float32[Array, "rows lanes"]:
    return jnp.broadcast_to(x, (GROUP, LANES))


def _zeros() -> Float32[Array, "rows lanes"]:
    return jnp.zeros((GROUP, LANES), jnp.float32)


def _round(x: Float32[Array, "*S"], dtype: Any) -> Float32[Array, "*S"]:
    return x.astype(dtype).astype(jnp.float32)


def _lanes(D: int) -> list[slice]:
    return [slice(j, j + LANES) for j in range(0, D, LANES)]


def _each_group(rows: int, body: Callable[[Any], None]) -> None:
    if rows == GROUP:
        return body(slice(None))

    def step(i: Array, carry: None) -> None:
        body(pl.ds(pl.multiple_of(i * GROUP, GROUP), GROUP))

    jax.lax.fori_loop(0, rows // GROUP, step, None)


def _each_slot(N: int, count: Array, f: Callable[[int], None]) -> None:
    for n in range(N):
        pl.when(n < count)(partial(f, n))


def _each_source(count: Array, sources: Sequence[Any], f: Callable[[int, Any], None]) -> None:
    N = len(sources) - 1
    _each_slot(N, count, lambda n: f(n, sources[n]))
    f(N, sources[N])


def _as_rows(
    prefix: Array, per_token: Sequence[Array], blocks: Array
) -> tuple[list[Float[Array, "R D"]], Float[Array, "N R D"], int, int]:
    """Tokens of all batch rows in one axis, a multiple of a step's; the true number of tokens; tokens of a step."""
    N, B, T, D = blocks.shape
    tokens = B * T
    padded = -(-tokens // GROUP) * GROUP
    rows = GROUP
    while padded % (2 * rows) == 0 and 2 * rows * _bytes_per_token(N, D, prefix.dtype.itemsize) <= VMEM // 2 and padded > 4 * rows:
        rows *= 2
    return [_padded(_flat(x), padded) for x in per_token], _padded(_flat(blocks), padded), tokens, rows


def _flat(x: Float[Array, "*N B T D"]) -> Float[Array, "*N R D"]:
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def _padded(x: Float[Array, "*N R D"], rows: int) -> Float[Array, "*N P D"]:
    more = rows - x.shape[-2]
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, more), (0, 0)]) if more else x


def _bytes_per_token(N: int, D: int, itemsize: int) -> int:
    """VMEM of the backward: windows in two buffers, the slots' gradients, the mix in fp32, three scratches per source."""
    return (2 * (N + 3) + N) * D * itemsize + 4 * D + 3 * 4 * LANES * (N + 1)


def _source_specs(N: int, rows: int, D: int) -> list[pl.BlockSpec]:
    def slot(n: int) -> pl.BlockSpec:
        def index(i: Array, count: Any) -> tuple[Any, Any, int]:
            used = n < count[0]
            return jnp.where(used, n, 0), jnp.where(used, i, 0), 0

        return pl.BlockSpec((None, rows, D), index)

    return [*map(slot, range(N)), _tokens(rows, D)]


def _tokens(rows: int, D: int) -> pl.BlockSpec:
    return pl.BlockSpec((rows, D), lambda i, count: (i, 0))


def _whole(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda i, count: (0,) * len(shape))


def _scratch(*shape: int) -> Any:
    return pltpu.VMEM(shape, jnp.float32)


def _params(N: int, D: int, rows: int, dtype: Any) -> Any:
    return pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM)
