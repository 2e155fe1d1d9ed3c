"""For ops that have no gradient: says so where one is asked for, instead of an error from within a kernel."""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def without_gradient(op: str, operands: T) -> T:
    """`operands` (a pytree), as jax arrays. A derivative with respect to one of them raises TypeError in the name of `op`."""
    return jax.tree.map(lambda x: _as_it_is(op, jnp.asarray(x)), operands)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _as_it_is(op: str, x: Any) -> Any:
    return x


@_as_it_is.defjvp
def _refuse(op: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(f"{op} has no gradient: it decodes. Train with the op over whole sequences, or pass what "
                    "jax.lax.stop_gradient returns.")
