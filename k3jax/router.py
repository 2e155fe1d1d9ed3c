"""Which experts a token goes to and with what weight; the counts from which Quantile Balancing sets the router bias."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from k3jax.config import K3Config, MoEConfig
from k3jax.param import Balance, normal, param, zeros

HISTOGRAM_BINS = 1000


class Router(nnx.Module):
    """Scores in fp32 from fp32 copies of x and the weight, whatever they are stored in.

        picks   = top k of scores + e_score_correction_bias
        weights = scores[picks] / sum(scores[picks]) * scaling_factor

    The bias picks, it never weighs. `kernel` is [D, E].
    """

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        assert config.moe is not None
        self.config = config.moe
        E = config.moe.num_experts
        self.kernel = param(rngs, (config.hidden_size, E), ("embed", None), normal(config.init_std), config.param_dtype)
        self.e_score_correction_bias = param(rngs, (E,), (None,), zeros, jnp.float32, Balance)

    def __call__(
        self, x: Float[Array, "N D"], picks: Int32[Array, "N k"] | None = None
    ) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"], Float32[Array, "N E"]]:
        """Picked experts by descending biased score, their weights, and all scores. Given picks are kept (replay)."""
        logits = jnp.matmul(x.astype(jnp.float32), self.kernel[...].astype(jnp.float32), precision="highest")
        log_scores = jax.nn.log_sigmoid(logits) if self.config.score == "sigmoid" else jax.nn.log_softmax(logits)
        scores = jnp.exp(log_scores)
        if picks is None:
            picks = select(scores + self.e_score_correction_bias[...], self.config)
        return picks, combine_weights(log_scores, picks, self.config), scores


def select(biased: Float32[Array, "N E"], config: MoEConfig) -> Int32[Array, "N k"]:
    """The k best experts. With groups, only those in the groups whose two best experts have the largest sum."""
    biased = jax.lax.stop_gradient(biased)
    if config.num_groups > config.groups_per_token:
        grouped = biased.reshape(-1, config.num_groups, config.num_experts // config.num_groups)
        best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        kept = jax.lax.top_k(best, config.groups_per_token)[1]
        keep = (kept[..., None] == jnp.arange(config.num_groups)).any(1)
        biased = jnp.where(keep[..., None], grouped, -jnp.inf).reshape(biased.shape)
    return jax.lax.top_k(biased, config.experts_per_token)[1]


def combine_weights(
    log_scores: Float32[Array, "N E"], picks: Int32[Array, "N k"], config: MoEConfig
) -> Float32[Array, "N k"]:
    """Weights of the picked experts. s_i / sum(s) is a softmax of log scores, which holds when every s underflows."""
    picked = jnp.take_along_axis(log_scores, picks, axis=-1)
    normalize = config.renormalize and config.experts_per_token > 1
    return (jax.nn.softmax(picked) if normalize else jnp.exp(picked)) * config.scaling_factor


def margin_histogram(
    scores: Float32[Array, "N E"], bias: Float32[Array, " E"], valid: Bool[Array, " N"], top_k: int
) -> Int[Array, "E bins"]:
    """Counts of r_ij = (k+1-th biased score of token i) - s_ij per expert j: token i picks j when b_j exceeds it.

    HISTOGRAM_BINS equal bins over [min(bias) - 1, max(bias) + 1] (`train.balance` turns them into the next bias). Tokens
    that are not valid do not count. Source: arXiv 2607.24653.
    """
    scores = jax.lax.stop_gradient(scores)
    N, E = scores.shape
    threshold = jax.lax.top_k(scores + bias, min(top_k + 1, E))[0][:, -1:]
    low, high = bias.min() - 1, bias.max() + 1
    bins = jnp.clip(jnp.floor((threshold - scores - low) / (high - low) * HISTOGRAM_BINS), 0, HISTOGRAM_BINS - 1)
    flat = jnp.arange(E) * HISTOGRAM_BINS + bins.astype(jnp.int32)
    count = jnp.broadcast_to(valid[:, None], (N, E)).astype(jnp.int32)
    return jnp.zeros(E * HISTOGRAM_BINS, jnp.int32).at[flat.reshape(-1)].add(count.reshape(-1)).reshape(E, HISTOGRAM_BINS)
