"""Kimi Delta Attention as it is defined: one token after the other."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32


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
    """The recurrence of `pallas_kernels.kda.kda`; `start` and `decay_floor` change nothing, for there are no chunks."""

    def token(S, x):
        q, k, v, log_decay, beta, reset = x
        if reset is not None:
            S = jnp.where(reset[:, None, None, None], 0, S)
        S = jnp.exp(log_decay)[..., None] * S
        seen = jnp.einsum("bhk,bhkv->bhv", k, S, precision="highest")
        S = S + (beta[..., None] * k)[..., None] * (v - seen)[..., None, :]
        return S, jnp.einsum("bhk,bhkv->bhv", q, S, precision="highest")

    tokens = (*(x.astype(jnp.float32) for x in (q, k, v, log_decay, beta)), reset)
    state, o = lax.scan(token, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state
