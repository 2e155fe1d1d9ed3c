"""Where each token of a batch belongs: sequence, position, adapter. Every layer gets the same one."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packing:
    """Segment 0 is padding; 1, 2, … are sequences, each contiguous in its row. Positions count from each sequence's start."""

    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # tokens since the start of the sequence, cached ones included
    adapters: Int[Array, "B T"] | None = None  # 0: none
    owners: Int[Array, " R"] | None = None  # adapter that owns each rank column of the LoRA pools

    @classmethod
    def of(cls, segments: Int[Array, "B T"], start: Int[Array, " B"] | int = 0, **adapters: Array | None) -> "Packing":
        """Positions follow from the segments; `start` tokens of each row's first sequence came in earlier calls."""
        t = jnp.arange(segments.shape[1])
        starts = jnp.where(_starts(segments), t, 0)
        offset = jax.lax.associative_scan(jnp.maximum, starts, axis=1)
        first = offset == jnp.argmax(segments > 0, axis=1)[:, None]
        start = jnp.broadcast_to(jnp.asarray(start, jnp.int32), segments.shape[:1])
        positions = t - offset + jnp.where(first, start[:, None], 0)
        return cls(segments, positions.astype(jnp.int32), **adapters)

    @property
    def valid(self) -> Bool[Array, "B T"]:
        return self.segments > 0

    @property
    def resets(self) -> Bool[Array, "B T"]:
        """True where recurrent state starts from zero. Padding never resets: state survives right padding."""
        return _starts(self.segments)

    @property
    def lengths(self) -> Int[Array, " B"]:
        return self.valid.sum(1, dtype=jnp.int32)

    @property
    def rank_gate(self) -> Bool[Array, "B T R"] | None:
        """True where a rank column belongs to the token's adapter; adapter 0 owns none."""
        if self.adapters is None or self.owners is None:
            return None
        ids = self.adapters[..., None]
        return (ids == self.owners) & (ids > 0)


def _starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    before = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    return (segments > 0) & (segments != before)
