"""Sizes at which the grouped matmul is measured."""

from typing import NamedTuple


class Size(NamedTuple):
    N: int  # rows: tokens times experts per token
    K: int
    M: int
    E: int


SIZES = {
    "nano few rows": Size(N=64, K=32, M=32, E=8),
    "nano prefill": Size(N=1024, K=64, M=64, E=16),
    "nano training": Size(N=8192, K=32, M=64, E=16),
    "wide": Size(N=2048, K=512, M=512, E=64),
    "decode, 896 experts": Size(N=128, K=64, M=64, E=896),
}
