"""Parameters of tests, of which the default run has some and `pytest -m full` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def some_by_default(values: Iterable[str], *chosen: str) -> list[Any]:
    """Return a parameter for each value; tests of those that are not chosen are full ones.

    Raises:
        ValueError: a chosen one is not among the values.
    """
    values = list(values)
    if missing := {*chosen} - {*values}:
        raise ValueError(f"each chosen value must be one of {values}, got {sorted(missing)}")
    return [pytest.param(each, id=each, marks=() if each in chosen else pytest.mark.full) for each in values]
