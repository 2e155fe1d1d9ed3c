"""Compiles an op's cases for one TPU generation. A process of its own: libtpu reads its flags once, and on some versions
what they make it write ends the process."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from pallas_kernels.aot import jobs

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any value silences the search for a real one
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}


def flags(folder: str) -> str:
    """libtpu's flags that make it write estimates and final schedules to an existing folder."""
    return (f"--xla_jf_dump_static_llo_profile_to={folder} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=.*final.*")


def estimate(chip: str, folder: Path | None, function: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Temporary memory, and with a folder the estimated cycles and the schedules of the kernels that take most of them."""
    from jax.experimental import topologies

    from pallas_kernels.aot import hlo, schedule
    from pallas_kernels.aot.chips import TPUS

    device = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[chip].topology).devices[0]
    begin = time.perf_counter()
    compiled = jobs.compiled(function, arguments, device)
    seconds = time.perf_counter() - begin
    result: dict[str, Any] = {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes, "compile_s": round(seconds, 2)}
    if folder is None:
        return result
    text = compiled.as_text() or ""
    if missing := hlo.kernels_without_cycles(text):
        return result | {"note": f"no estimate: libtpu counts {', '.join(missing)} as nothing"}
    cycles = hlo.cycles_by_operation(text)
    kernels = {}
    for name in cycles:
        if found := schedule.read(folder, name):
            kernels[name] = {"cycles": cycles[name], **found._asdict()}
    largest = dict(sorted(kernels.items(), key=lambda item: -item[1]["cycles"])[:4])
    return result | {"cycles": sum(cycles.values()), "kernels": largest}


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    if (root := sys.argv[2]) != "-":
        Path(root).mkdir(parents=True, exist_ok=True)
        os.environ["LIBTPU_INIT_ARGS"] = flags(root)
    jobs.run(estimate)
