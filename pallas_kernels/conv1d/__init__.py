"""Short convolution: causal and depthwise, then SiLU, with the last inputs kept as a window between calls."""

from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.conv1d import reference, tpu, xla
from pallas_kernels.dispatch import run
from pallas_kernels.shapes import checked

IMPLS = {"tpu": tpu, "xla": xla, "reference": reference}


@checked
def conv1d(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    window: Float[Array, "B W-1 D"],
    *,
    reset: Bool[Array, "B T"] | None = None,
    lengths: Int32[Array, " B"] | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
    """Convolves T tokens over time, each channel with its own W taps (Kimi Linear, arXiv 2510.26692; W = 4).

        y_t = silu(sum_i weight[:, i] x_(t - W + 1 + i))         summed in fp32; y in x's dtype

    window   the W - 1 inputs before the row's first token, oldest first; zeros start a sequence
    reset    True: a sequence starts at this token, no tap reaches behind it
    lengths  real tokens of each row, the rest is right padding (its y means nothing); None: all T
    Returns y and the window after the last real token: always W - 1 inputs, the older ones from `window`
    when fewer were given, zeros where they belong to an earlier sequence. A row without real tokens returns
    its window unchanged. Padding must be finite where gradients are taken: zero times NaN is NaN.
    """
    return run("conv1d", IMPLS, impl, x, weight, window, reset=reset, lengths=lengths)
