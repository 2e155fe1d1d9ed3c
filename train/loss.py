"""Losses over per-token arrays: those of the Tinker training protocol, with its numerics, and DPO.

Every loss is a plain sum over tokens (DPO: over pairs), and so is every metric beside it. So the losses,
gradients and metrics of a batch cut into micro-batches add up to those of the whole; divide by the metric
`tokens` or `pairs` once, at the end.

lp = log p(target) under the policy being trained, at temperature 1; q = the sampler's log p of the token;
r = exp(lp - q); A = advantage; w = weight, 1 if not given. All are fp32, of one shape.
A token with w = 0, or with A = 0 under a loss that A multiplies, adds exactly 0 to loss, gradient and
metrics, whatever its other values are, NaN included. So does a prompt token: the protocol marks it by
q = 0 and A = 0.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

Metrics = dict[str, Float32[Array, ""]]
Tokens = Float32[Array, "*shape"]
LossAndMetrics = tuple[Float32[Array, ""], Metrics]


def cross_entropy(logprobs: Tokens, weights: Tokens) -> LossAndMetrics:
    """sum of -w lp. Weights may be negative: a client's own loss C arrives as w = -dC/dlp."""
    active = weights != 0
    loss = -_sum(active, weights * jnp.where(active, logprobs, 0))
    return loss, {"loss": loss, "tokens": _count(active), "weight": _sum(active, weights)}


def importance_sampling(
    logprobs: Tokens, sampling_logprobs: Tokens, advantages: Tokens, weights: Tokens | None = None
) -> LossAndMetrics:
    """sum of -w r A: the policy gradient, importance weighted (arXiv 1707.06347, eq. 6)."""
    t = _Ratios.of(logprobs, sampling_logprobs, advantages, weights)
    return t.result(t.ratio * advantages)


