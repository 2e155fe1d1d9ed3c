"""Compiles cases of an op for one TPU generation and prints one line of JSON per case. A process of its own:
libtpu reads its flags once, and on some versions a dump ends the process.

    python -m pallas_kernels.aot.worker CHIP FOLDER MODULE CASE=IMPL ...
"""

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any value silences the search for a real one
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}


def flags(folder: Path) -> str:
    """libtpu's flags that make it write estimates and final schedules to an existing folder."""
    return (f"--xla_jf_dump_static_llo_profile_to={folder} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=.*final.*")


def main() -> None:
    chip, root, module, *jobs = sys.argv[1:]
    os.environ.update(ENVIRONMENT)
    folder = Path(root)
    if root != "-":
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["LIBTPU_INIT_ARGS"] = flags(folder)
    cases = importlib.import_module(module).CASES
    for job in jobs:
        name, impl = job.split("=")
        try:
            result = estimate(chip, None if root == "-" else folder, *cases[name].build(impl))
        except Exception as error:  # the parent reports it beside the other cases
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
        print(json.dumps({"case": name, "impl": impl, **result}), flush=True)


def estimate(chip: str, folder: Path | None, function: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Compiles `function` inside a program that also computes its operands, and reads what the compiler says."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from pallas_kernels.aot import hlo, schedule
    from pallas_kernels.aot.chips import TPUS

    device = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[chip].topology).devices[0]
    sharding = SingleDeviceSharding(device)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)

    def program(arguments: Any) -> Any:
        with jax.named_scope("operands"):
            operands = jax.lax.optimization_barrier(jax.tree.map(_computed, arguments))
        return function(*operands)

    begin = time.perf_counter()
    with jax.default_device(device):
        compiled = jax.jit(program).lower(given).compile()
    seconds = time.perf_counter() - begin
    memory: Any = compiled.memory_analysis()
    result: dict[str, Any] = {"temp_bytes": memory.temp_size_in_bytes, "compile_s": round(seconds, 2)}
    if folder is None:
        return result
    cycles = hlo.cycles_by_operation(compiled.as_text() or "")
    kernels = {}
    for name in cycles:
        if found := schedule.read(folder, name):
            kernels[name] = {"cycles": cycles[name], **found._asdict()}
    largest = dict(sorted(kernels.items(), key=lambda item: -item[1]["cycles"])[:4])
    return result | {"cycles": sum(cycles.values()), "kernels": largest}


def _computed(x: Any) -> Any:
    return ~x if x.dtype == bool else x + x


if __name__ == "__main__":
    main()
