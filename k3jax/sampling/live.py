"""A model's weights as they are now, and whether they changed since the last look."""

import weakref
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from k3jax.linear import LoRAOwners, LoRAParam, LoRAScale
from k3jax.model import K3

_LORA = (LoRAParam, LoRAScale, LoRAOwners)


class Look(NamedTuple):
    graphdef: Any
    state: Any
    base_changed: bool  # concerns every adapter
    adapters_changed: bool


class LiveWeights:
    """Splits a model anew at every look, which copies nothing. Arrays are immutable, so a weight has changed if and
    only if its variable holds another array than before. Keeps no array alive."""

    def __init__(self, model: K3):
        self.model = model
        self.version = 0  # counts changes of any kind
        self._base, self._adapters = _Seen(), _Seen()

    def look(self) -> Look:
        graphdef, state = nnx.split(self.model)
        variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        base = self._base.changed([v for v in variables if not isinstance(v, _LORA)])
        adapters = self._adapters.changed([v for v in variables if isinstance(v, _LORA)])
        self.version += base or adapters
        return Look(graphdef, state, base, adapters)

    @property
    def adapters(self) -> set[int]:
        """Ids of the adapters that the model has; 0, none, is not among them."""
        owners = self.model.lora_owners
        return set() if owners is None else set(np.asarray(owners[...]).tolist()) - {0}


class _Seen:
    """Remembers arrays without keeping them alive."""

    def __init__(self):
        self._arrays: list[weakref.ref[Any]] = []

    def changed(self, tree: Any) -> bool:
        """Whether the tree's arrays are others than at the last call."""
        arrays = jax.tree.leaves(tree)
        before, self._arrays = self._arrays, [weakref.ref(a) for a in arrays]
        return len(before) != len(arrays) or any(old() is not a for old, a in zip(before, arrays, strict=True))
