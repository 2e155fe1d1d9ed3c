"""MoonViT-V2 and the patch merger: patches of images in, embeddings of text tokens out (arXiv 2607.24653).

Whatever depends on the sizes of images is an array (`Patches`, made on the host by `pack_patches`), so one
compiled program serves every mix of images that fits into N patches per row. A row holds the images of one
row of text.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from k3jax.config import ConfigError, VisionConfig
from k3jax.linear import Linear
from k3jax.norm import RMSNorm
from k3jax.param import normal, param
from pallas_kernels.mla import attention

# The tower's norms leave eps to the framework: the machine epsilon of fp32, in bf16 runs too, because that is
# where the statistics run.
TOWER_EPS = float(jnp.finfo(jnp.float32).eps)
THETA = 10_000.0  # base of the rotary and of the time frequencies
BUCKET = 256  # patches; the smallest row


class Patches(NamedTuple):
    """Images packed into B rows of N patches; m = merge height x merge width patches are a cell, C = N / m.

    The frames of a clip share tokens: a token is the mean of its cells, one per frame.
    """

    pixels: Float[Array, "B N P"]  # P = 3 * patch_size**2, in the order channel, y, x; 0 in padding
    images: Int32[Array, "B N"]  # 1, 2, … in a row; 0 = padding
    at: Int32[Array, "B N 3"]  # frame, y, x of a patch in its image
    grids: Int32[Array, "B N 3"]  # frames, height, width of its image in patches
    cells: Int32[Array, "B C m"]  # the patches of each cell; cells of a token are adjacent
    tokens: Int32[Array, "B C"]  # the token that a cell belongs to; C = padding


def token_counts(grids: np.ndarray, config: VisionConfig) -> list[int]:
    """Tokens of each image, from grids [images, 3]: frames, height and width in patches.

    Raises ValueError if one does not split into cells or has more frames than the time table.
    """
    (mh, mw), counts = config.merge, []
    for t, h, w in np.asarray(grids).reshape(-1, 3).tolist():
        if min(t, h, w) < 1 or h % mh or w % mw:
            raise ValueError(
                f"An image of {h} x {w} patches, {t} frames, does not split into cells of {mh} x {mw}. "
                f"Pad it to multiples of {mh * config.patch_size} x {mw * config.patch_size} pixels."
            )
        if t > config.pos_emb_time:
            raise ValueError(
                f"A clip of {t} frames exceeds the time table's {config.pos_emb_time}. Split it."
            )
        counts.append(h * w // (mh * mw))
    return counts


def bucket(patches: int) -> int:
    """The row length for so many patches: four lengths per octave, so few are compiled and a fifth at most is
    padding once rows are longer than 4 * BUCKET."""
    step = max(BUCKET, (1 << (patches - 1).bit_length()) // 8)
    return -(-max(patches, 1) // step) * step


def pack_patches(
    pixels: Sequence[np.ndarray], grids: Sequence[np.ndarray], config: VisionConfig, size: int | None = None
) -> Patches:
    """Lays out the images of each row, in host memory.

    pixels  per row [n, 3, P, P] or [n, 3*P*P]: image after image, frame after frame, patches row by row
    grids   per row [images, 3]: frames, height and width in patches; a row may have no image
    size    patches per row; None: the `bucket` of the fullest row

    Raises ValueError if pixels and grids disagree, an image cannot be merged, or a row exceeds `size`.
    """
    grids = [np.asarray(g, np.int32).reshape(-1, 3) for g in grids]
    wanted = [int(g.prod(1).sum()) for g in grids]
    if len(pixels) != len(grids) or [len(p) for p in pixels] != wanted:
        given = [len(p) for p in pixels]
        raise ValueError(f"The grids of the rows need {wanted} patches, but the pixels have {given}.")
    counts = [token_counts(g, config) for g in grids]
    m = config.merge[0] * config.merge[1]
    fullest = max(wanted, default=0)
    N = bucket(fullest) if size is None else size
    if fullest > N or N % m:
        raise ValueError(
            f"size={N} must be a multiple of {m} that holds the {fullest} patches of the fullest row."
        )
    B, C, P = len(grids), N // m, 3 * config.patch_size**2
    rows = [np.asarray(p, np.float32) for p in pixels]
    for row in rows:
        if row.size != len(row) * P:
            length = row.size // len(row)
            raise ValueError(f"A patch has {length} numbers, but patch_size={config.patch_size} needs {P}.")
    out = {
        "pixels": np.zeros((B, N, P), np.float32),
        "images": np.zeros((B, N), np.int32),
        "at": np.zeros((B, N, 3), np.int32),
        "grids": np.ones((B, N, 3), np.int32),
        "cells": np.zeros((B, C, m), np.int32),
        "tokens": np.full((B, C), C, np.int32),
    }
    for b, row in enumerate(rows):
        out["pixels"][b, : len(row)] = row.reshape(len(row), P)
        patch = token = 0
        for image, ((t, h, w), count) in enumerate(zip(grids[b].tolist(), counts[b], strict=True), 1):
            here = slice(patch, patch + t * h * w)
            out["images"][b, here] = image
            out["at"][b, here] = np.indices((t, h, w)).reshape(3, -1).T
            out["grids"][b, here] = t, h, w
            cells = slice(patch // m, here.stop // m)
            out["cells"][b, cells] = patch + _cells(t, h, w, config.merge)
            out["tokens"][b, cells] = token + np.repeat(np.arange(count), t)
            patch, token = here.stop, token + count
    return Patches(**out)


def _cells(t: int, h: int, w: int, merge: tuple[int, int]) -> np.ndarray:
    """Patch numbers [cells, m] of an image: cell after cell, each in all frames; inside a cell row by row."""
    mh, mw = merge
    patches = np.arange(t * h * w, dtype=np.int32).reshape(t, h // mh, mh, w // mw, mw)
    return patches.transpose(1, 3, 0, 2, 4).reshape(-1, mh * mw)


class PositionEmbedding(nnx.Module):
    """A learned table [H, W, D], stretched over each image; clips add sines and cosines of the frame."""

    def __init__(self, config: VisionConfig, *, init_std: float, param_dtype: Any, rngs: nnx.Rngs):
        shape = (config.pos_emb_height, config.pos_emb_width, config.hidden_size)
        self.weight = param(rngs, shape, (None, None, "embed"), normal(init_std), param_dtype)

    def __call__(self, at: Int32[Array, "B N 3"], grids: Int32[Array, "B N 3"]) -> Float32[Array, "B N D"]:
        """Bilinear; patch i of n lies on a table side of m at max((i + 1/2) m/n - 1/2, 0), edges held."""
        H, W, D = self.weight.shape
        table = self.weight[...].astype(jnp.float32).reshape(H * W, D)
        top, bottom, down = _neighbours(at[..., 1], grids[..., 1], H)
        left, right, across = _neighbours(at[..., 2], grids[..., 2], W)
        down, across = down[..., None], across[..., None]
        upper = table[top * W + left] * (1 - across) + table[top * W + right] * across
        lower = table[bottom * W + left] * (1 - across) + table[bottom * W + right] * across
        place = upper * (1 - down) + lower * down
        return place + jnp.where(grids[..., :1] > 1, _sines(at[..., 0], D), 0)


def _neighbours(at: Int32[Array, "B N"], size: Int32[Array, "B N"], side: int) -> tuple[Array, Array, Array]:
    """The two table entries around a patch and how far it lies from the first towards the second."""
    source = jnp.maximum((at + 0.5) * (side / size.astype(jnp.float32)) - 0.5, 0)
    first = jnp.minimum(source.astype(jnp.int32), side - 1)
    return first, jnp.minimum(first + 1, side - 1), source - first


def _sines(frame: Int32[Array, "B N"], size: int) -> Float32[Array, "B N D"]:
    """[sin(f w_i), cos(f w_i)] with w_i = THETA^(-i / (D/2))."""
    angles = frame[..., None] * THETA ** -(jnp.arange(size // 2, dtype=jnp.float32) / (size // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


class PatchEmbed(nnx.Module):
    """Pixels of a patch to D numbers, plus its position."""

    def __init__(
        self, config: VisionConfig, *, dtype: Any, init_std: float, param_dtype: Any, rngs: nnx.Rngs
    ):
        self.dtype = dtype
        self.proj = Linear(
            3 * config.patch_size**2,
            config.hidden_size,
            (None, "embed"),
            init=normal(init_std),
            dtype=param_dtype,
            rngs=rngs,
        )
        self.pos_emb = PositionEmbedding(config, init_std=init_std, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, patches: Patches) -> Float[Array, "B N D"]:
        x = self.proj(patches.pixels.astype(self.dtype))
        return x + self.pos_emb(patches.at, patches.grids).astype(self.dtype)


def rotary_angles(at: Int32[Array, "B N 3"], head_dim: int) -> Float32[Array, "B N J"]:
    """Angles of a head's J = K/2 complex pairs: x w_i for pair 2i, y w_i for 2i + 1; w_i = THETA^(-4i/K)."""
    speed = THETA ** -(jnp.arange(0, head_dim, 4, dtype=jnp.float32) / head_dim)
    angles = at[..., :0:-1, None] * speed  # x, then y
    return jnp.swapaxes(angles, -1, -2).reshape(*at.shape[:-1], head_dim // 2)


def rotate(x: Float[Array, "B N H K"], angles: Float32[Array, "B N J"]) -> Float[Array, "B N H K"]:
    """Turns the complex pairs (x_2j, x_2j+1) by angle j, in fp32."""
    real, imaginary = jnp.moveaxis(x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2), -1, 0)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    turned = jnp.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
    return turned.reshape(x.shape).astype(x.dtype)


