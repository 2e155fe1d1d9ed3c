import hashlib
import io
import json
import logging
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from k3jax.images import ImageConfig, ImageError, expand_media_pads, media_repeats, preprocess

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "image_preprocess"
OFFICIAL = json.loads((FOLDER / "cases.json").read_text())


@pytest.fixture(scope="module")
def expected_patches():
    return load_file(FOLDER / "expected_patches.safetensors")


def sha256(array):
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def png(array, **options):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG", **options)
    return buffer.getvalue()


def painted(values):
    """Patches back to an image of 0..255, [height, width, 3]."""
    _, rows, columns = values.grid_thw
    patch = values.pixel_values.shape[-1]
    grid = values.pixel_values.reshape(rows, columns, 3, patch, patch).transpose(0, 3, 1, 4, 2)
    return np.rint((grid.reshape(rows * patch, columns * patch, 3) + 1) * 127.5).astype(np.uint8)


@pytest.mark.parametrize("case", OFFICIAL["cases"], ids=lambda case: case["name"])
def test_patches_grid_and_prompt_are_the_official_ones_to_the_bit(case, expected_patches):
    image = preprocess(FOLDER / case["png"])
    assert (list(image.grid_thw), image.num_tokens) == (case["grid_thw"], case["token_count"])
    assert (image.prompt, list(image.original_size)) == (case["prompt"], case["size_wh"])
    assert image.pixel_values.shape == (case["num_patches"], 3, 14, 14)
    assert sha256(painted(image)) == case["resized_padded_uint8_sha256"]
    np.testing.assert_array_equal(
        image.pixel_values[case["patch_indices"]], expected_patches[f"{case['name']}/patches"]
    )
    if case["full_values_stored"]:
        np.testing.assert_array_equal(image.pixel_values, expected_patches[f"{case['name']}/pixel_values"])
    assert sha256(image.pixel_values) == case["pixel_values_float32_sha256"]


def test_sizes_and_token_counts_are_the_official_ones():
    config = ImageConfig()
    for row in OFFICIAL["size_table"]:
        layout = config.layout(row["width"], row["height"])
        assert layout._asdict() == {key: row[key] for key in layout._fields}, row
        tokens = (layout.new_width + layout.pad_width) * (layout.new_height + layout.pad_height) // 28**2
        assert tokens == row["num_tokens"]


def test_the_defaults_are_the_official_settings():
    assert ImageConfig.from_media_proc_cfg(OFFICIAL["media_proc_cfg"]) == ImageConfig()


def test_transparency_shows_the_chessboard_by_its_share():
    rgba = np.zeros((56, 56, 4), np.uint8)
    rgba[28:, :, 3], rgba[28:, 28:, 3] = 128, 255
    seen = painted(preprocess(Image.fromarray(rgba)))
    assert set(np.unique(seen[:28])) == {200, 255}  # all board
    np.testing.assert_allclose(np.unique(seen[28:, :28]), [99.6, 127], atol=1)  # 200 and 255, times 127/255
    assert not seen[28:, 28:].any()  # all image
    assert seen[0, 0, 0] == 255 and seen[0, 16, 0] == 200


def test_bytes_path_and_image_give_the_same():
    path = FOLDER / "rgb_100x75.png"
    results = [preprocess(x) for x in (path, str(path), path.read_bytes(), Image.open(path))]
    assert len({result.content_hash for result in results}) == 1


def test_the_content_hash_sees_one_pixel_and_the_grid_but_not_the_file_format():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (56, 56, 3), np.uint8)
    other = pixels.copy()
    other[55, 55, 2] ^= 1
    hashes = [preprocess(Image.fromarray(x)).content_hash for x in (pixels, other)]
    assert hashes[0] != hashes[1] and len(hashes[0]) == 64
    assert preprocess(png(pixels)).content_hash == hashes[0]
    blank = [preprocess(Image.new("RGB", size)).content_hash for size in ((56, 28), (28, 56))]
    assert blank[0] != blank[1]


def test_an_image_over_the_limits_is_shrunk_within_them():
    config = ImageConfig(in_patch_limit=64, patch_limit_on_one_side=12)
    for size in ((400, 400), (2000, 30), (30, 2000), (333, 222)):
        layout = config.layout(*size)
        assert max(layout.new_width, layout.new_height) <= 12 * 14
        assert (layout.new_width // 14) * (layout.new_height // 14) <= 64
        _, rows, columns = preprocess(Image.new("RGB", size), config).grid_thw
        assert (columns * 14, rows * 14) == (
            layout.new_width + layout.pad_width,
            layout.new_height + layout.pad_height,
        )


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_arrays_of_a_large_image_take_four_times_its_patches_at_most(mode):
    config, image = ImageConfig(in_patch_limit=1024), Image.new(mode, (3000, 3000))
    image.load()
    tracemalloc.start()
    try:
        patches = preprocess(image, config)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 4 * patches.pixel_values.nbytes


def test_sixteen_bit_grey_keeps_its_range():
    ramp = np.arange(56 * 56, dtype=np.uint16).reshape(56, 56) * 20
    seen = painted(preprocess(png(ramp)))
    np.testing.assert_array_equal(seen[..., 0], ramp >> 8)


def test_a_cmyk_jpeg_and_an_animation_are_read():
    buffer = io.BytesIO()
    Image.new("CMYK", (30, 30), (0, 255, 255, 0)).save(buffer, "JPEG")
    red = painted(preprocess(buffer.getvalue()))[10, 10]
    assert red[0] > 200 and red[1] < 60
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (28, 28), colour) for colour in ("white", "black")]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    assert painted(preprocess(buffer.getvalue())).min() == 255


