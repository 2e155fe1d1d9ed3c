"""Kimi Delta Attention in chunks of tokens, in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

CHUNK = 64  # tokens


def why_not(*args: Array, **kwargs: Array | None) -> str | None:
    return None


def kda(q, k, v, log_decay, beta, state, *, reset=None, start=None):
    T = q.shape[1]
    if reset is not None:
        log_decay = jnp.where(reset[:, :, None, None], -jnp.inf, log_decay)
        state = jnp.where(reset[:, 0, None, None, None], 0, state)
    tokens = q, k, v, log_decay, beta
    if start is None:
        C = min(CHUNK, 1 << (T - 1).bit_length())
        tokens = jax.tree.map(lambda x: _pad(x, 0, -T % C), tokens)
        o, state = _chunks(*tokens, state, C)
        return o[:, :T], state
    skip = start % CHUNK
    length = -(-(T + CHUNK - 1) // CHUNK) * CHUNK
    slice_row = jax.vmap(lax.dynamic_slice_in_dim, (0, 0, None))
    tokens = jax.tree.map(lambda x: slice_row(_pad(x, CHUNK, length - T), CHUNK - skip, length), tokens)
    o, state = _chunks(*tokens, state, CHUNK)
    return slice_row(o, skip, T), state


def _pad(x, before, after):
    return jnp.pad(x, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))


def _dot(spec, a, b):
    return jnp.einsum(spec, a, b, precision="highest")


def _halves(x):
    x = x.reshape(*x.shape[:2], -1, 2, *x.shape[3:])
    return x[:, :, :, 0], x[:, :, :, 1]


def _chunk(q, k, v, log_decay, beta, state):
    """q.. [B C H K]"""
    dtype = v.dtype
    q, k, v, decay, beta = (jnp.moveaxis(x.astype(jnp.float32), 2, 1) for x in (q, k, v, jnp.exp(log_decay), beta))
    B, H, C, K = q.shape
    kb = k * beta[..., None]
    from_start, to_end = decay[:, :, :, None], jnp.ones_like(decay)[:, :, :, None]
    attn = jnp.sum(q * k, -1)[..., None, None]
    inverse = jnp.ones_like(attn)
    m = 1
    while m < C:
        q1 = _halves(q.reshape(B, H, -1, m, K))[1]
        kb1 = _halves(kb.reshape(B, H, -1, m, K))[1]
        k0 = _halves(k.reshape(B, H, -1, m, K))[0]
        P0, P1 = _halves(from_start)
        X0, X1 = _halves(to_end)
        key = k0 * X0
        qk = _dot("bhnik,bhnjk->bhnij", q1 * P1, key)
        kk = _dot("bhnik,bhnjk->bhnij", kb1 * P1, key)
        A0, A1 = _halves(attn)
        I0, I1 = _halves(inverse)
        attn = _join(A0, qk, A1)
        inverse = _join(I0, -_dot("bhnij,bhnjk->bhnik", I1, _dot("bhnij,bhnjk->bhnik", kk, I0)), I1)
        t0, t1 = P0[..., -1:, :], P1[..., -1:, :]
        from_start = jnp.concatenate([P0, P1 * t0], -2)
        to_end = jnp.concatenate([X0 * t1, X1], -2)
        m *= 2
    P, X, A, I = from_start[:, :, 0], to_end[:, :, 0], attn[:, :, 0], inverse[:, :, 0]
    w = _dot("bhij,bhjv->bhiv", I, beta[..., None] * v - _dot("bhck,bhkv->bhcv", kb * P, state))
    o = _dot("bhck,bhkv->bhcv", q * P, state) + _dot("bhij,bhjv->bhiv", A, w)
    state = P[:, :, -1, :, None] * state + _dot("bhck,bhcv->bhkv", k * X, w)
    return jnp.moveaxis(o, 1, 2).astype(dtype), state


def _join(a, b, d):
    return jnp.concatenate(
        [jnp.concatenate([a, jnp.zeros_like(a)], -1), jnp.concatenate([b, d], -1)], -2)


def _chunks(q, k, v, log_decay, beta, state, C):
    def body(S, i):
        x = [lax.dynamic_slice_in_dim(t, i * C, C, 1) for t in (q, k, v, log_decay, beta)]
        o, S = jax.checkpoint(_chunk)(*x, S)
        return S, o
    state, o = lax.scan(body, state, jnp.arange(q.shape[1] // C))
    o = jnp.moveaxis(o, 0, 1)
    return o.reshape(q.shape[:3] + v.shape[-1:]), state
