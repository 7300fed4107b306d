"""M-RoPE: positions in time, height and width for the tokens of a prompt with images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxserve.images.prepared import ImageSpan


def axis_positions(num_tokens: int, spans: Sequence[ImageSpan]) -> tuple[NDArray[np.int32], int]:
    """Return the positions int32 [3, num_tokens], and the number to add to the index of each later token.

    Text tokens have the same position on all axes. An image's tokens have their row and column, counted from the
    position where it starts; the text after it continues at the largest of these.

    Args:
        num_tokens: prompt tokens.
        spans: the prompt's images.
    """
    positions = np.empty((3, num_tokens), np.int32)
    start = position = 0
    for span in spans:
        position = _fill_text(positions, start, span.start, position)
        merge = math.isqrt(len(span.image.patches) // span.image.num_embeddings)
        rows, columns = (side // merge for side in span.image.grid)
        own = positions[:, span.start : span.end]
        own[0] = position
        own[1] = position + np.repeat(np.arange(rows, dtype=np.int32), columns)
        own[2] = position + np.tile(np.arange(columns, dtype=np.int32), rows)
        start, position = span.end, position + max(rows, columns)
    return positions, _fill_text(positions, start, num_tokens, position) - num_tokens


def _fill_text(positions: NDArray[np.int32], start: int, end: int, position: int) -> int:
    """Number the text tokens from `start` to `end`, beginning with `position`; return the next position."""
    positions[:, start:end] = np.arange(position, position + end - start, dtype=np.int32)
    return position + end - start
