"""What an op's bench compiles and times: functions of abstract arguments, with the work they cannot avoid."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Built = tuple[Callable[..., Any], tuple[Any, ...]]


class Case(NamedTuple):
    """One use of an op at a real size.

    build  implementation -> (function, its arguments as a tuple of pytrees of jax.ShapeDtypeStruct)
    flops, bytes  the least that any implementation computes, and moves between HBM and the chip; what is counted stands in
           the docstring of the op's bench
    impls  the implementations that it compares
    limit  largest allowed ratio of estimated to roofline time by chip, where the project set itself one
    estimate  False: compiled only, because libtpu, which walks through every step of such a kernel, takes minutes or does not end
    """

    build: Callable[[str], Built]
    flops: float
    bytes: float
    impls: tuple[str, ...] = ("tpu", "xla")
    limit: Mapping[str, float] = {}
    estimate: bool = True


def array(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """An abstract argument."""
    return jax.ShapeDtypeStruct(shape, dtype)
