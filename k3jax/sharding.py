"""One table from logical axes to mesh axes, and what follows from it: meshes, placements, sharded creation.

    mesh = make_mesh(fsdp=4, expert=2)
    model = create(lambda: K3(config, rngs=nnx.Rngs(0)), mesh, TRAIN)
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "expert", "tensor", "context")
MeshAxis = str | tuple[str, ...] | None
Rules = Mapping[str, MeshAxis]

TRAIN: Rules = {
    "batch": ("data", "fsdp"),
    "tokens": "context",
    "layers": None,  # stacked for the scan
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
    "expert_in": "fsdp",
}
SERVE: Rules = {**TRAIN, "embed": None, "expert_in": None}  # D stays whole: decode is latency bound


def make_mesh(*, devices: Any = None, **sizes: int) -> Mesh:
    """A mesh over MESH_AXES; axes not named have size 1. Raises ValueError if the sizes do not make up the devices."""
    devices = jax.devices() if devices is None else devices
    for name in sizes:
        _known(name, MESH_AXES, "mesh axis")
    shape = tuple(sizes.get(name, 1) for name in MESH_AXES)
    wanted = 1
    for size in shape:
        wanted *= size
    if wanted != len(devices):
        given = " x ".join(f"{name}={size}" for name, size in sizes.items()) or "nothing"
        raise ValueError(f"A mesh of {given} needs {wanted} devices, but there are {len(devices)}.")
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)


def partition_spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """Mesh axes of an array whose dimensions have these logical names. Raises ValueError on an unknown name."""
    for axis in axes:
        if axis is not None:
            _known(axis, tuple(rules), "logical axis")
    return PartitionSpec(*(None if axis is None else rules[axis] for axis in axes))


def shardings(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """The placement of every variable in a module or state, as a tree of the same structure.

    Raises ValueError if a dimension does not divide over its mesh axes.
    """

    def place(path: Any, variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        axes = variable.get_metadata().get("out_sharding") or (None,) * value.ndim
        spec = partition_spec(axes, rules)
        for size, axis, names in zip(value.shape, axes, spec, strict=True):
            parts = _size(mesh, names)
            if size % parts:
                where = jax.tree_util.keystr(path)
                raise ValueError(f"{where}: axis {axis!r} of size {size} cannot be split over {names}={parts} devices. "
                                 f"Use a divisor of {size}.")
        return variable.replace(NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def create(init: Callable[[], Any], mesh: Mesh, rules: Rules) -> Any:
    """Runs a module's constructor so that every weight is created in place, never whole on one device."""
    abstract = nnx.eval_shape(init)
    graphdef, state = nnx.split(abstract)
    placed = jax.tree.map(lambda v: v.get_value(), shardings(state, mesh, rules), is_leaf=lambda v: isinstance(v, nnx.Variable))
    leaves, tree = jax.tree.flatten(state)
    places = jax.tree.leaves(placed, is_leaf=lambda s: isinstance(s, NamedSharding))
    assert len(leaves) == len(places)
    values = jax.jit(lambda: jax.tree.leaves(nnx.state(init())), out_shardings=places)()
    return nnx.merge(graphdef, tree.unflatten(values))


def shard_batch(batch: Any, mesh: Mesh, rules: Rules) -> Any:
    """Places arrays [B, T, …] of a batch. Raises ValueError if B or T does not divide over its axes."""
    spec = partition_spec(("batch", "tokens"), rules)

    def place(a: jax.Array) -> jax.Array:
        for size, names, what in zip(a.shape, spec, ("batch size", "row length"), strict=False):
            if size % _size(mesh, names):
                raise ValueError(f"A {what} of {size} cannot be split over {names}={_size(mesh, names)} devices. "
                                 f"Use a multiple of {_size(mesh, names)}.")
        return jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec[: a.ndim])))

    return jax.tree.map(place, batch)


def _size(mesh: Mesh, names: MeshAxis) -> int:
    parts = 1
    for name in (names,) if isinstance(names, str) else names or ():
        parts *= mesh.shape[name]
    return parts


def _known(name: str, known: tuple[str, ...], what: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
        raise ValueError(f"Unknown {what} {name!r}.{hint}")
