"""A model's weights as they are now, and which version of them each adapter runs on."""

import weakref
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from k3jax.linear import LoRAOwners, LoRAParam, LoRAScale
from k3jax.model import K3

_LORA = (LoRAParam, LoRAScale, LoRAOwners)


class Look(NamedTuple):
    """A model split for the compiled steps."""

    graphdef: Any
    state: Any


class LiveWeights:
    """Splits a model anew at every look, which copies nothing. Arrays are immutable, so a weight has changed if and
    only if its variable holds another array than before. Keeps no array alive."""

    def __init__(self, model: K3):
        self.model = model
        self._base, self._adapters = _Seen(), _Seen()
        self._looks = self._base_since = self._adapters_since = 0

    def look(self) -> Look:
        """The weights now. Starts new versions for what has changed since the last look."""
        graphdef, state = nnx.split(self.model)
        variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        base = self._base.changed([v for v in variables if not isinstance(v, _LORA)])
        adapters = self._adapters.changed([v for v in variables if isinstance(v, _LORA)])
        self._looks += 1
        if base:
            self._base_since = self._looks
        if base or adapters:
            self._adapters_since = self._looks
        return Look(graphdef, state)

    def version(self, adapter: int) -> int:
        """Number of the look since which the weights under this adapter are what they are; 0 is the base model.

        Adapters share their arrays: adding, removing or training one starts a version of all of them, never of the base.
        """
        return self._adapters_since if adapter else self._base_since

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
