"""The cases of every op compiled for chips that are not here, beside their record.

  python -m pallas_kernels.aot --chip v5p v6e tpu7x         needs libtpu: pip install "k3jax[tpu]"
  python -m pallas_kernels.aot --chip h200                  needs the CUDA plugin of jax and ptxas (make gpu-aot)
  python -m pallas_kernels.aot --chip v5p --op kda mla --vs xla

Every case is compiled. For a TPU, cycles are estimated of those cases that are on record with the same libtpu, and of all with
--record or --vs: walking through a kernel that gives no figure in the end takes minutes each.

Exits with 1 where a case does not compile, or takes or spills over 10 % more than on record.
"""

import argparse
import importlib
import importlib.util
import pkgutil
import sys

import pallas_kernels
from pallas_kernels.aot.bench import compile_for
from pallas_kernels.aot.case import Case
from pallas_kernels.aot.chips import GPUS, TPUS


def all_cases() -> dict[str, dict[str, Case]]:
    """Op -> its CASES, for every op that has a bench."""
    ops = [package.name for package in pkgutil.iter_modules(pallas_kernels.__path__) if package.ispkg and package.name != "aot"]
    found = {}
    for op in ops:
        if importlib.util.find_spec(bench_of(op)):
            found[op] = importlib.import_module(bench_of(op)).CASES
    return found


def bench_of(op: str) -> str:
    return f"pallas_kernels.{op}.bench"


def main() -> None:
    ops = all_cases()
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=__doc__, formatter_class=raw)
    parser.add_argument("--chip", nargs="+", choices=[*TPUS, *GPUS], required=True, help="chips to compile for")
    parser.add_argument("--op", nargs="+", choices=ops, default=list(ops), help="ops (default: all)")
    parser.add_argument("--vs", nargs="+", default=[], help="implementations to put beside the kernels, such as xla")
    parser.add_argument("--record", action="store_true", help="keep the figures in pallas_kernels/OP/estimates")
    args = parser.parse_args()
    worse = []
    for op in args.op:
        print(f"\n== {op}", flush=True)
        found = compile_for(args.chip, bench_of(op), ops[op], vs=args.vs, record=args.record,
                            only_recorded=not (args.record or args.vs))
        worse += [f"{op}: {line}" for line in found]
    if worse and not args.record:
        sys.exit("worse than the record:\n  " + "\n  ".join(worse))


if __name__ == "__main__":
    main()