WHOLE = png(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
BROKEN = {
    "empty": b"",
    "text": b"hello",
    "cut in the header": WHOLE[:20],
    "cut in the pixels": WHOLE[: len(WHOLE) // 2],
    "bad checksum": WHOLE[:60] + bytes([WHOLE[60] ^ 0xFF]) + WHOLE[61:],
    "a format that is not opened": b"P6 28 28 255\n" + bytes(28 * 28 * 3),
    "absent file": "no/such/file.png",
}


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_whole_image_is_refused(source):
    with pytest.raises(ImageError, match="cannot be read"):
        preprocess(source)


def test_a_decompression_bomb_is_refused_before_it_is_decoded():
    bomb = bytearray(png(np.zeros((4, 4), np.uint8)))
    bomb[16:24] = (7000).to_bytes(4, "big") + (10_000).to_bytes(4, "big")  # the size in the header
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    with pytest.raises(ImageError, match="7000 x 10000 pixels, more than the 64,000,000 allowed"):
        preprocess(bytes(bomb))
    with pytest.raises(ImageError, match="30 x 30 pixels, more than the 899 allowed"):
        preprocess(Image.new("RGB", (30, 30)), max_pixels=899)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_range_are_refused(mode):
    with pytest.raises(ImageError, match=f"mode {mode} have no agreed range"):
        preprocess(Image.new(mode, (30, 30)))


def test_settings_come_from_the_checkpoint_folder(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert ImageConfig.from_checkpoint(tmp_path) == ImageConfig()
    assert "preprocessor_config.json is absent" in caplog.text and "65536" in caplog.text
    settings = OFFICIAL["media_proc_cfg"] | {
        "in_patch_limit": 100,
        "sample_fps": 2.0,
        "merge_kernel_size": [2, 2],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": settings}))
    assert ImageConfig.from_checkpoint(tmp_path) == ImageConfig(in_patch_limit=100)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cannot be read"),
        ("[]", "an object media_proc_cfg"),
        ('{"media_proc_cfg": {"in_patch_limits": 5}}', "'in_patch_limits'. Did you mean 'in_patch_limit'"),
        ('{"media_proc_cfg": {"in_patch_limit": "5"}}', "in_patch_limit must be a whole number"),
        ('{"media_proc_cfg": {"in_patch_limit": 0}}', "in_patch_limit must be at least 1"),
        ('{"media_proc_cfg": {"image_std": [0.5, 0.5]}}', "a list of 3 numbers"),
        ('{"media_proc_cfg": {"fixed_output_tokens": 64}}', "fixed_output_tokens=64 is not supported"),
        ('{"media_proc_cfg": {"transparent_bg_fill_stage": "before_resize"}}', "only 'after_resize'"),
        (
            '{"media_proc_cfg": {"transparent_bg_config": {"pattern": "white"}}}',
            "pattern='white' is not supported",
        ),
    ],
)
def test_unknown_and_unsupported_settings_are_refused_by_name(tmp_path, text, message):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ImageError) as error:
        ImageConfig.from_checkpoint(tmp_path)
    assert message in str(error.value)


def test_pads_expand_as_in_the_official_forward():
    official = load_file(GOLDEN / "vision_tiny" / "multimodal_forward.safetensors")
    config = json.loads((GOLDEN / "vision_tiny" / "checkpoint" / "config.json").read_text())
    pad, counts = config["media_placeholder_token_id"], official["tokens_per_image"].tolist()
    ids = official["input_ids"][0]
    np.testing.assert_array_equal(expand_media_pads(ids, pad, counts), official["expanded_input_ids"][0])
    is_text = np.repeat(ids != pad, media_repeats(ids, pad, counts))
    np.testing.assert_array_equal(np.flatnonzero(is_text), official["text_positions"])


def test_expansion_without_images_changes_nothing():
    np.testing.assert_array_equal(expand_media_pads([5, 6], 9, []), [5, 6])
    assert expand_media_pads([], 9, []).shape == (0,)


@pytest.mark.parametrize("ids, counts", [([1, 9, 2], []), ([1, 9, 2], [3, 4]), ([1, 2], [3]), ([9, 9], [2])])
def test_a_count_of_images_other_than_of_pads_is_refused(ids, counts):
    message = f"has {ids.count(9)} image placeholders .* but {len(counts)} images"
    with pytest.raises(ImageError, match=message):
        expand_media_pads(ids, 9, counts)


def test_an_image_of_no_tokens_is_refused():
    with pytest.raises(ImageError, match="at least one token"):
        expand_media_pads([9], 9, [0])
