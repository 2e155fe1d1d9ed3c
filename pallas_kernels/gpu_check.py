"""The kernels on this machine's NVIDIA GPU: first are they right, then how long do they take.

  python -m pallas_kernels.gpu_check                      everything; made for one H200, under five minutes there
  python -m pallas_kernels.gpu_check --only kda           one op
  python -m pallas_kernels.gpu_check --json figures.json  keep the figures

Right: values and gradients beside the recurrence or the dense formula in fp32 on the CPU, as the largest difference over the
largest number. Times: best of some calls of the compiled program, the kernel beside its XLA form. Exits with 1 where a kernel is
wrong or does not run.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.aot.bench import measure
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_mxfp4
from pallas_kernels.kda import kda
from pallas_kernels.kda_decode import kda_decode
from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights
from pallas_kernels.mla import attention
from pallas_kernels.mxfp4 import quantize
from pallas_kernels.paged_mla import paged_latent_attention

BOUND = {jnp.float32: 2e-5, jnp.bfloat16: 2e-2}
LENGTHS = (1300, 547, 2048, 963, 271, 3063)  # of the sequences of one packed row: 8192 tokens


class Use(NamedTuple):
    """One call of an op: `call(*inputs, impl=...)`. The first `free` inputs get gradients;"""

    call: Callable[..., Any]
    inputs: tuple[Any, ...]
    free: int


def kda_use(H: int, lengths: Sequence[int], dtype: Any, rng: np.random.Generator) -> Use:
    T, K = sum(lengths), 128
    q, k, v = rng.standard_normal((3, 1, T, H, K), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q * K**-0.5, k))
    log_decay = np.float32(-5) / (1 + np.exp(-2 * rng.standard_normal((1, T, H, K), np.float32)))
    beta = rng.uniform(0, 1, (1, T, H)).astype(np.float32)
    reset = np.zeros((1, T), bool)
    reset[0, np.cumsum(lengths)[:-1]] = True
    state = rng.standard_normal((1, H, K, K), np.float32)
    inputs = [jnp.asarray(x, dtype) for x in (q, k, v)] + [jnp.asarray(x) for x in (log_decay, beta, state)]
    marks = jnp.asarray(reset) if len(lengths) > 1 else None
    return Use(partial(kda, reset=marks, decay_floor=-5.0), tuple(inputs), free=6)


def kda_decode_use(H: int, N: int, dtype: Any, rng: np.random.Generator) -> Use:
    K, W = 128, 4

    def full(*sizes: int) -> Array:
        return jnp.asarray(rng.standard_normal(sizes, np.float32))

    q, k, v, decay, gate = (full(N, H * K).astype(dtype) for _ in range(5))
    x = Projected(q, k, v, decay, full(N, H).astype(dtype), gate)
    weights = Weights(full(3, W, H * K), full(H) / 4, full(H * K), full(K))
    pool = Pool(full(N, H, K, K), full(N, 3, W - 1, H * K).astype(dtype))
    slots = jnp.asarray(rng.permutation(N).astype(np.int32))
    return Use(partial(kda_decode, decay_floor=-5.0, eps=1e-5), (x, weights, pool, slots), free=0)


def attention_use(H: int, T: int, dtype: Any, rng: np.random.Generator) -> Use:
    q, k, v = (jnp.asarray(rng.standard_normal((1, T, H, size), np.float32), dtype) for size in (192, 192, 128))
    places = jnp.arange(T, dtype=jnp.int32)[None]
    return Use(partial(attention, scale=192**-0.5, q_positions=places, kv_positions=places), (q, k, v), free=3)


def paged_use(H: int, N: int, most: int, dtype: Any, rng: np.random.Generator) -> Use:
    """Decode of N sequences of 1 to `most` tokens over pages of 128."""
    pages = -(-most // 128)
    pool = jnp.asarray(rng.standard_normal((N * pages, 128, 576), np.float32), dtype)
    table = jnp.asarray(rng.permutation(N * pages).reshape(N, pages).astype(np.int32))
    q = jnp.asarray(rng.standard_normal((N, 1, H, 576), np.float32), dtype)
    lengths = jnp.asarray(np.linspace(1, most, N).astype(np.int32))
    return Use(partial(paged_latent_attention, value_dim=512, scale=192**-0.5), (q, pool, table, lengths), free=0)


def experts_use(sizes: Sequence[int], K: int, M: int, packed: bool, dtype: Any, rng: np.random.Generator) -> Use:
    x = jnp.asarray(rng.standard_normal((sum(sizes), K), np.float32), dtype)
    w = jnp.asarray(rng.standard_normal((len(sizes), M, K), np.float32) * K**-0.5)
    counts = jnp.asarray(sizes, jnp.int32)
    if packed:
        return Use(grouped_matmul_mxfp4, (x, *quantize(w), counts), free=1)
    return Use(grouped_matmul, (x, w.swapaxes(1, 2).astype(dtype), counts), free=2)


def parity(rng: np.random.Generator) -> dict[str, Callable[[Any], Use]]:
    """Name -> the small use of it in a dtype."""
    return {
        "kda one sequence": lambda dtype: kda_use(2, [257], dtype, rng),
        "kda packed row": lambda dtype: kda_use(2, [64, 1, 31, 100], dtype, rng),
        "kda_decode": lambda dtype: kda_decode_use(4, 16, dtype, rng),
        "paged_mla": lambda dtype: paged_use(4, 5, 400, dtype, rng),
        "attention": lambda dtype: attention_use(2, 300, dtype, rng),
        "grouped_matmul": lambda dtype: experts_use([100, 0, 3, 257, 40], 256, 384, False, dtype, rng),
        "grouped_matmul_mxfp4": lambda dtype: experts_use([100, 0, 3, 257, 40], 256, 384, True, dtype, rng),
    }


def timings(rng: np.random.Generator) -> dict[str, Callable[[], Use]]:
    """Name -> the use of it at a real size, in bf16."""
    half = jnp.bfloat16
    return {
        "kda T=8192 H=96": lambda: kda_use(96, [8192], half, rng),
        "kda T=8192 H=64": lambda: kda_use(64, [8192], half, rng),
        "kda lengths H=96": lambda: kda_use(96, LENGTHS, half, rng),
        "kda lengths H=64": lambda: kda_use(64, LENGTHS, half, rng),
        "kda_decode 256 H=96": lambda: kda_decode_use(96, 256, half, rng),
        "paged_mla 64 of 8192 H=96": lambda: paged_use(96, 64, 8192, half, rng),
        "attention T=8192 H=12": lambda: attention_use(12, 8192, half, rng),
        "grouped_matmul 14x1024 rows": lambda: experts_use([1024] * 14, 3584, 3072, False, half, rng),
        "grouped_matmul 14 rows": lambda: experts_use([1] * 14, 3584, 3072, False, half, rng),
        "grouped_matmul_mxfp4 14x1024 rows": lambda: experts_use([1024] * 14, 3584, 3072, True, half, rng),
        "grouped_matmul_mxfp4 14 rows": lambda: experts_use([1] * 14, 3584, 3072, True, half, rng),
    }


def forward(use: Use, impl: str) -> Callable[..., Any]:
    return partial(use.call, impl=impl)


def gradients(use: Use, impl: str) -> Callable[..., Any]:
    """The outputs' squares summed with fixed weights, differentiated: every output counts."""

    def loss(free: Any, rest: Any) -> Array:
        outputs = jax.tree.leaves(use.call(*free, *rest, impl=impl))
        return sum((jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in outputs), jnp.float32(0))

    return lambda *inputs: jax.grad(loss)(inputs[: use.free], inputs[use.free :])


