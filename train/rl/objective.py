"""Beside the loss of an RL step: group advantages, reference KL, and how far sampler and trainer differ."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Shaped

from train.loss import Metrics

EPSILON = 1e-6  # added to the deviation of a group's rewards; also the smallest spread that counts


class Advantages(NamedTuple):
    """advantages are 0 where `kept` is False. groups_kept of the groups had a spread."""

    advantages: Float32[np.ndarray, " N"]
    kept: Bool[np.ndarray, " N"]
    groups: int
    groups_kept: int


def group_advantages(rewards: Float[np.ndarray, " N"], groups: Shaped[np.ndarray, " N"]) -> Advantages:
    """A = (reward - mean) / (deviation + EPSILON) within each group (arXiv 2402.03300, section 4.1.2).

    groups   label of each trajectory's prompt; groups may differ in size
    The deviation is the population's (divided by n). A group whose rewards are all equal, or that has one
    member, teaches nothing: its members are not kept, so leave them out of the batch and of every count.
    Raises ValueError if a reward is not finite.
    """
    rewards = np.asarray(rewards, np.float64)
    if not np.isfinite(rewards).all():
        where = np.flatnonzero(~np.isfinite(rewards)).tolist()
        raise ValueError(
            f"Rewards must be finite; those of trajectories {where[:5]} are {rewards[where[:5]]}."
        )
    labels, group = np.unique(groups, return_inverse=True)
    sizes = np.maximum(np.bincount(group, minlength=len(labels)), 1)
    centred = rewards - (np.bincount(group, rewards, len(labels)) / sizes)[group]
    deviation = np.sqrt(np.bincount(group, centred**2, len(labels)) / sizes)
    spread = deviation > EPSILON
    kept = spread[group]
    advantages = np.where(kept, centred / (deviation[group] + EPSILON), 0).astype(np.float32)
    return Advantages(advantages, kept, len(labels), int(spread.sum()))


def reference_kl(
    logprobs: Float32[Array, "*shape"],
    reference_logprobs: Float32[Array, "*shape"],
    weights: Float32[Array, "*shape"],
) -> tuple[Float32[Array, ""], Metrics]:
    """sum of w (exp(d) - d - 1), d = reference - policy logprob of a sampled token; metrics kl, tokens.

    On tokens sampled from the policy this is an unbiased estimate of KL(policy || reference) and never
    negative: the "k3" estimator, as in GRPO (arXiv 2402.03300, eq. 4). It is a sum like the losses of
    train.loss: multiply by a coefficient and add. Tokens with w = 0 add exactly 0. Its gradient in a logprob
    is w (1 - exp(d)), on average over the policy's samples the gradient of KL(reference || policy).
    """
    active = weights != 0
    d = jnp.where(active, reference_logprobs, 0) - jnp.where(active, logprobs, 0)
    kl = jnp.sum(jnp.where(active, weights * (jnp.expm1(d) - d), 0))
    return kl, {"kl": kl, "tokens": jnp.sum(active, dtype=jnp.float32)}


def gap_grows(gaps: Sequence[float], *, window: int = 8, factor: float = 2.0, floor: float = 1e-3) -> bool:
    """Whether the mean logprob gap per step drifts up: a sign that the sampler serves old weights or caches.

    True if the mean of the last `window` steps is over `factor` times the mean of the first, and over `floor`
    nats (below that, rounding decides). False while there are fewer than two windows.
    """
    if len(gaps) < 2 * window:
        return False
    first, last = math.fsum(gaps[:window]) / window, math.fsum(gaps[-window:]) / window
    return last > max(factor * first, floor)
