"""Layouts: image sizes and patch orders by model family, equal to transformers' processors.

Sizes are (rows, columns). An image becomes one or several equal tiles, and each tile a grid of patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
Pixels = NDArray[np.uint8]  # [tiles, rows, columns, 3]

MAX_RESIZED_PIXELS = 2**26  # a very long image whose shorter side is enlarged


class Resampling(NamedTuple):
    """Filter and order for resizing images.

    Attributes:
        filter: resampling filter, by Pillow's number; None if images must already have their sizes.
        rows_first: True to resize along rows and then along columns, as torchvision and older versions of Pillow do;
            newer ones take the order that costs less. It matters to filters that exceed the range of pixels, such as
            bicubic.
    """

    filter: int | None
    rows_first: bool = False


@runtime_checkable
class Layout(Protocol):
    """Sizes and patches for a family's images.

    Attributes:
        patch_size: rows and columns of pixels in a patch.
        merge_size: side of the blocks whose patches are consecutive.
        num_frames: repetitions of each patch's pixels, as a video's frames.
        has_channels_last: True if each pixel's channels are consecutive.
    """

    @property
    def patch_size(self) -> int: ...
    @property
    def merge_size(self) -> int: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def has_channels_last(self) -> bool: ...

    def fit(self, image: Image, resampling: Resampling) -> Pixels:
        """Return an RGB image as pixels in the sizes that the tower reads; RequestError for impossible sizes."""

    def num_embeddings(self, grid: Size, size: Size) -> int:
        """Return the number of embeddings for a patch grid, made from an image whose original size is `size`."""


@dataclass(frozen=True)
class MergedLayout:
    """The Qwen family's layout: sides in whole blocks of merged patches, and bounds on the area.

    Attributes:
        patch_size: see `Layout`.
        merge_size: see `Layout`; each such block of patches becomes an embedding.
        num_frames: see `Layout`.
        min_pixels: minimum area; smaller images are enlarged.
        max_pixels: maximum area; larger images are reduced.
    """

    patch_size: int
    merge_size: int
    num_frames: int
    min_pixels: int
    max_pixels: int
    has_channels_last = False

    def fit(self, image: Image, resampling: Resampling) -> Pixels:
        return _pixels(_resized(image, self.target(_size(image)), resampling))

    def target(self, size: Size) -> Size:
        """Return the size to which an image is resized."""
        height, width = size
        if max(size) > 200 * min(size):
            raise RequestError(
                f"an image's longer side must be at most 200 times the shorter one, got {width} x {height} pixels"
            )
        block = self.patch_size * self.merge_size
        rows, columns = round(height / block) * block, round(width / block) * block
        if rows * columns > self.max_pixels:
            ratio = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(block, math.floor(side / ratio / block) * block) for side in size)
        elif rows * columns < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * ratio / block) * block for side in size)
        return rows, columns

    def num_embeddings(self, grid: Size, size: Size) -> int:
        return grid[0] * grid[1] // self.merge_size**2


@dataclass(frozen=True)
class BoundedLayout:
    """Pixtral's layout: sides up to a limit, rounded up to whole blocks of patches.

    Attributes:
        patch_size: see `Layout`.
        block_size: side of the patch blocks that become one embedding.
        max_size: maximum rows and columns.
    """

    patch_size: int
    block_size: int
    max_size: Size
    merge_size = 1
    num_frames = 1
    has_channels_last = False

    def fit(self, image: Image, resampling: Resampling) -> Pixels:
        return _pixels(_resized(image, self.target(_size(image)), resampling))

    def target(self, size: Size) -> Size:
        """Return the size to which an image is resized."""
        ratio = max(side / limit for side, limit in zip(size, self.max_size, strict=True))
        if ratio > 1:
            size = math.floor(size[0] / ratio), math.floor(size[1] / ratio)
        if min(size) == 0:
            raise RequestError(
                f"an image must keep at least 1 pixel of each side when it is reduced to {self.max_size[1]} x "
                f"{self.max_size[0]} pixels, got one {ratio:.0f} times as long"
            )
        block = self.patch_size * self.block_size
        return (size[0] - 1) // block * block + block, (size[1] - 1) // block * block + block

    def num_embeddings(self, grid: Size, size: Size) -> int:
        return grid[0] * grid[1] // self.block_size**2


@dataclass(frozen=True)
class PanAndScan:
    """Gemma 3's crops of long images, which follow the whole image.

    Attributes:
        min_crop_size: minimum sides of a crop.
        max_crops: maximum number of crops.
        min_ratio: minimum ratio between the longer and the shorter side of an image with crops.
    """

    min_crop_size: int
    max_crops: int
    min_ratio: float

    def boxes(self, size: Size) -> list[tuple[int, int, int, int]]:
        """Return the left, upper, right and lower ends of an image's crops; RequestError if one would be empty."""
        long, short = max(size), min(size)
        if long / short < self.min_ratio:
            return []
        count = min(max(min(math.floor(long / short + 0.5), long // self.min_crop_size), 2), self.max_crops)
        step = math.ceil(long / count)
        if min(step, short) < self.min_crop_size:
            return []
        if step * (count - 1) >= long:
            raise RequestError(
                f"an image must have pixels in each of its {count} crops, got {size[1]} x {size[0]} pixels; raise "
                "pan_and_scan_min_crop_size in mm_processor_kwargs"
            )
        ends = [(start, min(start + step, long)) for start in range(0, step * count, step)]
        if size[1] >= size[0]:
            return [(start, 0, end, short) for start, end in ends]
        return [(0, start, short, end) for start, end in ends]


@dataclass(frozen=True)
class FixedLayout:
    """One size for all images, as for the towers CLIP and SigLIP.

    Attributes:
        patch_size: see `Layout`.
        size: size to which an image is resized; None to resize the shorter side to `short_side`.
        short_side: length for the shorter side; 0 with `size`.
        crop: size to which the middle is cropped; None to keep all.
        background: colour that pads an image to a square first; None to pad nothing.
        num_pooled: number of embeddings, if the tower pools its patches; otherwise 0.
        num_extra: embeddings beyond one per patch.
        pan_and_scan: crops that are images of their own; None without.
    """

    patch_size: int
    size: Size | None
    short_side: int
    crop: Size | None
    background: tuple[int, int, int] | None = None
    num_pooled: int = 0
    num_extra: int = 0
    pan_and_scan: PanAndScan | None = None
    merge_size = 1
    num_frames = 1
    has_channels_last = False

    @property
    def grid(self) -> Size | None:
        """Rows and columns of patches; None if they differ from image to image."""
        size = self.crop or self.size
        return size and (size[0] // self.patch_size, size[1] // self.patch_size)

    def fit(self, image: Image, resampling: Resampling) -> Pixels:
        boxes = [] if self.pan_and_scan is None else self.pan_and_scan.boxes(_size(image))
        return np.concatenate([self._fit_one(each, resampling) for each in (image, *map(image.crop, boxes))])

    def _fit_one(self, image: Image, resampling: Resampling) -> Pixels:
        """Return an image, or a crop, as one tile."""
        if self.background is not None:
            image = _squared(image, self.background)
        size = self.size
        if size is None:
            short, long = sorted((image.height, image.width))
            longer = int(self.short_side * long / short)
            size = (longer, self.short_side) if image.width <= image.height else (self.short_side, longer)
        pixels = _pixels(_resized(image, size, resampling))
        return pixels if self.crop is None else _cropped(pixels, self.crop)

    def num_embeddings(self, grid: Size, size: Size) -> int:
        return self.num_pooled or grid[0] * grid[1] + self.num_extra


@dataclass(frozen=True)
class PooledLayout:
    """Gemma 4's layout: the largest sizes with the image's proportions whose pooled patches are within a limit.

    Attributes:
        patch_size: see `Layout`.
        pool_size: side of the patch blocks that become one embedding.
        max_embeddings: maximum number of embeddings.
    """

    patch_size: int
    pool_size: int
    max_embeddings: int
    merge_size = 1
    num_frames = 1
    has_channels_last = True

    def fit(self, image: Image, resampling: Resampling) -> Pixels:
        return _pixels(_resized(image, self.target(_size(image)), resampling))

    def target(self, size: Size) -> Size:
        """Return the size to which an image is resized."""
        height, width = size
        block = self.pool_size * self.patch_size
        area = self.max_embeddings * self.pool_size**2 * self.patch_size**2
        factor = math.sqrt(area / (height * width))
        rows, columns = math.floor(factor * height / block) * block, math.floor(factor * width / block) * block
        longest = self.max_embeddings * block
        if rows == 0:
            rows, columns = block, min(math.floor(width / height) * block, longest)
        elif columns == 0:
            rows, columns = min(math.floor(height / width) * block, longest), block
        return rows, columns

    def num_embeddings(self, grid: Size, size: Size) -> int:
        return grid[0] * grid[1] // self.pool_size**2


@dataclass(frozen=True)
class TiledLayout:
    """LLaVA OneVision's layout: the whole image in one tile, then the image in the best tile grid.

    Attributes:
        patch_size: see `Layout`.
        tile_size: a tile's rows and columns.
        pinpoints: possible grids of tiles, in pixels.
        max_tiles: tiles' worth of embeddings; more are interpolated to fewer.
        drops_one: True if an embedding is dropped, as `vision_feature_select_strategy="default"` counts them.
    """

    patch_size: int
    tile_size: int
    pinpoints: Sequence[Size]
    max_tiles: int
    drops_one: bool = False
    merge_size = 1
    num_frames = 1
    has_channels_last = False

    def fit(self, image: Image, resampling: Resampling) -> Pixels:
        size, tile = _size(image), self.tile_size
        best = self.best(size)
        scale_rows, scale_columns = best[0] / size[0], best[1] / size[1]
        if scale_columns < scale_rows:
            inner = min(math.ceil(size[0] * scale_columns), best[0]), best[1]
        else:
            inner = best[0], min(math.ceil(size[1] * scale_rows), best[1])
        pixels = np.zeros((*best, 3), np.uint8)
        top, left = (best[0] - inner[0]) // 2, (best[1] - inner[1]) // 2
        pixels[top : top + inner[0], left : left + inner[1]] = np.asarray(_resized(image, inner, resampling))
        tiles = (
            pixels.reshape(best[0] // tile, tile, best[1] // tile, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
        )
        return np.concatenate([_pixels(_resized(image, (tile, tile), resampling)), tiles])

    def best(self, size: Size) -> Size:
        """Return the tile grid that keeps the largest number of an image's pixels and then wastes fewest."""

        def rank(grid: Size) -> tuple[int, int]:
            scale = min(grid[1] / size[1], grid[0] / size[0])
            kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
            return kept, kept - grid[0] * grid[1]

        return max(self.pinpoints, key=rank)

    def num_embeddings(self, grid: Size, size: Size) -> int:
        best = self.best(size)
        rows, columns = (grid[i] * (best[i] // self.tile_size) for i in (0, 1))
        if size[1] / size[0] > columns / rows:
            rows -= (rows - int(round(size[0] * (columns / size[1]), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(size[1] * (rows / size[0]), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self.max_tiles * grid[0] ** 2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return grid[0] * grid[1] + rows * columns + rows - self.drops_one  # each row ends in an embedding of its own


def unfolded(pixels: NDArray[np.float32], layout: Layout) -> NDArray[np.float32]:
    """Return tiles [tiles, rows, columns, 3] as patches [P, S], tile after tile, without pixels beyond whole patches.

    SigLIP has 27 x 27 patches of 14 pixels in 384 x 384: a convolution drops the rest.
    """
    patch, merge = layout.patch_size, layout.merge_size
    tiles, height, width, channels = pixels.shape
    rows, columns = height // patch // merge, width // patch // merge
    pixels = pixels[:, : rows * merge * patch, : columns * merge * patch]
    patches = pixels.reshape(tiles, rows, merge, patch, columns, merge, patch, channels)
    if layout.has_channels_last:
        patches = patches.transpose(0, 1, 4, 2, 5, 3, 6, 7)
    else:
        patches = patches.transpose(0, 1, 4, 2, 5, 7, 3, 6)[:, :, :, :, :, :, None]
        patches = np.broadcast_to(patches, (*patches.shape[:6], layout.num_frames, patch, patch))
    return np.ascontiguousarray(patches).reshape(tiles * rows * columns * merge**2, -1)


def _size(image: Image) -> Size:
    return image.height, image.width


def _resized(image: Image, size: Size, resampling: Resampling) -> Image:
    """Return an image resized to (rows, columns); RequestError if it would be far too large, or must not be resized."""
    if size[0] * size[1] > MAX_RESIZED_PIXELS:
        raise RequestError(
            f"an image may have at most {MAX_RESIZED_PIXELS} pixels after resizing, got {image.width} x {image.height} "
            f"that become {size[1]} x {size[0]}; crop its longer side"
        )
    if resampling.filter is None:
        if _size(image) != size:
            raise RequestError(
                f"an image must have the size to which it would be resized, as do_resize is false: {size[1]} x "
                f"{size[0]} pixels, got {image.width} x {image.height}"
            )
        return image.copy()
    if resampling.rows_first and size[1] * image.height <= MAX_RESIZED_PIXELS:
        image = image.resize((size[1], image.height), resampling.filter)
    return image.resize((size[1], size[0]), resampling.filter)  # a copy if it has this size


def _pixels(image: Image) -> Pixels:
    """Return an RGB image as one tile."""
    return np.asarray(image)[None]


def _squared(image: Image, background: tuple[int, int, int]) -> Image:
    """Return an image padded on both sides to a square."""
    if image.width == image.height:
        return image
    from PIL import Image as pillow  # noqa: N813, PLC0415 - an extra

    side = max(image.width, image.height)
    if side**2 > MAX_RESIZED_PIXELS:
        raise RequestError(
            f"an image may have at most {MAX_RESIZED_PIXELS} pixels after padding to a square, got {image.width} x "
            f"{image.height}; crop its longer side"
        )
    square = pillow.new("RGB", (side, side), background)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _cropped(pixels: Pixels, size: Size) -> Pixels:
    """Return the middle of pixels, padded with zeros if they are smaller."""
    result = np.zeros((len(pixels), *size, pixels.shape[-1]), np.uint8)
    starts = [(length - wanted) // 2 for length, wanted in zip(pixels.shape[1:3], size, strict=True)]
    kept = pixels[:, max(0, starts[0]) :, max(0, starts[1]) :][:, : size[0], : size[1]]
    top, left = max(0, -starts[0]), max(0, -starts[1])
    result[:, top : top + kept.shape[1], left : left + kept.shape[2]] = kept
    return result
