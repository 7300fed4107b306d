"""Schema: accepted values for options, parameters and fields as data, with one reader for all."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from jaxserve.errors import brief, did_you_mean

Error = Callable[[str], Exception]


def _unchanged(value: Any) -> Any:
    return value


def _none() -> None:
    return None


@dataclass(frozen=True, slots=True)
class FieldType:
    """A field's type.

    Attributes:
        words: completion of "X must be".
        holds: predicate that accepted values satisfy.
        convert: function from an accepted value to the stored one.
        advice: suffix of the message, such as "; leave it out".
        items: element type of a list, which is stored as a list; None for any type.
        none_as: function that returns the stored value for None; None if the type has no other value for it.
        is_interval: True for integers within bounds.
    """

    words: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = _unchanged
    advice: str = ""
    items: FieldType | None = None
    none_as: Callable[[], Any] | None = None
    is_interval: bool = False

    def optional(self, none_as: Callable[[], Any] = _none) -> FieldType:
        """Return the type that also accepts None, for "not given"."""
        return replace(self, holds=lambda value: value is None or self.holds(value), none_as=none_as)

    def or_null(self) -> FieldType:
        """Return the type that also accepts null in JSON."""
        return replace(self.optional(), words=f"{self.words} or null")

    def problem(self, name: str, value: object) -> str | None:
        """Return the error message for a value of field `name`; None if it is accepted."""
        return None if self.holds(value) else self._refusal(name, value)

    def _refusal(self, name: str, value: object) -> str:
        """Return the error message for a value of field `name` that is not accepted."""
        return f"{name} must be {self.words}, got {brief(value)}{self.advice}"

    def read(self, name: str, value: Any, error: Error) -> Any:
        """Return the value to store for a given one of field `name`; raise `error` if it is not accepted."""
        if not self.holds(value):
            raise error(self._refusal(name, value))
        if value is None and self.none_as is not None:
            return self.none_as()
        return self.convert(value) if self.items is None else self.items.read_all(name, value, error)

    def read_all(self, name: str, values: Sequence[Any], error: Error) -> list[Any]:
        """Read each value in a list: return the values to store, or raise `error` for the first that is wrong."""
        if not values:
            return []
        is_plain = self.is_interval and set(map(type, values)) == {int}
        if is_plain and self.holds(min(values)) and self.holds(max(values)):  # faster than looking at each
            return list(values)
        return [self.read(name, each, error) for each in values]


def is_sequence(value: object) -> bool:
    """Return whether a value is a list or similar, and not text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_one_of(value: object, choices: Iterable[Any]) -> bool:
    """Return whether a value is among choices; True is not 1 here, but 0.0 is 0."""
    if getattr(value, "ndim", 0):  # an array, whose comparison has no truth value
        return False
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in choices)


def integer(low: int | None = None, high: int | None = None, words: str = "") -> FieldType:
    """Return the type for integers within inclusive bounds; `words` replaces the description of the bounds."""
    lowest, highest = -math.inf if low is None else low, math.inf if high is None else high

    def holds(value: Any) -> bool:
        if type(value) is int:  # nearly always
            return lowest <= value <= highest
        return isinstance(value, Integral) and not isinstance(value, bool) and lowest <= int(value) <= highest

    if high is None:
        known = {None: "an integer", 0: "an integer of 0 or more", 1: "a positive integer"}
    else:
        known = {low: f"an integer in [{low}, {high}]"}
    return FieldType(words or known[low], holds, int, is_interval=True)


def list_of(items: FieldType, words: str, min_len: int = 0, max_len: int = sys.maxsize) -> FieldType:
    """Return the type for lists of `items` with bounds on their length, described by `words`."""

    def holds(value: Any) -> bool:
        return is_sequence(value) and min_len <= len(value) <= max_len

    return FieldType(words, holds, items=items)


def number(low: int | float = -math.inf, high: int | float = math.inf, *, excludes_low: bool = False) -> FieldType:
    """Return the type for finite numbers within bounds, including the upper one."""

    def holds(value: Any) -> bool:
        if type(value) is not float:
            if not isinstance(value, Real) or isinstance(value, bool):
                return False
            try:
                value = float(value)  # NumPy's narrow floats do not compare with wide bounds
            except OverflowError:
                return False
        return math.isfinite(value) and low <= value <= high and not (excludes_low and value == low)

    if high < math.inf:
        words = f"a number in {'(' if excludes_low else '['}{low}, {high}]"
    else:
        words = {-math.inf: "a number", 0: "a positive number" if excludes_low else "a number of 0 or more"}[low]
    return FieldType(words, holds, float)


def one_of(
    choices: Collection[Any], aliases: Mapping[Any, Any] | None = None, *, words: str = "", advice: str = ""
) -> FieldType:
    """Return the type for the values `choices`, and for `aliases`, from which the value to store is looked up.

    `words` replaces the list of accepted values in error messages, and `advice` ends them.
    """
    others = dict(aliases or {})
    known = (*choices, *others)
    return FieldType(
        words or f"one of {list(known)}",
        lambda value: is_one_of(value, known),
        (lambda value: others.get(value, value)) if others else _unchanged,
        advice,
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


ANY = FieldType("anything", lambda value: True)
SWITCH = FieldType("a bool", lambda value: isinstance(value, bool))
TEXT = FieldType("a string", _is_text)
FILLED_TEXT = FieldType("a non-empty string", lambda value: isinstance(value, str) and value != "")
TEXTS = FieldType("a list of strings", lambda value: is_sequence(value) and all(map(_is_text, value)))
OBJECT = FieldType("an object", lambda value: isinstance(value, Mapping))
PATH = FieldType("a path", lambda value: isinstance(value, str | os.PathLike), os.fspath)
FILLED_PATH = FieldType(
    "a non-empty path",
    lambda value: PATH.holds(value) and os.fsdecode(value) != "" and "\0" not in os.fsdecode(value),
    os.fspath,
)


def unknown_names_message(what: str, unknown: Iterable[str], known: Collection[str]) -> str:
    """Return the error message for unknown names of `what`, such as "engine options", with similar known ones."""
    names = sorted(unknown)
    return f"unsupported {what} {names}{did_you_mean(names, known)}; supported are {sorted(known)}"


class Schema:
    """Field types of a dataclass, whose instances it checks.

    Args:
        error: exception that is raised with a message.
        owner: dataclass with the fields' defaults.
        types: types by field.
        where: text after a field's name in messages, such as " of speculative_config".
    """

    def __init__(self, error: Error, owner: type, types: Mapping[str, FieldType], where: str = "") -> None:
        self._error, self._where = error, where
        stored = vars(owner)
        self._entries = [(name, each, _skipped(each, stored.get(name, ANY))) for name, each in types.items()]

    def check(self, target: object) -> None:
        """Check the fields of an instance in place, frozen or not; a default that would be stored as it is passes."""
        values = vars(target)
        for name, each, skipped in self._entries:
            if (value := values[name]) is not skipped:
                values[name] = each.read(name + self._where, value, self._error)


def _skipped(field_type: FieldType, default: Any) -> Any:
    """Return the default if it needs no conversion, otherwise an object that no field has."""
    is_stored = default is not ANY and field_type.holds(default) and field_type.read("", default, ValueError) is default
    return default if is_stored else object()
