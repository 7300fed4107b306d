"""Reader for JSON that has been cut off."""

from __future__ import annotations

import json
import re
from typing import Any

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*("?)|[\[\]{},:]', re.DOTALL)  # a string, perhaps cut off, or punctuation
_CLOSING = {"{": "}", "[": "]"}


def read_partial_json(text: str) -> Any:
    """Parse JSON text that may have been cut off; a string, key or word that was cut off is left out.

    Raises:
        ValueError: the text is not the beginning of a list or an object.
    """
    for prefix in (text, *_closed_prefixes(text)):
        try:
            return json.loads(prefix)
        except ValueError:
            continue
    raise ValueError(f"not the beginning of a list or an object in JSON: {text[:100]!r}")


def _closed_prefixes(text: str) -> tuple[str, str]:
    """Return the whole text, and its longest prefix that ends after a complete value or an opening bracket.

    Both are returned with their missing closing brackets added.
    """
    closing: list[str] = []  # brackets that are still missing, the last one first
    end, brackets = 0, ""
    is_key = False  # True if a string would be an object's key
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token[0] == '"':
            if is_key or not match.group(1):
                continue
        elif token == ":":
            is_key = False
            continue
        elif token == ",":
            is_key = closing[-1:] == ["}"]
            end, brackets = match.start(), "".join(reversed(closing))
            continue
        elif token in _CLOSING:
            closing.append(_CLOSING[token])
            is_key = token == "{"
        elif closing:
            closing.pop()
        end, brackets = match.end(), "".join(reversed(closing))
    return text + "".join(reversed(closing)), text[:end] + brackets
