"""LoRA adapters (arXiv 2106.09685) on a model: many at once, of mixed ranks, chosen per row or token.

    adapters = Adapters(model, columns=32)
    one = adapters.add("countdown", LoRAConfig(rank=8, alpha=16), seed=0)
    model(ids, adapters=jnp.array([0, one]))            # row 0: the base model, row 1: the adapter

`columns` rank columns are laid beside each targeted projection and shared out among adapters (k3jax.linear), so adding
and removing adapters changes no shape and compiles nothing.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.linear import Embedding, Linear, LoRAOwners, LoRAPool
from k3jax.model import K3
from k3jax.moe import ExpertLinear, PackedExpertLinear

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


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """One adapter: W + scale * A B with scale = alpha / rank, or alpha / sqrt(rank) with rslora (arXiv 2312.03732).

    targets        groups (see GROUPS) or module names; a name stands for every module that ends with it
    rank_pattern   module name (may be a regular expression) -> rank instead of `rank`; alpha_pattern likewise
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("attention", "latent", "shared_experts", "mlp")
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self):
        for where, rank in (("rank", self.rank), *((f"rank_pattern[{k!r}]", r) for k, r in self.rank_pattern.items())):
            if not isinstance(rank, int) or rank < 1:
                raise ValueError(f"{where} must be a whole number of at least 1, got {rank!r}.")
        for where, alpha in (("alpha", self.alpha), *((f"alpha_pattern[{k!r}]", a) for k, a in self.alpha_pattern.items())):
            if not math.isfinite(alpha) or alpha <= 0:
                raise ValueError(f"{where} must be positive and finite, got {alpha!r}.")
        if not self.targets:
            raise ValueError("targets is empty: name at least one group or module.")

    @property
    def max_rank(self) -> int:
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank

    def covers(self, module: str) -> bool:
        return any(ends_with(module, name) for name in expand(self.targets))

    def rank_of(self, module: str) -> int:
        return next((r for key, r in self.rank_pattern.items() if matches(key, module)), self.rank)

    def scale_of(self, module: str) -> float:
        alpha = next((a for key, a in self.alpha_pattern.items() if matches(key, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def expand(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Groups replaced by the modules in them."""
    if targets == ("all",):
        targets = ALL
    return tuple(name for target in targets for name in GROUPS.get(target, (target,)))


def ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def matches(key: str, module: str) -> bool:
    """PEFT's rule for rank_pattern and alpha_pattern."""
    return re.match(rf"(.*\.)?({key})$", module) is not None


@dataclass(frozen=True)
class Projection:
    """A module that can carry adapters, for all layers stacked in it."""

    module: Linear | Embedding | ExpertLinear | PackedExpertLinear
    names: tuple[str, ...]  # checkpoint name per stacked layer, without prefix; experts: of the list of experts
    name: str  # the last part of it, such as self_attn.q_proj
    in_size: int
    out_size: int
    stack: tuple[int, ...]  # () | (layers,) | (layers, experts)
    axes: tuple[str | None, ...]  # logical names: of the stack, in, out

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.module, Embedding)


def projections(model: K3) -> Iterator[Projection]:
    """All modules that can carry adapters, in a fixed order."""
    embed = model.model.embed_tokens
    V, D = embed.weight.shape
    yield Projection(embed, ("model.embed_tokens",), "embed_tokens", V, D, (), ("vocab", "embed"))
    layers = model.model.layers
    for stack, numbers in zip(layers.stacks, layers.layers_of_stacks, strict=True):
        for path, module in nnx.iter_modules(stack):
            if isinstance(module, Linear | ExpertLinear | PackedExpertLinear):
                name = ".".join(map(str, path))
                names = tuple(f"model.layers.{i}.{name}" for i in numbers)
                yield _projection(module, names, _tail(name))
    yield _projection(model.lm_head, ("lm_head",), "lm_head")


def _projection(module: Any, names: tuple[str, ...], name: str) -> Projection:
    if isinstance(module, PackedExpertLinear):
        *stack, out_size, half = module.packed.shape
        axes = module.packed.get_metadata()["out_sharding"]
        return Projection(module, names, name, 2 * half, out_size, tuple(stack), (*axes[:-2], axes[-1], axes[-2]))
    *stack, in_size, out_size = module.kernel.shape
    axes = module.kernel.get_metadata()["out_sharding"]
    return Projection(module, names, name, in_size, out_size, tuple(stack), tuple(axes))


def _tail(name: str) -> str:
    return name.removeprefix("block_sparse_moe.")


@dataclass(frozen=True)
class Adapter:
    """Where an adapter lives."""

    id: int
    columns: tuple[int, ...]
    config: LoRAConfig


class Adapters:
    """The adapters of a model, by name. Changes the model's LoRA variables; never its base weights, except `merge`."""

    def __init__(self, model: K3, *, columns: int, targets: tuple[str, ...] = ALL):
        """Lays `columns` rank columns beside each projection in `targets`, all free."""
        if columns < 1:
            raise ValueError(f"columns must be at least 1, got {columns}.")
        if model.lora_owners is not None:
            raise ValueError("The model has adapters already: use that Adapters object.")
        self.model, self.columns = model, columns
        wanted = expand(targets)
        self.projections = [p for p in projections(model) if any(ends_with(p.names[0], w) for w in wanted)]
        for target in targets if targets != ("all",) else ALL:
            if target not in GROUPS and not any(ends_with(p.names[0], target) for p in self.projections):
                raise ValueError(f"Adapter target {target!r} is no group ({', '.join(GROUPS)}) and no module of this model.")
        for p in self.projections:
            p.module.lora = LoRAPool(p.in_size, p.out_size, columns, p.axes, p.stack, rngs=nnx.Rngs(0))
        owners = jnp.zeros(columns, jnp.int32)
        model.lora_owners = LoRAOwners(owners, out_sharding=(None,), eager_sharding=False)
        self._adapters: dict[str, Adapter] = {}
        self._last_id = 0

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def __getitem__(self, name: str) -> Adapter:
        if name not in self._adapters:
            raise KeyError(f"There is no adapter {name!r}. Present: {', '.join(self._adapters) or 'none'}.")
        return self._adapters[name]

    def id(self, name: str) -> int:
        return self[name].id

    def covered(self, config: LoRAConfig) -> list[Projection]:
        """The projections that the config targets. Raises ValueError for a target that has no pool or is nowhere."""
        for target in config.targets if config.targets != ("all",) else ALL:
            names = GROUPS.get(target, (target,))
            if not any(ends_with(p.names[0], n) for p in self.projections for n in names):
                exists = any(ends_with(p.names[0], n) for p in projections(self.model) for n in names)
                if exists:
                    raise ValueError(f"Adapter target {target!r} has no rank columns: name it in Adapters(targets=…).")
                if target not in GROUPS:
                    raise ValueError(f"Adapter target {target!r} is no group ({', '.join(GROUPS)}) and no module of this model.")
        return [p for p in self.projections if config.covers(p.names[0])]

    def add(self, name: str, config: LoRAConfig, *, seed: int = 0) -> int:
        """A new adapter that changes nothing yet (A random, B zero). Returns its id."""
        covered = self.covered(config)
        if not covered:
            raise ValueError(f"Adapter {name!r} with targets {config.targets} touches no projection of this model.")
        adapter = self.allocate(name, config)
        for n, p in enumerate(covered):
            key = jax.random.fold_in(jax.random.key(seed), n)
            rank = config.rank_of(p.names[0])
            bound = p.in_size**-0.5
            a = jax.random.uniform(key, (*p.stack, p.in_size, rank), jnp.float32, -bound, bound)
            b = jnp.zeros((*p.stack, rank, p.out_size), jnp.float32)
            if p.is_embedding:
                a, b = jnp.zeros_like(a), jax.random.normal(key, b.shape, jnp.float32)
            scale = jnp.full((*p.stack, rank), config.scale_of(p.names[0]), jnp.float32)
            self.write(adapter, p, a, b, scale)
        return adapter.id

    def remove(self, name: str) -> None:
        """Frees the adapter's columns. Its id is not used again."""
        adapter = self[name]
        self._clear(adapter)
        owners = self.model.lora_owners
        owners[...] = owners[...].at[jnp.array(adapter.columns)].set(0)
        del self._adapters[name]

    def read(self, adapter: Adapter, p: Projection) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A [*stack, in, r], B [*stack, r, out] and scale [*stack, r] of an adapter, r its rank there."""
        columns = jnp.array(adapter.columns[: adapter.config.rank_of(p.names[0])])
        pool = p.module.lora
        return pool.a[...][..., columns], pool.b[...][..., columns, :], pool.scale[...][..., columns]

    def write(self, adapter: Adapter, p: Projection, a: jax.Array, b: jax.Array, scale: jax.Array) -> None:
        columns = jnp.array(adapter.columns[: a.shape[-1]])
        pool = p.module.lora
        pool.a[...] = pool.a[...].at[..., columns].set(a)
        pool.b[...] = pool.b[...].at[..., columns, :].set(b)
        pool.scale[...] = pool.scale[...].at[..., columns].set(scale)

    def trainable_parameters(self, name: str) -> int:
        """Numbers in A and B of an adapter: the sum of rank * (in + out) over all matrices."""
        config = self[name].config
        return sum(config.rank_of(p.names[0]) * (p.in_size + p.out_size) * math.prod(p.stack) for p in self.covered(config))

    def allocate(self, name: str, config: LoRAConfig) -> Adapter:
        """Takes free columns for a new adapter and zeroes them. Raises ValueError if there are too few."""
        if name in self._adapters:
            raise ValueError(f"There is an adapter {name!r} already: remove it first or take another name.")
        taken = {c for adapter in self._adapters.values() for c in adapter.columns}
        free = [c for c in range(self.columns) if c not in taken]
        if len(free) < config.max_rank:
            raise ValueError(f"Adapter {name!r} needs {config.max_rank} rank columns, but only {len(free)} of {self.columns} "
                             f"are free. Remove an adapter or attach more columns.")
        self._last_id += 1
        adapter = Adapter(self._last_id, tuple(free[: config.max_rank]), config)
        self._adapters[name] = adapter
        self._clear(adapter)
        owners = self.model.lora_owners
        owners[...] = owners[...].at[jnp.array(adapter.columns)].set(adapter.id)
        return adapter

    def _clear(self, adapter: Adapter) -> None:
        rank = len(adapter.columns)
        for p in self.projections:
            zeros = (jnp.zeros((*p.stack, p.in_size, rank)), jnp.zeros((*p.stack, rank, p.out_size)), jnp.zeros((*p.stack, rank)))
            self.write(adapter, p, *zeros)
