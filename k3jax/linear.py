"""Linear projections and the token embedding, each able to carry a pool of LoRA columns.

A pool holds the rank columns of every adapter side by side. A token sees only the columns that its adapter owns, so
mixed ranks need no padding, gradients of adapters do not mix, and adapter 0 (none) adds exactly zero:

    y = x W + ((x A) * [owner == adapter of the token] * scale) B
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from k3jax.packing import Packing
from k3jax.param import Axes, Init, param, zeros


class LoRAParam(nnx.Variable):
    """Trainable adapter weights, fp32."""


class LoRAScale(nnx.Variable):
    """alpha / rank per rank column, fp32; 0 for a column that this projection does not use."""


class LoRAOwners(nnx.Variable):
    """Adapter id of each rank column, int32; 0: free. One for the whole model."""


class LoRAPool(nnx.Module):
    """Rank columns of all adapters for one projection: A [in, R], B [R, out], fp32.

    stack  sizes of the leading axes when layers and experts are stacked
    axes   logical names of all dimensions of the projection: the leading ones, in, out
    """

    def __init__(self, in_size: int, out_size: int, rank: int, axes: Axes, stack: tuple[int, ...], *, rngs: nnx.Rngs):
        *lead, inputs, outputs = axes
        self.a = param(rngs, (*stack, in_size, rank), (*lead, inputs, None), zeros, jnp.float32, LoRAParam)
        self.b = param(rngs, (*stack, rank, out_size), (*lead, None, outputs), zeros, jnp.float32, LoRAParam)
        self.scale = param(rngs, (*stack, rank), (*lead, None), zeros, jnp.float32, LoRAScale)

    @property
    def weights(self) -> tuple[Float[Array, "*stack I R"], Float[Array, "*stack R O"]]:
        """A and B to compute with. Numbers that are not finite count as 0: a gate of 0 times NaN would be NaN, and one
        broken adapter would break every row. Loading, saving and merging refuse an adapter that holds any."""
        return _finite(self.a[...]), _finite(self.b[...])

    def __call__(self, x: Float[Array, "*n I"], gate: Bool[Array, "*n R"]) -> Float[Array, "*n O"]:
        return self.up(dot(x, self.weights[0]), gate, x.dtype)

    def up(self, low: Float[Array, "*n R"], gate: Bool[Array, "*n R"], dtype: Any) -> Float[Array, "*n O"]:
        """The second half: gate and scale the R numbers per token, then B."""
        return dot((jnp.where(gate, low, 0) * self.scale[...]).astype(dtype), self.weights[1])


def _finite(weight: Array) -> Array:
    return jnp.where(jnp.isfinite(weight), weight, 0)


class Linear(nnx.Module):
    """y = x kernel, kernel [in, out], with no bias; a LoRA pool may be attached (k3jax.lora)."""

    def __init__(self, in_size: int, out_size: int, axes: Axes, *, init: Init, dtype: Any, rngs: nnx.Rngs):
        self.kernel = param(rngs, (in_size, out_size), axes, init, dtype)
        self.lora: LoRAPool | None = nnx.data(None)

    def __call__(
        self, x: Float[Array, "B T I"], packing: Packing | None = None, dtype: Any = None
    ) -> Float[Array, "B T O"]:
        """In x's dtype, or in `dtype` where the sums should not be rounded (logits)."""
        y: Array = dot(x, self.kernel[...], dtype)
        if self.lora is None or packing is None or (gate := packing.rank_gate) is None:
            return y
        return y + self.lora(x, gate)


class Embedding(nnx.Module):
    """Rows of `weight` [vocab, D]; a LoRA pool adds A's row times B."""

    def __init__(self, vocab: int, size: int, *, init: Init, dtype: Any, compute_dtype: Any, rngs: nnx.Rngs):
        self.dtype = compute_dtype
        self.weight = param(rngs, (vocab, size), ("vocab", "embed"), init, dtype)
        self.lora: LoRAPool | None = nnx.data(None)

    def __call__(self, ids: Int[Array, "B T"], packing: Packing | None = None) -> Float[Array, "B T D"]:
        y = self.weight[...][ids].astype(self.dtype)
        if self.lora is None or packing is None or (gate := packing.rank_gate) is None:
            return y
        return y + self.lora.up(self.lora.weights[0][ids], gate, self.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot(x: Float[Array, "*n I"], kernel: Float[Array, "I O"], dtype: Any = None) -> Float[Array, "*n O"]:
    """x kernel, in x's dtype or in `dtype` without rounding to x's first. fp32 inputs are multiplied in true fp32.

    The kernel's gradient is one product over all leading axes. What autodiff makes of it takes XLA:CPU 4 times as long.
    """
    y = jnp.matmul(x, kernel.astype(x.dtype), precision=precision(x.dtype), preferred_element_type=dtype)
    return y.astype(dtype or x.dtype)


def _dot_forward(x: Array, kernel: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return dot(x, kernel, dtype), (x, kernel)


def _dot_backward(dtype: Any, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = saved
    g = g.astype(x.dtype)
    d_kernel = jnp.einsum("...i,...o->io", x, g, precision=precision(x.dtype), preferred_element_type=jnp.float32)
    return jnp.matmul(g, kernel.astype(g.dtype).T, precision=precision(g.dtype)), d_kernel.astype(kernel.dtype)


dot.defvjp(_dot_forward, _dot_backward)


def precision(dtype: Any) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
