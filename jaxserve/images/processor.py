"""ImageProcessor: a model's preprocessing, from an image to the patches that the vision tower takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import RequestError
from jaxserve.images.layouts import Layout, Pixels, Resampling, Size, TiledLayout, unfolded
from jaxserve.images.prepared import PreparedImage

if TYPE_CHECKING:
    from PIL.Image import Image

DIGEST_SIZE = 16


@dataclass(frozen=True)
class Normalization:
    """Conversion from 8-bit pixels to the tower's inputs.

    Attributes:
        scale: factor of each value.
        mean: mean per channel, in scaled values; None to subtract and divide by nothing.
        std: standard deviation per channel.
    """

    scale: float
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None

    @property
    def is_finite(self) -> bool:
        """True if all pixels become finite inputs."""
        with np.errstate(all="ignore"):
            return bool(np.isfinite(self.table).all())

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """Inputs by channel and 8-bit value, rounded as transformers rounds them: [3, 256]."""
        values = np.tile((np.arange(256, dtype=np.float64) * self.scale).astype(np.float32), (3, 1))
        if self.mean is None or self.std is None:
            return values
        return (values - np.array([self.mean], np.float32).T) / np.array([self.std], np.float32).T


@dataclass(frozen=True)
class ImageProcessor:
    """Preprocessing for a model's images.

    Attributes:
        layout: sizes, and the order of patches.
        normalization: inputs for pixels.
        resampling: filter and order for resizing images.
        max_patches: maximum number of patches per image.
    """

    layout: Layout
    normalization: Normalization
    resampling: Resampling
    max_patches: int

    @cached_property
    def key(self) -> bytes:
        """Digest of all settings."""
        settings = repr((self.layout, self.normalization, self.resampling))
        return blake2b(settings.encode(), digest_size=DIGEST_SIZE, person=b"processor").digest()

    def fit(self, image: Image) -> Pixels:
        """Return an RGB image as one or several tiles of pixels; RequestError if its size is impossible."""
        pixels = self.layout.fit(image, self.resampling)
        tiles, rows, columns, _ = pixels.shape
        num_patches = (
            (tiles if self._joins_tiles else 1) * (rows // self.layout.patch_size) * (columns // self.layout.patch_size)
        )
        if num_patches > self.max_patches:
            raise RequestError(
                f"an image must have at most {self.max_patches} patches of {self.layout.patch_size} pixels, got "
                f"{num_patches} from {image.width} x {image.height} pixels; reduce its size, or limit it with "
                "mm_processor_kwargs"
            )
        return pixels

    @property
    def _joins_tiles(self) -> bool:
        """True if the tower takes all tiles as one image; otherwise each is an image: the whole one, then its crops."""
        return isinstance(self.layout, TiledLayout)

    def prepare_all(self, pixels: Pixels, size: Size) -> tuple[PreparedImage, ...]:
        """Return the image for the tower, followed by its crops; arguments as in `prepare`."""
        parts = [pixels] if self._joins_tiles else pixels[:, None]
        return tuple(self.prepare(part, size) for part in parts)

    def prepare(self, pixels: Pixels, size: Size) -> PreparedImage:
        """Return the image for the tower.

        Args:
            pixels: pixels from `fit`.
            size: the original image's rows and columns.
        """
        patch = self.layout.patch_size
        grid = pixels.shape[1] // patch, pixels.shape[2] // patch
        num_embeddings = self.layout.num_embeddings(grid, size)
        content = blake2b(self.key, digest_size=DIGEST_SIZE, person=b"pixels")
        content.update(repr((pixels.shape, size)).encode())
        content.update(pixels.tobytes())
        values = np.empty(pixels.shape, np.float32)
        for channel, row in enumerate(self.normalization.table):
            np.take(row, pixels[..., channel], out=values[..., channel])
        return PreparedImage(content.digest(), unfolded(values, self.layout), grid, num_embeddings, size)


def as_rgb(image: Image) -> Image:
    """Return an image upright and as RGB, with transparent pixels on white, as transformers converts it."""
    from PIL import Image as pillow  # noqa: N813, PLC0415 - an extra
    from PIL import ImageOps  # noqa: PLC0415 - an extra

    image = ImageOps.exif_transpose(image)
    if image.mode == "La":  # premultiplied; Pillow has no conversion to RGBA
        image = image.convert("LA")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def image_from_array(array: NDArray[np.generic], name: str = "image") -> Image:
    """Return an array as an RGB image.

    Args:
        array: 8-bit values with the shape [rows, columns], or with 1, 3 or 4 channels as its last or first axis.
        name: the array's name in error messages.

    Raises:
        RequestError: it has another dtype or shape, or no pixels.
    """
    from PIL import Image as pillow  # noqa: N813, PLC0415 - an extra

    array = np.asarray(array)
    if array.dtype != np.uint8:
        raise RequestError(f"an array as {name} must have the dtype uint8, with values 0 to 255, got {array.dtype}")
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.size == 0 or array.ndim not in (2, 3) or array.shape[2:] not in ((), (3,), (4,)):
        raise RequestError(
            f"an array as {name} must have the shape (rows, columns), or with 1, 3 or 4 channels as its last or first "
            f"axis, got {array.shape}"
        )
    return as_rgb(pillow.fromarray(np.ascontiguousarray(array)))
