"""For which platform ops are compiled: that of the default device, or one that is named.

    with target("tpu", interpret=True):      # TPU kernels, run by Pallas's interpreter on a machine without one
        o, state = kda(...)
    with jax.default_device(topology.devices[0]):        # compile for a device that is not here
        jax.jit(step).lower(...).compile()

Both are part of the key under which jax keeps traced programs: a program traced for one target is never taken for another.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType


class Target(NamedTuple):
    platform: str  # "cpu", "gpu" or "tpu"
    interpret: bool


_named: Any = jax.make_user_context(None)


def target(platform: str, *, interpret: bool = False) -> AbstractContextManager[None]:
    """Within it, ops are compiled for `platform`, or with `interpret` its kernels run in Pallas's interpreter.

    Raises ValueError for another platform than "cpu", "gpu" and "tpu".
    """
    if platform not in ("cpu", "gpu", "tpu"):
        raise ValueError(f"target: unknown platform {platform!r}. Choose one of cpu, gpu, tpu.")
    return _named(Target(platform, interpret))


def current() -> Target:
    """The target of ops that are traced now."""
    if _named.value is not None:
        return _named.value
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    return Target({"cuda": "gpu", "rocm": "gpu"}.get(platform, platform), interpret=False)


def in_hbm(*operands: Array) -> tuple[Array, ...]:
    """Operands of a TPU kernel that fetches slices of them by itself: XLA shall not move all of one into VMEM first."""
    if current().interpret:
        return operands
    return tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in operands)


def why_not_on(platform: str, *operands: Array) -> str | None:
    """Why a kernel of `platform` cannot run on the current target, over the current mesh, or because one of `operands` is empty
    and there would be no block to run it for; None if it can."""
    here, mesh = current().platform, jax.sharding.get_abstract_mesh()
    if here != platform:
        return f"it is a kernel for {platform}, and programs are compiled for {here} here"
    axes = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind != AxisType.Manual and mesh.shape[name] > 1]
    if axes:
        return (f"operands may be spread over the mesh axes {', '.join(axes)}, and a kernel sees one device's: call the op "
                "inside jax.shard_map")
    if any(0 in x.shape for x in operands):
        return f"an operand is empty: {', '.join(str(list(x.shape)) for x in operands)}"
    return None


def device_kind() -> str | None:
    """Kind of the device that programs are compiled for, such as "TPU v5"; None if only a platform was named."""
    if _named.value is not None:
        return None
    device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(jax.devices()[0] if device is None else device, "device_kind", None)
