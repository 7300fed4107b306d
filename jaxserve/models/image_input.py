"""ImageInput: the images that a decoder takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxserve.models.vision.arch import VisionArch


class ImageInput(NamedTuple):
    """Images that a decoder takes.

    Attributes:
        token_id: id of the tokens that take an image's embeddings.
        tower: vision tower that makes them.
        has_axes: True if the tokens have positions on several axes (M-RoPE).
        pad_id: id that they have where layers read ids themselves.
    """

    token_id: int
    tower: VisionArch
    has_axes: bool = False
    pad_id: int = 0

    @property
    def num_deep_layers(self) -> int:
        """Number of the decoder's first layers that get features of their own (DeepStack)."""
        return self.tower.num_features - 1
