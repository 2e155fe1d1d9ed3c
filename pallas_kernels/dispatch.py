"""Decides, alone, which implementation of an op runs.

An op hands over a table from name to module, in order of preference. Each module has a function named like the op and
`why_not(*args, **kwargs)`, which returns None or the reason why it cannot take these arguments.
"""

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

log = logging.getLogger("pallas_kernels")
_announced: set[tuple[str, str]] = set()


def run(op: str, impls: Mapping[str, ModuleType], impl: str | None, *args: Any, **kwargs: Any) -> Any:
    """Calls implementation `impl` of `op`, or with None the first one that can take the arguments. Arrays may be of numpy.

    Raises ValueError if `impl` is unknown or cannot take the arguments, or if none can. Logs once per op which
    implementation it took and why those before it could not.
    """
    if impl is not None and impl not in impls:
        raise ValueError(f"{op}: unknown implementation {impl!r}. Choose one of {', '.join(impls)}.")
    args, kwargs = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (args, kwargs))
    refused = []
    for name in impls if impl is None else (impl,):
        reason = impls[name].why_not(*args, **kwargs)
        if reason is None:
            if (op, name) not in _announced:
                _announced.add((op, name))
                log.info("%s: %s%s", op, name, f" ({'; '.join(refused)})" if refused else "")
            return getattr(impls[name], op)(*args, **kwargs)
        refused.append(f"not {name}: {reason}")
    raise ValueError(f"{op}: no implementation can take these arguments: {'; '.join(refused)}")
