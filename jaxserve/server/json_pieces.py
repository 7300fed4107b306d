"""JSON encoder in pieces: C's encoder holds the interpreter's lock, and so gets few values per call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.api.outputs import Logprob, RequestOutput
    from jaxserve.api.stream_events import Increment

PIECE_CHARS = 2**15
MAX_VALUES = 1024  # values per call to C's encoder
VALUE_CHARS = 32  # string characters that take a value's time
CHOICE_VALUES = 16  # values around a completion's text

_NUMBERS = {int, float, bool, type(None)}
_encode = partial(json.dumps, ensure_ascii=False)


def json_pieces(content: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield an object's JSON text as `json.dumps` writes it. An iterator stands for a list."""
    parts: list[str] = []
    num_chars = 0
    for part in _parts(content):
        parts.append(part)
        num_chars += len(part)
        if num_chars >= PIECE_CHARS:
            yield "".join(parts).encode(errors="replace")
            parts, num_chars = [], 0
    yield "".join(parts).encode(errors="replace")


def is_short(content: object) -> bool:
    """Return whether a value is short enough for the event loop to encode."""
    return _left(content, MAX_VALUES) >= 0


def num_values(output: RequestOutput, *, has_echo: bool) -> int:
    """Return the estimated number of JSON values in the reply to an output; with `has_echo` it repeats the prompt."""
    num = _num_prompt_values(output, has_echo=has_echo) + (0 if output.pooled is None else output.pooled.size)
    for each in output.outputs:
        first = each.logprobs_since(0, 1)
        num_tokens = len(each.token_ids)
        num += CHOICE_VALUES + len(each.text) // VALUE_CHARS + num_tokens * (1 if first is None else _width(first))
    return num


def num_new_values(output: RequestOutput, increments: Sequence[Increment], *, has_echo: bool) -> int:
    """Return the estimated number of values in the events for increments of `output`.

    With `has_echo` the first increment of a completion is sent with the prompt.
    """
    num = 0
    for increment in increments:
        num_tokens = len(increment.token_ids)
        width = 1 if increment.logprobs is None else _width(increment.logprobs[:1])
        num += len(increment.text) // VALUE_CHARS + num_tokens * width
        if num_tokens == len(increment.completion.token_ids):
            num += _num_prompt_values(output, has_echo=has_echo)
    return num


def _num_prompt_values(output: RequestOutput, *, has_echo: bool) -> int:
    """Return the estimated number of values for an output's prompt: its tokens and their log probabilities."""
    tables = output.prompt_tables
    if tables is None and not has_echo:
        return 0
    return len(output.prompt_token_ids) * (1 if tables is None else _width(tables[1:2]))


def _width(tables: Sequence[Mapping[int, Logprob] | None]) -> int:
    """Return the estimated number of values per token, given log-probability tables for the first token."""
    return 1 + sum(len(table) for table in tables if table is not None)


def _parts(value: Any) -> Iterator[str]:
    """Yield a value's JSON text in parts, each encoded in a fraction of a millisecond."""
    if _left(value, MAX_VALUES) >= 0:
        yield _encode(value)
    elif isinstance(value, Mapping):
        for number, (name, each) in enumerate(value.items()):
            yield f"{', ' if number else '{'}{_encode(name)}: "
            yield from _parts(each)
        yield "}"
    elif isinstance(value, str):
        yield '"'
        for start in range(0, len(value), PIECE_CHARS):
            yield _encode(value[start : start + PIECE_CHARS])[1:-1]
        yield '"'
    else:
        yield "["
        yield from _items(value)
        yield "]"


def _items(values: Any) -> Iterator[str]:
    """Yield the JSON text of a list or iterator, without brackets; consecutive short values form one part."""
    batch: list[Any] = []
    left, separator = MAX_VALUES, ""
    for value in values:
        left = _left(value, left)
        if left >= 0:
            batch.append(value)
            continue
        if batch:
            yield separator + _encode(batch)[1:-1]
            batch, separator = [], ", "
        left = _left(value, MAX_VALUES)
        if left >= 0:
            batch.append(value)
        else:
            yield separator
            yield from _parts(value)
            left, separator = MAX_VALUES, ", "
    if batch:
        yield separator + _encode(batch)[1:-1]


def _left(value: Any, budget: int) -> int:
    """Return the budget minus the value's size; negative if it is exceeded, or for an iterator."""
    if isinstance(value, str):
        return budget - 1 - len(value) // VALUE_CHARS
    if isinstance(value, Mapping):
        budget -= 1 + len(value) + sum(map(len, value)) // VALUE_CHARS
        return _left_of_all(value.values(), budget)
    if isinstance(value, list | tuple):
        return _left_of_all(value, budget - 1)
    return -1 if isinstance(value, Iterator) else budget - 1


def _left_of_all(values: Any, budget: int) -> int:
    """Return the budget minus the values' sizes; negative once it is exceeded."""
    if len(values) > budget:
        return -1
    for value in values:
        budget = budget - 1 if type(value) in _NUMBERS else _left(value, budget)
        if budget < 0:
            break
    return budget
