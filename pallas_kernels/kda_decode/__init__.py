"""Decode of Kimi Delta Attention for many sequences, from the projections to the gated output (Kimi Linear, arXiv 2510.26692)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import run
from pallas_kernels.gradient import without_gradient
from pallas_kernels.kda_decode import gpu, gpu_verify, reference, tpu, tpu_verify, xla
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.shapes import checked

IMPLS = {"tpu": tpu, "gpu": gpu, "xla": xla, "reference": reference}
VERIFY_IMPLS = {"tpu": tpu_verify, "gpu": gpu_verify, "xla": xla, "reference": reference}


@checked
def kda_decode(
    x: Projected,
    weights: Weights,
    pool: Pool,
    slots: Int32[Array, " N"],
    *,
    decay_floor: float | None,
    eps: float,
    impl: str | None = None,
) -> tuple[Float[Array, "N HK"], Pool]:
    """One token of each of N sequences, whose state and conv windows lie in slots of a pool and are updated there.

        q, k, v <- silu(sum_i conv_i window_i), the token itself the window's last input      in fp32, then in x's dtype
        q <- q / sqrt(sum q^2 + 1e-6) K^-1/2;   k <- k / sqrt(sum k^2 + 1e-6)                 per head, fp32 from here on
        log_decay = decay_floor sigmoid(exp(A_log) (decay + dt_bias))                         K3
                  = -exp(A_log) softplus(decay + dt_bias)                                     decay_floor=None: Kimi-Linear
        S <- diag(exp(log_decay)) S;   S <- S + sigmoid(beta) k (v - S'k)';   o = S'q         o in x's dtype
        y = o / sqrt(mean o^2 + eps) o_norm sigmoid(gate)                                     per head

    slots  slot of each row, no two the same; negative, or none that the pool has: the row is idle, its y is zero and nothing
           is read or written for it
    Returns y in gate's dtype, and the pool. Donate the pool to the jit around this, or XLA copies it first.
    No gradient: raises TypeError where one is asked for.
    """
    x, weights, pool = without_gradient("kda_decode", (x, weights, pool))
    return run("kda_decode", IMPLS, impl, x, weights, pool, _or_idle(slots, pool), decay_floor=decay_floor, eps=eps)


@checked
def kda_verify(
    x: Projected,
    before: Projected,
    accepted: Int32[Array, " N"],
    weights: Weights,
    pool: Pool,
    slots: Int32[Array, " N"],
    *,
    decay_floor: float | None,
    eps: float,
    impl: str | None = None,
) -> tuple[Float[Array, "N T HK"], Pool]:
    """T drafted tokens of each of N sequences, after some of the tokens that were drafted in the call before.

    The pool takes the first accepted[n] tokens of before[n], as `kda_decode` would one after the other, and none of x: what
    becomes of those is not known yet. The next call gets this one's x as its `before`:

        y, pool = kda_verify(x, before, accepted, ...)      x: T tokens, of which the first is certain
        accepted = how many of x the samples from y bear out
        y, pool = kda_verify(next_x, x, accepted, ...)

    A state is read and written once for it all: it costs no more memory traffic than one token.

    before    the R tokens of the call before; its gate is not used. Any finite numbers for a sequence that had none
    accepted  0 to R, for each row; more are taken for R
    slots     as in kda_decode
    Returns y in gate's dtype, and the pool. No gradient, as kda_decode.
    """
    x, before, weights, pool = without_gradient("kda_verify", (x, before, weights, pool))
    accepted, slots = jnp.clip(accepted, 0, before.q.shape[1]), _or_idle(slots, pool)
    return run(
        "kda_verify", VERIFY_IMPLS, impl, x, before, accepted, weights, pool, slots, decay_floor=decay_floor, eps=eps
    )


def _or_idle(slots: Int32[Array, " N"], pool: Pool) -> Int32[Array, " N"]:
    """A kernel would write past the pool's end."""
    return jnp.where(slots < len(pool.states), slots, -1)
