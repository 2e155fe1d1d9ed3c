"""From an image to what the vision tower reads: patches, their grid, and the text that stands for it."""

import dataclasses
import difflib
import hashlib
import io
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, UInt8
from PIL import Image

log = logging.getLogger(__name__)

MAX_PIXELS = 64_000_000  # decoded; everything above 13 million is shrunk anyway
FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
)  # Pillow's other readers stay shut: some start programs


class ImageError(ValueError):
    """An image that cannot be used, or image settings that are not supported."""


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """How images are cut: the official processor's settings, by its names. Sizes in pixels or patches."""

    patch_size: int = 14  # pixels
    merge_kernel_size: int = 2  # patches per side that make one token
    in_patch_limit: int = 65_536  # patches, before padding
    patch_limit_on_one_side: int = 512
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)  # of values in 0..1
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    chessboard_square_size: int = 16  # pixels
    chessboard_square_on_top_left: bool = True  # the top left square is white
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 200

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_kernel_size", "in_patch_limit", "chessboard_square_size"):
            if getattr(self, name) < 1:
                raise ImageError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.patch_limit_on_one_side < self.merge_kernel_size:
            raise ImageError(
                f"patch_limit_on_one_side={self.patch_limit_on_one_side} leaves no token per side."
            )
        for name in ("chessboard_white_value", "chessboard_gray_value"):
            if not 0 <= getattr(self, name) <= 255:
                raise ImageError(f"{name} must be 0 to 255, got {getattr(self, name)}.")
        if min(self.image_std) <= 0:
            raise ImageError(f"image_std must be above 0, got {self.image_std}.")

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> "ImageConfig":
        """The settings in the folder's preprocessor_config.json; if it has none, the defaults and a log line.

        Raises ImageError for a file that cannot be read, and for unknown or unsupported settings, by name.
        """
        path = Path(folder) / "preprocessor_config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            log.info("%s is absent: images are cut with the default settings, %s", path, cls())
            return cls()
        except (OSError, ValueError) as error:
            raise ImageError(f"{path} cannot be read: {error}.") from error
        settings = raw.get("media_proc_cfg") if isinstance(raw, dict) else None
        if not isinstance(settings, dict):
            raise ImageError(f"{path} must be a JSON object with an object media_proc_cfg.")
        return cls.from_media_proc_cfg(settings)

    @classmethod
    def from_media_proc_cfg(cls, settings: Mapping[str, Any]) -> "ImageConfig":
        """The settings under their names in a checkpoint. Those of video are left alone."""
        settings = {name: value for name, value in settings.items() if name not in _VIDEO_SETTINGS}
        board = settings.pop("transparent_bg_config", {})
        if not isinstance(board, Mapping):
            raise ImageError(f"media_proc_cfg: transparent_bg_config must be an object, got {board!r}.")
        settings |= board
        for name, only in _FIXED_SETTINGS.items():
            if (value := settings.pop(name, only)) != only:
                raise ImageError(f"media_proc_cfg: {name}={value!r} is not supported, only {only!r} is.")
        known = {field.name for field in dataclasses.fields(cls)}
        for name in settings.keys() - known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ImageError(f"media_proc_cfg: unknown setting {name!r}.{hint}")
        kernel = settings.get("merge_kernel_size")
        if isinstance(kernel, list) and len(kernel) == 2 and kernel[0] == kernel[1]:
            settings["merge_kernel_size"] = kernel[0]
        return cls(**{name: _checked(name, value, getattr(cls, name)) for name, value in settings.items()})

    def layout(self, width: int, height: int) -> "Layout":
        """How an image of this size is resized and padded.

        It is shrunk, never enlarged, by the factor that keeps it within both limits, then padded to whole
        tokens. Padding comes after the limit, so a large image may end with a few more patches.
        """
        patch, longest = self.patch_size, self.patch_limit_on_one_side * self.patch_size
        patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(self.in_patch_limit / patches), longest / width, longest / height)
        new_width, new_height = (min(max(1, int(side * scale)), longest) for side in (width, height))
        token = patch * self.merge_kernel_size
        return Layout(new_width, new_height, -new_width % token, -new_height % token)


