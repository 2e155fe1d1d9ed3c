"""Puts image features in the place of a text's placeholders: every <|media_pad|> takes one, in order (arXiv 2607.24653).

    image = preprocess("cat.png")                                  # its `prompt` stands for it in the text
    ids = expand_media_pads(ids, config.media_token_id, [image.num_tokens])[None]
    grids = [np.array([image.grid_thw])]
    check_placeholders(ids, grids, config)
    features = model.encode_images(pack_patches([image.pixel_values], grids, config.vision))
    out = model(ids, image_features=features)
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from k3jax.checks import is_concrete
from k3jax.config import K3Config, VisionConfig
from k3jax.vision import token_counts


def merge_images(
    embeds: Float[Array, "B T D"], ids: Int[Array, "B T"], features: Float[Array, "B M D"], config: K3Config
) -> Float[Array, "B T D"]:
    """Embeddings in which placeholder j of a row is the row's feature j; those of pad_token_id become zero.

    Features after the last placeholder are not read. A placeholder without one takes the last: `require_features` and
    `check_placeholders` refuse it beforehand.
    """
    is_media = ids == config.media_token_id
    index = jnp.clip(jnp.cumsum(is_media, axis=1) - 1, 0, features.shape[1] - 1)
    placed = jnp.take_along_axis(features, index[..., None], axis=1).astype(embeds.dtype)
    text = jnp.where((ids == config.pad_token_id)[..., None], 0, embeds)
    return jnp.where(is_media[..., None], placed, text)


def require_features(ids: Int[Array, "B T"], features: Float[Array, "B M D"] | None, config: K3Config) -> None:
    """Raises ValueError if a row of ids has more placeholders than features, or features come to a model that takes none.

    Placeholders are values: inside jit they cannot be counted. That a row has too many features cannot be told from the
    arrays, which pad them; `check_placeholders` tells both from the images' grids.
    """
    if features is not None:
        _require_vision(config)
    elif config.vision is None or config.media_token_id is None:
        return
    if is_concrete(ids):
        given = 0 if features is None else features.shape[1]
        for row, count in enumerate((np.asarray(ids) == config.media_token_id).sum(1).tolist()):
            if count > given:
                raise ValueError(
                    f"Row {row} has {count} image placeholders (id {config.media_token_id}), but {given} image features. "
                    "Pass image_features=model.encode_images(…), with a feature for each."
                )


def check_placeholders(ids: np.ndarray, grids: Sequence[np.ndarray], config: K3Config) -> None:
    """Raises ValueError unless each row of ids [B, T] has as many placeholders as its images have tokens.

    grids  per row [images, 3]: frames, height and width in patches, as for k3jax.vision.pack_patches
    """
    vision = _require_vision(config)
    ids = np.asarray(ids)
    if len(ids) != len(grids):
        raise ValueError(f"There are {len(ids)} rows of ids, but grids for {len(grids)} rows.")
    for row, grid in enumerate(grids):
        placeholders = int((ids[row] == config.media_token_id).sum())
        counts = token_counts(grid, vision)
        if placeholders != sum(counts):
            raise ValueError(
                f"Row {row} has {placeholders} placeholders (id {config.media_token_id}), but its images "
                f"make {' + '.join(map(str, counts)) or 'no'} tokens. Write one placeholder per token."
            )


def _require_vision(config: K3Config) -> VisionConfig:
    if config.vision is None or config.media_token_id is None:
        raise ValueError("This model takes no images: its config lacks vision_config or media_placeholder_token_id.")
    return config.vision
