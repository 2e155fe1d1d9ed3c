"""Rows sorted by group, each group times a matrix of its own: the routed experts."""

from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.dispatch import run
from pallas_kernels.grouped_matmul import gpu, gpu_mxfp4, reference, tpu, tpu_mxfp4, xla
from pallas_kernels.shapes import checked

IMPLS = {"tpu": tpu, "gpu": gpu, "xla": xla, "reference": reference}
MXFP4_IMPLS = {"tpu": tpu_mxfp4, "gpu": gpu_mxfp4, "xla": xla, "reference": reference}


@checked
def grouped_matmul(
    x: Float[Array, "N K"],
    w: Float[Array, "E K M"],
    group_sizes: Int32[Array, " E"],
    *,
    impl: str | None = None,
) -> Float[Array, "N M"]:
    """Multiplies each row by the matrix of its group.

        y[n] = x[n] w[e]    for the group_sizes[e] rows n of each group e in turn; 0 for rows after them

    group_sizes  any sizes >= 0 whose sum is at most N
    Returns y in x's dtype. Sums run in fp32, and fp32 inputs are multiplied at full precision.
    Differentiable in x and w. Rows after the last group, in x and in the gradient of y, may hold anything.
    """
    return run("grouped_matmul", IMPLS, impl, x, w, group_sizes)


@checked
def grouped_matmul_mxfp4(
    x: Float[Array, "N K"],
    packed: UInt8[Array, "E M Khalf"],
    scale: UInt8[Array, "E M Kgroup"],
    group_sizes: Int32[Array, " E"],
    *,
    impl: str | None = None,
) -> Float[Array, "N M"]:
    """`grouped_matmul` with frozen MXFP4 weights: w[e] = dequantize(packed[e], scale[e])'.

    packed, scale  as `pallas_kernels.mxfp4.dequantize` takes them
    A group's matrix is dequantised, to x's dtype, when its rows are multiplied: one at a time. Differentiable
    in x only.
    """
    (_, inputs), (groups, outputs, _) = x.shape, packed.shape
    if (packed.shape[2], scale.shape[2]) != (inputs / 2, inputs / 32):
        raise ValueError(f"grouped_matmul_mxfp4: {inputs} inputs of x need packed [{groups}, {outputs}, {inputs / 2:g}] and "
                         f"scale [{groups}, {outputs}, {inputs / 32:g}], got {list(packed.shape)} and {list(scale.shape)}.")
    return run("grouped_matmul_mxfp4", MXFP4_IMPLS, impl, x, packed, scale, group_sizes)

