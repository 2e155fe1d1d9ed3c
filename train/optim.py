"""Optimizers: AdamW, and per-head Muon for matrices with AdamW for the rest; one adapter of many; cosine schedule.

Weights are flat dicts, path -> fp32 array, as train.step keeps them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float32

from k3jax.kda import KimiDeltaAttention
from k3jax.mla import MultiHeadLatentAttention
from train.config import TrainConfig

Weights = Mapping[str, Float32[Array, "..."]]
BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95
# RMS of an orthogonalised update as a share of the learning rate: that of AdamW, so one rate serves both (arXiv 2502.16982).
MUON_RMS = 0.2

# Output heads of these projections, input heads of o_proj, are matrices of their own to Muon.
_PER_HEAD = ("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj", "f_b_proj", "q_b_proj", "kv_b_proj", "o_proj")
# Matrices whose rows or columns are tokens or experts rather than features, or single numbers per head.
_NOT_MUON = ("lm_head", "gate", "b_proj")


def schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up to lr over `warmup` of the steps, then a cosine to final_lr * lr at the last step."""
    warmup = math.ceil(config.warmup * config.steps)
    return optax.warmup_cosine_decay_schedule(
        config.lr / (warmup + 1), config.lr, warmup, max(config.steps, warmup + 1), config.final_lr * config.lr
    )


def adamw(config: TrainConfig, weights: Weights) -> optax.GradientTransformation:
    """AdamW; weight decay on matrices alone."""
    decays = {path: decays_weight(path) for path in weights}
    return optax.adamw(schedule(config), *BETAS, weight_decay=config.weight_decay, mask=decays)


def muon(config: TrainConfig, weights: Weights, heads: Mapping[str, int]) -> optax.GradientTransformation:
    """Muon (arXiv 2502.16982) for the matrices of layers, per head; AdamW for all else.

    heads  path -> number of heads, for attention projections (see `heads_of`)

    Matrices are the last two axes of a `kernel`; layers and experts in front are batch axes. A projection onto H heads,
    [..., D, H*K], is seen as [..., D, H, K], with D reduced, K the output and H one more batch axis; o_proj, [..., H*V, D],
    as [..., H, V, D]. kv_b_proj keeps a head's keys and values in one matrix. Embedding, head, router, norms, biases,
    convolutions, decay rates and b_proj (one number per head) go to AdamW. Weight decay as in `adamw`.
    """
    views = {path: _view(path, w.shape, heads.get(path)) for path, w in weights.items() if is_matrix(path)}
    matrices = optax.contrib.muon(
        schedule(config), beta=MUON_MOMENTUM, weight_decay=config.weight_decay, consistent_rms=MUON_RMS,
        muon_weight_dimension_numbers={path: numbers for path, (_, numbers) in views.items()},
    )
    rest = adamw(config, {path: w for path, w in weights.items() if path not in views})

    def split(tree: Any) -> tuple[Any, Any]:
        return {p: tree[p].reshape(shape) for p, (shape, _) in views.items()}, {p: tree[p] for p in tree if p not in views}

    def init(params: Any) -> Any:
        of_muon, of_adamw = split(params)
        return {"muon": matrices.init(of_muon), "adamw": rest.init(of_adamw)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        (g_muon, g_adamw), (p_muon, p_adamw) = split(updates), split(params)
        u_muon, of_muon = matrices.update(g_muon, state["muon"], p_muon)
        u_adamw, of_adamw = rest.update(g_adamw, state["adamw"], p_adamw)
        whole = {path: u.reshape(params[path].shape) for path, u in {**cast(Any, u_muon), **cast(Any, u_adamw)}.items()}
        return whole, {"muon": of_muon, "adamw": of_adamw}

    return optax.GradientTransformation(init, update)


def in_columns(transform: optax.GradientTransformation, columns: Sequence[int]) -> optax.GradientTransformation:
    """`transform` for one adapter of many: rank columns of LoRA pools that are not its own keep their bits, weight decay or
    not."""

    def own(path: str, update: Array) -> Array:
        mine = np.isin(np.arange(update.shape[-1 if path.endswith("lora/a") else -2]), columns)
        return jnp.where(mine if path.endswith("lora/a") else mine[:, None], update, 0)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = transform.update(updates, state, params)
        return {path: own(path, u) for path, u in cast(Any, updates).items()}, state

    return optax.GradientTransformation(transform.init, update)


def heads_of(model: nnx.Module) -> dict[str, int]:
    """Path of each attention kernel that has heads -> how many."""
    found = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, KimiDeltaAttention | MultiHeadLatentAttention):
            part = module.config.kda if isinstance(module, KimiDeltaAttention) else module.config.mla
            names = [name for name in _PER_HEAD if hasattr(module, name)]
            found |= {"/".join(map(str, (*path, name, "kernel"))): part.num_heads for name in names}
    return found


def decays_weight(path: str) -> bool:
    """Matrices decay: kernels, embeddings and both halves of an adapter. Norms, biases and per-channel numbers do not."""
    return path.endswith(("kernel", "embed_tokens/weight", "lora/a", "lora/b"))


def is_matrix(path: str) -> bool:
    *_, module, name = path.split("/")
    return name == "kernel" and module not in _NOT_MUON


def _view(path: str, shape: tuple[int, ...], heads: int | None) -> tuple[tuple[int, ...], optax.contrib.MuonDimensionNumbers]:
    """The shape in which heads are an axis, and which axes of it are the matrix."""
    *lead, rows, columns = shape
    n = len(lead)
    if heads is None:
        return shape, optax.contrib.MuonDimensionNumbers(n, n + 1)
    if path.endswith("o_proj/kernel"):
        return (*lead, heads, rows // heads, columns), optax.contrib.MuonDimensionNumbers(n + 1, n + 2)
    return (*lead, rows, heads, columns // heads), optax.contrib.MuonDimensionNumbers(n, n + 2)


def global_norm(tree: Weights) -> Float32[Array, ""]:
    """The 2-norm over all entries, fp32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))
