"""Compiles an op's cases for an NVIDIA GPU (sm_90a) that is not here, and asks ptxas for registers and spills."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pallas_kernels.aot import jobs
from pallas_kernels.aot.chips import GPUS

# An XLA GpuTargetConfig of the Hopper generation, whose cards differ in memory only.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.83 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: 9 minor: 0 }}
  memory_bandwidth: {bandwidth} device_memory_size: {memory}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{name}"
"""
_FUNCTION = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"kCustomKernel .*\] (\S+) grid: .*shared_memory: (\d+) bytes")


def find_ptxas() -> str | None:
    """The assembler of CUDA, on the path or in its default place."""
    return shutil.which("ptxas") or shutil.which("ptxas", path=os.path.join(os.sep, "usr", "local", "cuda", "bin"))


def estimate(chip: str, folder: Path | None, function: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Temporary memory; per kernel registers per thread, bytes of shared memory per block, spilled bytes."""
    from jax.experimental import topologies

    facts = GPUS[chip]
    config = TARGET.format(bandwidth=int(facts.hbm), memory=int(facts.hbm_size), name=chip)
    device = topologies.get_topology_desc(platform="cuda", topology=facts.topology, target_config=config).devices[0]
    before = set() if folder is None else set(folder.iterdir())
    begin = time.perf_counter()
    compiled = jobs.compiled(function, arguments, device)
    seconds = time.perf_counter() - begin
    result: dict[str, Any] = {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes, "compile_s": round(seconds, 2)}
    return result if folder is None else result | {"kernels": _kernels(set(folder.iterdir()) - before)}


def _kernels(written: set[Path]) -> dict[str, dict[str, int]]:
    shared = {}
    for path in written:
        if path.name.endswith("thunk_sequence.txt"):
            shared |= {name: int(size) for name, size in _SHARED.findall(path.read_text())}
    kernels: dict[str, dict[str, int]] = {}
    for path in (path for path in written if path.suffix == ".ptx" and ".version" in path.read_text()):
        command = [find_ptxas() or "ptxas", "-v", "-arch", "sm_90a", str(path), "-o", os.devnull]
        name = ""
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines():
            if found := _FUNCTION.search(line):
                name = found[1]
                kernels[name] = {"registers": 0, "shared_bytes": shared.get(name, 0), "spills": 0}
            elif found := _SPILLS.search(line):
                kernels[name]["spills"] = int(found[1]) + int(found[2])
            elif found := _REGISTERS.search(line):
                kernels[name]["registers"] = int(found[1])
    return kernels


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = ["--xla_gpu_autotune_level=0"]  # nothing to measure on
    if (root := sys.argv[2]) != "-":
        Path(root).mkdir(parents=True, exist_ok=True)
        flags.append(f"--xla_dump_to={root}")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    jobs.run(estimate)
