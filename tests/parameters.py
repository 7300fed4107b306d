"""Parameters of tests, of which the default run has some and `pytest -m full` the others."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.random_runs import FACTOR


def some_by_default(values: Iterable[str], *chosen: str, long: Iterable[str] = ()) -> list[Any]:
    """Return a parameter for each value; tests of those in `long` are long, of those not chosen full ones.

    Raises:
        ValueError: a chosen or a long one is not among the values.
    """
    values, long = list(values), list(long)
    if missing := {*chosen, *long} - {*values}:
        raise ValueError(f"each chosen value must be one of {values}, got {sorted(missing)}")

    def mark(each: str) -> Any:
        return pytest.mark.long if each in long else () if each in chosen else pytest.mark.full

    return [pytest.param(each, id=each, marks=mark(each)) for each in values]


def seeds(few: int) -> list[Any]:
    """Return seeds of which the default run takes `few`, and the full run others."""
    return mainly(range(few), *range(few, few * FACTOR))


def mainly(chosen: Iterable[Any], *others: Any) -> list[Any]:
    """Return parameters of which the default run takes the chosen ones, and the full run the others."""
    return [*chosen, *(pytest.param(other, marks=pytest.mark.full) for other in others)]
