"""What the compilers for TPUs and GPUs say about an op's cases, each chip in a process of its own, and their record."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.aot.chips import TPUS
from pallas_kernels.aot.gpu_worker import find_ptxas
from pallas_kernels.aot.worker import ENVIRONMENT

Job = tuple[str, str]  # case, implementation
WORSE = 1.10  # estimates may grow by this factor before `regressions` names them
PATIENCE = 240  # seconds for one job

_INSTALL = {
    "libtpu": 'pip install "k3jax[tpu]"',
    "jax-cuda13-plugin": "pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt (jax's version) in an environment of its own",
}


def why_not(chip: str) -> str | None:
    """Why this environment cannot compile for `chip`; None if it can."""
    package = _package(chip)
    if not any(True for _ in importlib.metadata.distributions(name=package)):
        return f"{package}, which holds the compiler, is not installed: {_INSTALL[package]}"
    if chip not in TPUS and find_ptxas() is None:
        return "ptxas, the assembler of CUDA, is not on the path"
    return None


def compiler(chip: str) -> str:
    """Package and version that decide the estimates for `chip`."""
    return f"{_package(chip)} {importlib.metadata.version(_package(chip))}"


def _package(chip: str) -> str:
    return "libtpu" if chip in TPUS else "jax-cuda13-plugin"


def estimates(module: str, chip: str, jobs: Sequence[Job], *, dump: bool = True) -> Iterator[dict[str, Any]]:
    """Compiles each job of `module`.CASES for `chip`; yields its figures as they come, "error" where it did not compile.

    dump  False: only compiles. Some versions of libtpu end the process as they write a kernel's figures, or place arrays in VMEM
    by them so that it overflows, and large kernels are simulated step by step for longer than PATIENCE: such a job is compiled
    without, and its "note" says why.
    """
    remaining = list(jobs)
    while remaining:
        reason = ""
        for result in _compiled(module, chip, remaining, dump):
            if isinstance(result, str):
                reason = result
            else:
                job = remaining.pop(0)
                failed = dump and "error" in result
                yield _compiled_only(module, chip, job, result["error"].splitlines()[0]) if failed else result
        if not remaining:
            return
        case, impl = stopped = remaining.pop(0)
        yield _compiled_only(module, chip, stopped, reason) if dump else {"case": case, "impl": impl, "error": reason}


def _compiled_only(module: str, chip: str, job: Job, reason: str) -> dict[str, Any]:
    """The job compiled without figures, which `reason` prevented."""
    (result,) = estimates(module, chip, [job], dump=False)
    return result | {"note": f"no estimate: {reason}"}


def _compiled(module: str, chip: str, jobs: Sequence[Job], dump: bool) -> Iterator[dict[str, Any] | str]:
    """Results of one process in the order of the jobs; last, why it ended before the jobs did."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        arguments = [f"{case}={impl}" for case, impl in jobs]
        worker = "worker" if chip in TPUS else "gpu_worker"
        command = [sys.executable, "-m", f"pallas_kernels.aot.{worker}", chip, folder if dump else "-", module, *arguments]
        env = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env) as process:
            assert process.stdout is not None
            watch = Watch(process.kill, PATIENCE)
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
                    watch.restart()
            watch.stop()
        errors.seek(0)
        yield f"over {PATIENCE} s" if watch.rang else f"{compiler(chip)} ended the process: {gist(errors.read())}"


def gist(stderr: str) -> str:
    """The line in which a process says why it ended: that of a fatal check without its date and place, else the last one."""
    if fatal := re.search(r"^F\d{4} [^]]*\] (.*)", stderr, re.MULTILINE):
        return fatal[1].strip()
    return next((line for line in reversed(stderr.splitlines()) if line.strip()), "it said nothing")


class Watch:
    """Calls `ring` once `seconds` have passed since it was started or last restarted."""

    def __init__(self, ring: Callable[[], None], seconds: float):
        self.ring, self.seconds, self.rang = ring, seconds, False
        self.timer = self._start()

    def _start(self) -> threading.Timer:
        timer = threading.Timer(self.seconds, self._ring)
        timer.daemon = True
        timer.start()
        return timer

    def _ring(self) -> None:
        self.rang = True
        self.ring()

    def restart(self) -> None:
        self.stop()
        self.timer = self._start()

    def stop(self) -> None:
        self.timer.cancel()


def record_path(module: str, chip: str) -> Path:
    """Where the figures of record for `chip` lie: beside the op."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "estimates" / f"{chip}.json"


def read_record(module: str, chip: str) -> dict[str, dict[str, Any]]:
    """"case impl" -> figures that were recorded with this compiler; empty if none were."""
    path = record_path(module, chip)
    if not path.exists():
        return {}
    return json.loads(path.read_text()).get(compiler(chip), {}).get("cases", {})


def write_record(module: str, chip: str, results: Sequence[dict[str, Any]]) -> None:
    """Adds these figures to the record, in the place of those of the same cases and compiler."""
    path = record_path(module, chip)
    record = json.loads(path.read_text()) if path.exists() else {}
    entry = record.setdefault(compiler(chip), {"jax": importlib.metadata.version("jax"), "cases": {}})
    for result in results:
        figures = {k: result[k] for k in ("cycles", "temp_bytes", "kernels") if k in result}
        entry["cases"][f"{result['case']} {result['impl']}"] = figures
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def regressions(recorded: dict[str, dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[str]:
    """One line per result that does not compile, or takes or spills over 10 % more than on record."""
    found = []
    for result in results:
        name = f"{result['case']} {result['impl']}"
        if "error" in result:
            found.append(f"{name}: {result['error']}")
        elif name in recorded:
            now, before = _watched(result), _watched(recorded[name])
            found += [f"{name}: {what} {now[what]}, on record {before[what]}"
                      for what in now if now[what] > WORSE * before.get(what, now[what])]
    return found


def _watched(result: dict[str, Any]) -> dict[str, int]:
    """The figures of a result that must not grow."""
    spills = sum(kernel["spills"] for kernel in result.get("kernels", {}).values())
    return {what: result[what] for what in ("cycles",) if what in result} | {"spills": spills}
