"""Cycles that the TPU compiler estimates for a compiled program, loops counted by their trips."""

import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-<>]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARGUMENT = 'op_name="arguments['
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
UNKNOWN = 2**62  # the compiler's mark for operations that it cannot estimate


def cycles_by_operation(text: str, without: str = "operands") -> dict[str, int]:
    """name of an operation -> cycles of all its executions, from the text of a compiled program.

    without  operations under this jax.named_scope are left out
    A loop of unknown trip count is counted once; of the branches of a conditional, the most expensive one.
    """
    computations, entry, body = {}, "", None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            body = computations.setdefault(found[1], [])
            if line.startswith("ENTRY"):
                entry = found[1]
        elif line.startswith("}"):
            body = None
        elif body is not None and (found := _OPERATION.match(line)):
            body.append((found[1], line))

    def total(name: str, times: int) -> dict[str, int]:
        cycles: dict[str, int] = {}
        for operation, line in computations.get(name, []):
            if f"/{without}/" in line or _ARGUMENT in line:
                continue
            inner: dict[str, int] = {}
            if " while(" in line:
                trips = _TRIPS.search(line)
                inner = total(_callee(line, "body"), int(trips[1]) if trips else 1)
            elif " conditional(" in line and (found := _BRANCHES.search(line)):
                names = found[1].replace("%", "").split(", ") if found[1] else [found[2], found[3]]
                inner = max((total(branch, 1) for branch in names), key=lambda c: sum(c.values()))
            elif " call(" in line:
                inner = total(_callee(line, "to_apply"), 1)
            elif found := _CYCLES.search(line):
                inner = {operation: int(found[1])}
            for key, value in inner.items():
                if value < UNKNOWN:
                    cycles[key] = cycles.get(key, 0) + value * times
        return cycles

    return total(entry, 1)


def kernels_without_cycles(text: str) -> list[str]:
    """Names of the Pallas kernels in a compiled program that the compiler estimates at nothing: it could not follow them."""
    calls = (line for line in text.splitlines() if '"tpu_custom_call"' in line)
    found = ((_OPERATION.match(line), _CYCLES.search(line)) for line in calls)
    return [name[1] for name, cycles in found if name and not (cycles and 0 < int(cycles[1]) < UNKNOWN)]


def _callee(line: str, key: str) -> str:
    found = re.search(rf"{key}=%?([\w.\-]+)", line)
    return found[1] if found else ""
