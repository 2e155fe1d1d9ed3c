import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from k3jax.config import ConfigError, K3Config
from k3jax.vision import (
    MoonViT,
    Patches,
    PatchMerger,
    bucket,
    gather_tokens,
    pack_patches,
    rotary_angles,
    token_counts,
)
from k3jax.weights import load

FOLDER = Path(__file__).parents[1] / "golden" / "vision_tiny"
CONFIG = K3Config.load(FOLDER / "checkpoint").vision
MEASURED = json.loads((FOLDER / "measured.json").read_text())
OFFICIAL = load_file(FOLDER / "tower_and_projector.safetensors")
PIXELS, GRIDS = OFFICIAL["pixel_values"], OFFICIAL["grid_thws"]
ENDS = np.cumsum(GRIDS.prod(1))
IMAGES = np.split(PIXELS, ENDS[:-1])
SIZE = 192  # patches per row, 172 of them real when all images are packed


class Vision(nnx.Module):
    """The parts of a model that an image goes through."""

    def __init__(self, tower: MoonViT, projector: PatchMerger):
        self.vision_tower, self.mm_projector = tower, projector

    def __call__(self, patches):
        return self.mm_projector(self.vision_tower(patches))


def load_official(dtype):
    model = load(FOLDER / "checkpoint", dtype=dtype)
    return Vision(model.vision_tower, model.mm_projector)


@pytest.fixture(scope="module")
def model():
    return load_official(jnp.float32)


@nnx.jit
def project(model, patches):
    return model(patches)


@pytest.fixture(scope="module")
def packed():
    return jax.tree.map(jnp.asarray, pack_patches([PIXELS], [GRIDS], CONFIG, SIZE))


def close(actual, expected, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=tolerance)


def test_every_stage_of_the_tower_is_the_official_one(model, packed):
    tower, real, ends = model.vision_tower, slice(0, len(PIXELS)), np.cumsum(token_counts(GRIDS, CONFIG))
    embed = tower.patch_embed
    close(embed.proj(packed.pixels)[0, real], OFFICIAL["patch_proj"])
    positions = embed.pos_emb(packed.at, packed.grids)[0, real]
    for i, expected in enumerate(np.split(np.asarray(positions), ENDS[:-1])):
        close(expected, OFFICIAL[f"image{i}_pos_emb"], 2e-6)
    x = embed(packed)
    close(x[0, real], OFFICIAL["patch_embed_out"])

    angles = rotary_angles(packed.at, tower.encoder.head_dim)
    graphdef, blocks = nnx.split(tower.encoder.blocks)
    run = jax.jit(lambda block, x: nnx.merge(graphdef, block)(x, packed.images, angles))
    y = x
    for i in range(CONFIG.num_layers):
        y = run(jax.tree.map(lambda a, i=i: a[i], blocks), y)
        close(y[0, real], OFFICIAL[f"block{i}_out"])
    y = tower.encoder(x, packed)
    close(y[0, real], OFFICIAL["encoder_out"])
    tokens = gather_tokens(y, packed)[0]
    projected = model.mm_projector(tokens[None])[0]
    for i, end in enumerate(ends):
        here = slice(end - len(OFFICIAL[f"image{i}_projected"]), end)
        close(tokens[here], OFFICIAL[f"image{i}_tower_out"])
        close(projected[here], OFFICIAL[f"image{i}_projected"], 5e-5)


def test_the_whole_path_is_the_official_one_in_one_program(model, packed):
    official = np.concatenate([OFFICIAL[f"image{i}_projected"] for i in range(len(GRIDS))])
    close(project(model, packed)[0, : len(official)], official, 5e-5)


def test_in_bf16_the_error_is_that_of_the_official_bf16_run():
    model = load_official(jnp.bfloat16)
    official = np.concatenate([OFFICIAL[f"image{i}_projected"] for i in range(len(GRIDS))])
    out = project(model, pack_patches([PIXELS], [GRIDS], CONFIG, SIZE))
    assert out.dtype == jnp.bfloat16
    error = np.abs(np.asarray(out, np.float32)[0, : len(official)] - official)
    assert error.mean() < 2 * MEASURED["projected_bf16_vs_fp32"]["mean_abs"]


def test_an_image_alone_is_the_image_among_others_in_any_row_and_order(model, packed):
    together = np.asarray(project(model, packed))[0]
    counts = token_counts(GRIDS, CONFIG)
    order, rows = [[2], [1, 0]], []
    for row in order:
        rows.append(pack_patches([np.concatenate([IMAGES[i] for i in row])], [GRIDS[row]], CONFIG, SIZE))
    both = Patches(*(np.concatenate(pair) for pair in zip(*rows, strict=True)))
    apart = np.asarray(project(model, both))
    parts = np.split(together[: sum(counts)], np.cumsum(counts)[:-1])
    for row, here in zip(order, apart, strict=True):
        expected = np.concatenate([parts[i] for i in row])
        close(here[: len(expected)], expected, 5e-6)


