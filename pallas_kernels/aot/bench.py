"""The command line of every op's bench: what compilers say about chips that are not here, or times on the device that is.

    python -m pallas_kernels.kda.bench --chip v5p tpu7x         estimates of the TPU compiler
    python -m pallas_kernels.kda.bench --chip h200              registers, shared memory and spills
    python -m pallas_kernels.kda.bench                          times on this machine's device
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot import estimate
from pallas_kernels.aot.case import Case
from pallas_kernels.aot.chips import GPUS, TPUS, Chip, roofline


def main(module: str, cases: Mapping[str, Case], description: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs the bench of `module`, whose CASES are `cases`. Exits with 1 if --check finds a regression."""
    op = module.split(".")[-2]
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"examples:\n  python -m {module} --chip v5p tpu7x --vs xla\n  python -m {module} --case {next(iter(cases))}",
    )
    parser.add_argument("--chip", nargs="+", choices=[*TPUS, *GPUS], help="print the compilers' figures for these chips")
    parser.add_argument("--case", nargs="+", choices=cases, default=list(cases), help="cases (default: all)")
    parser.add_argument("--impl", nargs="+", help="implementations (default: the kernel that fits the chip or device)")
    parser.add_argument("--vs", nargs="+", default=[], help="implementations to put beside them, such as xla")
    parser.add_argument("--record", action="store_true", help=f"keep the figures in pallas_kernels/{op}/estimates")
    parser.add_argument("--check", action="store_true", help="fail if the figures are over 10 %% worse than the record")
    parser.add_argument("--repeats", type=int, default=5, help="calls to take the best of, when timing")
    args = parser.parse_args(argv)
    chosen = {name: cases[name] for name in args.case}
    if not args.chip:
        return times(chosen, args.impl, args.vs, args.repeats)
    worse = compile_for(args.chip, module, chosen, args.impl, args.vs, record=args.record)
    if args.check and worse:
        sys.exit(f"{module}: worse than the record:\n  " + "\n  ".join(worse))


def compile_for(
    chips: Sequence[str], module: str, cases: Mapping[str, Case], impls: Sequence[str] | None = None,
    vs: Sequence[str] = (), *, record: bool = False, only_recorded: bool = False,
) -> list[str]:
    """Compiles the cases and prints a table per chip. Returns a line for each figure that is worse than the record.

    impls  None: the kernel that fits the chip. vs: others to put beside them. record: keep the figures.
    only_recorded  estimate those cases only that are on record with this compiler: others may take minutes to give none
    Exits with the reason if this environment cannot compile for one of the chips.
    """
    worse = []
    for chip in chips:
        if reason := estimate.why_not(chip):
            sys.exit(f"{module}: cannot compile for {chip}: {reason}.")
        own = impls or ["tpu" if chip in TPUS else "gpu"]
        jobs = [(name, impl) for name, case in cases.items()
                for impl in dict.fromkeys([*own, *vs]) if impl in case.impls]
        recorded = estimate.read_record(module, chip)
        if only_recorded:
            known = {job.split()[0] for job in recorded}
            cases = {name: case._replace(estimate=name in known) for name, case in cases.items()}
        results = (report if chip in TPUS else report_gpu)(module, chip, cases, jobs)
        worse += [f"{chip}: {line}" for line in estimate.regressions(recorded, results)]
        if record:
            estimate.write_record(module, chip, [r for r in results if "kernels" in r])
    return worse


def report(module: str, chip: str, cases: Mapping[str, Case], jobs: Sequence[estimate.Job]) -> list[dict[str, Any]]:
    """Compiles the jobs for `chip` and prints a line for each: what the estimate is made of, and its ratio to the roofline.

    The estimated time is max(cycles / clock, bytes / bandwidth): cycles leave out the waiting for HBM.
    """
    facts = TPUS[chip]
    print(f"\n{chip}: compiler estimates (jax {jax.__version__}, {estimate.compiler(chip)}); never timed on hardware")
    print(f"{'case':26} {'impl':10} {'cycles':>10} {'ms':>8} {'roofline':>8} {'ratio':>6} {'limit':>5} {'HBM MB':>8} "
          f"{'temp MB':>8} {'VMEM MB':>7} {'spills':>6}  busiest kernel: bundles, units")
    results = []
    walked = [job for job in jobs if cases[job[0]].estimate]
    others = [job for job in jobs if job not in walked]
    figures = estimate.estimates(module, chip, walked), estimate.estimates(module, chip, others, dump=False)
    for result in chain(*figures):
        case = cases[result["case"]]
        result = _believed(result, case, facts)
        results.append(result)
        line = f"{result['case']:26} {result['impl']:10} "
        if "error" in result:
            print(f"{line}{result['error'].splitlines()[0][:150]}", flush=True)
            continue
        least = roofline(facts, case.flops, case.bytes)
        if "cycles" not in result:
            print(f"{line}{'compiles':>10} {'':8} {1e3 * least:8.3f}  {result.get('note', 'compiled only')}", flush=True)
            continue
        seconds = max(result["cycles"] / facts.clock, case.bytes / facts.hbm)
        limit = case.limit.get(chip)
        kernels = list(result["kernels"].values())
        line += f"{result['cycles']:10d} {1e3 * seconds:8.3f} {1e3 * least:8.3f} {seconds / least:6.2f} {limit or '':>5} "
        line += f"{case.bytes / 1e6:8.1f} {result['temp_bytes'] / 1e6:8.1f} "
        if kernels:
            line += f"{max(k['vmem'] for k in kernels) / 1e6:7.1f} {sum(k['spills'] for k in kernels):6d}  "
            busy = ", ".join(f"{unit} {share:.0%}" for unit, share in kernels[0]["occupancy"].items() if share >= 0.1)
            line += f"{kernels[0]['bundles']}: {busy}"
        print(line, flush=True)
    return results


