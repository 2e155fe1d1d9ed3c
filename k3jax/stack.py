"""All layers of a model as scans over stacked weights, with a backward pass that keeps one copy of the snapshots.

A scan's gradient stores its carry at every step. With Attention Residuals the carry holds every snapshot slot, so
autodiff would store layers x (slots + 1) arrays of [B, T, D]. But slots are written once and a layer reads only those
written before it, so recomputing layer i from the *final* slots gives the same values. Hence here: the forward pass
stores the running sum per layer (or per repeat) and the slots once; the backward pass recomputes layer by layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from k3jax.cache import Cache
from k3jax.config import K3Config
from k3jax.layer import Layer, Residuals
from k3jax.packing import Packing
from k3jax.plan import Segment, plan


class Layers(nnx.Module):
    """Layers 0..n-1. `stacks` holds one module per run of equal layers (k3jax.plan), weights stacked in front."""

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        self.config = config
        self.segments = plan([(kind, config.feed_forward(i)) for i, kind in enumerate(config.attention)])
        self.stacks = nnx.List(
            _stacked(config, run.kind, len(segment.layers(r)), rngs)
            for segment in self.segments
            for r, run in enumerate(segment.runs)
        )

    def layer(self, index: int) -> tuple[int, int]:
        """(stack, position in it) of a layer."""
        for s, layers in enumerate(self.layers_of_stacks):
            if index in layers:
                return s, layers.index(index)
        raise IndexError(f"layer {index} does not exist: the model has layers 0..{self.config.num_layers - 1}.")

    def __getitem__(self, index: int) -> Layer:
        """A copy of one layer, to look at or to use alone."""
        s, position = self.layer(index)
        graphdef, state = nnx.split(self.stacks[s])
        return nnx.merge(graphdef, jax.tree.map(lambda a: a[position], state))

    @property
    def layers_of_stacks(self) -> tuple[tuple[int, ...], ...]:
        return tuple(segment.layers(r) for segment in self.segments for r in range(len(segment.runs)))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        packing: Packing,
        cache: Cache | None = None,
        picks: Sequence[Int32[Array, "n B T k"] | None] | None = None,
        histogram: bool = False,
    ) -> tuple[Residuals, Cache | None, tuple[Any, ...]]:
        """Runs all layers. Returns the stream, the cache after these tokens, and the routing per stack (None: dense)."""
        blocks = None
        if self.config.attn_res_block is not None:
            blocks = jnp.zeros((self.config.num_blocks, *x.shape), x.dtype)
        graphdefs, states = zip(*(nnx.split(stack) for stack in self.stacks), strict=True)
        program = _Program(self.segments, partial(_apply, graphdefs, histogram), self.config.remat)
        picks = (None,) * len(states) if picks is None else tuple(picks)
        stream = Residuals(x, blocks)
        if cache is not None or self.config.remat == "none":
            entries = (None,) * len(states) if cache is None else cache.layers
            stream, entries, routing, _ = program.forward(states, stream, packing, picks, entries)
            cache = None if cache is None else Cache(entries, cache.length + packing.lengths)
        else:
            stream, routing = _rematerialised(program, states, stream, packing, picks)
        return stream, cache, routing


def _stacked(config: K3Config, kind: Any, count: int, rngs: nnx.Rngs) -> Layer:
    @nnx.split_rngs(splits=count)
    @partial(nnx.vmap, in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(rngs: nnx.Rngs) -> Layer:
        return Layer(config, kind, rngs=rngs)

    return create(rngs)


def _apply(
    graphdefs: Any, histogram: bool, stack: int, state: Any, index: Array, stream: Any, packing: Any, entry: Any, picks: Any
) -> Any:
    return nnx.merge(graphdefs[stack], state)(stream, index, packing, entry, picks, histogram)


@dataclass(frozen=True)
class _Program:
    """The scans over a model's segments. `apply` runs one layer of a stack."""

    segments: tuple[Segment, ...]
    apply: Callable[..., Any]
    remat: str

    def forward(self, states: Any, stream: Residuals, packing: Packing, picks: Any, entries: Any, save: str = "nothing") -> Any:
        """Returns the stream, entries, routing per stack, and per segment what `save` asks for of the running sum:
        "layer" before each layer, per run; "group" before each repeat."""
        entries, routing, saved, first = list(entries), [], [], 0
        for segment in self.segments:
            stacks = range(first, first + len(segment.runs))
            first = stacks.stop
            xs = tuple(self._per_repeat(segment, r, (states[s], picks[s])) for r, s in enumerate(stacks))
            group = partial(self._group, segment, stacks, packing, save)
            carry, (routed, kept) = _scan(group, (stream, tuple(entries[s] for s in stacks)), xs, segment.repeats)
            stream = carry[0]
            entries[stacks.start : stacks.stop] = carry[1]
            routing += [jax.tree.map(_merge_leading, r) for r in routed]
            saved.append(kept)
        return stream, tuple(entries), tuple(routing), saved

    def _per_repeat(self, segment: Segment, run: int, tree: Any) -> Any:
        """Splits the stacked axis [repeats * count] into [repeats, count] and adds layer number and stack position."""
        layers = segment.layers(run)
        tree = (*tree, jnp.asarray(layers, jnp.int32), jnp.arange(len(layers), dtype=jnp.int32))
        return jax.tree.map(lambda a: a.reshape(segment.repeats, -1, *a.shape[1:]), tree)

    def _group(self, segment: Segment, stacks: range, packing: Packing, save: str, carry: Any, xs: Any) -> Any:
        """One repeat of a segment: its runs in order."""
        (stream, entries), start = carry, carry[0].prefix
        entries, routed, kept = list(entries), [], []
        for r, stack in enumerate(stacks):

            def step(carry: Any, x: Any, stack: int = stack) -> Any:
                (stream, entry), (state, picks, index, position) = carry, x
                view = None if entry is None else entry.at(position)
                after, new, routing = self.apply(stack, state, index, stream, packing, view, picks)
                entry = None if entry is None else entry.put(position, new)
                return (after, entry), (routing, stream.prefix if save == "layer" else None)

            (stream, entries[r]), (routing, prefix) = _scan(step, (stream, entries[r]), xs[r], segment.runs[r].count)
            routed.append(routing)
            kept.append(prefix)
        return (stream, tuple(entries)), (routed, start if save == "group" else kept)

    def backward(
        self, states: Any, packing: Packing, picks: Any, saved: Any, blocks: Any, grad: Residuals, wanted: Any
    ) -> Any:
        """Gradients of the wanted leaves of `states` and of the stream that came in. `blocks`: the final slots."""
        grads, first = [None] * len(states), sum(len(segment.runs) for segment in self.segments)
        for segment, kept in zip(reversed(self.segments), reversed(saved), strict=True):
            stacks = range(first - len(segment.runs), first)
            first = stacks.start
            xs = tuple(self._per_repeat(segment, r, (states[s], picks[s])) for r, s in enumerate(stacks))
            group = partial(self._group_backward, segment, stacks, packing, blocks, wanted)
            grad, d_states = _scan(group, grad, (xs, kept), segment.repeats, reverse=True)
            for s, d_state in zip(stacks, d_states, strict=True):
                grads[s] = jax.tree.map(_merge_leading, d_state)
        return grads, grad

    def _group_backward(
        self, segment: Segment, stacks: range, packing: Packing, blocks: Any, wanted: Any, grad: Residuals, x: Any
    ) -> Any:
        """One repeat of a segment, backwards: each layer is run again from what was saved before it."""
        xs, kept = x
        if self.remat == "group":
            start = (Residuals(kept, blocks), (None,) * len(stacks))
            _, (_, kept) = self._group(segment, stacks, packing, "layer", start, xs)
        d_states: list[Any] = [None] * len(stacks)
        for r in reversed(range(len(stacks))):
            stack = stacks[r]

            def step(grad: Residuals, x: Any, stack: int = stack) -> Any:
                (state, picks, index, _), prefix = x
                leaves, tree = jax.tree.flatten(state)
                trained = [leaf for leaf, want in zip(leaves, wanted[stack], strict=True) if want]

                def layer(trained: list[Array], stream: Residuals) -> Residuals:
                    fresh = iter(trained)
                    whole = [next(fresh) if want else leaf for leaf, want in zip(leaves, wanted[stack], strict=True)]
                    return self.apply(stack, tree.unflatten(whole), index, stream, packing, None, picks)[0]

                _, vjp = jax.vjp(layer, trained, Residuals(prefix, blocks))
                d_trained, grad = vjp(grad)
                return grad, d_trained

            grad, d_states[r] = _scan(step, grad, (xs[r], kept[r]), segment.runs[r].count, reverse=True)
        return grad, d_states