class VisionMLP(nnx.Module):
    """fc1(gelu(fc0 x)), GELU in its tanh form."""

    def __init__(self, config: VisionConfig, *, init_std: float, param_dtype: Any, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        kind: dict[str, Any] = {"init": normal(init_std), "dtype": param_dtype, "rngs": rngs}
        self.fc0 = Linear(D, F, ("embed", "mlp"), **kind)
        self.fc1 = Linear(F, D, ("mlp", "embed"), **kind)

    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        h = jax.nn.gelu(self.fc0(x).astype(jnp.float32), approximate=True)
        return self.fc1(h.astype(x.dtype))


class Block(nnx.Module):
    """x += wo attention(norm0 x), then x += mlp(norm1 x). A patch sees its whole image, in all frames."""

    def __init__(self, config: VisionConfig, *, init_std: float, param_dtype: Any, rngs: nnx.Rngs):
        D, self.num_heads = config.hidden_size, config.num_heads
        kind: dict[str, Any] = {"init": normal(init_std), "dtype": param_dtype, "rngs": rngs}
        norm: dict[str, Any] = {"eps": TOWER_EPS, "axis": "embed", "dtype": param_dtype, "rngs": rngs}
        self.norm0 = RMSNorm(D, **norm)
        self.wqkv = Linear(D, 3 * config.qkv_size, ("embed", "heads"), **kind)
        self.wo = Linear(config.qkv_size, D, ("heads", "embed"), **kind)
        self.norm1 = RMSNorm(D, **norm)
        self.mlp = VisionMLP(config, init_std=init_std, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B N D"], images: Int32[Array, "B N"], angles: Float32[Array, "B N J"]
    ) -> Float[Array, "B N D"]:
        B, N, _ = x.shape
        q, k, v = jnp.moveaxis(self.wqkv(self.norm0(x)).reshape(B, N, 3, self.num_heads, -1), 2, 0)
        everywhere = jnp.zeros_like(images)  # equal positions: causality hides nothing
        a = attention(
            rotate(q, angles),
            rotate(k, angles),
            v,
            scale=q.shape[-1] ** -0.5,
            q_segments=images,
            kv_segments=images,
            q_positions=everywhere,
            kv_positions=everywhere,
        )
        x = x + self.wo(a.reshape(B, N, -1))
        return x + self.mlp(self.norm1(x))


class Encoder(nnx.Module):
    """All blocks, weights stacked and scanned, recomputed in the backward pass; then the final norm."""

    def __init__(self, config: VisionConfig, *, init_std: float, param_dtype: Any, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.num_layers)
        @partial(nnx.vmap, in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create(rngs: nnx.Rngs) -> Block:
            return Block(config, init_std=init_std, param_dtype=param_dtype, rngs=rngs)

        if config.qkv_size % (4 * config.num_heads):
            raise ConfigError(
                f"qkv_hidden_size={config.qkv_size} must be a multiple of 4 * vt_num_attention_heads="
                f"{4 * config.num_heads}: x and y each turn complex pairs of a head"
            )
        self.head_dim = config.qkv_size // config.num_heads
        self.blocks = create(rngs)
        self.final_layernorm = RMSNorm(
            config.hidden_size, eps=TOWER_EPS, axis="embed", dtype=param_dtype, rngs=rngs
        )

    def __call__(self, x: Float[Array, "B N D"], patches: Patches) -> Float[Array, "B N D"]:
        graphdef, state = nnx.split(self.blocks)
        angles = rotary_angles(patches.at, self.head_dim)

        @partial(jax.checkpoint, prevent_cse=False)
        def step(x: Array, block: Any) -> tuple[Array, None]:
            return nnx.merge(graphdef, block)(x, patches.images, angles), None

        return self.final_layernorm(jax.lax.scan(step, x, state)[0])


class MoonViT(nnx.Module):
    """Features of every token, before the projector: the m patches of its cell, averaged over frames (arXiv 2607.24653).

    Rows count tokens over all images of a row in order; those after the last token are zero.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.bfloat16,
        init_std: float = 0.02,
        rngs: nnx.Rngs,
    ):
        kind: dict[str, Any] = {"init_std": init_std, "param_dtype": param_dtype, "rngs": rngs}
        self.patch_embed = PatchEmbed(config, dtype=dtype, **kind)
        self.encoder = Encoder(config, **kind)

    def __call__(self, patches: Patches) -> Float[Array, "B C m D"]:
        """The m patches of each of the C = N / m tokens that fit into a row, D = vt_hidden_size, in the tower's dtype.

        Raises ValueError for what `pack_patches` has not made for this patch size.
        """
        self._check(patches)
        return gather_tokens(self.encoder(self.patch_embed(patches), patches), patches)

    def _check(self, patches: Any) -> None:
        size = self.patch_embed.proj.kernel.shape[0]
        if not isinstance(patches, Patches):
            given = f"an array of shape {list(patches.shape)}" if hasattr(patches, "shape") else type(patches).__name__
            raise ValueError(f"MoonViT takes k3jax.vision.Patches, as pack_patches makes them, got {given}.")
        if len(patches.pixels.shape) != 3 or patches.pixels.shape[2] != size:
            raise ValueError(f"MoonViT takes pixels [rows, patches, {size}], got {list(patches.pixels.shape)}. "
                             "Make the patches with pack_patches and the model's own config.vision.")


def gather_tokens(x: Float[Array, "B N D"], patches: Patches) -> Float[Array, "B C m D"]:
    """The patches of each token side by side, mean over the frames of a clip in fp32."""
    (B, C, m), D = patches.cells.shape, x.shape[-1]
    index = patches.cells.reshape(B, C * m, 1)
    frames = jnp.take_along_axis(patches.grids[..., :1], patches.cells[..., :1], axis=1)[..., None]
    cells = jnp.take_along_axis(x, index, axis=1).reshape(B, C, m, D).astype(jnp.float32) / frames
    total = partial(
        jax.ops.segment_sum, num_segments=C, indices_are_sorted=True
    )  # drops token C, the padding
    return jax.vmap(total)(cells, patches.tokens).astype(x.dtype)


class PatchMerger(nnx.Module):
    """post_norm(proj.2(gelu(proj.0(the m patches of a token, concatenated)))), GELU in its erf form (arXiv 2607.24653)."""

    def __init__(
        self,
        config: VisionConfig,
        text_size: int,
        *,
        param_dtype: Any = jnp.bfloat16,
        init_std: float = 0.02,
        rngs: nnx.Rngs,
    ):
        size = config.merge[0] * config.merge[1] * config.hidden_size
        kind: dict[str, Any] = {"init": normal(init_std), "dtype": param_dtype, "rngs": rngs}
        self.proj = nnx.Dict(
            {
                "0": Linear(size, size, ("embed", "mlp"), **kind),
                "2": Linear(size, text_size, ("mlp", "embed"), **kind),
            }
        )
        self.post_norm = RMSNorm(
            text_size, eps=config.projector_eps, axis="embed", dtype=param_dtype, rngs=rngs
        )

    def __call__(self, x: Float[Array, "B C m D"]) -> Float[Array, "B C O"]:
        """Embeddings of the text model, O = its hidden_size, from what MoonViT returns; in x's dtype, the GELU in fp32.

        Raises ValueError unless m times D is the projector's size.
        """
        size = self.proj["0"].kernel.shape[0]
        if len(x.shape) != 4 or x.shape[2] * x.shape[3] != size:
            raise ValueError(f"PatchMerger takes [rows, tokens, patches of a token, hidden size], the last two {size} numbers "
                             f"in all, got {list(x.shape)}.")
        h = self.proj["0"](x.reshape(*x.shape[:2], -1)).astype(jnp.float32)
        h = jax.nn.gelu(h, approximate=False).astype(x.dtype)
        return self.post_norm(self.proj["2"](h))
