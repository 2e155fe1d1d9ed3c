"""Rows sorted by group times one matrix per group: the routed experts."""

from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.dispatch import run
from pallas_kernels.grouped_matmul import mxfp4_xla, xla

IMPLS = {"xla": xla}
MXFP4_IMPLS = {"xla": mxfp4_xla}


def grouped_matmul(
    x: Float[Array, "N K"], w: Float[Array, "E K M"], group_sizes: Int[Array, "E"], *, impl: str | None = None
) -> Float[Array, "N M"]:
    """y[n] = x[n] w[e] for the group_sizes[e] rows of each group e in turn; rows past the last group give zeros.

    Sums run in fp32; y has x's dtype. Differentiable in x and w. Any group sizes whose sum is at most N.
    """
    return run("grouped_matmul", IMPLS, impl, x, w, group_sizes)


def grouped_matmul_mxfp4(
    x: Float[Array, "N K"], packed: UInt8[Array, "E M Khalf"], scale: UInt8[Array, "E M Kgroup"],
    group_sizes: Int[Array, "E"], *, impl: str | None = None,
) -> Float[Array, "N M"]:
    """`grouped_matmul` with frozen MXFP4 weights (pallas_kernels.mxfp4), dequantised group by group inside the op."""
    return run("grouped_matmul_mxfp4", MXFP4_IMPLS, impl, x, packed, scale, group_sizes)
