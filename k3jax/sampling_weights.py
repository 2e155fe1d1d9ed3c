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
        self._seen: tuple[list[Any], list[Any]] = ([], [])

    def look(self) -> Look:
        graphdef, state = nnx.split(self.model)
        variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        lora = [isinstance(v, _LORA) for v in variables]
        arrays = [jax.tree.leaves(v) for v in variables]
        now = tuple([a for part, is_lora in zip(arrays, lora, strict=True) if is_lora == kind for a in part] for kind in (False, True))
        base, adapters = (not _same(seen, new) for seen, new in zip(self._seen, now, strict=True))
        self._seen = tuple([weakref.ref(a) for a in part] for part in now)
        self.version += base or adapters
        return Look(graphdef, state, base, adapters)

    @property
    def adapters(self) -> set[int]:
        """Ids of the adapters that the model has; 0, none, is not among them."""
        owners = self.model.lora_owners
        return set() if owners is None else set(np.asarray(owners[...]).tolist()) - {0}


def _same(seen: list[Any], new: list[jax.Array]) -> bool:
    return len(seen) == len(new) and all(reference() is array for reference, array in zip(seen, new, strict=True))
