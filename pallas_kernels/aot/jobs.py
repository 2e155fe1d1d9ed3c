"""What the two compiling processes share: jobs from the command line, operands computed inside, one line of JSON per job.

    python -m pallas_kernels.aot.{worker,gpu_worker} CHIP FOLDER MODULE CASE=IMPL ...
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(compile_case: Callable[[str, Path | None, Callable[..., Any], tuple[Any, ...]], dict[str, Any]]) -> None:
    """Compiles every job by `compile_case(chip, folder, function, arguments)`; folder is None if given as "-"."""
    chip, root, module, *jobs = sys.argv[1:]
    cases = importlib.import_module(module).CASES
    for job in jobs:
        name, impl = job.split("=")
        try:
            result = compile_case(chip, None if root == "-" else Path(root), *cases[name].build(impl))
        except Exception as error:  # the parent reports it beside the other cases
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
        print(json.dumps({"case": name, "impl": impl, **result}), flush=True)


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...], device: Any) -> Any:
    """`function` compiled for `device` in a program that also computes its operands, under the scope "operands"."""
    import jax
    from jax.sharding import SingleDeviceSharding

    def computed(x: Any) -> Any:
        return ~x if x.dtype == bool else x + x

    def program(arguments: Any) -> Any:
        with jax.named_scope("operands"):
            operands = jax.lax.optimization_barrier(jax.tree.map(computed, arguments))
        return function(*operands)

    sharding = SingleDeviceSharding(device)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.default_device(device):
        return jax.jit(program).lower(given).compile()
