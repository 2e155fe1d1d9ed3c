"""Kimi Delta Attention at K3's sizes as one device sees them: 8192 tokens, 12 or 24 of its 96 heads, K = V = 128, bf16.

The least work, per token and head:

    FLOPs, forward   6 K V: the state is read for k and for q and written once. A chunk of C tokens adds 2 C (K + V), the lower
                     triangles of its products; so the recurrence itself, C = 1, needs the least.
    FLOPs, backward  12 K V more: two products for each of the forward
    bytes, forward   2 (2 K + 2 V) + 4 K + 4: q, k, v and o in bf16, log_decay and beta in fp32
    bytes, backward  2 (4 K + 3 V) + 2 (4 K + 4) more: the inputs again, for the gradient of o exists only once o has left the
                     chip, with that of o; and the gradients of the inputs

The states at both ends are some KB per token less than that and left out. "backward" is one jax.vjp, forward and backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.aot import rivals
from pallas_kernels.aot.bench import main
from pallas_kernels.aot.case import Built, Case, array
from pallas_kernels.kda import kda

T, K, V = 8192, 128, 128
STARTS = 0, 1300, 1847, 3895, 4858, 5129  # of the sequences in a packed row


def build(impl: str, *, H: int, gradients: bool, decay_floor: float | None, packed: bool = False) -> Built:
    def decaying(q: Array, k: Array, v: Array, log_decay: Array, *rest: Array) -> tuple[Array, ...]:
        with jax.named_scope("operands"):  # timed with random numbers, compiled as if they came so
            log_decay = jax.lax.optimization_barrier(jnp.maximum(-jnp.abs(log_decay), -5))
            return q, k, v, log_decay, *rest

    tokamax = impl == "tokamax"
    reset: Any = np.isin(np.arange(T), STARTS)[None] if packed else None
    ours = partial(kda, impl=impl, reset=reset)
    op: Callable[..., Any] = partial(rivals.kda if tokamax else ours, decay_floor=decay_floor)
    lead = (H, 1, T) if tokamax else (1, T, H)
    bf16, fp32 = (partial(array, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))
    inputs = (*(bf16(*lead, size) for size in (K, K, V)), fp32(*lead, K), fp32(*lead), fp32(1, H, K, V))
    if not gradients:
        return lambda *inputs: op(*decaying(*inputs)), inputs
    return lambda do, dstate, *inputs: jax.vjp(op, *decaying(*inputs))[1]((do, dstate)), (inputs[2], inputs[5], *inputs)


def case(H: int, gradients: bool, decay_floor: float | None, limit: float | None = None, *, packed: bool = False) -> Case:
    flops, moved = 6 * K * V, 2 * (2 * K + 2 * V) + 4 * K + 4
    if gradients:
        flops, moved = flops + 12 * K * V, moved + 2 * (4 * K + 3 * V) + 2 * (4 * K + 4)
    return Case(
        partial(build, H=H, gradients=gradients, decay_floor=decay_floor, packed=packed),
        flops=T * H * flops,
        bytes=T * H * moved,
        impls=("tpu", "gpu", "xla") if decay_floor is None or packed else ("tpu", "gpu", "xla", "tokamax"),
        limit={chip: limit for chip in ("v5p", "tpu7x")} if limit else {},
    )


CASES = {
    "forward_12_heads": case(12, False, -5, 3.0),
    "backward_12_heads": case(12, True, -5, 4.0),
    "forward_24_heads": case(24, False, -5),
    "backward_24_heads": case(24, True, -5),
    "forward_12_unbounded": case(12, False, None),
    "backward_12_unbounded": case(12, True, None),
    "forward_12_packed": case(12, False, -5, packed=True),
    "backward_12_packed": case(12, True, -5, packed=True),
}

if __name__ == "__main__":
    main("pallas_kernels.kda.bench", CASES, __doc__)
