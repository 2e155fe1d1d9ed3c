"""The table between tensor names of official checkpoints and the arrays of a model, in both directions.

It follows from the modules, whose attributes mirror the checkpoint. What differs: layers are stacked here
(`layers.stacks.<s>` with the layers of stack s in front), blocks of the vision tower and routed experts too,
matrices are [in, out] here and [out, in] there, a few tensors have their own layout, and the prediction layer
`mtp` is the layer after the last there. Names below carry no `language_model.` prefix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flax import nnx

from k3jax.config import K3Config
from k3jax.linear import LoRAOwners, LoRAParam, LoRAScale

if TYPE_CHECKING:
    from k3jax.model import K3

PREFIX = "language_model."
_OUTSIDE = ("vision_tower.", "mm_projector.")  # never prefixed
_LEAVES = {"kernel": "weight", "packed": "weight_packed", "scale": "weight_scale"}
_RESIDUALS = ("self_attention_res", "mlp_res", "output_attn_res")

Path = tuple[Any, ...]  # of an array in a model: attribute names and stack numbers


@dataclass(frozen=True)
class Spelling:
    """What official checkpoints write in more than one way. The defaults are those of Kimi K3."""

    prefix: str = PREFIX
    residual: Literal["_proj.weight", ".proj_weight"] = "_proj.weight"
    residual_row: bool = True  # AttnRes projections are [1, D], else [D]
    a_log: Literal["[H]", "[1, 1, H, 1]", "padded"] = "[H]"
    scale_dtype: Literal["U8", "F8_E8M0"] = "U8"

    @classmethod
    def default(cls, config: K3Config) -> "Spelling":
        """That of Kimi K3, or of Kimi-Linear for a config that is written flat."""
        if config.attn_res_block is None and config.vision is None:
            return cls(prefix="", a_log="[1, 1, H, 1]")
        return cls()


@dataclass(frozen=True)
class Parameter:
    """One array of the model, [layers?, experts?, *shape]: in a checkpoint a tensor per layer and expert."""

    path: Path
    name: str  # with `{}` for the layer and for the expert
    layers: tuple[int, ...] | None  # checkpoint layer of each position
    experts: int | None
    shape: tuple[int, ...]  # of one tensor, as the model holds it
    dtype: Any
    stored: tuple[int, ...]  # official shape
    pad: int = 0  # length that a checkpoint may zero-pad A_log to

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the stacked axes."""
        layers = None if self.layers is None else len(self.layers)
        return tuple(n for n in (layers, self.experts) if n is not None)

    @property
    def tensor_size(self) -> int:
        return prod(self.shape)

    @property
    def size(self) -> int:
        return prod(self.lead) * self.tensor_size

    @property
    def transpose(self) -> bool:
        """The checkpoint holds [out, in], the model [in, out]."""
        return self.path[-1] == "kernel"

    @property
    def is_residual_row(self) -> bool:
        return self.name.endswith("_res_proj.weight")

    @property
    def view(self) -> tuple[int, ...]:
        """The checkpoint's tensor as the model sees it before transposing."""
        return self.shape[::-1] if self.transpose else self.shape

    def position(self, layer: int | None) -> int | None:
        return None if layer is None or self.layers is None else self.layers.index(layer)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        if self.path[-1] == "A_log":
            return shape in {self.shape, (1, 1, *self.shape, 1), (self.pad,)}
        return shape == self.stored or self.is_residual_row and shape == self.shape

    def stored_shape(self, spelling: Spelling) -> tuple[int, ...]:
        if self.path[-1] == "A_log":
            shapes = {"[H]": self.shape, "[1, 1, H, 1]": (1, 1, *self.shape, 1), "padded": (self.pad,)}
            return shapes[spelling.a_log]
        return self.shape if self.is_residual_row and not spelling.residual_row else self.stored

    def tensor_name(self, spelling: Spelling, layer: int | None = None, expert: int | None = None) -> str:
        """The checkpoint's name of the tensor of one layer (a checkpoint's number) and expert."""
        name = self.name if spelling.residual == "_proj.weight" else _older(self.name)
        name = name.format(*(n for n in (layer, expert) if n is not None))
        return name if name.startswith(_OUTSIDE) else spelling.prefix + name


class Location(NamedTuple):
    """A tensor's place: a parameter and positions in its leading axes."""

    parameter: Parameter
    layer: int | None
    expert: int | None


