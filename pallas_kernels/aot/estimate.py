"""The TPU compiler's figures for an op's cases, each generation in a process of its own, and their record."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.aot.worker import ENVIRONMENT

Job = tuple[str, str]  # case, implementation
WORSE = 1.10  # estimates may grow by this factor before `regressions` names them


def why_not() -> str | None:
    """Why this environment cannot compile for TPUs; None if it can."""
    if importlib.util.find_spec("libtpu") is None:
        return 'libtpu, which holds the TPU compiler, is not installed: pip install "k3jax[tpu]"'
    return None


def versions() -> dict[str, str]:
    """Of what decides the estimates."""
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


def estimates(module: str, chip: str, jobs: Sequence[Job], *, dump: bool = True) -> Iterator[dict[str, Any]]:
    """Compiles each job of `module`.CASES for `chip`; yields its figures as they come, "error" where it did not compile.

    dump  False: only compiles. Where a version of libtpu ends the process as it writes its figures (0.0.42 for tpu7x), the
    rest of the jobs are compiled without, and "note" says so.
    """
    remaining = list(jobs)
    with tempfile.TemporaryDirectory() as folder:
        where = folder if dump else "-"
        arguments = [f"{case}={impl}" for case, impl in remaining]
        command = [sys.executable, "-m", "pallas_kernels.aot.worker", chip, where, module, *arguments]
        env = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                if line.startswith("{"):
                    remaining.pop(0)
                    yield json.loads(line)
            errors = process.stderr.read()
    if remaining and dump:
        note = f"no estimates: libtpu {versions()['libtpu']} ended the process as it wrote them"
        for result in estimates(module, chip, remaining, dump=False):
            yield result | {"note": note}
    elif remaining:
        yield from ({"case": c, "impl": i, "error": f"the compiler ended the process: {errors[-500:]}"} for c, i in remaining)


def record_path(module: str, chip: str) -> Path:
    """Where the figures of record for `chip` lie: beside the op."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "estimates" / f"{chip}.json"


def read_record(module: str, chip: str) -> dict[str, dict[str, Any]]:
    """"case impl" -> figures that were recorded with this libtpu; empty if none were."""
    path = record_path(module, chip)
    if not path.exists():
        return {}
    return json.loads(path.read_text()).get(versions()["libtpu"], {}).get("cases", {})


def write_record(module: str, chip: str, results: Sequence[dict[str, Any]]) -> None:
    """Adds these figures to the record, in the place of those of the same cases and libtpu."""
    path = record_path(module, chip)
    all_versions = json.loads(path.read_text()) if path.exists() else {}
    entry = all_versions.setdefault(versions()["libtpu"], {"jax": versions()["jax"], "cases": {}})
    for result in results:
        figures = {k: result[k] for k in ("cycles", "temp_bytes", "kernels") if k in result}
        entry["cases"][f"{result['case']} {result['impl']}"] = figures
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(all_versions, indent=1, sort_keys=True) + "\n")


def regressions(recorded: dict[str, dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[str]:
    """One line per result that does not compile, spills where the record does not, or takes over 10 % more cycles."""
    found = []
    for result in results:
        name = f"{result['case']} {result['impl']}"
        if "error" in result:
            found.append(f"{name}: {result['error']}")
        elif name in recorded and "cycles" in result:
            before = recorded[name]
            if result["cycles"] > WORSE * before["cycles"]:
                found.append(f"{name}: {result['cycles']} cycles, {before['cycles']} on record")
            if _spills(result) > WORSE * _spills(before):
                found.append(f"{name}: {_spills(result)} spilled registers, {_spills(before)} on record")
    return found


def _spills(result: dict[str, Any]) -> int:
    return sum(kernel["spills"] for kernel in result.get("kernels", {}).values())
