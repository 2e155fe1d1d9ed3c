"""Holds the arguments of an op to the shapes and kinds of numbers that its signature says, before an implementation sees them."""

import inspect
import typing
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax.numpy as jnp
import numpy as np

KINDS = {"float": jnp.floating, "int": np.integer, "bool": np.bool_}  # of which width, an implementation says
P = ParamSpec("P")
R = TypeVar("R")


def checked(op: Callable[P, R]) -> Callable[P, R]:
    """`op`, which raises ValueError where an array is not of the shape in its jaxtyping annotation, or of another kind of number.

    The name of a dimension stands for one size in a call, also in fields of named tuples; `*name` for any dimensions there.
    """
    signature = inspect.signature(op)
    annotated = {name: p.annotation for name, p in signature.parameters.items()}

    @wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        sizes: dict[str, tuple[int, str]] = {}
        for name, value in given.items():
            for where, array, kind in _arrays(name, value, annotated[name]):
                _check(op.__name__, where, array, kind, sizes)
        return op(*args, **kwargs)

    return call


def _arrays(name: str, value: Any, annotation: Any) -> Iterator[tuple[str, Any, Any]]:
    """(where, array, jaxtyping class) of the argument, or of each field if it is a named tuple."""
    if value is None:
        return
    for kind in typing.get_args(annotation) or (annotation,):
        if hasattr(kind, "dim_str") and hasattr(value, "shape"):
            yield name, value, kind
        elif hasattr(kind, "_fields"):
            for field, inner in kind.__annotations__.items():
                yield from _arrays(f"{name}.{field}", getattr(value, field), inner)


def _check(op: str, where: str, array: Any, kind: Any, sizes: dict[str, tuple[int, str]]) -> None:
    named = kind.dtypes[0] if isinstance(kind.dtypes, tuple | list) else ""  # "": any
    numbers = next((name for name in KINDS if name in named), None)
    if numbers is not None and not jnp.issubdtype(array.dtype, KINDS[numbers]):
        raise ValueError(f"{op}: {where} must be of {numbers}s, got {array.dtype}.")
    dims, shape = kind.dim_str.split(), tuple(array.shape)
    wrong = ValueError(f"{op}: {where} must be [{', '.join(dims)}]{_known(dims, sizes)}, got {list(shape)}.")
    free = next((i for i, dim in enumerate(dims) if dim.startswith("*")), None)
    if free is not None:
        dims = [*dims[:free], *[""] * (len(shape) - len(dims) + 1), *dims[free + 1 :]]
    if len(dims) != len(shape):
        raise wrong
    for dim, size in zip(dims, shape, strict=True):
        if dim and _size(dim, sizes) not in (None, size):
            raise wrong
        if dim.isidentifier():
            sizes.setdefault(dim, (size, where))


def _size(dim: str, sizes: dict[str, tuple[int, str]]) -> int | None:
    """That of `3`, `T` or `W-1`; None where it is not known yet."""
    name, _, less = dim.partition("-")
    if name.isdigit():
        return int(name)
    return sizes[name][0] - int(less or 0) if name in sizes else None


def _known(dims: list[str], sizes: dict[str, tuple[int, str]]) -> str:
    names = dict.fromkeys(dim.partition("-")[0] for dim in dims)
    known = [f"{name}={sizes[name][0]} of {sizes[name][1]}" for name in names if name in sizes]
    return f" with {', '.join(known)}" if known else ""
