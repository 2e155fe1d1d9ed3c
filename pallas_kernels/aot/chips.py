"""Chips by name, per device as JAX sees one: the one table that rooflines are computed from."""

from typing import NamedTuple


class Chip(NamedTuple):
    """Peak rates are the vendor's. Clocks of TPUs are inferred from peak rates and unit counts; none was measured."""

    topology: str  # the smallest that the compiler accepts
    bf16: float  # FLOP/s
    hbm: float  # bytes/s
    clock: float  # Hz
    hbm_size: float  # bytes; for TPUs what their compiler enforces


GiB = 2.0**30
TPUS = {
    "v5e": Chip("v5e:2x2", bf16=197e12, hbm=0.82e12, clock=1.5e9, hbm_size=15.75 * GiB),
    "v5p": Chip("v5p:2x2x1", bf16=459e12, hbm=2.77e12, clock=1.75e9, hbm_size=95.74 * GiB),
    "v6e": Chip("v6e:2x2", bf16=918e12, hbm=1.64e12, clock=1.75e9, hbm_size=31.25 * GiB),
    "tpu7x": Chip("tpu7x:2x2x1", bf16=1153.5e12, hbm=3.685e12, clock=2.2e9, hbm_size=94.75 * GiB),  # half a chip
}
GPUS = {
    "h100": Chip("1x1x1", bf16=989e12, hbm=3.35e12, clock=1.83e9, hbm_size=80e9),
    "h200": Chip("1x1x1", bf16=989e12, hbm=4.8e12, clock=1.83e9, hbm_size=141e9),
}


def roofline(chip: Chip, flops: float, bytes_moved: float) -> float:
    """Seconds that the work takes at least: max(flops / peak, bytes / bandwidth)."""
    return max(flops / chip.bf16, bytes_moved / chip.hbm)
