"""Scanner for JSON in a growing text, with the building blocks for tool calls.

Its methods are generators that wait wherever the text ends, so that where the text was cut makes no difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

MAX_HEAD_CHARS = 512  # text between a call's or a header's delimiters

Steps = Generator[None, None, Any]
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,{}\[\]\"<`]+")
_CHARACTERS = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)  # inside of a string in JSON
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_STRUCTURE = re.compile(r'["\\{}\[\]]')


class NotACallError(Exception):
    """Sign that the text is no tool call after all."""


class CutError(NotACallError):
    """Sign that the text has ended within a possible tool call."""


@dataclass
class _Nesting:
    """Open brackets in JSON.

    Attributes:
        depth: their number.
        in_string: True inside a string.
        is_through: True after the first one is closed.
    """

    depth: int = 0
    in_string: bool = False
    is_through: bool = False

    def read(self, text: str, position: int) -> int:
        """Continue; return the position after the last bracket, or the end of the decided text."""
        while (found := _STRUCTURE.search(text, position)) is not None:
            sign, position = found.group(), found.end()
            if self.in_string:
                if sign == "\\":
                    if position == len(text):
                        return position - 1  # the next character decides
                    position += 1
                elif sign == '"':
                    self.in_string = False
            elif sign == '"':
                self.in_string = True
            else:
                self.depth += _DEPTH.get(sign, 0)
                if self.depth == 0:
                    self.is_through = True
                    return position
        return len(text)


class JsonScanner:
    """Scanner for JSON and the delimiters around it."""

    def __init__(self) -> None:
        self._text, self._position, self._is_end, self._is_cut = "", 0, False, False
        self._raw = ""  # text of a possible call

    def _feed(self, text: str, *, is_end: bool, is_cut: bool) -> None:
        self._text, self._position = self._text[self._position :] + text, 0
        self._is_end, self._is_cut = is_end, is_end and is_cut

    def _missing(self, wanted: str) -> NotACallError:
        """Return the error for a text that continues in another way than wanted."""
        is_end = self._is_end and wanted.startswith(self._text[self._position :])
        return CutError() if is_end else NotACallError()

    def _nested(self, emit: Callable[[str, str], None] | None = None) -> Steps:
        """Take an object or a list, up to its last bracket, and return it.

        Args:
            emit: function that takes it in parts instead: the text before the last bracket, and the bracket.
        """
        nesting, pieces = _Nesting(), []
        while True:
            start = self._position
            stop = nesting.read(self._text, start)
            if self._is_end and not nesting.is_through:
                stop = len(self._text)
            if emit is not None:
                self._position = stop
                last = stop - nesting.is_through
                emit(self._text[start:last], self._text[last:stop])
            else:
                pieces.append(self._take(stop - start))
            if nesting.is_through:
                return "".join(pieces)
            if self._is_end:
                raise CutError
            yield

    def _value(self) -> Steps:
        """Take a value, and return it as JSON arguments: a string's content, and an empty object for null."""
        character = yield from self._peek()
        if character == '"':
            text = (yield from self._long_string()).strip()
        elif character in ("{", "["):
            text = yield from self._nested()
        else:
            text = yield from self._matched(_SCALAR)
            if self._is_cut and self._position == len(self._text):
                raise CutError
        return "{}" if text in ("", "null") else text

    def _long_string(self) -> Steps:
        """Take a JSON string with any length, and return its content."""
        pieces = [self._take(1)]
        while True:
            pieces.append(self._take(_CHARACTERS.match(self._text, self._position).end() - self._position))  # type: ignore[union-attr]  # also matches nothing
            if self._text[self._position : self._position + 1] == '"':
                break
            if self._is_end:
                raise CutError
            yield
        try:
            return json.loads("".join(pieces) + self._take(1), strict=False)
        except ValueError:
            raise NotACallError from None

    def _string(self) -> Steps:
        """Take a JSON string, and return its content."""
        if (yield from self._peek()) != '"':
            raise self._missing('"')
        while (found := _STRING.match(self._text, self._position)) is None:
            if len(self._text) - self._position > MAX_HEAD_CHARS:
                raise NotACallError
            if self._is_end:
                raise CutError
            yield
        if len(found.group()) > MAX_HEAD_CHARS:
            raise NotACallError
        try:
            return json.loads(self._take(len(found.group())), strict=False)
        except ValueError:
            raise NotACallError from None

    def _space(self) -> Steps:
        return (yield from self._matched(_SPACE))

    def _matched(self, pattern: re.Pattern[str]) -> Steps:
        """Take characters as long as they match, and return them."""
        pieces = []
        while True:
            found = pattern.match(self._text, self._position)
            if found is not None:
                pieces.append(self._take(len(found.group())))
            if self._position < len(self._text) or self._is_end:
                return "".join(pieces)
            yield

    def _peek(self) -> Steps:
        """Return the next character; none at the end."""
        while self._position == len(self._text) and not self._is_end:
            yield
        return self._text[self._position : self._position + 1]

    def _literal(self, wanted: str) -> Steps:
        """Take a text if it comes next; return whether it does."""
        while True:
            rest = self._text[self._position : self._position + len(wanted)]
            if rest == wanted:
                self._take(len(wanted))
                return True
            if self._is_end or not wanted.startswith(rest):
                return False
            yield

    def _take(self, num_chars: int) -> str:
        text = self._text[self._position : self._position + num_chars]
        self._position += num_chars
        self._raw += text
        return text

    def _end_delimiter(self, delimiter: str) -> Steps:
        """Consume the delimiter that closes a tool call if it comes next; if the text is cut off inside it, consume
        that part.
        """
        if not (yield from self._literal(delimiter)):
            self._take_begun(delimiter)

    def _take_begun(self, delimiter: str) -> bool:
        """Take a delimiter's beginning if the text is cut off in it; return whether it is."""
        rest = self._text[self._position :]
        is_begun = self._is_cut and rest != "" and delimiter.startswith(rest)
        if is_begun:
            self._position = len(self._text)
        return is_begun
