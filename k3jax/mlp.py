"""The gated feed-forward and its activations."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.config import K3Config
from k3jax.linear import Linear
from k3jax.packing import Packing
from k3jax.param import normal


def situ(
    gate: Float[Array, "*n F"], up: Float[Array, "*n F"], *, beta: float, linear_beta: float | None
) -> Float[Array, "*n F"]:
    """SiTU (arXiv 2607.24653), both branches bounded:

        beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)

    Computed in fp32, returned in gate's dtype. linear_beta=None leaves the up branch linear.
    """
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    u = u if linear_beta is None else linear_beta * jnp.tanh(u / linear_beta)
    return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * u).astype(gate.dtype)


def gated_activation(config: K3Config, gate: Float[Array, "*n F"], up: Float[Array, "*n F"]) -> Float[Array, "*n F"]:
    """The config's activation of a (gate, up) pair: SiTU, or SiLU(gate) * up."""
    if config.hidden_act == "situ":
        return situ(gate, up, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
    return jax.nn.silu(gate) * up


class MLP(nnx.Module):
    """y = down(act(gate x, up x)), act = SiTU or SwiGLU by the config."""

    def __init__(self, config: K3Config, size: int | None = None, *, rngs: nnx.Rngs):
        D, F = config.hidden_size, size or config.intermediate_size
        kind = {"init": normal(config.init_std), "dtype": config.param_dtype, "rngs": rngs}
        self.config = config
        self.gate_proj = Linear(D, F, ("embed", "mlp"), **kind)
        self.up_proj = Linear(D, F, ("embed", "mlp"), **kind)
        self.down_proj = Linear(F, D, ("mlp", "embed"), **kind)

    def __call__(self, x: Float[Array, "B T D"], packing: Packing | None = None) -> Float[Array, "B T D"]:
        h = gated_activation(self.config, self.gate_proj(x, packing), self.up_proj(x, packing))
        return self.down_proj(h, packing)
