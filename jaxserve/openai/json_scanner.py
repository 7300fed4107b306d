"""Scanner for JSON in a growing text, with the building blocks for tool calls.

Its methods are generators that yield whenever they need more text, so that where the text was cut makes no difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

MAX_HEAD_CHARS = 512  # text between a call's or a header's delimiters

Steps = Generator[None, None, Any]  # yields to wait for more text, and returns the scanned value
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,{}\[\]\"<`]+")
_CHARACTERS = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)  # inside of a string in JSON
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_STRUCTURE = re.compile(r'["\\{}\[\]]')


class NotACallError(Exception):
    """Error if the text at the position is no tool call after all."""


class CutError(NotACallError):
    """Error if the text has ended inside a possible tool call."""


@dataclass
class _Nesting:
    """Incremental search for the bracket that closes a JSON object or list.

    Attributes:
        depth: number of open brackets.
        in_string: True inside a string.
        is_through: True once the first bracket is closed.
    """

    depth: int = 0
    in_string: bool = False
    is_through: bool = False

    def read(self, text: str, position: int) -> int:
        """Continue the search at a position in `text`; return the position after the closing bracket.

        Without that bracket, return the position at which to continue once there is more text.
        """
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
    """Scanner for JSON and the delimiters around it, at a position in a growing text."""

    def __init__(self) -> None:
        self._text, self._position, self._is_end, self._is_cut = "", 0, False, False
        self._raw = ""  # text taken of a possible call

    def _feed(self, text: str, *, is_end: bool, is_cut: bool) -> None:
        """Append text, and drop the text before the position; flags as in `Scanner.scan`."""
        self._text, self._position = self._text[self._position :] + text, 0
        self._is_end, self._is_cut = is_end, is_end and is_cut

    def _missing(self, wanted: str) -> NotACallError:
        """Return the error for a position at which `wanted` does not come: CutError if the text ends inside it."""
        is_end = self._is_end and wanted.startswith(self._text[self._position :])
        return CutError() if is_end else NotACallError()

    def _nested(self, emit: Callable[[str, str], None] | None = None) -> Steps:
        """Take a JSON object or list, up to its last bracket, and return its text.

        Args:
            emit: function that receives the text in parts instead, as it comes: the new text before the last bracket,
                and the last bracket if it has come.
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
        """Take a JSON value, and return it as the text of a call's arguments: a string's content, and {} for null."""
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
        """Take a JSON string of any length, and return its content."""
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
        """Take a JSON string of at most MAX_HEAD_CHARS characters, and return its content."""
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
        """Take white space, and return it."""
        return (yield from self._matched(_SPACE))

    def _matched(self, pattern: re.Pattern[str]) -> Steps:
        """Take the text that matches a pattern, as long as more of it comes, and return it."""
        pieces = []
        while True:
            found = pattern.match(self._text, self._position)
            if found is not None:
                pieces.append(self._take(len(found.group())))
            if self._position < len(self._text) or self._is_end:
                return "".join(pieces)
            yield

    def _peek(self) -> Steps:
        """Return the next character without taking it; empty at the end of the text."""
        while self._position == len(self._text) and not self._is_end:
            yield
        return self._text[self._position : self._position + 1]

    def _literal(self, wanted: str) -> Steps:
        """Take the text `wanted` if it comes next; return whether it does."""
        while True:
            rest = self._text[self._position : self._position + len(wanted)]
            if rest == wanted:
                self._take(len(wanted))
                return True
            if self._is_end or not wanted.startswith(rest):
                return False
            yield

    def _take(self, num_chars: int) -> str:
        """Move the position over some characters, and return them; they also become part of `_raw`."""
        text = self._text[self._position : self._position + num_chars]
        self._position += num_chars
        self._raw += text
        return text

    def _end_delimiter(self, delimiter: str) -> Steps:
        """Take a delimiter after a tool call if it comes next, or its beginning if the text is cut off inside it."""
        if not (yield from self._literal(delimiter)):
            self._take_begun(delimiter)

    def _take_begun(self, delimiter: str) -> bool:
        """Take the beginning of a delimiter if the text is cut off inside it; return whether it is."""
        rest = self._text[self._position :]
        is_begun = self._is_cut and rest != "" and delimiter.startswith(rest)
        if is_begun:
            self._position = len(self._text)
        return is_begun
