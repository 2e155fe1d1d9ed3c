"""The normed Attention Residuals mix as K3 runs it: 7168 channels in bf16, N + 1 sources, all slots in use.

K3 gives a device 8192 tokens of each of 93 layers; here it is 512, and time is linear in them. (The compiler's estimator walks
through all iterations of a kernel's loops, and at 8192 tokens fills the memory of a workstation.)

What is counted. With R bytes for a row of all tokens (7.3 MB), n slots in use:

    forward    reads n + 1 sources, writes one row            (n + 2) R
    backward   reads n + 1 sources, the row's gradient and the gradient of n slots so far;
               writes n of those and that of the prefix       (3 n + 3) R

Operations are 2 per multiply-add on the vector unit, which has no peak of its own in the table of chips: the bytes decide.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot.bench import main
from pallas_kernels.aot.case import Built, Case, array
from pallas_kernels.attn_res import attn_res_norm

T, D = 512, 7168
ROW = 2 * T * D  # bytes


def _arguments(slots: int) -> tuple[Any, ...]:
    bf16, fp32 = jnp.bfloat16, jnp.float32
    return (array(1, T, D, dtype=bf16), array(slots, 1, T, D, dtype=bf16), array(dtype=jnp.int32), array(D, dtype=fp32),
            array(D, dtype=bf16))


def _forward(slots: int) -> Callable[[str], Built]:
    def build(impl: str) -> Built:
        return lambda *x: attn_res_norm(*x, eps=1e-5, impl=impl)[0], _arguments(slots)

    return build


def _backward(slots: int) -> Callable[[str], Built]:
    def build(impl: str) -> Built:
        prefix, blocks, count, weight, norm_weight = _arguments(slots)

        def gradients(prefix: Any, blocks: Any, count: Any, weight: Any, norm_weight: Any, dy: Any, dblocks: Any) -> Any:
            def op(prefix: Any, blocks: Any, weight: Any, norm_weight: Any) -> Any:
                return attn_res_norm(prefix, blocks, count, weight, norm_weight, eps=1e-5, impl=impl)

            return jax.vjp(op, prefix, blocks, weight, norm_weight)[1]((dy, dblocks))

        return gradients, (prefix, blocks, count, weight, norm_weight, prefix, blocks)

    return build


CASES = {
    f"{name}_{slots + 1}": Case(build(slots), flops=4.0 * (slots + 1) * T * D * factor, bytes=rows * ROW)
    for slots in (8, 1, 0)
    for name, build, factor, rows in (("forward", _forward, 1, slots + 2), ("backward", _backward, 3, 3 * slots + 3))
}

if __name__ == "__main__":
    main("pallas_kernels.attn_res.bench", CASES, __doc__ or "")
