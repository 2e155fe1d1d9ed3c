from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from k3jax.images import expand_media_pads
from k3jax.multimodal import check_placeholders, merge_images
from k3jax.vision import pack_patches, token_counts
from k3jax.weights import load

FOLDER = Path(__file__).parents[1] / "golden" / "vision_tiny"
OFFICIAL = load_file(FOLDER / "multimodal_forward.safetensors")
IMAGES = load_file(FOLDER / "tower_and_projector.safetensors")
IDS, GRIDS = OFFICIAL["expanded_input_ids"], OFFICIAL["grid_thws"]


@pytest.fixture(scope="module")
def model():
    return load(FOLDER / "checkpoint", dtype=jnp.float32)


@pytest.fixture(scope="module")
def features(model):
    patches = pack_patches([IMAGES["pixel_values"]], [GRIDS], model.config.vision, 192)
    return nnx.jit(lambda model, patches: model.encode_images(patches))(model, patches)


@nnx.jit
def run(model, ids, features):
    return model.logits(model(ids, image_features=features).hidden)


def test_ids_embeddings_and_logits_are_the_official_ones(model, features):
    config = model.config
    counts = token_counts(GRIDS, config.vision)
    assert counts == OFFICIAL["tokens_per_image"].tolist()
    expanded = expand_media_pads(OFFICIAL["input_ids"][0], config.media_token_id, counts)
    np.testing.assert_array_equal(expanded, IDS[0])
    check_placeholders(IDS, [GRIDS], config)

    ids = jnp.asarray(IDS)
    embeds = merge_images(model.model.embed_tokens(ids), ids, features, config)
    np.testing.assert_allclose(embeds, OFFICIAL["inputs_embeds"], rtol=0, atol=5e-5)
    error = np.abs(np.asarray(run(model, IDS, features)) - OFFICIAL["logits"])
    assert error.max() < 3e-4 and error.mean() < 2e-5


def test_a_forward_in_two_calls_takes_the_features_where_the_first_stopped(model, features):
    @jax.jit
    def prefill(model, ids, segments, cache, features):
        return model(ids, segments, cache=cache, image_features=features)

    cut, total = 33, IDS.shape[1]  # inside the second image
    seen = int((IDS[0, :cut] == model.config.media_token_id).sum())
    counts = token_counts(GRIDS, model.config.vision)
    assert counts[0] < seen < counts[0] + counts[1]
    start = np.pad(IDS[:, :cut], ((0, 0), (0, 1)))  # one token of padding: both calls run one program
    cache = model.empty_cache(1, total)
    first = prefill(model, start, (np.arange(cut + 1)[None] < cut).astype(np.int32), cache, features)
    rest = np.pad(IDS[:, cut:], ((0, 0), (0, 2 * cut + 1 - total)))
    valid = (np.arange(cut + 1)[None] < total - cut).astype(np.int32)
    second = prefill(model, rest, valid, first.cache, jnp.roll(features, -seen, axis=1))
    hidden = jnp.concatenate([first.hidden[:, :cut], second.hidden[:, : total - cut]], 1)
    np.testing.assert_allclose(model.logits(hidden), OFFICIAL["logits"], rtol=0, atol=3e-4)


def test_each_row_takes_its_own_features_in_order_and_padding_is_zeroed(model):
    config = replace(model.config, media_token_id=9, pad_token_id=0)
    ids = jnp.array([[5, 9, 9, 0], [9, 6, 0, 9], [5, 6, 0, 7]])
    embeds, features = jnp.full((3, 4, 1), -1.0), jnp.arange(1.0, 10.0).reshape(3, 3, 1)
    merged = merge_images(embeds, ids, features, config)[..., 0]
    np.testing.assert_array_equal(merged, [[-1, 1, 2, 0], [4, -1, 0, 5], [-1, -1, 0, -1]])


def test_gradient_goes_to_the_features_that_are_read_and_to_the_text_around_them(model):
    config = replace(model.config, media_token_id=9, pad_token_id=0)
    ids = jnp.array([[5, 9, 0, 9]])
    total = lambda embeds, features: merge_images(embeds, ids, features, config).sum()  # noqa: E731
    to_text, to_features = nnx.grad(total, argnums=(0, 1))(jnp.ones((1, 4, 1)), jnp.ones((1, 3, 1)))
    np.testing.assert_array_equal(to_text[0, :, 0], [1, 0, 0, 0])
    np.testing.assert_array_equal(to_features[0, :, 0], [1, 1, 0])


def test_a_wrong_number_of_placeholders_is_refused_with_the_numbers(model):
    config = model.config
    with pytest.raises(ValueError, match=r"Row 0 has 3 placeholders \(id 253\).*15 \+ 16 \+ 6 tokens"):
        check_placeholders(OFFICIAL["input_ids"], [GRIDS], config)
    with pytest.raises(ValueError, match="Row 1 has 37 placeholders.*make no tokens"):
        check_placeholders(np.concatenate([IDS, IDS]), [GRIDS, GRIDS[:0]], config)
    with pytest.raises(ValueError, match="1 rows of ids, but grids for 2"):
        check_placeholders(IDS, [GRIDS, GRIDS], config)
    with pytest.raises(ValueError, match="takes no images"):
        check_placeholders(IDS, [GRIDS], replace(config, vision=None))


@pytest.mark.parametrize(("features", "given"), [(None, 0), (np.zeros((1, 36, 48), np.float32), 36)])
def test_a_call_outside_jit_refuses_placeholders_without_features(model, features, given):
    with pytest.raises(ValueError, match=rf"Row 0 has 37 image placeholders \(id 253\), but {given} image features"):
        model(jnp.asarray(IDS), image_features=features)


def test_features_for_a_model_without_vision_are_refused(small):
    with pytest.raises(ValueError, match="takes no images"):
        small.model(jnp.ones((1, 3), jnp.int32), image_features=jnp.zeros((1, 1, 32)))
