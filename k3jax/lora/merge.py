"""Folds an adapter into the base weights: W + scale * A B, into bf16, fp32 or re-packed MXFP4."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from k3jax.lora.adapters import Adapters
from k3jax.moe import PackedExpertLinear
from k3jax.weights.quant import pack, unpack


@dataclass(frozen=True)
class MergeError:
    """How far stored weights are from W + scale * A B, relative L2, the worst matrix of a projection."""

    name: str
    of_weight: float  # ||stored - exact|| / ||exact||
    of_delta: float  # ||stored - exact|| / ||scale A B||: from 1 on, rounding outweighs the adapter


def merge(adapters: Adapters, name: str) -> list[MergeError]:
    """Merges `name` into the base for good and frees its columns. Returns the rounding error per projection.

    Other adapters stay, from now on beside the merged base. Raises ValueError if a weight is not finite.
    """
    broken = [p.name for p, a, b, _ in adapters.read(name) if not (np.isfinite(a).all() and np.isfinite(b).all())]
    if broken:
        raise ValueError(f"Adapter {name!r} holds NaN or infinite numbers, in {broken[0]} first. It was not merged.")
    errors = []
    for p, a, b, scale in adapters.read(name):
        module, delta = p.module, (a * scale[..., None, :], b)
        if isinstance(module, PackedExpertLinear):
            weights = (module.packed[...], module.scale[...])
            (module.packed[...], module.scale[...]), error = _over_matrices(_merge_packed, weights, delta, p.stack)
        else:
            p.weight[...], error = _over_matrices(_merge_dense, p.weight[...], delta, p.stack)
        errors.append(MergeError(p.name, float(error[0].max()), float(error[1].max())))
    adapters.remove(name)
    return errors


@partial(jax.jit, static_argnames=("merge_one", "stack"))
def _over_matrices(
    merge_one: Callable[..., Any], weights: Any, delta: Any, stack: tuple[int, ...]
) -> tuple[Any, tuple[Array, Array]]:
    """Runs merge_one(weight, delta) matrix by matrix, so that only one exists in fp32 at a time.

    The loop carries bits: XLA would widen a stack of bf16 to fp32 around it.
    """
    n = len(stack)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[n:]), (weights, delta))
    dtypes = jax.tree.map(lambda x: x.dtype, weights)

    def step(x: Any) -> Any:
        weight, delta = x
        merged, error = merge_one(jax.tree.map(jax.lax.bitcast_convert_type, weight, dtypes), delta)
        return jax.tree.map(_bits, merged), error

    merged, error = jax.lax.map(step, (jax.tree.map(_bits, flat[0]), flat[1]))
    merged = jax.tree.map(jax.lax.bitcast_convert_type, merged, dtypes)
    return jax.tree.map(lambda x: x.reshape(*stack, *x.shape[1:]), merged), error


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _merge_dense(weight: Float[Array, "I O"], delta: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
    change = jnp.matmul(*delta, precision="highest")
    exact = weight.astype(jnp.float32) + change
    stored = exact.astype(weight.dtype)
    return stored, _errors(stored.astype(jnp.float32), exact, change)


def _merge_packed(
    weight: tuple[UInt8[Array, "O I2"], UInt8[Array, "O I32"]], delta: tuple[Array, Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Equal numbers can have several packed forms: a matrix that does not change keeps its bytes."""
    change = jnp.matmul(*delta, precision="highest")
    exact = unpack(*weight, jnp.float32) + change
    stored: tuple[Array, Array] = jax.tree.map(lambda new, old: jnp.where(change.any(), new, old), pack(exact), weight)
    return stored, _errors(unpack(*stored, jnp.float32), exact, change)


def _errors(stored: Array, exact: Array, change: Array) -> tuple[Array, Array]:
    off = jnp.linalg.norm(stored - exact)
    tiny = jnp.finfo(jnp.float32).tiny
    return off / jnp.maximum(jnp.linalg.norm(exact), tiny), off / jnp.maximum(jnp.linalg.norm(change), tiny)
