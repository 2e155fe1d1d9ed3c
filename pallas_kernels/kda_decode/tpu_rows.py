"""What the TPU kernels of decode share: which block a row reads, and how vectors turn between lanes and sublanes."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from pallas_kernels.target import device_kind

ROWS = 16  # sublanes of a tile of bf16
VMEM = 40 * 2**20  # bytes


def cores() -> int:
    """Of the device that programs are compiled for; rows are split over them."""
    return 2 if device_kind() in ("TPU v4", "TPU v5") else 1


def stride_of(heads: int) -> int:
    return -(-heads // 8) * 8


def standing_of(slots: Int32[Array, " N"], parts: int) -> Int32[Array, "parts N/parts+3"]:
    """Whose blocks the rows from -1 to n + 1 of a part read: their own if they are active, else those of the active row before,
    else those of the part's row 0."""
    n = len(slots) // parts
    row, other = np.arange(n + 3) - 1, np.arange(n)
    earlier = jnp.asarray(np.where(other <= row[:, None], other, 0), jnp.int32)
    return jnp.max(jnp.where(slots.reshape(parts, 1, n) < 0, 0, earlier), axis=2) + n * np.arange(parts, dtype=np.int32)[:, None]


def pieces_of(x: Float32[Array, "..."]) -> list[Float32[Array, "..."]]:
    """Three numbers of bf16 that add up to x: 8 of its 24 bits each."""
    pieces = []
    for _ in range(3):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        pieces.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
        x = x - pieces[-1]
    return pieces


def unit(x: Float32[Array, "heads K"]) -> Float32[Array, "heads K"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6)


def gated_norm(
    o: Float32[Array, "heads K"], weight: Float32[Array, "1 K"], gate: Float32[Array, "heads K"], eps: float
) -> Float32[Array, "heads K"]:
    return o * jax.lax.rsqrt(jnp.mean(o * o, axis=1, keepdims=True) + eps) * weight * jax.nn.sigmoid(gate)


def down(x: Float32[Array, "1 H"], head_0: Int32[Array, ""], heads: int) -> Float32[Array, "heads 1"]:
    """Some heads of a row, one in each sublane."""
    lane, sublane = (jax.lax.broadcasted_iota(jnp.int32, (heads, x.shape[1]), axis) for axis in (1, 0))
    return jnp.sum(jnp.where(lane == head_0 + sublane, x, 0), axis=1, keepdims=True)
