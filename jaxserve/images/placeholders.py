"""Placeholders: the tokens that stand for images in prompts, one per image or already expanded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import RequestError
from jaxserve.images.prepared import ImageSpan, PreparedImage

TokenIds = list[int]

# Gemma 3's text before an image with crops, between the two, and between crops
_CROP_TEXTS = "Here is the original image ", " and here are some crops to help you see better ", " "


@dataclass(frozen=True)
class Placeholders:
    """A family's tokens for images.

    Attributes:
        token_id: placeholder, and the id of all tokens that take an embedding.
        before: tokens before an image's own, which are inserted if they are missing.
        after: likewise, after them.
        row_end: token after each row of embeddings but the last; None without.
        image_end: token after the last row.
        block_size: side of the patch blocks that become one embedding, if rows end in tokens.
        written: text that stands for an image in a text prompt, or in a chat whose template writes none.
        encoded: text that replaces it before the prompt is encoded; empty if it stays.
        encode: function from a text to its token ids, without special tokens around it; None without a tokenizer.
    """

    token_id: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    row_end: int | None = None
    image_end: int = 0
    block_size: int = 1
    written: str = ""
    encoded: str = ""
    encode: Callable[[str], TokenIds] | None = field(default=None, compare=False)

    def tokens(self, image: PreparedImage) -> tuple[TokenIds, NDArray[np.int32]]:
        """Return the tokens of one image, and the indices of those that take an embedding."""
        if self.row_end is None:
            count = image.num_embeddings
            return [self.token_id] * count, np.arange(count, dtype=np.int32)
        rows, columns = (side // self.block_size for side in image.grid)
        token_ids = ([self.token_id] * columns + [self.row_end]) * rows
        token_ids[-1] = self.image_end
        indices = np.arange(rows * columns, dtype=np.int32)
        return token_ids, indices + indices // np.int32(columns)

    def check_count(self, token_ids: TokenIds, num_images: int) -> None:
        """Raise RequestError if a prompt cannot have this number of images, whatever their sizes."""
        num_found = token_ids.count(self.token_id)
        if num_found < num_images or (num_images == 0 and num_found):
            raise RequestError(self._wrong_count(num_found, num_images))

    def _wrong_count(self, num_found: int, num_images: int) -> str:
        """Return the error message for a prompt with another number of placeholders than images."""
        return (
            f"a prompt must have one placeholder, token id {self.token_id}, per image, got {num_found} of them in the "
            f"prompt and {num_images} images in multi_modal_data"
        )

    def expand(self, token_ids: TokenIds, images: Sequence[PreparedImage]) -> tuple[TokenIds, tuple[ImageSpan, ...]]:
        """Return a prompt in which each image has all its tokens, and the images' positions.

        Args:
            token_ids: prompt with one placeholder per image, or one that is already expanded.
            images: its images, in order.

        Raises:
            RequestError: it has another number of placeholders.
        """
        found = [index for index, token_id in enumerate(token_ids) if token_id == self.token_id]
        made = [self.tokens(image) for image in images]
        if (spans := self._expanded(token_ids, found, images, made)) is not None:
            return token_ids, spans
        if len(found) != len(images):
            sizes = ", ".join(str(image.num_embeddings) for image in images)
            expanded = f", or {sizes} of them in a prompt that is already expanded" if images else ""
            raise RequestError(self._wrong_count(len(found), len(images)) + expanded)
        result: TokenIds = []
        placed, end = [], 0
        for index, image, (own, indices) in zip(found, images, made, strict=True):
            result += token_ids[end:index]
            if self.before and tuple(result[-len(self.before) :]) != self.before:
                result += self.before
            placed.append(ImageSpan(image, len(result), indices))
            result += own
            end = index + 1
            if self.after and tuple(token_ids[end : end + len(self.after)]) != self.after:
                result += self.after
        return result + token_ids[end:], tuple(placed)

    def _expanded(
        self,
        token_ids: TokenIds,
        found: Sequence[int],
        images: Sequence[PreparedImage],
        made: Sequence[tuple[TokenIds, NDArray[np.int32]]],
    ) -> tuple[ImageSpan, ...] | None:
        """Return the images' positions in a prompt that has all their tokens; None if it has not.

        Args:
            token_ids: prompt.
            found: indices of its placeholders.
            images: its images.
            made: their tokens, from `tokens`.
        """
        if len(found) != sum(len(indices) for _, indices in made):
            return None
        placed, next_found = [], 0
        for image, (own, indices) in zip(images, made, strict=True):
            start = found[next_found]
            if token_ids[start : start + len(own)] != own:
                return None
            placed.append(ImageSpan(image, start, indices))
            next_found += len(indices)
        return tuple(placed)

    def with_crops(self, token_ids: TokenIds, counts: Iterable[int]) -> TokenIds:
        """Return a prompt with a placeholder for each crop, too, and with the text around crops.

        Args:
            token_ids: prompt with one placeholder per image.
            counts: number of crops per image.

        Raises:
            RequestError: there is no tokenizer for the text.
        """
        if self.encode is None:
            raise RequestError("an image with crops needs a tokenizer; set do_pan_and_scan to false")
        edge = self.encoded.partition(self.written)[0]
        first, middle, between = _CROP_TEXTS
        first, middle, between = first + edge, edge + middle + edge, edge + between + edge
        result, rest, left = TokenIds(), iter(counts), token_ids
        while self.token_id in left:
            index, count = left.index(self.token_id), next(rest)
            before, left = left[:index], left[index + 1 :]
            if not count:
                result += [*before, self.token_id]
                continue
            if self.before and tuple(before[-len(self.before) :]) == self.before:
                before = before[: -len(self.before)]
            if self.after and tuple(left[: len(self.after)]) == self.after:
                left = left[len(self.after) :]
            texts = [first, middle, *[between] * (count - 1)]
            result += [*before, *chain.from_iterable([*self.encode(text), self.token_id] for text in texts)]
        return result + left

    def in_text(self, text: str, counts: Iterable[int] = (), marked: str | None = None) -> str:
        """Return a text as it is encoded if the prompt has images.

        Args:
            text: text prompt, or rendered chat.
            counts: number of crops per image; none by default.
            marked: the same with stand-ins for characters in client-written special tokens, which are no placeholders;
                None if they are.
        """
        if not self.encoded:
            return text
        marked = text if marked is None else marked
        parts, start, rest = [], 0, chain(counts, repeat(0))
        first, middle, between = _CROP_TEXTS
        while (index := marked.find(self.written, start)) >= 0:
            count = next(rest)
            crops = between.join([self.encoded] * count)
            parts += [text[start:index], f"{first}{self.encoded}{middle}{crops}" if count else self.encoded]
            start = index + len(self.written)
        return "".join([*parts, text[start:]])