_VIDEO_SETTINGS = frozenset(
    "in_patch_limit_each_frame in_patch_limit_video sample_fps max_num_frames_each_video "
    "temporal_merge_kernel_size timestamp_mode config_type".split()
)
_FIXED_SETTINGS = {
    "pattern": "chessboard",
    "transparent_bg_fill_stage": "after_resize",
    "fixed_output_tokens": None,
}


def _checked(name: str, value: Any, default: Any) -> Any:
    """A setting read from JSON, which must be of the default's kind: bool, whole number or 3 numbers."""
    if isinstance(default, tuple):
        if isinstance(value, list) and len(value) == 3 and all(type(v) in (int, float) for v in value):
            return tuple(map(float, value))
        raise ImageError(f"media_proc_cfg: {name} must be a list of 3 numbers, got {value!r}.")
    if type(value) is not type(default):
        kind = "true or false" if isinstance(default, bool) else "a whole number"
        raise ImageError(f"media_proc_cfg: {name} must be {kind}, got {value!r}.")
    return value


class Layout(NamedTuple):
    """Size after resizing, and the padding at right and bottom; pixels."""

    new_width: int
    new_height: int
    pad_width: int
    pad_height: int


@dataclass(frozen=True)
class ImagePatches:
    """One image, ready for the vision tower. N = t h w patches, row by row.

    grid_thw       t = 1, rows and columns of patches
    num_tokens     embeddings that the tower makes of it, one per <|media_pad|> after expand_media_pads
    prompt         what stands for the image in the encoded chat: one <|media_pad|> and the original size
    original_size  width, height in pixels
    """

    pixel_values: Float32[np.ndarray, "N 3 P P"]
    grid_thw: tuple[int, int, int]
    num_tokens: int
    prompt: str
    original_size: tuple[int, int]

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of grid and pixels, in full: equal exactly if the tower sees the same. A key for caches."""
        digest = hashlib.sha256(f"{self.grid_thw}{self.pixel_values.shape}".encode())
        digest.update(np.ascontiguousarray(self.pixel_values).data)
        return digest.hexdigest()


def preprocess(
    image: Image.Image | bytes | str | Path,
    config: ImageConfig | None = None,
    *,
    max_pixels: int = MAX_PIXELS,
) -> ImagePatches:
    """Cuts an image (Pillow's, the bytes of a file, or its path) into normalised patches, as official K3.

    It is resized with Pillow's bicubic filter (palette and 1-bit images: nearest neighbour, before their
    colours are looked up), laid over a chessboard where transparent, padded with 0 at right and bottom, and
    becomes (x/255 - mean) / std in fp32. Of an animation the first frame counts; EXIF turns nothing.
    We differ in one thing: 16-bit grey keeps its upper 8 bits, where Pillow alone would clip it to white.
    Raises ImageError for what is no image, is broken or cut off, or has more than `max_pixels` pixels, which
    is checked before anything is decoded.
    """
    config = config or ImageConfig()
    decoded = _decode(image, max_pixels)
    layout = config.layout(*decoded.size)
    pixels = _resized_and_padded(decoded, layout, config)
    patch, token = config.patch_size, config.patch_size * config.merge_kernel_size
    height, width = pixels.shape[:2]
    rows, columns = height // patch, width // patch
    patches = (
        pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)
    )
    values = patches.astype(np.float32)
    values /= np.float32(255)
    values -= np.asarray(config.image_mean, np.float32)[:, None, None]
    values /= np.asarray(config.image_std, np.float32)[:, None, None]
    return ImagePatches(
        pixel_values=values,
        grid_thw=(1, rows, columns),
        num_tokens=(height // token) * (width // token),
        prompt="<|media_begin|>image {}x{}<|media_content|><|media_pad|><|media_end|>".format(*decoded.size),
        original_size=decoded.size,
    )


def _decode(image: Image.Image | bytes | str | Path, max_pixels: int) -> Image.Image:
    try:
        if not isinstance(image, Image.Image):
            image = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image, formats=FORMATS)
        width, height = image.size
        if width * height <= max_pixels:
            image.load()
    except Exception as error:  # Pillow's readers raise anything on a broken file
        raise ImageError(
            f"The image cannot be read: {type(error).__name__}: {error}. "
            f"A whole file in one of the formats {', '.join(FORMATS)} is needed."
        ) from error
    if width * height > max_pixels:
        raise ImageError(
            f"The image has {width} x {height} pixels, more than the {max_pixels:,} allowed. Shrink it."
        )
    if not width or not height:
        raise ImageError(f"The image is empty: {width} x {height} pixels.")
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ImageError(
            f"Pixels of mode {image.mode} have no agreed range. Convert the image to 8 bits per channel."
        )
    return image


def _resized_and_padded(
    image: Image.Image, layout: Layout, config: ImageConfig
) -> UInt8[np.ndarray, "height width 3"]:
    image = image.resize((layout.new_width, layout.new_height), Image.Resampling.BICUBIC)
    if image.has_transparency_data:
        pixels = _over_chessboard(np.asarray(image.convert("RGBA")), config)
    else:
        pixels = np.asarray(image.convert("RGB"))
    return np.pad(pixels, [(0, layout.pad_height), (0, layout.pad_width), (0, 0)])


def _over_chessboard(
    rgba: UInt8[np.ndarray, "height width 4"], config: ImageConfig
) -> UInt8[np.ndarray, "height width 3"]:
    """rgb alpha + board (1 - alpha) in fp32, cut (not rounded) to 8 bits, as the official code to the bit."""
    row, column = (np.arange(size) // config.chessboard_square_size for size in rgba.shape[:2])
    grey = (row[:, None] + column) % 2 == (1 if config.chessboard_square_on_top_left else 0)
    board = np.where(
        grey, np.float32(config.chessboard_gray_value), np.float32(config.chessboard_white_value)
    )
    alpha = rgba[..., 3:].astype(np.float32) / np.float32(255)
    return (rgba[..., :3].astype(np.float32) * alpha + board[..., None] * (1 - alpha)).astype(np.uint8)


def media_repeats(
    ids: Int[np.ndarray, " T"], pad_id: int, tokens_per_image: Sequence[int]
) -> Int32[np.ndarray, " T"]:
    """How often each token occurs after expansion: once, a <|media_pad|> as often as its image has tokens.

    np.repeat(x, media_repeats(…)) expands whatever else is per token, a loss mask for instance. Raises
    ImageError unless `ids` holds one pad per image and every image has a token.
    """
    places = np.flatnonzero(np.asarray(ids) == pad_id)
    if len(places) != len(tokens_per_image):
        raise ImageError(
            f"The prompt has {len(places)} image placeholders (id {pad_id}), "
            f"but {len(tokens_per_image)} images came with it. Each needs exactly one, not expanded yet."
        )
    if len(places) and min(tokens_per_image) < 1:
        raise ImageError(f"Every image has at least one token, got {list(tokens_per_image)}.")
    repeats = np.ones(len(ids), np.int32)
    repeats[places] = tokens_per_image
    return repeats


def expand_media_pads(
    ids: Sequence[int] | Int[np.ndarray, " T"], pad_id: int, tokens_per_image: Sequence[int]
) -> Int32[np.ndarray, " expanded"]:
    """Repeats the one <|media_pad|> of each image as often as the image has tokens; see media_repeats."""
    row = np.asarray(ids, np.int32)
    return np.repeat(row, media_repeats(row, pad_id, tokens_per_image))
