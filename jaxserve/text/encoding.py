"""Encoding of long texts while other threads run Python."""

from __future__ import annotations

import tokenizers

from jaxserve.api.token_ids import TokenIds

LONG_TEXT_CHARS = 8192  # longer texts are tokenised without Python's global lock


def encode_freely(
    backend: tokenizers.Tokenizer, text: str | tuple[str, str], num_chars: int, *, add_special_tokens: bool
) -> TokenIds:
    """Return the token ids for a text, or a pair of texts, while other threads run if it is long.

    Args:
        backend: tokenizer.
        text: text, or pair of texts for one prompt.
        num_chars: total number of characters.
        add_special_tokens: True to add the model's special tokens around the prompt.
    """
    if num_chars >= LONG_TEXT_CHARS:
        # Freeing offsets would block all other threads for tens of milliseconds.
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    first, second = (text, None) if isinstance(text, str) else text
    return backend.encode(first, second, add_special_tokens=add_special_tokens).ids
