"""Images in saved sessions: a description in the session's file, and their patches in a file beside it.

Pages with images are found by the images' digests. Their patches are needed if such pages are missing.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.errors import RequestError
from jaxserve.images.prepared import NO_PATCHES, ImageSpan, PreparedImage

if TYPE_CHECKING:
    from pathlib import Path


def to_json(span: ImageSpan) -> list[Any]:
    """Return an image without its patches, in types that JSON has."""
    image = span.image
    return [image.digest.hex(), image.grid, image.num_embeddings, image.size, span.start, span.tokens.tolist()]


def from_json(
    digest: str, grid: Sequence[int], num_embeddings: int, size: Sequence[int], start: int, tokens: Sequence[int]
) -> ImageSpan:
    """Return the image that `to_json` has written, without its patches."""
    (rows, columns), (height, width) = grid, size
    image = PreparedImage(bytes.fromhex(digest), NO_PATCHES, (rows, columns), num_embeddings, (height, width))
    return ImageSpan(image, start, np.array(tokens, np.int32))


def content_name(spans: Iterable[ImageSpan]) -> str:
    """Return a name for the patches of some images; it is different for other images."""
    return blake2b(b"".join(sorted({span.image.digest for span in spans})), digest_size=8).hexdigest()


def pack_patches(spans: Iterable[ImageSpan]) -> bytes:
    """Return the content of a file with the images' patches."""
    file = io.BytesIO()
    arrays = {span.image.digest.hex(): span.image.patches for span in spans}
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy's stub has the arrays as one argument
    return file.getvalue()


def read_patches(spans: Iterable[ImageSpan], path: Path) -> tuple[ImageSpan, ...]:
    """Return images with the patches in a file; RequestError if the file lacks some or is damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            patches = {name: arrays[name] for name in arrays}
        return tuple(replace(each, image=each.image.with_patches(patches[each.image.digest.hex()])) for each in spans)
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RequestError(
            f"the images of a saved session must be readable, but: {error}; send the conversation again"
        ) from error
