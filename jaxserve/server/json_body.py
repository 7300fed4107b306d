"""JSON parser for bodies, with limits, which does not halt other threads.

Python's parser in C holds the interpreter's lock from the first byte to the last: 8 MB of small lists take seconds, and
no other thread continues meanwhile. So the parser in Python reads a long body, on another thread; it leaves only short
parts to C, and texts, which are fast. It counts, and refuses a body that is nested too deeply or has too many values.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]  # as long as Python has had json
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # the same in all versions since 2.7
from typing import Any

from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError

SHORT_BODY_BYTES = 16384  # a body up to this size is parsed by C
MAX_ITEMS = 2**18  # lists, objects and their elements, without numbers in lists
MAX_FIELDS = 1024  # top-level fields; no request has a tenth of them

_MAX_SHARED = 4096  # field names that objects share

# Numbers in a list, each with its comma; C reads this many in a fraction of a millisecond.
_NUMBERS = re.compile(r"(?:[ \t\n\r]*-?\d{1,18}[ \t\n\r]*,){1,4096}+")
_SPACE = re.compile(r"[ \t\n\r]*")


def parse_json(body: bytes, max_depth: int) -> dict[str, Any]:
    """Return the JSON object in a body; BadRequestError if there is none, or it is too large or too deeply nested."""
    try:
        if len(body) <= SHORT_BODY_BYTES:
            content = json.loads(body, parse_constant=_refuse_constant)
        else:
            content = _Decoder(max_depth).decode(body.decode())
    except BadRequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"a body must be JSON, but: {error}", None, "invalid_json") from None
    if not isinstance(content, dict):
        raise BadRequestError(f"a body must be a JSON object, got {type(content).__name__}", None, "invalid_json")
    if body.count(b"[") + body.count(b"{") > max_depth and not _is_shallow(content, max_depth):
        raise _too_deep(max_depth)
    return content


class _Decoder(json.JSONDecoder):
    """JSON parser in Python, which lets other threads run, and which limits nesting and the number of values.

    Args:
        max_depth: maximum nesting.
    """

    def __init__(self, max_depth: int) -> None:
        super().__init__(parse_constant=_refuse_constant)
        self._max_depth, self._depth, self._num_items = max_depth, 0, 0
        self.parse_object = self._parse_object
        self.parse_array = self._parse_array
        self._scan = py_make_scanner(self)
        self.scan_once = self._scan_once

    def _scan_once(self, text: str, start: int) -> Any:
        """Count a value, and return it and the position after it; BadRequestError if there are too many."""
        self._num_items += 1
        if self._num_items > MAX_ITEMS:
            raise BadRequestError(
                f"a body must have at most {MAX_ITEMS} values; send less at once", None, "too_large", 413
            )
        return self._scan(text, start)

    def _enter(self) -> None:
        """Count a level of nesting; BadRequestError if there are too many."""
        self._depth += 1
        if self._depth > self._max_depth:
            raise _too_deep(self._max_depth)

    def _parse_object(
        self, start: tuple[str, int], strict: bool, scan_once: Any, hook: Any, pairs_hook: Any, memo: dict[str, str]
    ) -> Any:
        """Return the object that begins before `start`, (text, position), and the position after it.

        Python's own function, whose signature this is, would make the dict in one call to C.
        """
        self._enter()
        text, position = start
        found: dict[str, Any] = {}
        position = _after_space(text, position)
        if text[position : position + 1] == "}":
            self._depth -= 1
            return found, position + 1
        while True:
            if text[position : position + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, position)
            name, position = scanstring(text, position + 1, strict)
            if len(memo) < _MAX_SHARED:
                name = memo.setdefault(name, name)
            position = _after_space(text, position)
            if text[position : position + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", text, position)
            found[name], position = self._value(text, _after_space(text, position + 1))
            if self._depth == 1 and len(found) > MAX_FIELDS:
                message = f"a body must have at most {MAX_FIELDS} fields, got more, as {brief(name)}"
                raise BadRequestError(message, None, "unsupported_parameter")
            position = _after_space(text, position)
            following = text[position : position + 1]
            position += 1
            if following == "}":
                self._depth -= 1
                return found, position
            if following != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, position - 1)
            position = _after_space(text, position)

    def _value(self, text: str, start: int) -> tuple[Any, int]:
        """Return the value at a position, and the position after it; JSONDecodeError if there is none."""
        try:
            value, position = self._scan_once(text, start)
        except StopIteration as error:
            raise json.JSONDecodeError("Expecting value", text, error.value) from None
        return value, position

    def _parse_array(self, start: tuple[str, int], scan_once: Any) -> Any:
        """Return the list that begins before `start`, (text, position), and the position after it."""
        self._enter()
        text, position = start
        values: list[Any] = []
        position = _after_space(text, position)
        if text[position : position + 1] == "]":
            self._depth -= 1
            return values, position + 1
        while True:
            if (numbers := _NUMBERS.match(text, position)) is not None:
                values += json.loads(f"[{text[position : numbers.end() - 1]}]")
                position = _after_space(text, numbers.end())
            value, position = self._value(text, position)
            values.append(value)
            position = _after_space(text, position)
            following = text[position : position + 1]
            position += 1
            if following == "]":
                self._depth -= 1
                return values, position
            if following != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, position - 1)
            position = _after_space(text, position)


def _after_space(text: str, position: int) -> int:
    """Return the position of the first character from `position` on that is not white space."""
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]  # never None: the empty string matches


def _is_shallow(content: dict[str, Any], max_depth: int) -> bool:
    """Return whether lists and objects in `content` are nested at most `max_depth` deep."""
    level: list[Any] = [content]
    for _ in range(max_depth):
        values = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return True
    return False


def _too_deep(max_depth: int) -> BadRequestError:
    """Return the error for a body that is nested more than `max_depth` deep."""
    return BadRequestError(f"a body must be nested at most {max_depth} deep", None, "invalid_json")


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN or Infinity, which Python's parser accepts."""
    raise ValueError(f"{name} is not JSON")
