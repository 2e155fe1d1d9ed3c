"""Kimi Delta Attention, the delta rule with one decay per key channel (Kimi Linear, arXiv 2510.26692)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.dispatch import run
from pallas_kernels.kda import gpu, reference, step, tpu, xla
from pallas_kernels.kda.gate import log_decay as log_decay
from pallas_kernels.shapes import checked

IMPLS = {"tpu": tpu, "gpu": gpu, "xla": xla, "reference": reference}
STEP_IMPLS = {"xla": step}


@checked
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
    impl: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """Runs T tokens through the state: decay first, then the delta write, then the read.

        S <- diag(exp(log_decay)) S;   S <- S + beta k (v - S'k)';   o = S'q

    q, k       k of unit length; q already scaled by K**-0.5
    log_decay  nats per token, <= 0, of any size: -inf forgets everything
    state      S after the previous call; zeros start a sequence
    reset      True: S is set to zero before this token (the first of a sequence in a packed row)
    start      position in its sequence of each row's first token, 0 if None. Chunks begin at multiples of 128
               of that position, so a sequence cut at such a multiple gives the bits of one pass over it;
               another cut gives the same up to rounding.
    decay_floor  a promise that no log_decay is below it (K3: -5), which spares kernels work; None promises nothing.
               Log decays below it may be taken for it. Without it a kernel may take those that leave less of the
               state than its rounding (e^-20 with fp32 inputs, e^-10 with bf16) for such.
    Returns o in v's dtype and the last S. Sums run in fp32, and fp32 inputs are multiplied at full precision.

    A token with beta = 0, log_decay = 0 and k = 0 leaves the state as it was, bit for bit: this is how the
    caller pads. Its other inputs must still be finite (zero times NaN is NaN).
    """
    return run("kda", IMPLS, impl, q, k, v, log_decay, beta, state, reset=reset, start=start, decay_floor=decay_floor)


def kda_transition(
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float32[Array, "B T H K"],
    beta: Float32[Array, "B T H"],
    *,
    reset: Bool[Array, "B T"] | None = None,
    start: Int32[Array, " B"] | None = None,
    decay_floor: float | None = None,
    impl: str | None = None,
) -> tuple[Float32[Array, "B H K K"], Float32[Array, "B H K V"]]:
    """What T tokens do to any state: (M, S) such that `kda` ends in M state + S.

    Segments compose: (M1, S1), then (M2, S2), is (M2 M1, M2 S1 + S2). So devices that hold successive segments of a sequence
    exchange these two, whatever its length. M is the product of the (I - beta k k') diag(exp(log_decay)), last token first, and
    zero once there was a reset. Arguments as in `kda`, of which this is one call: of values that are zero for the columns of M.
    """
    B, T, H, K = k.shape
    V = v.shape[-1]
    values = jnp.concatenate([jnp.zeros((B, T, H, K), v.dtype), v], -1)
    state = jnp.broadcast_to(jnp.eye(K, K + V), (B, H, K, K + V))
    options = {"reset": reset, "start": start, "decay_floor": decay_floor, "impl": impl}
    _, last = kda(jnp.zeros_like(k), k, values, log_decay, beta, state, **options)
    return last[..., :K], last[..., K:]


@checked
def kda_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float32[Array, "B H K"],
    beta: Float32[Array, "B H"],
    state: Float32[Array, "B H K V"],
    *,
    impl: str | None = None,
) -> tuple[Float[Array, "B H V"], Float32[Array, "B H K V"]]:
    """Runs one token (decode): `kda` without the token axis, up to rounding."""
    return run("kda_step", STEP_IMPLS, impl, q, k, v, log_decay, beta, state)
