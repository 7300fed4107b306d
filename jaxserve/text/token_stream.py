"""Incremental detokenisation: text that a stream has returned never changes."""

import codecs
import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from jaxserve.api.token_ids import TokenIds

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ByteTable:
    """Table of each token's bytes, for tokenizers whose decoder concatenates them.

    Args:
        token_text: function from a token id to its vocabulary entry; None for unknown ids.
        to_bytes: function from a vocabulary entry to bytes.
        strip_left: number of leading spaces that the decoder removes.

    Attributes:
        strip_left: number of leading spaces that the decoder removes.
    """

    def __init__(
        self, token_text: Callable[[int], str | None], to_bytes: Callable[[str], bytes], strip_left: int
    ) -> None:
        self._token_text = token_text
        self._to_bytes = to_bytes
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self.strip_left = strip_left

    def __getitem__(self, token_id: int) -> bytes:
        """Return a token's bytes; none for ids outside the vocabulary."""
        if (found := self._known.get(token_id)) is None:
            text = self._token_text(token_id)
            found = self._known[token_id] = b"" if text is None else self._to_bytes(text)
        return found

    def text(self, token_id: int) -> str | None:
        """Return a token's text if its bytes are whole characters; None otherwise."""
        if token_id not in self._texts:
            try:
                self._texts[token_id] = self[token_id].decode()
            except UnicodeDecodeError:
                self._texts[token_id] = None
        return self._texts[token_id]

    @classmethod
    def from_backend(cls, backend: tokenizers.Tokenizer) -> "ByteTable | None":
        """Return a tokenizer's table; None if its decoder does more than concatenate bytes.

        Tokenizers that are byte-level (GPT-2, Llama 3, Qwen) or fall back to bytes (Llama 2, Mistral, Gemma) have one.
        """
        match json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None:
            case {"type": "ByteLevel"}:
                alphabet = _byte_level_alphabet()
                return cls(backend.id_to_token, lambda text: _byte_level_bytes(text, alphabet), 0)
            case {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    *rest,
                ],
            } if (strip_left := _strip_left(rest)) is not None:
                return cls(backend.id_to_token, lambda text: _fallback_bytes(text, old, new), strip_left)
        return None


def _strip_left(steps: list[dict[str, Any]]) -> int | None:
    """Return the number of leading spaces that a decoder's last steps remove; None if they do anything else."""
    match steps:
        case []:
            return 0
        case [{"type": "Strip", "content": " ", "start": int(start), "stop": 0}]:
            return start
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Return the character -> byte table in GPT-2's byte-level BPE (`bytes_to_unicode` in its encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _byte_level_bytes(text: str, alphabet: dict[str, int]) -> bytes:
    """Return the bytes for a vocabulary entry of a byte-level tokenizer, whose alphabet is character -> byte."""
    try:
        return bytes([alphabet[c] for c in text])
    except KeyError:  # added tokens are plain text
        return text.encode()


def _fallback_bytes(text: str, old: str, new: str) -> bytes:
    """Return the bytes for a vocabulary entry with byte fallback: of a byte's name, or with `old` replaced by `new`."""
    if re.fullmatch("<0x[0-9A-F]{2}>", text):
        return bytes([int(text[3:5], 16)])
    return text.replace(old, new).encode()


class ByteStream:
    """Incremental detokenizer that decodes the tokens' bytes as UTF-8: exact, and O(1) per token.

    For byte-level vocabularies the text equals that of `decode`, also for bytes that are not UTF-8. A byte-fallback
    decoder turns a whole run of byte tokens into U+FFFD if one of them is invalid; here only the invalid ones become
    U+FFFD, because valid ones may already be visible.

    Args:
        table: bytes by token id.
        hidden: ids that add no text.
        context: tokens before the text.
    """

    def __init__(self, table: ByteTable, hidden: frozenset[int], context: TokenIds) -> None:
        self._table = table
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in context:  # the last may be an incomplete character
            self._decoder.decode(table[token_id])
        self._strip = 0 if context else table.strip_left

    def push(self, token_id: int) -> str:
        """Append a token; return the text that is final with it, often none."""
        return "" if token_id in self._hidden else self._stripped(self._decoder.decode(self._table[token_id]))

    def peek(self, token_id: int) -> str:
        """Return the text that `push` would return for a token, without changing the stream."""
        state, strip = self._decoder.getstate(), self._strip
        if not (strip or state[0] or token_id in self._hidden) and (text := self._table.text(token_id)) is not None:
            return text
        text = self.push(token_id)
        self._decoder.setstate(state)
        self._strip = strip
        return text

    def finish(self) -> str:
        """Return the remaining text, which is an incomplete character."""
        return self._stripped(self._decoder.decode(b"", True))

    def _stripped(self, text: str) -> str:
        """Return the next text without those leading spaces that the decoder removes from the whole text."""
        taken = min(self._strip, len(text) - len(text.lstrip(" ")))
        if text:
            self._strip = self._strip - taken if taken == len(text) else 0
        return text[taken:]


class WindowStream:
    """Incremental detokenizer for any decoder: a token's text is the difference to the text without it.

    This is the prefix/read-offset algorithm of Hugging Face's text-generation-inference: the most recent tokens are
    decoded again together with the new ones, to give the decoder context (spaces, "##" pieces). U+FFFD at the end may
    be the first bytes of a character: it is held back until four tokens, the most a character can take, have not
    completed it.

    Args:
        decode: function from token ids to their text.
        hidden: ids that add no text.
        context: tokens before the text.
    """

    def __init__(self, decode: Callable[[TokenIds], str], hidden: frozenset[int], context: TokenIds) -> None:
        self._decode = decode
        self._hidden = hidden
        num_whole = len(context)
        while num_whole and len(context) - num_whole < 3 and decode(context[:num_whole]).endswith(REPLACEMENT):
            num_whole -= 1
        self._context, self._pending = context[:num_whole], context[num_whole:]
        self._context_len = len(decode(self._context))

    def push(self, token_id: int) -> str:
        """Append a token; return the text that is final with it, often none."""
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < 4:
            return ""
        return self._accept(text)

    def peek(self, token_id: int) -> str:
        """Return the text that `push` would return for a token, without changing the stream."""
        state = self._context, self._context_len, self._pending
        self._pending = list(self._pending)
        text = self.push(token_id)
        self._context, self._context_len, self._pending = state
        return text

    def finish(self) -> str:
        """Return the remaining text, which is an incomplete character."""
        return self._accept(self._decode(self._context + self._pending))

    def _accept(self, text: str) -> str:
        """Make the pending tokens the new context; return their part of `text`, which begins with the old context."""
        new = text[self._context_len :]
        if self._pending:
            self._context, self._pending = self._pending, []
            self._context_len = len(self._decode(self._context))
        return new
