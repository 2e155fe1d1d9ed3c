"""Decoding attention over paged latents at K3's sizes as one device sees them: 12, 24 or all 96 heads, bf16, ragged contexts.

What is counted: the latents of all used tokens once, 576 numbers of 2 bytes each, queries in and outputs out; per token, query
and head 2 (576 + 512) FLOPs. In HBM a latent fills whole tiles, so 640 numbers are moved for 576 (1.11), in chunks of 128
tokens (64 with pages of 64): `moved` is what the TPU kernel copies, 1.15 times the least at most.

The lengths are known when a case is compiled: without that, the number of grid steps is not. The TPU compiler's estimate takes
every step for a whole block of one sequence: it leaves out what the last block of a sequence adds (its mask) and saves.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from pallas_kernels.aot.bench import main
from pallas_kernels.aot.case import Built, Case, array
from pallas_kernels.paged_mla import paged_latent_attention, tpu

LATENT, VALUE, LONGEST = 576, 512, 8192
ROOM = 640  # numbers of a row of the pool: whole tiles


def ragged(sequences: int) -> Int32[np.ndarray, " B"]:
    """Tokens of each sequence: one idle, one full, the others of any length up to LONGEST."""
    lengths = np.random.default_rng(0).integers(1, LONGEST + 1, sequences).astype(np.int32)
    if sequences > 1:
        lengths[:2] = 0, LONGEST
    return lengths


def decode(impl: str, *, lengths: Any, queries: int, heads: int, page: int) -> Built:
    B, pages = len(lengths), -(-int(lengths.max()) // page)

    def attend(q: Any, pool: Any, table: Any) -> Any:
        return paged_latent_attention(q, pool, table, lengths, value_dim=VALUE, scale=192**-0.5, impl=impl)

    return attend, (array(B, queries, heads, LATENT, dtype=jnp.bfloat16),
                    array(B * pages, page, ROOM, dtype=jnp.bfloat16), array(B, pages, dtype=jnp.int32))


def least(lengths: Any, queries: int, heads: int) -> tuple[float, float]:
    """FLOPs and bytes."""
    tokens, rows = float(lengths.sum()), queries * heads
    return 2 * (LATENT + VALUE) * rows * tokens, 2 * (LATENT * tokens + len(lengths) * rows * (LATENT + VALUE))


def moved(lengths: Any, queries: int, heads: int, page: int) -> float:
    """Bytes that the TPU kernel moves between HBM and the chip, on chips with one core."""
    rows = -(-queries * heads // tpu.ROWS) * tpu.ROWS
    tokens = (-(-lengths // tpu.chunk(page)) * tpu.chunk(page)).sum()
    return float(2 * ROOM * (tokens + len(lengths) * rows) + len(lengths) * rows * (2 * VALUE + 4 * tpu.LANES))


def decode_case(lengths: Any, queries: int, heads: int, page: int) -> Case:
    build = partial(decode, lengths=lengths, queries=queries, heads=heads, page=page)
    return Case(build, *least(lengths, queries, heads), impls=("tpu", "gpu", "xla"), estimate=False)


SIZES = {
    f"s{sequences}_t{queries}_h{heads}_page{page}": (ragged(sequences), queries, heads, page)
    for sequences, queries, heads, page in [
        (64, 1, 12, 64), (64, 1, 12, 128), (64, 1, 12, 256), (64, 1, 12, 512), (64, 1, 24, 128), (64, 1, 96, 128),
        (64, 8, 12, 128), (256, 1, 12, 64), (256, 1, 12, 512), (256, 1, 24, 256), (256, 4, 24, 256), (256, 1, 96, 256),
    ]
} | {"one_of_128k_h12_page256": (np.array([131072], np.int32), 1, 12, 256)}
CASES = {name: decode_case(*size) for name, size in SIZES.items()}

if __name__ == "__main__":
    main("pallas_kernels.paged_mla.bench", CASES, __doc__)