class TensorNames:
    """All tensors of a model, which may be abstract (nnx.eval_shape).

    table.locate("language_model.model.layers.3.self_attn.o_proj.weight")
    for location in table.locations(): print(table.name(location, Spelling()))
    """

    def __init__(self, model: "K3", config: K3Config):
        self.config = config
        stacks = model.model.layers.layers_of_stacks
        variables = nnx.to_flat_state(nnx.state(model))
        self.parameters = tuple(
            _parameter(path, v, config, stacks)
            for path, v in variables
            if not isinstance(v, LoRAParam | LoRAScale | LoRAOwners)
        )
        groups: dict[str, list[Parameter]] = {}
        for p in self.parameters:
            groups.setdefault("" if p.layers is None else p.name.partition("{}")[0], []).append(p)
        self._groups = groups
        self._places: dict[str, tuple[Parameter, int | None]] = {}
        for p in self.parameters:
            for position, layer in [(None, None)] if p.layers is None else enumerate(p.layers):
                numbers = (layer, None if p.experts is None else "*")
                name = p.name.format(*(n for n in numbers if n is not None))
                self._places[name] = self._places[_older(name)] = (p, position)

    def locate(self, name: str) -> Location | None:
        """Where a tensor of a checkpoint belongs, whatever its spelling; None if nowhere."""
        name = name.removeprefix(PREFIX)
        head, found, tail = name.partition(".experts.")
        if not found:
            place = self._places.get(name)
            return None if place is None else Location(*place, None)
        number, _, leaf = tail.partition(".")
        place = self._places.get(f"{head}.experts.*.{leaf}")
        if place is None or not number.isdecimal() or number != str(int(number)):
            return None
        expert = int(number)
        return Location(*place, expert) if expert < (place[0].experts or 0) else None

    def locations(self) -> Iterator[Location]:
        """Every tensor: those outside the layers, then layer by layer, expert by expert."""
        for group, members in sorted(self._groups.items(), key=lambda item: item[0] != ""):
            layers = {None} if not group else {layer for p in members for layer in p.layers or ()}
            for layer in sorted(layers, key=lambda n: n or 0):
                here = [(p, p.position(layer)) for p in members if layer is None or layer in (p.layers or ())]
                routed = [(p, position) for p, position in here if p.experts is not None]
                yield from (Location(p, position, None) for p, position in here if p.experts is None)
                for expert in range(routed[0][0].experts or 0 if routed else 0):
                    yield from (Location(p, position, expert) for p, position in routed)

    def name(self, location: Location, spelling: Spelling) -> str:
        p, position, expert = location
        layer = None if position is None or p.layers is None else p.layers[position]
        return p.tensor_name(spelling, layer, expert)


def is_mtp(name: str, config: K3Config) -> bool:
    """Whether a tensor looks like one of a multi-token-prediction layer."""
    parts = name.removeprefix(PREFIX).split(".")
    if any(part.startswith(("mtp", "nextn")) for part in parts):
        return True
    layer = parts[2] if parts[:2] == ["model", "layers"] and len(parts) > 3 else ""
    return layer.isdecimal() and int(layer) >= config.num_layers


def spelling_of(names: Mapping[str, Any], table: TensorNames) -> Spelling:
    """How a checkpoint spells its tensors. Values of `names` have a dtype and a shape."""
    values: dict[str, Any] = {"prefix": PREFIX if any(name.startswith(PREFIX) for name in names) else ""}
    for name, tensor in names.items():
        if name.endswith(".proj_weight"):
            values["residual"] = ".proj_weight"
        if name.endswith(("_res_proj.weight", "_res.proj_weight")):
            values["residual_row"] = len(tensor.shape) == 2
        if name.endswith(".weight_scale"):
            values["scale_dtype"] = tensor.dtype
        if name.endswith(".A_log"):
            place = table.locate(name)
            padded = place is not None and tensor.shape != place.parameter.shape
            values["a_log"] = "[1, 1, H, 1]" if len(tensor.shape) == 4 else "padded" if padded else "[H]"
    return Spelling(**values)


def _parameter(
    path: Path, variable: nnx.Variable, config: K3Config, stacks: tuple[tuple[int, ...], ...]
) -> Parameter:
    value = variable.get_value()
    shape, layers, experts = tuple(value.shape), None, None
    parts = list(path)
    if parts[0] == "mtp":
        parts[:1] = ["model", "layers", config.num_layers]
    if "stacks" in parts:
        at = parts.index("stacks")
        layers, shape = stacks[int(parts[at + 1])], shape[1:]
        parts[at : at + 2] = ["{}"]
    if "blocks" in parts:
        layers, shape = tuple(range(shape[0])), shape[1:]
        parts.insert(parts.index("blocks") + 1, "{}")
    if "experts" in parts:
        experts, shape = shape[0], shape[1:]
        parts.insert(parts.index("experts") + 1, "{}")
    parts[-1] = _LEAVES.get(parts[-1], parts[-1])
    if len(parts) > 2 and parts[-3] in _RESIDUALS:
        parts[-3:-1] = [f"{parts[-3]}_{parts[-2]}"]
    name = ".".join(map(str, parts))
    stored = _stored_shape(path, name, shape, config)
    return Parameter(path, name, layers, experts, shape, value.dtype, stored, config.kda.head_dim)


def _stored_shape(path: Path, name: str, shape: tuple[int, ...], config: K3Config) -> tuple[int, ...]:
    """The official shape of a tensor that the model holds in `shape`."""
    if name.endswith("_res_proj.weight"):
        return (1, *shape)
    if name.endswith("_conv1d.weight"):
        return shape[0], 1, shape[1]
    if name.endswith("patch_embed.proj.weight"):
        assert config.vision is not None
        return shape[-1], 3, config.vision.patch_size, config.vision.patch_size
    return shape[::-1] if path[-1] == "kernel" else shape


def _older(name: str) -> str:
    """self_attention_res_proj.weight -> self_attention_res.proj_weight; other names stay."""
    head, _, leaf = name.rpartition("_res_")
    return f"{head}_res.{leaf.replace('.', '_')}" if leaf in ("proj.weight", "norm.weight") else name
