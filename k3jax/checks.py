"""What a call can tell of its input: shapes always, values only outside jit."""

from typing import Any

import jax
from jax.core import Tracer


def is_concrete(*arrays: Any) -> bool:
    """True if the values can be read here: nothing is traced, and no part lies with another process."""
    return not any(isinstance(a, Tracer) or (isinstance(a, jax.Array) and not a.is_fully_addressable) for a in arrays)


def require_hidden(x: Any, size: int, tokens: tuple[int, ...] | None, layer: str) -> None:
    """Raises ValueError unless x is [batch, tokens, size], with batch and tokens as in the packing's [B, T] if there is one."""
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) != 3 or shape[2] != size:
        given = f"an array of shape {list(shape)}" if shape is not None else type(x).__name__
        raise ValueError(f"{layer} takes hidden states [batch, tokens, {size}], got {given}.")
    if tokens is not None and tuple(tokens) != tuple(shape[:2]):
        raise ValueError(f"{layer}: x has [batch, tokens] = {list(shape[:2])}, but its packing {list(tokens)}. "
                         f"Make it with Packing.of(segments), segments [batch, tokens].")
