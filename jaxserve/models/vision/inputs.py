"""EncoderInputs: images packed for one encoder run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.models.vision.arch import VisionArch

Grid = tuple[int, int]  # patch rows and columns


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
        patches: float32 [P, S], images one after the other, then padding.
        spans: int32 [2, P], each patch's span: its image's first patch, and the one after its last.
        windows: int32 [2, P], likewise for windows.
        positions: int32 [P, 2], each patch's row and column in its image.
        learned: learned position embeddings for each patch.
        outputs: hidden states that make each embedding.
    """

    patches: NDArray[np.float32]
    spans: NDArray[np.int32] | None = None
    windows: NDArray[np.int32] | None = None
    positions: NDArray[np.int32] | None = None
    learned: Taps | None = None
    outputs: Taps | None = None


class Packed(NamedTuple):
    """Images in a bucket, without padding.

    Attributes:
        grids: each image's patch rows and columns.
        starts: each image's first patch, then the number of all patches.
    """

    grids: Sequence[Grid]
    starts: NDArray[np.int32]

    @classmethod
    def join(cls, grids: Sequence[Grid]) -> Packed:
        """Put images one after the other."""
        return cls(grids, np.cumsum([0, *(rows * columns for rows, columns in grids)], dtype=np.int32))

    def spans(self, num_patches: int) -> NDArray[np.int32]:
        """Return each patch's span [2, P], which is its image; padding sees itself."""
        spans = np.stack([np.arange(num_patches), np.arange(1, num_patches + 1)]).astype(np.int32)
        for start, end in zip(self.starts, self.starts[1:], strict=False):
            spans[:, start:end] = [[start], [end]]
        return spans


def join_patches(arch: VisionArch, images: Sequence[NDArray[np.float32]], num_patches: int) -> NDArray[np.float32]:
    """Return all images' patches, then zeros, as [num_patches, S]."""
    joined = np.zeros((num_patches, arch.patch_size), np.float32)
    start = 0
    for patches in images:
        joined[start : start + len(patches)] = patches
        start += len(patches)
    return joined
