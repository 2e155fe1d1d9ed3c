"""How many tokens the KDA kernels may take together, so that no decay between them leaves the range of a number."""

from typing import Any

import jax.numpy as jnp

RANGE = 80.0  # nats that a tile may decay: e^80 and e^-80 are normal numbers in fp32 and bf16
LIMIT = {jnp.dtype(jnp.float32): -20.0, jnp.dtype(jnp.bfloat16): -10.0}  # e^limit is below the rounding of a product


def tile(decay_floor: float | None, dtype: Any) -> tuple[int, float]:
    """Tokens of the largest tile for decays above `decay_floor` (None: unbounded); the log decay that lower ones count as."""
    limit = LIMIT[jnp.dtype(dtype)]
    floor = limit if decay_floor is None else max(decay_floor, limit)
    return next(size for size in (16, 8, 4) if -floor * size <= RANGE), floor