def difference(found: Any, wanted: Any) -> float:
    """Largest difference over the largest number, the worst over all arrays."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        size = np.abs(b).max()
        worst = max(worst, float(np.abs(a - b).max() / (size or 1))) if np.isfinite(a).all() else float("inf")
    return worst


def check(name: str, use: Use, dtype: Any) -> dict[str, Any]:
    """Differences of the kernel from the reference on the CPU."""
    row: dict[str, Any] = {"name": name, "dtype": jnp.dtype(dtype).name}
    cpu = jax.devices("cpu")[0]
    for what, make in (("values", forward), ("gradients", gradients)):
        if what == "gradients" and not use.free:
            continue
        with jax.default_device(cpu):
            wanted = jax.jit(make(use, "reference"))(*jax.device_put(use.inputs, cpu))
        row[what] = difference(jax.jit(make(use, "gpu"))(*use.inputs), wanted)
    return row | {"right": max(row.get("values", 0), row.get("gradients", 0)) <= BOUND[dtype]}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.gpu_check", description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="+", default=[""], help="only checks whose names begin with one of these")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--repeats", type=int, default=10, help="calls of which the fastest counts")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        sys.exit(f"gpu_check needs a machine with an NVIDIA GPU and jax for it (pip install 'k3jax[cuda]'); jax found "
                 f"{device.device_kind}. Without one, `make gpu-aot` compiles the kernels.")
    begin, rng, failed = time.perf_counter(), np.random.default_rng(0), False
    figures: dict[str, Any] = {"card": device.device_kind, "jax": jax.__version__, "python": sys.version.split()[0]}
    figures |= {"parity": [], "times": []}
    print(f"{device.device_kind}, jax {jax.__version__}, Python {figures['python']}\n\n{'':36} {'values':>10} {'gradients':>10}")
    for name, make in parity(rng).items():
        for dtype in BOUND if name.startswith(tuple(args.only)) else ():
            try:
                row = check(name, make(dtype), dtype)
                verdict = "" if row["right"] else f"  WRONG: over {BOUND[dtype]:.0e}"
                print(f"{name:24} {row['dtype']:11} {row['values']:10.1e} {row.get('gradients', 0):10.1e}{verdict}", flush=True)
            except Exception as error:  # the other kernels are checked all the same
                traceback.print_exc()
                row = {"name": name, "dtype": jnp.dtype(dtype).name, "right": False, "error": str(error)[:500]}
            failed |= not row["right"]
            figures["parity"].append(row)
    print(f"\n{'best of several calls, ms':36} {'':10} {'gpu':>9} {'xla':>9} {'xla/gpu':>8}")
    for name, make in timings(rng).items():
        if not name.startswith(tuple(args.only)):
            continue
        use = make()
        for what, program in (("forward", forward), ("fwd+bwd", gradients))[: 2 if use.free else 1]:
            row: dict[str, Any] = {"name": name, "what": what}
            for impl in ("gpu", "xla"):
                try:
                    row[impl] = 1e3 * measure(program(use, impl), use.inputs, args.repeats)[0]
                except Exception as error:
                    row[f"{impl}_error"] = str(error)[:500]
                    failed |= impl == "gpu"
            shown = [f"{row[impl]:9.3f}" if impl in row else f"{'failed':>9}" for impl in ("gpu", "xla")]
            ratio = f"{row['xla'] / row['gpu']:8.2f}" if "gpu" in row and "xla" in row else ""
            print(f"{name:36} {what:10} {shown[0]} {shown[1]} {ratio}", flush=True)
            figures["times"].append(row)
    figures["seconds"] = round(time.perf_counter() - begin, 1)
    print(f"\n{figures['seconds']} s in all")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if failed:
        sys.exit("gpu_check: a kernel is wrong or does not run")


if __name__ == "__main__":
    main()