def test_padding_reaches_nothing_and_makes_no_token(model, packed):
    real = packed.images > 0
    dirty = packed._replace(
        pixels=np.where(real[..., None], packed.pixels, 1e3),
        at=np.where(real[..., None], packed.at, 3),
        grids=np.where(real[..., None], packed.grids, 5),
        cells=np.where(packed.tokens[..., None] < packed.tokens.size, packed.cells, SIZE - 1),
    )
    out, expected = project(model, dirty), project(model, packed)
    np.testing.assert_array_equal(out, expected)
    assert not np.asarray(out)[0, sum(token_counts(GRIDS, CONFIG)) :].any()


def test_images_of_other_sizes_and_numbers_run_the_same_program(model):
    traces = 0

    @nnx.jit
    def run(model, patches):
        nonlocal traces
        traces += 1
        return model(patches)

    for grids in ([[1, 2, 2]], [[1, 4, 2], [1, 2, 6]], [[4, 2, 2]], []):
        grid = np.array(grids, np.int32).reshape(-1, 3)
        run(model, pack_patches([np.ones((grid.prod(1).sum(), 588))], [grid], CONFIG, 32))
    assert traces == 1


@nnx.jit
def gradients(model, patches):
    def loss(model):
        return (model(patches)[0, :37] * jnp.linspace(-1, 1, 48)).sum()

    return nnx.grad(loss)(model)


def test_every_weight_gets_a_finite_gradient(model, packed):
    for path, grad in nnx.to_flat_state(gradients(model, packed)):
        grad = np.asarray(grad.get_value())
        assert np.isfinite(grad).all() and np.abs(grad).max() > 0, path


def test_a_row_of_only_padding_has_finite_gradients(model):
    empty = pack_patches([PIXELS[:0]], [GRIDS[:0]], CONFIG, SIZE)
    assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(gradients(model, empty)))


def test_a_token_is_the_mean_over_frames_of_its_two_by_two_patches():
    grid = np.array([[2, 2, 4]], np.int32)
    packed = pack_patches([np.zeros((16, 588))], [grid], CONFIG, 20)
    x = np.arange(20, dtype=np.float32)[None, :, None]
    tokens = gather_tokens(jnp.asarray(x), packed)[0, :, :, 0]
    np.testing.assert_array_equal(tokens[:2], [[4, 5, 8, 9], [6, 7, 10, 11]])
    np.testing.assert_array_equal(tokens[2:], 0)


def test_row_lengths_are_few_and_hold_what_is_asked():
    sizes = [bucket(n) for n in range(70_000)]
    assert all(size >= n and size % 256 == 0 for n, size in enumerate(sizes))
    assert len(set(sizes)) < 32
    assert all(size <= n * 1.25 for n, size in enumerate(sizes) if n >= 1024)


def test_patches_of_another_size_are_refused():
    with pytest.raises(ValueError, match="A patch has 768 numbers, but patch_size=14 needs 588"):
        pack_patches([np.zeros((4, 3, 16, 16))], [np.array([[1, 2, 2]])], CONFIG)


@pytest.mark.parametrize(
    ("part", "given", "message"),
    [
        ("tower", np.zeros((1, 8, 588)), r"Patches, as pack_patches makes them, got an array of shape \[1, 8, 588\]"),
        ("tower", [1], "got list"),
        ("tower", Patches(*6 * [np.zeros((1, 8, 768))]), r"takes pixels \[rows, patches, 588\], got \[1, 8, 768\]"),
        ("projector", np.zeros((1, 2, 32)), r"the last two 128 numbers in all, got \[1, 2, 32\]"),
        ("projector", np.zeros((1, 2, 4, 33)), r"the last two 128 numbers in all, got \[1, 2, 4, 33\]"),
    ],
)
def test_what_is_no_image_is_refused_with_its_shape(model, monkeypatch, part, given, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users run it
    with pytest.raises(ValueError, match=message):
        (model.vision_tower if part == "tower" else model.mm_projector)(given)


def test_a_head_that_two_axes_cannot_turn_is_refused():
    with pytest.raises(ConfigError, match="qkv_hidden_size=42 must be a multiple of .*=12"):
        MoonViT(replace(CONFIG, qkv_size=42), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("grids", "patches", "size", "message"),
    [
        ([[1, 3, 2]], 6, None, "3 x 2 patches.*cells of 2 x 2.*multiples of 28 x 28 pixels"),
        ([[0, 2, 2]], 0, None, "0 frames"),
        ([[5, 2, 2]], 20, None, "5 frames exceeds the time table's 4"),
        ([[1, 2, 2]], 5, None, r"need \[4\] patches, but the pixels have \[5\]"),
        ([[1, 4, 4]], 16, 12, "size=12 must be a multiple of 4 that holds the 16"),
        ([[1, 4, 4]], 16, 18, "size=18 must be a multiple of 4"),
    ],
)
def test_images_that_do_not_fit_are_refused_with_what_to_do(grids, patches, size, message):
    with pytest.raises(ValueError, match=message):
        pack_patches([np.zeros((patches, 588))], [np.array(grids)], CONFIG, size)
