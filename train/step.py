"""One optimizer step for every loss: exact accumulation over micro-batches, clipping, refusal of what is not finite.

    trainer = Trainer(model, nnx.Param, objective, config, optimizer)
    figures = trainer.step([micro_batch, micro_batch])

Losses and metrics are sums over tokens, so those of micro-batches add up to those of the whole batch, and one division
by its count gives the mean. Two programs are compiled, whatever the number of micro-batches: one adds a micro-batch to
the running sums, one applies them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float32, Int32

from k3jax.param import Balance
from train.balance import next_bias
from train.config import RunError, TrainConfig
from train.loss import Metrics
from train.optim import Weights, global_norm

MicroBatch = Mapping[str, Any]  # [rows, row_length] each, or [rows, slots]
Optimizer = Callable[[TrainConfig, Weights], optax.GradientTransformation]


class TrainingError(RunError):
    """Training cannot go on; the message says why and what to try."""


class Sums(NamedTuple):
    """What an objective returns for a micro-batch: all of it adds up over micro-batches."""

    loss: Float32[Array, ""]
    metrics: Metrics  # sums; "tokens" or "pairs" is the count that divides them
    counts: Mapping[str, Int32[Array, "n E bins"]]  # path of a router bias -> margin histogram, for Quantile Balancing


Objective = Callable[[nnx.Module, MicroBatch], Sums]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that training changes, but the data's position."""

    weights: Mapping[str, Any]  # path -> fp32 array
    biases: Mapping[str, Any]  # path -> fp32 [layers, E]: router biases, set by Quantile Balancing
    optimizer: Any
    step: Any  # int32 []


class Trainer:
    """Trains the variables of one type in a model. The model always holds the latest weights; what others change there
    between steps (they add an adapter, say) is taken over.

    kind       type of the variables to train: nnx.Param (all weights) or k3jax.linear.LoRAParam
    objective  see Sums; a traced function of the model and a micro-batch
    balance    set the router biases by Quantile Balancing, from the objective's counts; False: they stay as they are
    require    called before every step; raises if the weights are not to be trained any more
    """

    def __init__(
        self, model: Any, kind: type, objective: Objective, config: TrainConfig, optimizer: Optimizer, *, balance: bool = False,
        require: Callable[[], None] = lambda: None,
    ):
        self.model, self._filters = model, (kind, Balance if balance else ())
        graphdef, trained, biases, self._frozen = nnx.split(model, *self._filters, ...)
        self._trained, self._biases = _Names(trained), _Names(biases)
        weights = {path: w.astype(jnp.float32) for path, w in self._trained.arrays(trained).items()}
        if not weights:
            raise TrainingError(f"The model has no {kind.__name__} to train.")
        transform = optimizer(config, weights)
        self.state = State(
            jax.tree.map(jnp.copy, weights),  # the model's own arrays stay out of the donated state
            jax.tree.map(jnp.copy, self._biases.arrays(biases)),
            jax.jit(transform.init)(weights),
            jnp.zeros((), jnp.int32),
        )
        self._shown = self._trained.arrays(trained)  # what the model holds, unless others changed it
        self.require = require
        self.max_refused, self._refused_in_a_row = config.max_refused, 0
        merge = partial(_merge, graphdef, self._trained, self._biases)
        add = partial(_add, merge, objective)
        self._first = partial(add, None)
        self._add = jax.jit(add, donate_argnums=0)
        top_k = getattr(model.config.moe, "experts_per_token", 0)
        self._apply = jax.jit(partial(_apply, transform, config.clip, top_k), donate_argnums=0)
        self._empty: Any = None

    def step(self, batch: Sequence[MicroBatch]) -> dict[str, float]:
        """One step over all micro-batches; the means of its metrics, grad_norm, and refused: 1 if nothing was changed.

        Raises TrainingError after `max_refused` refused steps in a row.
        """
        self.require()
        self._take_over()
        sums = self._zeros(batch[0])
        for micro in batch:
            sums = self._add(sums, self.state.weights, self.state.biases, self._frozen, micro)
        self.state, figures = self._apply(self.state, sums)
        self._update_model()
        figures = {name: float(value) for name, value in jax.device_get(figures).items()}
        self._refused_in_a_row = self._refused_in_a_row + 1 if figures["refused"] else 0
        if self._refused_in_a_row >= self.max_refused:
            raise TrainingError(
                f"The loss or its gradient was not finite in {self._refused_in_a_row} steps in a row (loss "
                f"{figures['loss']}, gradient norm {figures['grad_norm']}). The weights are those before. "
                f"Try a smaller lr or clip, and look for broken rows in the data."
            )
        return figures

    def restore(self, state: State) -> None:
        self.state = state
        self._update_model()

    def _zeros(self, micro: MicroBatch) -> Any:
        """Fresh running sums. Their shapes are those of a micro-batch's gradients, metrics and counts."""
        if self._empty is None:
            shapes = jax.eval_shape(self._first, self.state.weights, self.state.biases, self._frozen, micro)
            self._empty = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
        return self._empty()

    def _take_over(self) -> None:
        """Arrays are immutable: a weight has changed if and only if its variable holds another one than was put there."""
        _, trained, _, self._frozen = nnx.split(self.model, *self._filters, ...)
        changed = {path: w for path, w in self._trained.arrays(trained).items() if w is not self._shown[path]}
        if changed:
            copies = {path: jnp.array(w, jnp.float32, copy=True) for path, w in changed.items()}
            self.state = replace(self.state, weights={**self.state.weights, **copies})

    def _update_model(self) -> None:
        trained = self._trained.state(self.state.weights)
        self._shown = self._trained.arrays(trained)
        nnx.update(self.model, trained, self._biases.state(self.state.biases))


