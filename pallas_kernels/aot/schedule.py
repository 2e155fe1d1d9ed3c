"""What the final schedule of a TPU kernel shows: instruction bundles, occupied units, spilled registers, VMEM."""

import re
from pathlib import Path
from typing import NamedTuple

FILL, SPILL = "VLOAD:FILL", "VSTORE:SPILL"
_VMEM = re.compile(r"#allocation\d+ \[shape = .*space=vmem, size = (0x[0-9a-f]+)")


class Schedule(NamedTuple):
    bundles: int  # instruction words, loops counted once
    occupancy: dict[str, float]  # unit -> used share of its slots in all bundles
    spills: int  # registers stored to VMEM and loaded back for want of room
    vmem: int  # bytes, windows with their buffers


def read(folder: Path, kernel: str) -> Schedule | None:
    """Of `kernel`, from what the compiler wrote to `folder`; None if it wrote nothing about it."""
    table = sorted(folder.glob(f"*-{kernel}-*static-per-bundle-utilization.txt"))
    if not table:
        return None
    lines = table[-1].read_text().splitlines()
    units = [unit.strip() for unit in lines[1].split(",")]
    capacity = [int(x) for x in lines[2].split()]
    rows = [[int(x) for x in line.split()] for line in lines[4:] if line.strip()]
    used = dict(zip(units, map(sum, zip(*rows, strict=True)), strict=True))
    shares = {unit: used[unit] / (slots * len(rows)) for unit, slots in zip(units, capacity, strict=True) if ":" not in unit}
    allocations = "".join(path.read_text() for path in folder.glob(f"*-{kernel}-00-*"))
    vmem = sum(int(size, 16) for size in _VMEM.findall(allocations))
    return Schedule(len(rows), shares, used[FILL] + used[SPILL], vmem)
