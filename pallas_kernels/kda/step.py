"""One token of Kimi Delta Attention, for decode: reads the state once and writes it once."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def why_not(*args: Array) -> str | None:
    return None


def kda_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float32[Array, "B H K"],
    beta: Float32[Array, "B H"],
    state: Float32[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float32[Array, "B H K V"]]:
    """See `pallas_kernels.kda.kda_step`.

    The new state is S + k w' with w = beta (v - S'k), so the read q'S + (q'k) w needs no second pass over it.
    """
    qf, kf, vf = (x.astype(jnp.float32) for x in (q, k, v))
    decay = jnp.exp(log_decay)
    rows = jnp.stack([qf, kf], axis=2) * decay[:, :, None]
    read, seen = jnp.moveaxis(jnp.einsum("bhrk,bhkv->bhrv", rows, state, precision="highest"), 2, 0)
    write = beta[..., None] * (vf - seen)
    o = read + jnp.sum(qf * kf, axis=-1, keepdims=True) * write
    return o.astype(v.dtype), decay[..., None] * state + kf[..., None] * write[..., None, :]
