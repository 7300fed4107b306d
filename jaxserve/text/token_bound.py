"""TokenBound: minimum number of tokens in a text, without encoding it.

A prompt of megabytes takes seconds to encode, only to be refused for its length. A token covers at most as many
characters as the longest token text, unless the tokenizer drops or composes characters: white space next to some
special tokens is dropped, and normalisation may compose characters. Tokenizers that drop others, such as those with an
unknown token, have no bound.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import tokenizers

_COMPOSED = 4  # maximum characters that NFC and NFKC compose to one (Unicode's longest canonical decomposition)
_PART_CHARS = 2**16  # characters per C call
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}  # they drop nothing
_DROPPING_SPACES = {"Whitespace", "WhitespaceSplit"}


@dataclass(frozen=True, slots=True)
class TokenBound:
    """Lower bound on the number of tokens in a text, by its characters.

    Attributes:
        max_chars: maximum characters per token; None if unknown.
        drops_spaces: True if white space may be dropped.
    """

    max_chars: int | None = None
    drops_spaces: bool = False

    @classmethod
    def from_backend(cls, backend: tokenizers.Tokenizer) -> TokenBound:
        """Return the bound for a tokenizer of the `tokenizers` library."""
        composed = _composed_chars(_state(backend.normalizer))
        drops_spaces = _drops_spaces(_state(backend.pre_tokenizer))
        if composed is None or drops_spaces is None or not _has_all_bytes(backend):
            return cls()
        drops_spaces |= any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        return cls(composed * longest, drops_spaces)

    def num_tokens(self, text: str) -> int:
        """Return the minimum number of tokens in a text; 0 if there is no bound."""
        if self.max_chars is None:
            return 0
        num_chars = len(text)
        if self.drops_spaces:
            starts = range(0, num_chars, _PART_CHARS)
            num_chars = sum(sum(map(len, text[start : start + _PART_CHARS].split())) for start in starts)
        return -(-num_chars // self.max_chars)


NO_BOUND = TokenBound()


def _state(step: Any) -> dict[str, Any] | None:
    """Return the configuration of a tokenizer's step, as in `tokenizer.json`."""
    return None if step is None else json.loads(step.__getstate__())


def _has_all_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Return whether a tokenizer has a token for every byte, so that no text needs an unknown token."""
    model = backend.model
    if getattr(model, "byte_fallback", False):
        return all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    state = json.dumps([_state(backend.pre_tokenizer), _state(backend.normalizer)])
    if "ByteLevel" not in state or not isinstance(model, tokenizers.models.BPE):
        return False
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return all(backend.token_to_id(each) is not None for each in alphabet)


def _composed_chars(normalizer: dict[str, Any] | None) -> int | None:
    """Return the maximum number of characters that a normalizer composes to one; None if it may drop characters."""
    match normalizer:
        case None | {"type": "Prepend" | "NFD" | "NFKD" | "Lowercase" | "ByteLevel"}:
            return 1
        case {"type": "NFC" | "NFKC"}:
            return _COMPOSED
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(new) >= len(old):
            return 1
        case {"type": "Sequence", "normalizers": list(steps)}:
            factors = [_composed_chars(step) for step in steps]
            known = [factor for factor in factors if factor is not None]
            return math.prod(known) if len(known) == len(factors) else None
    return None


def _drops_spaces(step: dict[str, Any] | None) -> bool | None:
    """Return whether a pre-tokenizer drops white space; None if it may drop anything else."""
    match step:
        case None:
            return False
        case {"type": str(name)} if name in _KEEPING:
            return False
        case {"type": str(name)} if name in _DROPPING_SPACES:
            return True
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return None if behavior == "Removed" else False
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            found = [_drops_spaces(each) for each in steps]
            return None if None in found else any(found)
    return None
