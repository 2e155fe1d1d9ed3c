"""Attention of MLA layers at K3's sizes as one device sees them: 12 or 24 of 96 heads, bf16.

What is counted, per head:
  prefill   T = 8192 tokens in one sequence. Each query sees the keys up to its own, T^2 / 2 pairs. Forward: q.k and p v, so
            2 (K + V) FLOPs per pair with K = 192, V = 128. Backward: q.k again, g.v, and the gradients of q, k and v, so
            2 (3 K + 2 V). Bytes: q, k, v in and o out; for the backward, which includes its forward, also g in and three
            gradients out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot import rivals
from pallas_kernels.aot.bench import main
from pallas_kernels.aot.case import Built, Case, array
from pallas_kernels.mla import attention

K, V = 192, 128
TOKENS = 8192
IMPLS = ("tpu", "gpu", "xla", "tokamax")
WITHIN = {"v5p": 2.0, "tpu7x": 2.0}


def prefill(impl: str, *, heads: int, backward: bool) -> Built:
    """One sequence, whose positions are known when it is compiled: without that, the number of grid steps is not, and an
    estimate of cycles guesses it."""
    positions: Any = np.arange(TOKENS, dtype=np.int32)[None]
    ours: Callable[..., Any] = partial(attention, q_positions=positions, kv_positions=positions, impl=impl)
    attend: Callable[..., Any] = partial(rivals.attention if impl == "tokamax" else ours, scale=K**-0.5)
    q, k, v = (array(1, TOKENS, heads, size, dtype=jnp.bfloat16) for size in (K, K, V))
    if not backward:
        return attend, (q, k, v)
    return lambda g, *x: jax.vjp(attend, *x)[1](g), (v, q, k, v)


def prefill_case(heads: int, backward: bool) -> Case:
    pairs, numbers = heads * TOKENS**2 / 2, 2 * heads * TOKENS  # bytes of one number per token and head
    forward = 2 * (K + V) * pairs
    if not backward:
        return Case(partial(prefill, heads=heads, backward=False), forward, numbers * (2 * K + 2 * V), IMPLS, WITHIN)
    flops = forward + 2 * (3 * K + 2 * V) * pairs
    return Case(partial(prefill, heads=heads, backward=True), flops, numbers * 2 * (2 * K + 2 * V), IMPLS)


CASES = {
    f"prefill{'_backward' * backward}_h{heads}": prefill_case(heads, backward)
    for heads in (12, 24)
    for backward in (False, True)
}

if __name__ == "__main__":
    main("pallas_kernels.mla.bench", CASES, __doc__)
