"""Attention Residuals: a softmax over depth picks what the next layer reads."""

from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attn_res import reference, tpu, xla
from pallas_kernels.dispatch import run
from pallas_kernels.shapes import checked

IMPLS = {"xla": xla, "reference": reference}
NORM_IMPLS = {"tpu": tpu, **IMPLS}


@checked
def attn_res(
    prefix: Float[Array, "B T D"],
    blocks: Float[Array, "N B T D"],
    count: int | Int32[Array, ""],
    weight: Float32[Array, " D"],
    *,
    eps: float,
    impl: str | None = None,
) -> Float[Array, "B T D"]:
    """Mixes the running residual with those of earlier blocks (Attention Residuals, arXiv 2603.15031).

        v = blocks[:count] + [prefix];  score_n = sum_d v_nd rsqrt(mean_d v_nd**2 + eps) weight_d
        out = sum_n softmax(score)_n v_n                          per token; v enters the sum un-normalised

    prefix  sum of the layer outputs since the last block boundary
    blocks  slots for the residuals of finished blocks, oldest first; slots from `count` on are ignored,
            whatever they hold, and get gradient zero
    count   slots in use, 0 <= count <= N; may be traced. With 0 the result is `prefix`
    weight  product of the norm's weight and the projection's row
    Returns the mix in the dtype of prefix. Sums run in fp32, but no fp32 copy of the candidates
    is stored, neither here nor in the gradient.
    """
    return run("attn_res", IMPLS, impl, prefix, blocks, count, weight, eps=eps)


@checked
def attn_res_norm(
    prefix: Float[Array, "B T D"],
    blocks: Float[Array, "N B T D"],
    count: int | Int32[Array, ""],
    weight: Float32[Array, " D"],
    norm_weight: Float[Array, " D"],
    *,
    eps: float,
    impl: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "N B T D"]]:
    """The mix of `attn_res` under the RMS norm of the layer that reads it, which is all that it reads of the mix.

        h = attn_res(prefix, blocks, count, weight)
        y = norm_weight * (h rsqrt(mean_d h**2 + eps))          h and the quotient rounded to the dtype of prefix

    norm_weight  used in the dtype of prefix
    Returns y in the dtype of prefix, and `blocks` as given. Let later readers of the blocks take these: the gradient of
    the blocks then passes through here, where this call adds its share to the slots in use, without another pass.
    """
    return run("attn_res_norm", NORM_IMPLS, impl, prefix, blocks, count, weight, norm_weight, eps=eps)
