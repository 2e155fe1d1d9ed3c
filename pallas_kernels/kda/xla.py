"""Kimi Delta Attention in chunks of tokens, in plain XLA, with a backward pass that recomputes each chunk.

Within a chunk (G sums log_decay over its tokens; P_t decays from its begin to token t, X_s from s to its end)

    L_ts = sum_d k_td k_sd e^(G_td - G_sd)  (t > s),   A_ts the same with q_t  (t >= s)
    w = (I + diag(beta) L)^-1 diag(beta) (v - (k P) S)
    o = (q P) S + A w;   S <- diag(P_last) S + (k X)' w

e^(G_t - G_s) is never formed from cumulative sums. A pair t > s is split at the middle of the smallest
aligned block of 2, 4, 8 ... tokens that holds both: t decays from the middle, s up to the middle. Each is
one sum of log decays, all of one sign: nothing overflows and nothing cancels, whatever the decay, and
log2(C) masked products cover every pair. The same blocks invert I + diag(beta) L by halves, without the
powers of L, which grow where keys repeat.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.kda.grid import on_grid

FORGET = -1e30  # stands for -inf in sums of log decays, where 0 * inf would be NaN


def why_not(*args: Array, **kwargs: Array | None) -> str | None:
    return None


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float32[Array, "B T H K"],
    beta: Float32[Array, "B T H"],
    state: Float32[Array, "B H K V"],
    *,
    reset: Bool[Array, "B T"] | None = None,
    start: Int32[Array, " B"] | None = None,
    decay_floor: float | None = None,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """See `pallas_kernels.kda.kda`. A reset is a decay to nothing, `start` adds inert tokens, `decay_floor` is not needed."""
    if not v.size:
        return jnp.zeros_like(v), state
    C = _chunk_size(q.shape[-1])
    if reset is not None:
        log_decay = jnp.where(reset[:, :, None, None], FORGET, log_decay)
        state = jnp.where(reset[:, 0, None, None, None], 0, state)
    tokens, off_grid = on_grid((q, k, v, log_decay, beta), start, C)
    o, state = _chunks(tokens, state)
    return off_grid(o), state


def _chunk_size(K: int) -> int:
    """Tokens per chunk, a divisor of 64; bench.py says why these."""
    return 32 if K >= 64 else 16


@jax.custom_vjp
def _chunks(tokens: list[Array], state: Array) -> tuple[Array, Array]:
    """Whole chunks, one after the other. tokens: q, k, v, log_decay, beta, each [B, T, H, ...]."""
    return _chunks_forward(tokens, state)[0]


def _chunks_forward(
    tokens: list[Array], state: Array
) -> tuple[tuple[Array, Array], tuple[list[Array], Float32[Array, "N B H K V"]]]:
    """(o, last state), and what the backward needs: the inputs and the state before each chunk."""
    C = _chunk_size(tokens[0].shape[-1])

    def chunk(carry, i):
        state, o = carry
        q, k, v, log_decay, beta = _cut(tokens, i, C)
        o_chunk, after = _chunk(q, k, v, log_decay, beta, state)
        return (after, *_paste([o], [o_chunk], i, C)), state

    steps = jnp.arange(tokens[0].shape[1] // C)
    (last, o), states = lax.scan(chunk, (state, jnp.zeros_like(tokens[2])), steps)
    return (o, last), (tokens, states)


def _chunks_backward(
    saved: tuple[list[Array], Array], cotangents: tuple[Array, Array]
) -> tuple[list[Array], Array]:
    tokens, states = saved
    do, dstate = cotangents
    C = _chunk_size(tokens[0].shape[-1])

    def chunk(carry, i_and_state):
        dstate, grads = carry
        i, state = i_and_state
        q, k, v, log_decay, beta, do_chunk = _cut([*tokens, do], i, C)
        chunk_grads, dstate = _chunk_pullback(q, k, v, log_decay, beta, state, do_chunk, dstate)
        return (dstate, _paste(grads, chunk_grads, i, C)), None

    carry = dstate, [jnp.zeros_like(x) for x in tokens]
    (dstate, grads), _ = lax.scan(chunk, carry, (jnp.arange(len(states)), states), reverse=True)
    return grads, dstate


_chunks.defvjp(_chunks_forward, _chunks_backward)


def _cut(arrays: list[Array], i: Int32[Array, ""], C: int) -> list[Float32[Array, "B H C ..."]]:
    """Chunk i of each [B, T, H, ...], as [B, H, C, ...] in fp32."""
    chunks = [lax.dynamic_slice_in_dim(x, i * C, C, axis=1) for x in arrays]
    return [jnp.moveaxis(x, 2, 1).astype(jnp.float32) for x in chunks]


def _paste(arrays: list[Array], chunks: list[Array], i: Int32[Array, ""], C: int) -> list[Array]:
    """The inverse of `_cut`: writes chunk i of each array."""
    chunks = [jnp.moveaxis(x, 1, 2).astype(whole.dtype) for x, whole in zip(chunks, arrays, strict=True)]
    return [lax.dynamic_update_slice_in_dim(a, x, i * C, axis=1) for a, x in zip(arrays, chunks, strict=True)]


@cache
def _levels(C: int) -> tuple[Float32[np.ndarray, "sums C C"], Bool[np.ndarray, "levels C C"]]:
    """Which tokens' log decays each token sums, and which pairs (t, s) each level of blocks covers.

    The last two sums are those of P (from the chunk's begin) and X (to its end), of which no pair is made.
    """
    t, s = np.arange(C)[:, None], np.arange(C)
    sums, pairs = [], []
    for half in 2 ** np.arange(C.bit_length() - 1):
        middle = t // (2 * half) * (2 * half) + half
        sums.append(np.where(t >= middle, (middle <= s) & (s <= t), (t < s) & (s < middle)))
        pairs.append((t >= middle) & (s < middle) & (s >= middle - half))
    sums += [s <= t, s > t]
    return np.stack(sums).astype(np.float32), np.stack(pairs)


_matmul = partial(jnp.einsum, precision="highest")
_ab = partial(_matmul, "bhij,bhjk->bhik")
_abt = partial(_matmul, "bhij,bhkj->bhik")
_atb = partial(_matmul, "bhji,bhjk->bhik")


def _decays(log_decay: Float32[Array, "B H C K"]) -> list[Float32[Array, "B H C K"]]:
    """e^(each of the sums of `_levels`)."""
    C = log_decay.shape[2]
    sums = _levels(C)[0]
    decays = jnp.exp(_ab(_per_head(sums.reshape(-1, C), log_decay), jnp.maximum(log_decay, FORGET)))
    return jnp.split(decays, len(sums), axis=2)


def _per_head(
    matrix: Float32[np.ndarray, "I J"], like: Float32[Array, "B H ..."]
) -> Float32[Array, "B H I J"]:
    """A constant for each head of `like`, sharded alike: XLA multiplies batches faster than it copies."""
    return jnp.zeros_like(like[:, :, :1, :1]) + matrix


def _products(q: Array, k: Array, beta: Array, decays: list[Array]) -> tuple[Array, Array, Array]:
    """L, A and the inverse of I + diag(beta) L, each [B, H, C, C]."""
    C = q.shape[2]
    pairs = _levels(C)[1]
    L = A = jnp.zeros((), q.dtype)
    for decay, mask in zip(decays, pairs, strict=True):
        rows = jnp.concatenate([q * decay, k * decay], axis=2)
        product = _abt(rows, rows[:, :, C:])
        A += jnp.where(mask, product[:, :, :C], 0)
        L += jnp.where(mask, product[:, :, C:], 0)
    A += jnp.sum(q * k, axis=-1, keepdims=True) * jnp.eye(C)
    L_beta = beta[..., None] * L
    inverse = jnp.eye(C) - jnp.where(pairs[0], L_beta, 0)
    for mask in pairs[1:]:
        inverse -= _ab(inverse, _ab(jnp.where(mask, L_beta, 0), inverse))
    return L, A, inverse


def _chunk(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Float32[Array, "B H C V"], Float32[Array, "B H K V"]]:
    """o and the next state from one chunk, [B, H, C, ...] in fp32."""
    C = q.shape[2]
    *decays, P, X = _decays(log_decay)
    _, A, inverse = _products(q, k, beta, decays)
    read = _ab(jnp.concatenate([q * P, k * P], axis=2), state)
    w = _ab(inverse, beta[..., None] * (v - read[:, :, C:]))
    return read[:, :, :C] + _ab(A, w), P[:, :, -1, :, None] * state + _atb(k * X, w)


def _chunk_pullback(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, do: Array, dnext: Array
) -> tuple[list[Float32[Array, "B H C ..."]], Float32[Array, "B H K V"]]:
    """Gradients of q, k, v, log_decay, beta and of the state, from those of o and of the next state."""
    C = q.shape[2]
    sums, pairs = _levels(C)
    *decays, P, X = _decays(log_decay)
    L, A, inverse = _products(q, k, beta, decays)
    qP, kP, kX = q * P, k * P, k * X
    error = v - _ab(kP, state)
    w = _ab(inverse, beta[..., None] * error)

    dw = _atb(A, do) + _ab(kX, dnext)
    dwrite = _atb(inverse, dw)  # of beta * error
    dv = beta[..., None] * dwrite
    dread = jnp.concatenate([do, -dv], axis=2)
    dstate = P[:, :, -1, :, None] * dnext + _atb(jnp.concatenate([qP, kP], axis=2), dread)
    dA = _abt(do, w)
    dL_beta = -_abt(dwrite, w)  # d(M^-1) = -M^-1 dM M^-1
    dbeta = jnp.sum(dwrite * error, axis=-1) + jnp.sum(jnp.tril(dL_beta, -1) * L, axis=-1)
    dL = beta[..., None] * dL_beta

    dqP, dkP = jnp.split(_abt(dread, state), 2, axis=2)
    dkX = _abt(w, dnext)
    dlast = P[:, :, -1] * _matmul("bhkv,bhkv->bhk", state, dnext)
    ddiagonal = jnp.diagonal(dA, axis1=2, axis2=3)[..., None]
    dq = dqP * P + ddiagonal * k
    dk = dkP * P + dkX * X + ddiagonal * q
    dsums = []
    for decay, mask in zip(decays, pairs, strict=True):
        rows = jnp.concatenate([q * decay, k * decay], axis=2)
        dproduct = jnp.concatenate([jnp.where(mask, dA, 0), jnp.where(mask, dL, 0)], axis=2)
        drows = _ab(dproduct, rows[:, :, C:])
        dq_decayed, dk_decayed = drows[:, :, :C], drows[:, :, C:] + _atb(dproduct, rows)
        dq += dq_decayed * decay
        dk += dk_decayed * decay
        dsums.append(rows[:, :, :C] * dq_decayed + rows[:, :, C:] * dk_decayed)
    dsums += [(qP * dqP + kP * dkP).at[:, :, -1].add(dlast), kX * dkX]
    dlog_decay = _atb(_per_head(sums.reshape(-1, C), q), jnp.concatenate(dsums, axis=2))
    return [dq, dk, dv, dlog_decay, dbeta], dstate
