"""LoRA adapters (arXiv 2106.09685) on a model: many at once, of mixed ranks, chosen per row or token.

    adapters = Adapters(model, columns=32)
    one = adapters.add("countdown", LoRAConfig(rank=8, alpha=16), seed=0)
    model(ids, adapters=jnp.array([0, one]))            # row 0: the base model, row 1: the adapter

`columns` rank columns are laid beside each targeted projection and shared out among adapters (k3jax.linear), so adding
and removing adapters changes no shape and compiles nothing.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.linear import LoRAOwners, LoRAPool
from k3jax.lora.targets import ALL, GROUPS, Projection, ends_with, expand, matches, projections
from k3jax.model import K3
from k3jax.weights.reader import as_bytes


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """One adapter: W + scale * A B with scale = alpha / rank, or alpha / sqrt(rank) with rslora (arXiv 2312.03732).

    targets        groups ("attention", "latent", "shared_experts", "mlp", "experts", "embedding", "head", or "all") or
                   module names; a name means every module that ends with it: "o_proj", "layers.3.self_attn.o_proj"
    rank_pattern   end of a module name (a regular expression) -> rank instead of `rank`; the first that matches counts
    alpha_pattern  likewise for alpha
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("attention", "latent", "shared_experts", "mlp")
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self):
        for where, rank in _named("rank", self.rank, self.rank_pattern):
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                raise ValueError(f"{where} must be a whole number of at least 1, got {rank!r}.")
        for where, alpha in _named("alpha", self.alpha, self.alpha_pattern):
            if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
                raise ValueError(f"{where} must be a positive, finite number, got {alpha!r}.")
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"Pattern {pattern!r} is no regular expression: {error}.") from None
        if isinstance(self.targets, str):
            raise ValueError(f"targets={self.targets!r} is one string: a tuple is needed, such as ({self.targets!r},).")
        if not self.targets:
            raise ValueError("targets is empty: name at least one group or module.")

    @property
    def max_rank(self) -> int:
        """The rank columns that an adapter takes."""
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank

    def rank_of(self, matrix: str) -> int:
        return next((r for key, r in self.rank_pattern.items() if matches(key, matrix)), self.rank)

    def scale_of(self, matrix: str) -> float:
        alpha = next((a for key, a in self.alpha_pattern.items() if matches(key, matrix)), self.alpha)
        rank = self.rank_of(matrix)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def scales(self, p: Projection) -> np.ndarray:
        """[*stack, r] fp32, r the largest rank in the projection: the scale of each rank column, 0 where a matrix has none."""
        targets = expand(self.targets)
        whole = {layer for layer, name in enumerate(p.layers) if ends_with(name, targets)}
        covered = [
            (name, index)
            for name, index in p.matrices
            if (index[0] if index else 0) in whole or ends_with(name, targets)
        ]
        scales = np.zeros((*p.stack, max((self.rank_of(name) for name, _ in covered), default=0)), np.float32)
        for name, index in covered:
            scales[index][: self.rank_of(name)] = self.scale_of(name)
        return scales


