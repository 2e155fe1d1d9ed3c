"""Puts image features in the place of a text's placeholders: every <|media_pad|> takes one, in order."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config
from k3jax.vision import token_counts


def merge_images(
    embeds: Float[Array, "B T D"], ids: Int[Array, "B T"], features: Float[Array, "B M D"], config: K3Config
) -> Float[Array, "B T D"]:
    """Embeddings in which placeholder j of a row is the row's feature j; those of pad_token_id become zero.

    Features after the last placeholder are not read. `check_placeholders` tells beforehand if enough exist.
    """
    is_media = ids == config.media_token_id
    index = jnp.clip(jnp.cumsum(is_media, axis=1) - 1, 0, features.shape[1] - 1)
    placed = jnp.take_along_axis(features, index[..., None], axis=1).astype(embeds.dtype)
    text = jnp.where((ids == config.pad_token_id)[..., None], 0, embeds)
    return jnp.where(is_media[..., None], placed, text)


def check_placeholders(ids: np.ndarray, grids: Sequence[np.ndarray], config: K3Config) -> None:
    """Raises ValueError unless each row of ids [B, T] has as many placeholders as its images have tokens.

    grids  per row [images, 3]: frames, height and width in patches, as for k3jax.vision.pack_patches
    """
    if config.vision is None or config.media_token_id is None:
        raise ValueError(
            "This model takes no images: its config lacks vision_config or media_placeholder_token_id."
        )
    ids = np.asarray(ids)
    if len(ids) != len(grids):
        raise ValueError(f"There are {len(ids)} rows of ids, but grids for {len(grids)} rows.")
    for row, grid in enumerate(grids):
        placeholders = int((ids[row] == config.media_token_id).sum())
        counts = token_counts(grid, config.vision)
        if placeholders != sum(counts):
            raise ValueError(
                f"Row {row} has {placeholders} placeholders (id {config.media_token_id}), but its images "
                f"make {' + '.join(map(str, counts)) or 'no'} tokens. Write one placeholder per token."
            )
