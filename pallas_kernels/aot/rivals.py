"""The ops as Google's tokamax has them (0.0.17, Python 3.12 and later), to put beside ours: --vs tokamax.

Nothing here is used outside benches. What can be compared: on a TPU, times. Compiled without one, its kernels read the lengths
of their loops from memory, which the compiler's estimate takes for zero, or copy in a way that it does not model; such figures
lie below the roofline and the bench says so instead of printing a ratio.
"""

from typing import Any

from jax import Array


def kda(q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, *, decay_floor: float) -> tuple[Array, Array]:
    """As `pallas_kernels.kda.kda`, with heads first: q, k, v, log_decay [H, B, T, K], beta [H, B, T]. v6e and tpu7x."""
    _tokamax()
    from tokamax._src.ops.kda.api import kimi_delta_attention  # pyright: ignore[reportMissingImports]

    o, last = kimi_delta_attention(
        q, k, v, log_decay, beta, scale=1.0, initial_state=state[:, None], output_final_state=True, lower_bound=decay_floor,
        implementation="mosaic",
    )
    return o, last[:, 0]


def attention(q: Array, k: Array, v: Array, *, scale: float) -> Array:
    """Causal, all tokens in order: q, k [B, T, H, K], v [B, T, H, V]."""
    return _tokamax().dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation="mosaic")


def grouped_matmul(x: Array, w: Array, group_sizes: Array) -> Array:
    """As `pallas_kernels.grouped_matmul.grouped_matmul`."""
    return _tokamax().ragged_dot(x, w, group_sizes, implementation="mosaic", bypass_device_check=True)


def _tokamax() -> Any:
    try:
        import tokamax  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("tokamax is not installed: pip install tokamax, in Python 3.12 or later") from error
    return tokamax
