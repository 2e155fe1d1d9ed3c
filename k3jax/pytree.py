"""Dataclasses that jax sees as trees of their fields."""

from typing import TypeVar

import jax

T = TypeVar("T", bound=type)


def pytree(cls: T) -> T:
    """Registers a dataclass as a pytree. Its fields' annotations are what jitted code sees, but its constructor accepts
    anything: trees rebuild it around None, shardings, axis numbers or shapes too."""
    cls.__no_type_check__ = True  # jaxtyping's import hook leaves __init__ alone; methods are still checked
    return jax.tree_util.register_dataclass(cls)
