"""Scanner of JSON in a text that is still growing: what grammars of calls are made of.

Its methods are generators that wait wherever the text ends, so that where the text was cut makes no difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

MAX_HEAD_CHARS = 512  # text between the marks of a call, or of a header

Steps = Generator[None, None, Any]
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,{}\[\]\"<`]+")
_CHARACTERS = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)  # inside of a string in JSON
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_STRUCTURE = re.compile(r'["\\{}\[\]]')


class NotACallError(Exception):
    """Sign that the text at hand is no call after all."""


class CutError(NotACallError):
    """Sign that the text has ended within what would be a call."""


@dataclass
class _Nesting:
    """Brackets that are open in JSON.

    Attributes:
        depth: their number.
        in_string: True inside a string.
        is_through: True once the first one is closed.
    """

    depth: int = 0
    in_string: bool = False
    is_through: bool = False

    def read(self, text: str, position: int) -> int:
        """Continue, and return the position after the last bracket, or up to which all is known."""
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
    """Scanner of JSON, and of the marks around it."""

    def __init__(self) -> None:
        self._text, self._position, self._is_end, self._is_cut = "", 0, False, False
        self._raw = ""  # text of a possible call

    def _feed(self, text: str, *, is_end: bool, is_cut: bool) -> None:
        self._text, self._position = self._text[self._position :] + text, 0
        self._is_end, self._is_cut = is_end, is_end and is_cut

    def _missing(self, wanted: str) -> NotACallError:
        """Return the error for a text that does not go on with what is wanted."""
        is_end = self._is_end and wanted.startswith(self._text[self._position :])
        return CutError() if is_end else NotACallError()

    def _nested(self, emit: Callable[[str, str], None] | None = None) -> Steps:
        """Take an object or a list, up to its last bracket, and return it.

        Args:
            emit: function that takes it in parts instead, each as all but the last bracket, and that.
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
        """Take a value, and return its JSON, as arguments have it: what a string says, and an object for nothing."""
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
        """Take a string of JSON of any length, and return what it says."""
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
        """Take a string of JSON, and return what it says."""
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
        """Take a text if it is the next, and return whether it is."""
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

    def _end_mark(self, mark: str) -> Steps:
        """Take a mark after a call if it is the next, or its beginning where the text is cut off."""
        if not (yield from self._literal(mark)):
            self._take_begun(mark)

    def _take_begun(self, mark: str) -> bool:
        """Take the beginning of a mark where the text is cut off in it, and return whether it is."""
        rest = self._text[self._position :]
        is_begun = self._is_cut and rest != "" and mark.startswith(rest)
        if is_begun:
            self._position = len(self._text)
        return is_begun