def _named(name: str, value: Any, pattern: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield name, value
    yield from ((f"{name}_pattern[{key!r}]", v) for key, v in pattern.items())


class Placed(NamedTuple):
    """The part of an adapter beside one projection. r is its largest rank there."""

    projection: Projection
    a: np.ndarray  # [*stack, in, r] fp32
    b: np.ndarray  # [*stack, r, out] fp32
    scale: np.ndarray  # [*stack, r] fp32; 0 where a matrix has fewer than r columns, or none


@dataclass(frozen=True)
class Adapter:
    """Where an adapter lives."""

    id: int
    columns: tuple[int, ...]
    config: LoRAConfig


class Adapters:
    """The adapters of a model, by name. Changes the model's LoRA variables, never its base weights."""

    def __init__(self, model: K3, *, columns: int, targets: tuple[str, ...] = ALL):
        """Lays `columns` rank columns beside each projection in `targets`, all free.

        By default beside every projection, the routed experts' and the embedding's too, which for K3 are by far the
        most: name the groups that the adapters will use.
        """
        if columns < 1:
            raise ValueError(f"columns must be at least 1, got {columns}.")
        if model.lora_owners is not None:
            raise ValueError("The model has adapters already: use that Adapters object.")
        self.model, self.columns = model, columns
        every = list(projections(model))
        _require_known(targets, every)
        self.projections = [p for p in every if p.is_named_by(expand(targets))]
        for p in self.projections:
            p.module.lora = LoRAPool(p.in_size, p.out_size, columns, p.axes, p.stack, rngs=nnx.Rngs(0))
            _place(p)
        owners = jnp.zeros(columns, jnp.int32)
        model.lora_owners = LoRAOwners(owners, out_sharding=(None,), eager_sharding=False)
        self._adapters: dict[str, Adapter] = {}
        self._last_id = 0

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __getitem__(self, name: str) -> Adapter:
        if name not in self._adapters:
            raise KeyError(f"There is no adapter {name!r}. Present: {', '.join(self._adapters) or 'none'}.")
        return self._adapters[name]

    def id(self, name: str) -> int:
        """What chooses the adapter in a call of the model. Never given to another adapter."""
        return self[name].id

    def add(self, name: str, config: LoRAConfig, *, seed: int = 0) -> int:
        """A new adapter that changes nothing yet: A uniform in ±in**-0.5 and B zero; of the embedding, A zero and B
        normal. Returns its id. Raises ValueError if it does not fit (`check`)."""
        return self.install(name, config, self._fresh(config, seed))

    def _fresh(self, config: LoRAConfig, seed: int) -> Iterator[Placed]:
        for n, (p, scale) in enumerate(self.covered(config)):
            rng, used = np.random.default_rng((seed, n)), scale > 0
            a = np.zeros((*p.stack, p.in_size, scale.shape[-1]), np.float32)
            b = np.zeros((*scale.shape, p.out_size), np.float32)
            if p.is_embedding:
                b = rng.standard_normal(b.shape, np.float32) * used[..., None]
            else:
                a = (2 * rng.random(a.shape, np.float32) - 1) * np.float32(p.in_size**-0.5) * used[..., None, :]
            yield Placed(p, a, b, scale)

    def install(self, name: str, config: LoRAConfig, parts: Iterable[Placed]) -> int:
        """A new adapter with these weights, and zeros beside every other projection. Returns its id, the next number."""
        columns = self.check(name, config)
        rest = list(self.projections)
        for part in parts:
            rest.remove(part.projection)
            _write(part.projection, columns, part)
        for p in rest:
            _write(p, columns)
        self._last_id += 1
        self._own(columns, self._last_id)
        self._adapters[name] = Adapter(self._last_id, columns, config)
        return self._last_id

    def remove(self, name: str) -> None:
        """Frees the adapter's columns. Rows that still ask for its id get the base model."""
        adapter = self[name]
        self._own(adapter.columns, 0)
        for p in self.projections:
            _write(p, adapter.columns)
        del self._adapters[name]

    def check(self, name: str, config: LoRAConfig) -> tuple[int, ...]:
        """The columns that a new adapter would get.

        Raises ValueError if the name is taken, columns are too few, a target is nowhere or has no columns, or a pattern
        matches no targeted module.
        """
        if name in self._adapters:
            raise ValueError(f"There is an adapter {name!r} already: remove it first or take another name.")
        every = list(projections(self.model))
        _require_known(config.targets, every)
        covered = [p for p in every if config.scales(p).any()]
        if not covered:
            raise ValueError(f"Adapter {name!r} with targets {config.targets} touches no module of this model.")
        bare = [p.name for p in covered if p.module.lora is None]
        if bare:
            raise ValueError(f"Adapter {name!r} targets modules without rank columns: name them in Adapters(targets=…): "
                             f"{', '.join(bare[:5])}.")
        for pattern in (*config.rank_pattern, *config.alpha_pattern):
            if not any(matches(pattern, matrix) for p in covered for matrix, _ in p.matrices):
                raise ValueError(f"Pattern {pattern!r} of adapter {name!r} matches none of the modules that it targets.")
        taken = {c for adapter in self._adapters.values() for c in adapter.columns}
        free = [c for c in range(self.columns) if c not in taken]
        if len(free) < config.max_rank:
            raise ValueError(
                f"Adapter {name!r} needs {config.max_rank} rank columns, but only {len(free)} of {self.columns} are free. "
                "Remove an adapter or attach more columns."
            )
        return tuple(free[: config.max_rank])

    def covered(self, config: LoRAConfig) -> list[tuple[Projection, np.ndarray]]:
        """The projections that have a matrix which the config targets, with their scales (`LoRAConfig.scales`)."""
        scales = ((p, config.scales(p)) for p in self.projections)
        return [(p, scale) for p, scale in scales if scale.any()]

    def read(self, name: str) -> Iterator[Placed]:
        """An adapter's weights in host memory, projection by projection. All processes must join in."""
        adapter = self[name]
        for p, scale in self.covered(adapter.config):
            columns = list(adapter.columns[: scale.shape[-1]])
            pool = p.module.lora
            assert pool is not None
            yield Placed(p, _on_host(pool.a[...])[..., columns], _on_host(pool.b[...])[..., columns, :], scale)

    def read_matrices(self, name: str) -> Iterator[tuple[str, Projection, np.ndarray, np.ndarray, float]]:
        """(name, projection, A [in, r], B [r, out], scale) of every matrix, r its own rank."""
        for p, a, b, scale in self.read(name):
            for matrix, index in p.matrices:
                rank = int(np.count_nonzero(scale[index]))
                if rank:
                    yield matrix, p, a[index][:, :rank], b[index][:rank], float(scale[index][0])

    def trainable_parameters(self, name: str) -> int:
        """Numbers in A and B of an adapter: the sum of rank * (in + out) over all matrices."""
        covered = self.covered(self[name].config)
        return sum(int(np.count_nonzero(scale)) * (p.in_size + p.out_size) for p, scale in covered)

    def delta_norms(self, name: str) -> dict[str, float]:
        """Frobenius norm of scale * A B of every matrix: what an adapter does, at a glance."""
        norms = {}
        for matrix, _, a, b, scale in self.read_matrices(name):
            a, b = a.astype(np.float64), b.astype(np.float64)
            norms[matrix] = scale * math.sqrt(max(0.0, float(np.sum((a.T @ a) * (b @ b.T)))))
        return norms

    def content_version(self, name: str) -> str:
        """16 hex digits that name what an adapter computes: its modules, ranks, scales and weights, bit for bit.

        Equal for two loads of equal content, whatever their ids and columns; another after any change.
        """
        digest = hashlib.blake2b(digest_size=8)
        for matrix, _, a, b, scale in self.read_matrices(name):
            digest.update(f"{matrix} {a.shape} {b.shape} {scale.hex()}\n".encode())
            digest.update(as_bytes(np.ascontiguousarray(a)))
            digest.update(as_bytes(np.ascontiguousarray(b)))
        return digest.hexdigest()

    def _own(self, columns: tuple[int, ...], owner: int) -> None:
        owners = self.model.lora_owners
        assert owners is not None
        owners[...] = owners[...].at[jnp.array(columns)].set(owner)


def _require_known(targets: Iterable[str], every: list[Projection]) -> None:
    """Raises ValueError for a target that is neither a group nor names a module. A model may lack what a group names."""
    for target in targets:
        if target in GROUPS or target == "all":
            continue
        if not any(p.is_named_by((target,)) for p in every):
            raise ValueError(f"Adapter target {target!r} is no group (all, {', '.join(GROUPS)}) and no module of this model.")


def _place(p: Projection) -> None:
    """Spreads a pool over the mesh on which its projection lies."""
    pool, weight = p.module.lora, p.weight.get_value()
    assert pool is not None
    if isinstance(weight.sharding, NamedSharding):
        *lead, first, second = (*weight.sharding.spec, *(None,) * weight.ndim)[: weight.ndim]
        inputs, outputs = (second, first) if p.is_packed else (first, second)
        for variable, spec in ((pool.a, (inputs, None)), (pool.b, (None, outputs)), (pool.scale, (None,))):
            place = NamedSharding(weight.sharding.mesh, PartitionSpec(*lead, *spec))
            variable.set_value(jax.device_put(variable.get_value(), place))


def _on_host(array: jax.Array) -> np.ndarray:
    """The whole array in host memory, gathered from other processes if need be."""
    if not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _write(p: Projection, columns: tuple[int, ...], part: Placed | None = None) -> None:
    """Sets these rank columns to the part's, then zeros; without a part to zeros. Whatever the rank, it compiles once."""
    pool = p.module.lora
    assert pool is not None
    _set_columns(pool.a, -1, columns, part and part.a)
    _set_columns(pool.b, -2, columns, part and part.b)
    _set_columns(pool.scale, -1, columns, part and part.scale)


def _set_columns(variable: nnx.Variable, axis: int, columns: tuple[int, ...], values: np.ndarray | None) -> None:
    old = variable.get_value()
    new, ours = np.zeros(old.shape, np.float32), np.zeros(old.shape[axis], bool)
    ours[list(columns)] = True
    if values is not None:
        np.moveaxis(new, axis, 0)[list(columns[: values.shape[axis]])] = np.moveaxis(values, axis, 0)
    result = jnp.where(ours if axis == -1 else ours[:, None], new, old)
    variable.set_value(result if result.sharding == old.sharding else jax.device_put(result, old.sharding))
