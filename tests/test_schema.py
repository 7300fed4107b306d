"""The schema reader: bounds, conversions, defaults and messages of its field types."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.schema import PATH, SWITCH, TEXT, FieldType, Schema, integer, list_of, number, one_of
from jaxserve.errors import ConfigError

ODD = [None, True, "1", [], {}, b"1", math.nan, math.inf, 10**400, 1.5]


@given(st.integers(-5, 5), st.integers(-5, 5), st.integers(-8, 8))
def test_integers_within_bounds_are_stored_as_int(low: int, high: int, value: int) -> None:
    kind = integer(low, high)
    for given_value in (value, np.int64(value)):
        assert kind.holds(given_value) == (low <= value <= high)
        if kind.holds(given_value):
            assert type(kind.read("x", given_value, ConfigError)) is int
    assert not any(kind.holds(each) for each in ODD)


@given(st.floats(-3, 3), st.booleans())
def test_numbers_within_bounds_are_stored_as_float(value: float, excludes_low: bool) -> None:
    kind = number(-1, 1, excludes_low=excludes_low)
    assert kind.holds(value) == (-1 <= value <= 1 and not (excludes_low and value == -1))
    assert type(kind.read("x", 1, ConfigError)) is float
    assert [each for each in ODD if number().holds(each)] == [1.5]


@given(st.lists(st.integers(-3, 12) | st.sampled_from([True, np.int32(3), "a"])))
def test_a_list_names_its_first_wrong_element(values: list[Any]) -> None:
    item, kind = integer(0, 9), list_of(integer(0, 9), "a list")
    wrong = [each for each in values if not item.holds(each)]
    if wrong:
        with pytest.raises(ConfigError) as caught:
            kind.read("x", values, ConfigError)
        assert str(caught.value) == f"x must be an integer in [0, 9], got {wrong[0]!r}"
    else:
        assert kind.read("x", tuple(values), ConfigError) == values


@dataclass(frozen=True)
class Options:
    """Options of a test."""

    size: int = 1
    names: Any = None
    dtype: str = "float32"
    path: Any = None
    switch: bool = False
    unchecked: Any = 5

    def __post_init__(self) -> None:
        SCHEMA.check(self)


SCHEMA = Schema(
    ConfigError,
    Options,
    {
        "size": integer(1),
        "names": list_of(TEXT, "a list of strings").optional(list),
        "dtype": one_of(("float32",), {"float": "float32"}),
        "path": PATH.optional(),
        "switch": SWITCH,
    },
    " of options",
)


def test_a_frozen_dataclass_is_checked_and_converted_in_place(tmp_path: Any) -> None:
    assert Options() == Options(names=[])
    assert Options(names=("a",), dtype="float", path=tmp_path) == Options(names=["a"], path=str(tmp_path))
    assert Options().names is not Options().names
    for name, value in {"size": 0, "names": "a", "dtype": "int", "path": 5, "switch": 1}.items():
        with pytest.raises(ConfigError, match=rf"^{name} of options must be .*, got {value!r}$"):
            Options(**{name: value})


def test_an_array_is_none_of_the_choices() -> None:
    assert not any(one_of(("a", 1)).holds(value) for value in (np.array(["a", "b"]), np.array([1]), ["a"], {}))
    assert all(one_of(("a", 1, [], {}, set())).holds(value) for value in (np.int64(1), [], {}, set()))


def test_a_message_ends_with_advice() -> None:
    kind = FieldType("5", lambda value: value == 5, advice="; leave it out")
    assert kind.problem("x", 4) == "x must be 5, got 4; leave it out"
    assert kind.or_null().problem("x", 4) == "x must be 5 or null, got 4; leave it out"
    assert kind.or_null().problem("x", None) is None
