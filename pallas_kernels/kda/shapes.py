"""Real sizes of Kimi Delta Attention and inputs like a model's, shared by tests and bench."""

from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    B: int
    T: int
    H: int
    K: int
    V: int


SHAPES = {
    "k3": Shape(B=1, T=4096, H=96, K=128, V=128),
    "kimi_linear": Shape(B=1, T=4096, H=32, K=128, V=128),
    "k3_tp12": Shape(B=1, T=4096, H=8, K=128, V=128),  # one of 12 tensor-parallel shares of K3's heads
    "nano": Shape(B=64, T=128, H=2, K=32, V=32),  # a model that is trained on a CPU
    "nano16": Shape(B=32, T=256, H=4, K=16, V=16),
}


def draw(
    shape: Shape, *, seed: int = 0, log_decay: np.ndarray | float | None = None
) -> tuple[np.ndarray, ...]:
    """q, k, v, log_decay, beta, state in fp32: unit keys, scaled unit queries, decays all over (-5, 0)."""
    B, T, H, K, V = shape
    r = np.random.default_rng(seed)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in r.standard_normal((2, B, T, H, K)))
    if log_decay is None:
        log_decay = -5 / (1 + np.exp(-3 * r.standard_normal((B, T, H, K))))
    beta = 1 / (1 + np.exp(-2 * r.standard_normal((B, T, H))))
    v, state = r.standard_normal((B, T, H, V)), r.standard_normal((B, H, K, V))
    inputs = q * K**-0.5, k, v, np.broadcast_to(log_decay, q.shape), beta, state
    return tuple(x.astype(np.float32) for x in inputs)
