"""Real sizes of decode with Kimi Delta Attention, and inputs like a model's, shared by tests and bench."""

from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.kda_decode.arrays import Pool, Projected, Weights


class Shape(NamedTuple):
    N: int  # sequences that are decoded
    H: int
    slots: int
    K: int = 128
    W: int = 4


SHAPES = {  # K3's 96 heads over 8 and 4 devices
    "h12_64": Shape(N=64, H=12, slots=64),
    "h12_256": Shape(N=256, H=12, slots=256),
    "h24_64": Shape(N=64, H=24, slots=64),
    "h24_256": Shape(N=256, H=24, slots=256),
}


def draw(shape: Shape, *tokens: int, seed: int = 0) -> tuple[Projected, Weights, Pool]:
    """Arrays of numpy in fp32 and of about unit size; `tokens`: T, where each row has several."""
    N, H, slots, K, W = shape
    r = np.random.default_rng(seed)

    def normal(*sizes: int) -> Any:
        return r.standard_normal(sizes).astype(np.float32)

    q, k, v, decay, gate = (normal(N, *tokens, H * K) for _ in range(5))
    x = Projected(q, k, v, decay, normal(N, *tokens, H), gate)
    weights = Weights(normal(3, W, H * K), 0.3 * normal(H), normal(H * K), 1 + 0.1 * normal(K))
    return x, weights, Pool(normal(slots, H, K, K), normal(slots, 3, W - 1, H * K))
