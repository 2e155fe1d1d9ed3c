"""The short convolution of one device's 12 heads of 128 channels over 8192 tokens in bf16, packed rows.

What is counted. With R bytes for x (25 MB), the window and the weight being nothing beside it:

    forward    reads x, writes y                  2 R
    backward   reads x and dy, writes dx          3 R

Operations: 4 multiply-adds and about 4 for SiLU per element, about three times that in the backward, all on the vector unit.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot.bench import main
from pallas_kernels.aot.case import Built, Case, array
from pallas_kernels.conv1d import conv1d

B, T, D, W = 1, 8192, 12 * 128, 4
R = 2 * B * T * D  # bytes


def _arguments() -> tuple[Any, ...]:
    bf16 = jnp.bfloat16
    return array(B, T, D, dtype=bf16), array(D, W, dtype=bf16), array(B, W - 1, D, dtype=bf16), array(B, T, dtype=jnp.bool_)


def _forward(impl: str) -> Built:
    return lambda x, weight, window, reset: conv1d(x, weight, window, reset=reset, impl=impl), _arguments()


def _backward(impl: str) -> Built:
    x, weight, window, reset = _arguments()

    def gradients(x: Any, weight: Any, window: Any, reset: Any, dy: Any, dwindow: Any) -> Any:
        return jax.vjp(lambda *inputs: conv1d(*inputs, reset=reset, impl=impl), x, weight, window)[1]((dy, dwindow))

    return gradients, (x, weight, window, reset, x, window)


CASES = {
    "forward": Case(_forward, flops=12.0 * B * T * D, bytes=2 * R, impls=("tpu", "xla")),
    "backward": Case(_backward, flops=36.0 * B * T * D, bytes=3 * R, impls=("tpu", "xla")),
}

if __name__ == "__main__":
    main("pallas_kernels.conv1d.bench", CASES, __doc__ or "")
