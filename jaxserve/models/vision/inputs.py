"""EncoderInputs: images packed for one encoder run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.models.vision.arch import VisionArch

Grid = tuple[int, int]  # patch rows and columns


class TowerImage(NamedTuple):
    """An image for a vision tower.

    Attributes:
        grid: patch rows and columns, in each of its tiles.
        patches: float32 [P, S] in the processor's order.
        size: pixel rows and columns before preprocessing; only towers with tiles read it.
    """

    grid: Grid
    patches: NDArray[np.float32]
    size: tuple[int, int] = (0, 0)

    @property
    def num_patches(self) -> int:
        """Number of patches in all tiles."""
        return len(self.patches)


class Taps(NamedTuple):
    """Weighted sums over rows.

    Attributes:
        index: int32 [N, K], rows that each sum reads.
        weight: float32 [N, K], their weights; None if the rows are not added but concatenated.
    """

    index: Any
    weight: Any | None = None


class EncoderInputs(NamedTuple):
    """Operands for an encoder program, numpy arrays on the host; None if a tower does not read them.

    Attributes:
        patches: float32 [P, S], images one after the other, then padding; None after the first layer's inputs.
        spans: int32 [2, P], each patch's span: its image's first patch, and the one after its last.
        windows: int32 [2, P], likewise for windows.
        positions: int32 [P, 2], each patch's row and column in its image.
        learned: learned position embeddings for each patch.
        outputs: hidden states that make each embedding.
    """

    patches: NDArray[np.float32] | None
    spans: NDArray[np.int32] | None = None
    windows: NDArray[np.int32] | None = None
    positions: NDArray[np.int32] | None = None
    learned: Taps | None = None
    outputs: Taps | None = None


class Packed(NamedTuple):
    """Images in a bucket, without padding.

    Attributes:
        inputs: the images.
        starts: each image's first patch, then the number of all patches.
    """

    inputs: Sequence[TowerImage]
    starts: NDArray[np.int32]

    @classmethod
    def join(cls, images: Sequence[TowerImage]) -> Packed:
        """Put images one after the other."""
        return cls(images, np.cumsum([0, *(image.num_patches for image in images)], dtype=np.int32))

    def images(self) -> Iterator[tuple[int, int, TowerImage]]:
        """Yield each image's first patch, the one after its last, and the image."""
        bounds = map(int, self.starts)
        start = next(bounds)
        for image, end in zip(self.inputs, bounds, strict=True):
            yield start, end, image
            start = end

    def spans(self, num_patches: int) -> NDArray[np.int32]:
        """Return each patch's span [2, P], which is its image; padding has empty spans."""
        spans = np.full((2, num_patches), self.starts[-1], np.int32)
        for start, end, _ in self.images():
            spans[:, start:end] = [[start], [end]]
        return spans


def blocks(images: Sequence[TowerImage], side: int, num_blocks: int) -> NDArray[np.int32]:
    """Return the patches [num_blocks, side * side] in square blocks, given patches in raster order.

    Rows and columns that do not fill a block are left out.
    """
    index = np.zeros((num_blocks, side * side), np.int32)
    filled = 0
    for start, end, image in Packed.join(images).images():
        rows, columns = image.grid
        patches = np.arange(start, end, dtype=np.int32).reshape(rows, columns)
        patches = patches[: rows // side * side, : columns // side * side]
        own = patches.reshape(rows // side, side, columns // side, side).swapaxes(1, 2).reshape(-1, side * side)
        index[filled : filled + len(own)] = own
        filled += len(own)
    return index


def axis_taps(
    index: NDArray[np.int32], size: int, side: int, *, align_corners: bool
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the two elements [N, 2] around positions on an axis, and their weights for linear interpolation.

    Args:
        index: positions, below `size`.
        size: length of the axis.
        side: length to which the interpolated elements are stretched.
        align_corners: True if the axes' ends coincide; False if elements have a width.
    """
    position = index.astype(np.float32)
    if align_corners:
        source = position * np.float32(side - 1) / np.float32(max(size - 1, 1))
    else:
        source = (position + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)
    floor = np.floor(source)[:, None]
    taps = floor + np.arange(2, dtype=np.float32)
    weight = np.clip(1 - np.abs(source[:, None] - taps), 0, None).astype(np.float32)
    return np.clip(taps, 0, side - 1).astype(np.int32), weight


def join_patches(
    arch: VisionArch, images: Sequence[TowerImage], orders: Sequence[NDArray[np.int32] | None], num_patches: int
) -> NDArray[np.float32]:
    """Return all images' patches, each in its order, then zeros, as [num_patches, S]."""
    joined = np.zeros((num_patches, arch.patch_size), np.float32)
    for (start, end, image), order in zip(Packed.join(images).images(), orders, strict=True):
        if order is None:
            joined[start:end] = image.patches
        else:
            np.take(image.patches, order, axis=0, out=joined[start:end])
    return joined
