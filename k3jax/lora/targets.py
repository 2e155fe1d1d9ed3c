"""Which matrices of a model can carry adapters, and the rules by which names in PEFT's configs pick them.

A matrix is named by its module in the official checkpoint, without `language_model.`:
`model.layers.3.block_sparse_moe.experts.7.w1`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from k3jax.linear import Embedding, Linear
from k3jax.model import K3
from k3jax.moe import ExpertLinear, PackedExpertLinear
from k3jax.weights.names import PREFIX

GROUPS: dict[str, tuple[str, ...]] = {
    "attention": tuple(f"self_attn.{n}_proj" for n in "q k v o b g g_a g_b f_a f_b q_a q_b kv_b".split())
    + ("self_attn.kv_a_proj_with_mqa",),
    "latent": ("routed_expert_down_proj", "routed_expert_up_proj"),
    "shared_experts": tuple(f"shared_experts.{n}_proj" for n in ("gate", "up", "down")),
    "mlp": tuple(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
    "experts": ("experts.w1", "experts.w2", "experts.w3"),
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
}
ALL = tuple(GROUPS)


@dataclass(frozen=True, eq=False)
class Projection:
    """A module that can carry adapters: one matrix, or those of all layers (and experts) stacked in it."""

    module: Linear | Embedding | ExpertLinear | PackedExpertLinear
    layers: tuple[str, ...]  # name per stacked layer; of routed experts, that of the list of experts
    in_size: int
    out_size: int
    stack: tuple[int, ...]  # () | (layers,) | (layers, experts)
    axes: tuple[str | None, ...]  # logical names: of the stack, in, out

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.module, Embedding)

    @property
    def is_packed(self) -> bool:
        return isinstance(self.module, PackedExpertLinear)

    @property
    def weight(self) -> nnx.Variable:
        """The base weight, [*stack, in, out]; if packed, its codes, [*stack, out, in/2]."""
        if isinstance(self.module, PackedExpertLinear):
            return self.module.packed
        return self.module.weight if isinstance(self.module, Embedding) else self.module.kernel

    @property
    def name(self) -> str:
        """That of its first layer."""
        return self.layers[0]

    @property
    def matrices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, index into arrays that are stacked like this) of every matrix."""
        for layer, name in enumerate(self.layers):
            if len(self.stack) == 2:
                yield from ((expert_name(name, e), (layer, e)) for e in range(self.stack[1]))
            else:
                yield name, (layer,) if self.stack else ()

    def is_named_by(self, targets: Iterable[str]) -> bool:
        """Whether some target names one of the matrices."""
        targets = tuple(targets)
        return any(ends_with(name, targets) for name in self.layers) or any(
            ends_with(name, targets) for name, _ in self.matrices
        )


def projections(model: K3) -> Iterator[Projection]:
    """All modules that can carry adapters, in a fixed order."""
    yield _projection(model.model.embed_tokens, ("model.embed_tokens",))
    layers = model.model.layers
    for stack, numbers in zip(layers.stacks, layers.layers_of_stacks, strict=True):
        for path, module in nnx.iter_modules(stack):
            if isinstance(module, Linear | ExpertLinear | PackedExpertLinear):
                name = ".".join(map(str, path))
                yield _projection(module, tuple(f"model.layers.{i}.{name}" for i in numbers))
    yield _projection(model.lm_head, ("lm_head",))


def _projection(module: Any, layers: tuple[str, ...]) -> Projection:
    p = Projection(module, layers, 0, 0, (), ())
    *stack, in_size, out_size = p.weight.get_value().shape
    *lead, inputs, outputs = p.weight.get_metadata()["out_sharding"]
    if p.is_packed:
        in_size, out_size, inputs, outputs = 2 * out_size, in_size, outputs, inputs
    return replace(p, in_size=in_size, out_size=out_size, stack=tuple(stack), axes=(*lead, inputs, outputs))


def expert_name(experts: str, number: int) -> str:
    """model.layers.3.block_sparse_moe.experts.w1 -> model.layers.3.block_sparse_moe.experts.7.w1"""
    return experts.replace(".experts.", f".experts.{number}.")


def expand(targets: Iterable[str]) -> tuple[str, ...]:
    """Groups replaced by the modules in them."""
    targets = tuple(targets)
    groups = ALL if "all" in targets else ()
    return tuple(name for target in (*groups, *targets) if target != "all" for name in GROUPS.get(target, (target,)))


def spellings(matrix: str) -> tuple[str, ...]:
    """The names that targets may use for a matrix: an expert's also without its number, for all experts of the layer."""
    whole = re.sub(r"\.experts\.\d+\.", ".experts.", matrix)
    return (PREFIX + matrix,) if whole == matrix else (PREFIX + matrix, PREFIX + whole)


def ends_with(matrix: str, targets: Iterable[str]) -> bool:
    """Whether some target names the matrix: in full, or by last parts of its name."""
    names = spellings(matrix)
    return any(f".{name}".endswith(f".{target}") for target in targets for name in names)


def matches(pattern: str, matrix: str) -> bool:
    """PEFT's rule for keys of rank_pattern and alpha_pattern: a regular expression for last parts of the name."""
    expression = rf"(.*\.)?({pattern})$"
    return re.match(expression, matrix) is not None or re.match(expression, PREFIX + matrix) is not None


def shortest_targets(covered: Iterable[str], every: Iterable[str]) -> tuple[str, ...]:
    """The shortest last parts of names that, by PEFT's suffix rule, mean the covered matrices and no other of `every`."""
    covered = list(covered)
    inside, total = (Counter(part for name in names for part in _suffixes(name)) for names in (covered, every))
    return tuple(sorted({next(part for part in _suffixes(name) if inside[part] == total[part]) for name in covered}))


def _suffixes(name: str) -> list[str]:
    """Last parts of a name, short ones first, none beginning with a number."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in reversed(range(len(parts))) if not parts[i].isdecimal()]
