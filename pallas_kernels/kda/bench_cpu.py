"""Times Kimi Delta Attention: python -m pallas_kernels.kda.bench_cpu --shape k3_tp12

What to expect: multiply-adds per token and head of the chunked form, for K = V = 128 and chunks of C = 32,

    reads and writes of the state     3 K V                        49 k
    pairs, one product per level      2 C K log2 C                 41 k
    sums of log decays                C K (log2 C + 2)             29 k
    A w and the inverse's products    2 C V + 2 C^2 (log2 C - 1)   16 k

135 k, so 8.9 GFLOP at T = 4096, H = 8: 0.09 s at the 100 GFLOP/s that XLA reaches in batched products of
this size on two cores, to which passes over [C, K] arrays add half. The backward repeats the forward and
does twice its work. The recurrence passes about five times over a state of K V numbers per token, 10 GB
here, and stores one state per token for its backward: 4096 of 0.5 MB. The chunked form stores one per
chunk: 128, or 67 MB. For H = 96 that is 0.8 GB, as much as q, k, v and log_decay take.

Why C = 32 for K >= 64: C = 64 stores half as many states but takes 20 to 40 % longer; C = 16 is a tenth
faster forward and no faster with its backward, and stores twice as many. Where K is smaller a state is as
small as a chunk and C = 16 is the fastest.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda import IMPLS, kda
from pallas_kernels.kda.shapes import SHAPES, draw


def measure(f: Callable, inputs: tuple[jax.Array, ...], repeats: int) -> tuple[float, float]:
    """Seconds of the best of `repeats` calls (fewer where one takes long), and MB of temporary memory."""
    compiled = jax.jit(f).lower(*inputs).compile()
    jax.block_until_ready(compiled(*inputs))
    times = []
    while len(times) < repeats and sum(times) < 5:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        times.append(time.perf_counter() - begin)
    memory: Any = compiled.memory_analysis()
    return min(times), memory.temp_size_in_bytes / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.kda.bench_cpu",
        description="Times each implementation of Kimi Delta Attention; `reference` is the scan over tokens.",
    )
    parser.add_argument("--shape", choices=SHAPES, default="k3_tp12", help="sizes from shapes.py")
    parser.add_argument(
        "--impls", nargs="+", choices=IMPLS, default=list(IMPLS), help="implementations to time"
    )
    parser.add_argument("--repeats", type=int, default=5, help="calls to take the best of")
    args = parser.parse_args()

    shape = SHAPES[args.shape]
    inputs = tuple(map(jnp.asarray, draw(shape)))
    print(f"{args.shape} {shape} fp32 on {jax.devices()[0].device_kind}; ratios: reference / implementation")
    print(
        f"{'impl':10} {'fwd s':>9} {'fwd+bwd s':>10} {'temp MB':>9} {'fwd':>7} {'fwd+bwd':>8} {'memory':>7}"
    )
    rows = {}
    for name in sorted(args.impls, key=lambda name: name != "reference"):
        op = partial(kda, impl=name)
        gradients = jax.grad(lambda *x, op=op: sum(jnp.vdot(y, y) for y in op(*x)), range(len(inputs)))
        forward, _ = measure(op, inputs, args.repeats)
        rows[name] = forward, *measure(gradients, inputs, args.repeats)
        line = f"{name:10} {rows[name][0]:9.4f} {rows[name][1]:10.4f} {rows[name][2]:9.1f}"
        if "reference" in rows:
            ratios = [slow / own for slow, own in zip(rows["reference"], rows[name], strict=True)]
            line += " {:6.1f}x {:7.1f}x {:6.1f}x".format(*ratios)
        print(line, flush=True)


if __name__ == "__main__":
    main()