def ppo(
    logprobs: Tokens,
    sampling_logprobs: Tokens,
    advantages: Tokens,
    weights: Tokens | None = None,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> LossAndMetrics:
    """sum of -w min(r A, clip(r, low, high) A) (arXiv 1707.06347, eq. 7).

    The thresholds are ratios, not distances to 1. Metric `clipped` counts the tokens without a
    gradient: r has left the range in the direction of A.
    """
    t = _Ratios.of(logprobs, sampling_logprobs, advantages, weights)
    free = t.ratio * advantages
    bounded = jnp.clip(t.ratio, clip_low_threshold, clip_high_threshold) * advantages
    return t.result(jnp.minimum(free, bounded), clipped=bounded < free)


def cispo(
    logprobs: Tokens,
    sampling_logprobs: Tokens,
    advantages: Tokens,
    weights: Tokens | None = None,
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> LossAndMetrics:
    """sum of -w stop_gradient(clip(r, low, high)) A lp (arXiv 2506.13585): no token loses its gradient.

    Metric `clipped` counts the tokens whose ratio was outside the range.
    """
    t = _Ratios.of(logprobs, sampling_logprobs, advantages, weights)
    bounded = jax.lax.stop_gradient(jnp.clip(t.ratio, clip_low_threshold, clip_high_threshold))
    outside = (t.ratio < clip_low_threshold) | (t.ratio > clip_high_threshold)
    return t.result(bounded * advantages * t.logprobs, clipped=outside)


def dro(
    logprobs: Tokens,
    sampling_logprobs: Tokens,
    advantages: Tokens,
    weights: Tokens | None = None,
    *,
    beta: float = 0.05,
) -> LossAndMetrics:
    """sum of -w (A lp - beta/2 (lp - q)^2): direct reward optimisation, per token (arXiv 2405.19107)."""
    t = _Ratios.of(logprobs, sampling_logprobs, advantages, weights, also=sampling_logprobs != 0)
    return t.result(advantages * t.logprobs - beta / 2 * jnp.square(t.log_ratio))


def dpo(
    logprobs: Float32[Array, "B T"],
    weights: Float32[Array, "B T"],
    segments: Int[Array, "B T"],
    reference_logprobs: Float32[Array, "B S"],
    *,
    beta: float = 0.1,
) -> LossAndMetrics:
    """sum over pairs of -log sigmoid(beta ((c - c_ref) - (d - d_ref))) (arXiv 2305.18290, eq. 7).

    c and d are the log-probabilities of the chosen and the rejected answer: sums of w lp over a segment.
    Segments 1 and 2 of a row are the chosen and the rejected one of its first pair, 3 and 4 of its second,
    and so on. reference_logprobs[:, s - 1] is the same sum for segment s under the reference policy. A pair
    counts if both of its segments have a token with w != 0. Metrics: pairs, correct (pairs that prefer the
    chosen answer), margin, and the rewards beta (c - c_ref) and beta (d - d_ref).
    """
    slots = reference_logprobs.shape[1]
    if slots % 2:
        raise ValueError(f"dpo needs an even number of segments per row, two for each pair; got {slots}.")
    active = weights != 0
    member = active[:, None, :] & (
        segments[:, None, :] == jnp.arange(1, slots + 1)[None, :, None]
    )  # [B, S, T]
    weighted = jnp.where(active, weights, 0) * jnp.where(active, logprobs, 0)
    totals = jnp.sum(jnp.where(member, weighted[:, None, :], 0), axis=-1)
    present = member.any(axis=-1)
    pairs = present[:, 0::2] & present[:, 1::2]
    rewards = beta * (totals - jnp.where(present, reference_logprobs, 0))
    chosen, rejected = rewards[:, 0::2], rewards[:, 1::2]
    loss = -_sum(pairs, jax.nn.log_sigmoid(chosen - rejected))
    return loss, {
        "loss": loss,
        "pairs": _count(pairs),
        "correct": _count(pairs & (chosen > rejected)),
        "margin": _sum(pairs, chosen - rejected),
        "chosen_reward": _sum(pairs, chosen),
        "rejected_reward": _sum(pairs, rejected),
    }


@dataclass(frozen=True)
class _Ratios:
    """What the losses over sampled tokens share; inert tokens hold harmless values."""

    active: Bool[Array, "*shape"]
    logprobs: Tokens
    log_ratio: Tokens
    weights: Tokens

    @classmethod
    def of(
        cls,
        logprobs: Tokens,
        sampling_logprobs: Tokens,
        advantages: Tokens,
        weights: Tokens | None,
        also: Bool[Array, "*shape"] | bool = False,
    ) -> "_Ratios":
        """Tokens are active where w != 0 and either A != 0 or `also` holds."""
        weights = jnp.ones_like(logprobs) if weights is None else weights
        active = (weights != 0) & ((advantages != 0) | also)
        logprobs = jnp.where(active, logprobs, 0)
        return cls(active, logprobs, logprobs - jnp.where(active, sampling_logprobs, 0), weights)

    @property
    def ratio(self) -> Tokens:
        return jnp.exp(self.log_ratio)

    def result(self, objective: Tokens, **counts: Bool[Array, "*shape"]) -> LossAndMetrics:
        """-sum w objective, and the sums loss, tokens, ratio r, logprob_gap |lp - q| and the given counts."""
        loss = -_sum(self.active, self.weights * objective)
        metrics = {
            "loss": loss,
            "tokens": _count(self.active),
            "ratio": _sum(self.active, self.ratio),
            "logprob_gap": _sum(self.active, jnp.abs(self.log_ratio)),
        }
        return loss, metrics | {name: _count(self.active & flags) for name, flags in counts.items()}


def _sum(active: Bool[Array, "*shape"], values: Tokens) -> Float32[Array, ""]:
    return jnp.sum(jnp.where(active, values, 0), dtype=jnp.float32)


def _count(flags: Bool[Array, "*shape"]) -> Float32[Array, ""]:
    return jnp.sum(flags, dtype=jnp.float32)


LOSSES: dict[str, Callable[..., LossAndMetrics]] = {
    loss.__name__: loss for loss in (cross_entropy, importance_sampling, ppo, cispo, dro, dpo)
}
_UNAVAILABLE = {"stable_reinforce": "it needs server state that its authors have not described"}


@dataclass(frozen=True)
class Loss:
    """A loss with its settings, hashable. Made by `loss_named`."""

    name: str
    config: tuple[tuple[str, float], ...]  # every setting, defaults included

    @property
    def needs(self) -> tuple[str, ...]:
        """The arrays it cannot do without, beside the policy's logprobs."""
        return tuple(p.name for p in _arrays(self.name) if p.default is p.empty)

    @property
    def takes(self) -> tuple[str, ...]:
        """The arrays it uses if they are given, beside the policy's logprobs."""
        return tuple(p.name for p in _arrays(self.name))

    def __call__(self, logprobs: Tokens, arrays: Mapping[str, Array]) -> LossAndMetrics:
        """The loss of the arrays it takes; others are left alone, so one batch serves every loss.

        Raises ValueError if one that it needs is missing.
        """
        if missing := [name for name in self.needs if name not in arrays]:
            raise ValueError(
                f"The loss {self.name} needs {', '.join(missing)}; "
                f"the batch has {', '.join(arrays) or 'nothing'}."
            )
        used = {name: arrays[name] for name in self.takes if name in arrays}
        return LOSSES[self.name](logprobs, **used, **dict(self.config))


def loss_named(name: str, config: Mapping[str, Any] | None = None) -> Loss:
    """The loss `name` with `config` over its defaults. ValueError for an unknown name or a bad value."""
    if name in _UNAVAILABLE:
        raise ValueError(
            f"The loss {name} is not available: {_UNAVAILABLE[name]}. Choose one of {_list(LOSSES)}."
        )
    if name not in LOSSES:
        raise ValueError(f"There is no loss {name!r}.{_nearest(name, LOSSES)} Choose one of {_list(LOSSES)}.")
    settings = {p.name: p.default for p in _parameters(name) if p.kind is p.KEYWORD_ONLY}
    for key, value in (config or {}).items():
        if key not in settings:
            raise ValueError(
                f"The loss {name} has no setting {key!r}.{_nearest(key, settings)} "
                f"It takes {_list(settings) or 'none'}."
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name}: {key} must be a finite number, got {value!r}.")
        settings[key] = float(value)
    low, high = (settings.get(f"clip_{end}_threshold", 0.0) for end in ("low", "high"))
    if not 0 <= low <= high:
        raise ValueError(
            f"{name}: clip_low_threshold={low}, clip_high_threshold={high}: "
            f"ratios with 0 <= low <= high are needed (0.8 and 1.2, not 0.2 and 0.2)."
        )
    if settings.get("beta", 0) < 0:
        raise ValueError(f"{name}: beta={settings['beta']} must not be negative.")
    return Loss(name, tuple(settings.items()))


def _parameters(name: str) -> list[inspect.Parameter]:
    return list(inspect.signature(LOSSES[name]).parameters.values())


def _arrays(name: str) -> list[inspect.Parameter]:
    return [p for p in _parameters(name)[1:] if p.kind is not p.KEYWORD_ONLY]


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {near[0]}?" if near else ""


def _list(names: Mapping[str, object]) -> str:
    return ", ".join(names)