class _Names:
    """Translates between a module's state and a flat dict, path -> array, in the state's dtypes."""

    def __init__(self, state: nnx.State):
        abstract = jax.eval_shape(lambda: state)  # shapes alone: no second copy of the weights is kept
        self.variables = {"/".join(map(str, path)): (path, v) for path, v in nnx.to_flat_state(abstract)}

    def arrays(self, state: nnx.State) -> dict[str, Array]:
        return {"/".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(state)}

    def state(self, arrays: Mapping[str, Array]) -> nnx.State:
        flat = [(path, v.replace(arrays[name].astype(v.get_value().dtype))) for name, (path, v) in self.variables.items()]
        return nnx.from_flat_state(flat)


def _merge(graphdef: Any, trained: _Names, biases: _Names, weights: Weights, bias: Weights, frozen: nnx.State) -> Any:
    return nnx.merge(graphdef, trained.state(weights), biases.state(bias), frozen)


def _add(
    merge: Any, objective: Objective, before: Any, weights: Weights, biases: Weights, frozen: nnx.State, micro: MicroBatch
) -> Any:
    """Adds the gradients and sums of a micro-batch to those `before` it (None: to nothing)."""

    def loss(weights: Weights) -> tuple[Array, Sums]:
        sums = objective(merge(weights, biases, frozen), micro)
        return sums.loss, sums

    grads, sums = jax.grad(loss, has_aux=True)(weights)
    return (grads, sums) if before is None else jax.tree.map(jnp.add, before, (grads, sums))


def _apply(transform: optax.GradientTransformation, clip: float, top_k: int, state: State, total: Any) -> tuple[State, Metrics]:
    """Divides by the count, clips, updates; where loss, gradient or update is not finite, all but `step` stays as it was."""
    grads, sums = total
    count = sums.metrics["pairs"] if "pairs" in sums.metrics else sums.metrics["tokens"]
    share = 1 / jnp.maximum(count, 1)
    grads = jax.tree.map(lambda g: g * share, grads)
    norm = global_norm(grads)
    shrink = jnp.minimum(1, clip / jnp.maximum(norm, clip))
    updates, optimizer = transform.update(jax.tree.map(lambda g: g * shrink, grads), state.optimizer, state.weights)
    fine = jnp.isfinite(sums.loss) & jnp.isfinite(norm) & jnp.isfinite(global_norm(cast(Weights, updates)))
    weights: Any = optax.apply_updates(state.weights, updates)
    biases = {
        path: next_bias(sums.counts[path], bias, top_k) if path in sums.counts else bias
        for path, bias in state.biases.items()
    }
    new = State(weights, biases, optimizer, state.step)
    kept = jax.tree.map(partial(jnp.where, fine), new, state)
    means = {name: value if name in ("tokens", "pairs") else value * share for name, value in sums.metrics.items()}
    return replace(kept, step=state.step + 1), means | {"grad_norm": norm, "refused": (~fine).astype(jnp.float32)}
