"""PreparedImage and ImageSpan: an image as the vision tower takes it, and its tokens in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

NO_PATCHES = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class PreparedImage:
    """An image after preprocessing. Two are equal if their digests are.

    Attributes:
        digest: 16 bytes that cover the decoded pixels and the preprocessing, but no name that a caller has for the
            image: pages on disk outlive such names.
        patches: float32 [P, S], unfolded in the order that the tower reads. Their S values are channels, then rows and
            columns of pixels (channels, frames, rows and columns for the Qwen families).
        grid: rows and columns of patches, per tile if an image has several tiles.
        num_embeddings: number of tokens that take an embedding.
        size: rows and columns of pixels before preprocessing, from which towers with tiles know what padding to drop.
    """

    digest: bytes
    patches: NDArray[np.float32] = field(compare=False, repr=False)
    grid: tuple[int, int] = field(compare=False)
    num_embeddings: int = field(compare=False)
    size: tuple[int, int] = field(default=(0, 0), compare=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the patches take."""
        return self.patches.nbytes

    def with_patches(self, patches: NDArray[np.float32] = NO_PATCHES) -> PreparedImage:
        """Return the image with these patches; by default with none, if only its identity counts."""
        return replace(self, patches=patches)


@dataclass(frozen=True)
class ImageSpan:
    """One image in an expanded prompt.

    Attributes:
        image: the image.
        start: index of its first token in the prompt.
        tokens: int32 [E], indices relative to `start`, in order: the tokens that take the image's embeddings. Others
            between them, such as row breaks, take the embedding of their own ids.
    """

    image: PreparedImage
    start: int
    tokens: NDArray[np.int32] = field(compare=False, repr=False)

    @cached_property
    def first(self) -> int:
        """Prompt index where the embeddings begin."""
        return self.start + int(self.tokens[0])

    @cached_property
    def end(self) -> int:
        """Prompt index after the last embedding."""
        return self.start + int(self.tokens[-1]) + 1

    @property
    def positions(self) -> NDArray[np.int32]:
        """Prompt indices that take embeddings."""
        return self.tokens + np.int32(self.start)


class ExpandedPrompt(list[int]):
    """Token ids of a prompt in which each image has all its tokens.

    Args:
        token_ids: the token ids.
        images: its images, in order.
    """

    def __init__(self, token_ids: Iterable[int], images: Sequence[ImageSpan] = ()) -> None:
        super().__init__(token_ids)
        self.images = tuple(images)


class EncodedPrompt(list[int]):
    """Token ids of a text with one placeholder per image, which are others if images have crops.

    Args:
        token_ids: the token ids without crops.
        encode: function from the number of crops per image to the token ids with a placeholder for each crop, too.
    """

    def __init__(self, token_ids: Iterable[int], encode: Callable[[Sequence[int]], list[int]]) -> None:
        super().__init__(token_ids)
        self.encode = encode


def without_patches(spans: Iterable[ImageSpan]) -> tuple[ImageSpan, ...]:
    """Return a prompt's images without their patches."""
    return tuple(replace(span, image=span.image.with_patches()) for span in spans)


def num_patch_bytes(spans: Iterable[ImageSpan]) -> int:
    """Return the bytes of the patches in a prompt; an image counts once."""
    return sum({span.image.digest: span.image.num_bytes for span in spans}.values())


def count_embeddings(spans: Sequence[ImageSpan]) -> int:
    """Return the number of tokens that take an image's embedding."""
    return sum(span.image.num_embeddings for span in spans)