def _believed(result: dict[str, Any], case: Case, facts: Chip) -> dict[str, Any]:
    """The result, without its figures if these are fewer cycles than its arithmetic takes."""
    if "cycles" not in result or result["cycles"] / facts.clock >= 0.95 * case.flops / facts.bf16:
        return result
    note = f"no estimate: {result['cycles']} cycles are too few; loops whose lengths it reads from memory count as none"
    return {k: v for k, v in result.items() if k not in ("cycles", "kernels")} | {"note": note}


def report_gpu(module: str, chip: str, cases: Mapping[str, Case], jobs: Sequence[estimate.Job]) -> list[dict[str, Any]]:
    """Compiles the jobs for `chip` and prints a line per kernel. Nothing here tells its time; the roofline is for reference."""
    print(f"\n{chip}: compiled (jax {jax.__version__}, {estimate.compiler(chip)}); never timed on hardware")
    print(f"{'case':26} {'impl':10} {'roofline ms':>11} {'temp MB':>8}  kernel: registers, shared kB, spilled bytes")
    results = []
    for result in estimate.estimates(module, chip, jobs):
        results.append(result)
        case = cases[result["case"]]
        line = f"{result['case']:26} {result['impl']:10} {1e3 * roofline(GPUS[chip], case.flops, case.bytes):11.3f} "
        if "error" in result:
            print(f"{line}{result['error'].splitlines()[0][:150]}", flush=True)
            continue
        line += f"{result['temp_bytes'] / 1e6:8.1f}  "
        print(line + "; ".join(f"{name}: {k['registers']}, {k['shared_bytes'] / 1e3:.1f}, {k['spills']}"
                               for name, k in result["kernels"].items() if k["shared_bytes"]), flush=True)
    return results


def times(cases: Mapping[str, Case], impls: Sequence[str] | None, vs: Sequence[str], repeats: int) -> None:
    """Times the cases on this machine's device, on random operands."""
    device = jax.devices()[0]
    own = {"tpu": "tpu", "gpu": "gpu"}.get(device.platform, "xla")
    print(f"{device.device_kind}, jax {jax.__version__}: best of {repeats} calls")
    print(f"{'case':26} {'impl':10} {'ms':>10} {'GFLOP/s':>9} {'GB/s':>8} {'temp MB':>9}")
    for name, case in cases.items():
        for impl in dict.fromkeys([*(impls or [own]), *vs]):
            if impl not in case.impls:
                continue
            function, arguments = case.build(impl)
            seconds, temp = measure(function, jax.tree.map(draw, arguments), repeats)
            rates = f"{case.flops / seconds / 1e9:9.1f} {case.bytes / seconds / 1e9:8.1f}"
            print(f"{name:26} {impl:10} {1e3 * seconds:10.3f} {rates} {temp:9.1f}", flush=True)


def draw(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Random numbers of about unit size; integers are zero."""
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jnp.asarray(np.random.default_rng(0).standard_normal(like.shape, np.float32), like.dtype)
    return jnp.zeros(like.shape, like.dtype)


def measure(f: Callable[..., Any], inputs: Sequence[Any], repeats: int) -> tuple[float, float]:
    """Seconds of the best of `repeats` calls (fewer where one takes long), and MB of temporary memory."""
    compiled = jax.jit(f).lower(*inputs).compile()
    jax.block_until_ready(compiled(*inputs))
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < 5:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        seconds.append(time.perf_counter() - begin)
    memory: Any = compiled.memory_analysis()
    return min(seconds), memory.temp_size_in_bytes / 1e6
