"""How weights are declared: a value, a logical axis name per dimension, and what may change it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Axes = tuple[str | None, ...]
Init = Callable[[jax.Array, Sequence[int], Any], jax.Array]


class Packed(nnx.Variable):
    """Quantised bytes of a frozen weight: never trained, never given to an optimizer."""


class Balance(nnx.Variable):
    """Router bias: set by Quantile Balancing, not by gradient."""


def param(rngs: nnx.Rngs, shape: Sequence[int], axes: Axes, init: Init, dtype: Any, kind: type = nnx.Param) -> Any:
    """A variable with a logical axis per dimension (k3jax.sharding maps them to a mesh). Placement is the caller's."""
    assert len(axes) == len(shape), f"{axes} does not name the dimensions of {shape}"
    return kind(init(rngs.params(), tuple(shape), dtype), out_sharding=axes, eager_sharding=False)


def normal(std: float) -> Init:
    return lambda key, shape, dtype: (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def ones(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    return jnp.ones(shape, dtype)


def zeros(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    return jnp.zeros(shape, dtype)
