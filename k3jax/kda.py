"""Kimi Delta Attention (arXiv 2510.26692): linear attention with a state per head and a decay per key channel."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from k3jax.cache import KDAState
from k3jax.checks import require_hidden
from k3jax.config import K3Config
from k3jax.linear import Linear
from k3jax.norm import GatedRMSNorm, l2_normalize
from k3jax.packing import Packing
from k3jax.param import normal, param, zeros
from pallas_kernels.conv1d import conv1d
from pallas_kernels.kda import kda, log_decay
from pallas_kernels.kda_decode import Projected, Weights, kda_decode


class ShortConv(nnx.Module):
    """Weight of a causal depthwise convolution over tokens, [channels, width], fp32."""

    def __init__(self, channels: int, width: int, *, rngs: nnx.Rngs):
        bound = width**-0.5
        init = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)  # noqa: E731
        self.weight = param(rngs, (channels, width), ("heads", None), init, jnp.float32)


class KimiDeltaAttention(nnx.Module):
    """Projects to q, k, v, decay and beta, runs the delta rule, gates and projects back (arXiv 2510.26692).

        q, k, v = silu(conv(W_{q,k,v} x)), q and k of unit length;  beta = sigmoid(W_b x)
        o = delta rule of q K^-1/2, k, v, log_decay(W_fb W_fa x + dt_bias), beta      (pallas_kernels.kda)
        y = W_o [norm(o) * sigmoid(W_g x)]
    """

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs):
        c, D = config.kda, config.hidden_size
        H, K = c.num_heads, c.head_dim
        self.config = config
        kind: dict[str, Any] = {"init": normal(config.init_std), "dtype": config.param_dtype, "rngs": rngs}
        for name in "qkv":
            setattr(self, f"{name}_proj", Linear(D, H * K, ("embed", "heads"), **kind))
            setattr(self, f"{name}_conv1d", ShortConv(H * K, c.conv_width, rngs=rngs))
        self.b_proj = Linear(D, H, ("embed", "heads"), **kind)
        self.f_a_proj = Linear(D, K, ("embed", None), **kind)
        self.f_b_proj = Linear(K, H * K, (None, "heads"), **kind)
        if c.full_rank_gate:
            self.g_proj = Linear(D, H * K, ("embed", "heads"), **kind)
        else:
            self.g_a_proj = Linear(D, K, ("embed", None), **kind)
            self.g_b_proj = Linear(K, H * K, (None, "heads"), **kind)
        self.A_log = param(rngs, (H,), ("heads",), _init_a_log if c.decay_floor is None else zeros, jnp.float32)
        self.dt_bias = param(rngs, (H * K,), ("heads",), _init_dt_bias(c.decay_floor), jnp.float32)
        self.o_norm = GatedRMSNorm(K, eps=config.norm_eps, rngs=rngs)
        self.o_proj = Linear(H * K, D, ("heads", "embed"), **kind)

    def __call__(
        self, x: Float[Array, "B T D"], packing: Packing | None = None, cache: KDAState | None = None
    ) -> tuple[Float[Array, "B T D"], KDAState]:
        """Runs T tokens per row; y in x's dtype.

        packing  sequences of the tokens; None: each row is one sequence, without padding
        cache    the state after the row's earlier tokens; a row is then one sequence that goes on, with padding after its
                 tokens:

            y, state = layer(x[:, :30])
            z, state = layer(x[:, 30:], cache=state)

        Returns y and the state after each row's last token (of its last sequence), in the dtypes of the cache, or without
        one in config.state_dtype and config.dtype; sums run in fp32. Raises ValueError for wrong shapes.
        """
        H, K = self.config.kda.num_heads, self.config.kda.head_dim
        require_hidden(x, self.config.hidden_size, None if packing is None else packing.segments.shape, type(self).__name__)
        B, T, _ = x.shape
        packing = Packing.of(jnp.ones((B, T), jnp.int32)) if packing is None else packing
        old = KDAState.empty(self.config, B) if cache is None else cache
        # With a cache, a row is one sequence that goes on: nothing resets, and padding follows the tokens.
        resets, lengths = (packing.resets, None) if cache is None else (None, packing.lengths)

        inputs = [getattr(self, f"{name}_proj")(x, packing) for name in "qkv"]
        decay, beta = self.f_b_proj(self.f_a_proj(x, packing), packing), self.b_proj(x, packing)
        gate = self.g_proj(x, packing) if self.config.kda.full_rank_gate else self.g_b_proj(self.g_a_proj(x, packing), packing)
        if T == 1 and cache is not None:
            y, state = self._decode(Projected(*(u[:, 0] for u in (*inputs, decay, beta, gate))), packing.valid[:, 0], cache)
            return self.o_proj(y[:, None], packing), state

        recurrent, conv = old.read()
        mixed, windows = [], []
        for i, (name, u) in enumerate(zip("qkv", inputs, strict=True)):
            u = jnp.where(packing.valid[..., None], u, 0)
            weight = getattr(self, f"{name}_conv1d").weight[...]
            u, window = conv1d(u, weight, conv[:, i].astype(u.dtype), reset=resets, lengths=lengths)
            mixed.append(u.reshape(B, T, H, K))
            windows.append(window)
        q, k, v = mixed

        z = (decay.astype(jnp.float32) + self.dt_bias[...]).reshape(B, T, H, K)
        inert = ~packing.valid[..., None, None]  # padding: k = beta = log decay = 0 leaves the state as it was
        g = jnp.where(inert, 0, log_decay(z, self.A_log[...], self.config.kda.decay_floor))
        beta = jnp.where(inert[..., 0], 0, jax.nn.sigmoid(beta.astype(jnp.float32)))
        q = l2_normalize(q) * K**-0.5
        k = jnp.where(inert, 0, l2_normalize(k))
        start = None if cache is None else packing.positions[:, 0]
        floor = self.config.kda.decay_floor
        o, recurrent = kda(q, k, v, g, beta, recurrent.astype(jnp.float32), reset=resets, start=start, decay_floor=floor)
        y = self.o_norm(o, gate.reshape(B, T, H, K)).reshape(B, T, H * K)
        return self.o_proj(y, packing), old.write(recurrent, jnp.stack(windows, 1))

    def _decode(self, x: Projected, active: Bool[Array, " B"], cache: KDAState) -> tuple[Float[Array, "B HK"], KDAState]:
        """One token per row, from the projections to the gated output; rows that are not active keep their state."""
        taps = jnp.stack([getattr(self, f"{name}_conv1d").weight[...].T for name in "qkv"])
        weights = Weights(taps, self.A_log[...], self.dt_bias[...], self.o_norm.weight[...])
        pool, slots = cache.pool()
        floor, eps = self.config.kda.decay_floor, self.config.norm_eps
        y, pool = kda_decode(x, weights, pool, jnp.where(active, slots, -1), decay_floor=floor, eps=eps)
        return y, cache.with_pool(pool)


def _init_a_log(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    """log of a rate uniform in [1, 16]."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1, 16))


def _init_dt_bias(floor: float | None) -> Any:
    """Biases that give a decay of dt nats per token at rate 1, dt log-uniform in [0.001, 0.1].

    With a floor the rate starts at 1 (A_log = 0): it multiplies the bias inside a sigmoid, which a larger one would
    saturate, and with it every gradient of the decay.
    """

    def init(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(1e-1)))
        if floor is None:
            return dt + jnp.log(-jnp.expm1(-dt))  # softplus(this) = dt
        return jax.scipy.special.logit(dt / -floor)  # -floor * sigmoid(this) = dt

    return init
