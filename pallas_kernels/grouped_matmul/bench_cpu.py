"""Time and temporary memory of the grouped matmul on CPU, beside jax.lax.ragged_dot.

  python -m pallas_kernels.grouped_matmul.bench_cpu
  python -m pallas_kernels.grouped_matmul.bench_cpu --shape wide --repeats 20

Each cell: milliseconds of the fastest of --repeat calls / MB of temporaries of the compiled program. fwd is
the product, bwd both gradients, mxfp4 the product with packed weights.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_mxfp4
from pallas_kernels.grouped_matmul.shapes import SIZES, Size
from pallas_kernels.mxfp4 import quantize


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    program = "python -m pallas_kernels.grouped_matmul.bench_cpu"
    parser = argparse.ArgumentParser(prog=program, description=__doc__, formatter_class=raw)
    parser.add_argument("--shape", choices=SIZES, nargs="+", default=list(SIZES), help="sizes from shapes.py")
    parser.add_argument("--repeats", type=int, default=5, help="calls of which the fastest counts")
    args = parser.parse_args()
    print(f"{jax.default_backend()}, fp32\n{'':44}{'xla':>18}{'ragged_dot':>18}")
    for name in args.shape:
        table(f"{name} {tuple(SIZES[name])}", SIZES[name], args.repeats)


def table(name: str, size: Size, repeat: int) -> None:
    x, w, g, group_sizes = draw(size)
    packed, scale = quantize(w.swapaxes(1, 2))
    ragged_dot = partial(jax.lax.ragged_dot, precision="highest")
    columns = {"fwd": [], "bwd": []}
    for op in (partial(grouped_matmul, impl="xla"), ragged_dot):
        columns["fwd"].append(measure(op, (x, w, group_sizes), repeat))
        columns["bwd"].append(measure(partial(gradients, op), (x, w, group_sizes, g), repeat))
    mxfp4 = partial(grouped_matmul_mxfp4, impl="xla")
    columns["mxfp4"] = [measure(mxfp4, (x, packed, scale, group_sizes), repeat)]
    for kind, cells in columns.items():
        print(f"{name:36}{kind:8}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def draw(size: Size) -> tuple[Array, Array, Array, Array]:
    """x, w, a gradient of y, and sizes of groups that rows chose at random."""
    keys = jax.random.split(jax.random.key(0), 4)
    choice = jax.random.randint(keys[3], (size.N,), 0, size.E)
    shapes = (size.N, size.K), (size.E, size.K, size.M), (size.N, size.M)
    x, w, g = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False))
    return x, w, g, jnp.bincount(choice, length=size.E).astype(jnp.int32)


def gradients(op: Callable[..., Array], x: Array, w: Array, group_sizes: Array, g: Array) -> list[Array]:
    return list(jax.vjp(lambda x, w: op(x, w, group_sizes), x, w)[1](g))


def measure(f: Callable[..., Array | list[Array]], args: tuple[Array, ...], repeat: int) -> str:
    compiled = jax.jit(f).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "every backend of XLA reports it"
    jax.block_until_ready(compiled(*args))
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        best = min(best, time.perf_counter() - start)
    return f"{1e3 * best:.2f} / {memory.temp_size_in_bytes / 1e6:.2f}"


if __name__ == "__main__":
    main()
