"""Placeholders by model family, from config.json, processor_config.json and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.images.layouts import BoundedLayout, Layout
from jaxserve.images.placeholders import Placeholders

TokenId = Callable[[str], int | None]
TokenText = Callable[[int], str]


def read_placeholders(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    token_id: int,
    layout: Layout,
    find_id: TokenId,
    find_text: TokenText,
    encode: Callable[[str], list[int]] | None = None,
) -> Placeholders:
    """Return the tokens that a model has for images.

    Args:
        config: the model's config.json.
        processor: content of processor_config.json; {} without one.
        token_id: id of the tokens that take embeddings.
        layout: the model's layout of patches.
        find_id: function from a token to its id; None for unknown ones.
        find_text: function from a token's id to its text; an empty text without a tokenizer.
        encode: function from a text to its token ids, without special tokens around it; None without a tokenizer.

    Raises:
        ConfigError: the tokenizer lacks one of them.
    """
    written = find_text(token_id)
    if isinstance(layout, BoundedLayout):
        row_end, image_end = (
            _special(processor.get(f"image_{name}_token") or f"[IMG_{name.upper()}]", find_id)
            for name in ("break", "end")
        )
        return Placeholders(
            token_id, row_end=row_end, image_end=image_end, block_size=layout.block_size, written=written
        )
    name = str((config.get("architectures") or [""])[0])
    if not name.startswith("Gemma"):
        return Placeholders(token_id, written=written)
    is_fourth = name.startswith("Gemma4")
    begin = _id(config, "boi_token", 255_999)
    end = _id(config, "eoi_token", 258_882 if is_fourth else 256_000)
    if is_fourth or not (begin_text := find_text(begin)):
        return Placeholders(token_id, (begin,), (end,), written=written)
    # Gemma 3's templates write the first delimiter; its processor puts the image into a paragraph of its own, whose
    # line breaks may join those around it in one token.
    encoded = f"\n\n{begin_text}{written}{find_text(end)}\n\n"
    return Placeholders(token_id, (begin,), (end,), written=begin_text, encoded=encoded, encode=encode)


def _id(config: Mapping[str, Any], name: str, default: int) -> int:
    """Return a token's id in a config, under one of its two names."""
    given = (config.get(f"{name}_{suffix}") for suffix in ("index", "id"))
    found = next((each for each in given if each is not None), default)
    if not isinstance(found, int) or isinstance(found, bool):
        raise ConfigError(f"config.json: {name}_id must be an integer, got {found!r}")
    return found


def _special(token: object, find_id: TokenId) -> int:
    """Return a special token's id; ConfigError if the tokenizer has none."""
    found = find_id(token) if isinstance(token, str) else None
    if found is None:
        raise ConfigError(f"the tokenizer must have the token {token!r}, which ends rows of images, and has none")
    return found