def _rematerialised(program: _Program, states: Any, stream: Residuals, packing: Packing, picks: Any) -> Any:
    """program.forward for training: gradients by recomputation, only for weights that someone differentiates."""

    @jax.custom_vjp
    def run(states: Any, stream: Residuals, packing: Packing, picks: Any) -> Any:
        stream, _, routing, _ = program.forward(states, stream, packing, picks, (None,) * len(states))
        return stream, routing

    def forward(states: Any, stream: Residuals, packing: Packing, picks: Any) -> Any:
        wanted = tuple(tuple(leaf.perturbed for leaf in _leaves(state)) for state in states)
        states, stream, packing, picks = jax.tree.map(lambda p: p.value, (states, stream, packing, picks), is_leaf=_is_primal)
        after, _, routing, saved = program.forward(states, stream, packing, picks, (None,) * len(states), program.remat)
        return (after, routing), (states, packing, picks, saved, after.blocks, _Static(wanted))

    def backward(residuals: Any, cotangents: Any) -> Any:
        states, packing, picks, saved, blocks, wanted = residuals
        grad = jax.tree.map(_instantiate, cotangents[0], is_leaf=_is_symbolic_zero)
        d_trained, d_stream = program.backward(states, packing, picks, saved, blocks, grad, wanted.value)
        d_states = tuple(
            _fill(state, trained, want) for state, trained, want in zip(states, d_trained, wanted.value, strict=True)
        )
        return d_states, d_stream, None, None

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(states, stream, packing, picks)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """A hashable value that rides through a pytree."""

    value: Any


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _is_symbolic_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_primal)


def _instantiate(x: Any) -> Array:
    return jnp.zeros(x.shape, x.dtype) if _is_symbolic_zero(x) else x


def _fill(state: Any, trained: list[Array], wanted: tuple[bool, ...]) -> Any:
    """Puts gradients back in the shape of `state`, with symbolic zeros for what was not wanted."""
    leaves, tree = jax.tree.flatten(state)
    fresh = iter(trained)
    return tree.unflatten([next(fresh) if want else _no_gradient(leaf) for leaf, want in zip(leaves, wanted, strict=True)])


def _no_gradient(leaf: Array) -> Any:
    return jax.custom_derivatives.zero_from_primal(leaf, symbolic_zeros=True)


def _merge_leading(a: Array) -> Array:
    return a.reshape(-1, *a.shape[2:])


def _scan(f: Callable[..., Any], init: Any, xs: Any, length: int, reverse: bool = False) -> Any:
    """lax.scan, except that one step is not a loop: its program is that of the body."""
    if length > 1:
        return jax.lax.scan(f, init, xs, length, reverse=reverse)
    carry, y = f(init, jax.tree.map(lambda a: a[0], xs))
    return carry, jax.tree.map(lambda a: a[None], y)
