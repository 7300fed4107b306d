"""Settings of the calls that are traced inside a context: the interpreter, and block sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from jaxserve.pallas_kernels.quantized_matmul.interface import Problem
from jaxserve.pallas_kernels.tuning import measured_sizes

TUNED = Path(__file__).parent / "tuned"  # measured block sizes, by chip

_given_sizes: ContextVar[dict[str, int] | None] = ContextVar("given_sizes", default=None)
_interpret_params: ContextVar[Any] = ContextVar("interpret_params", default=None)


@contextlib.contextmanager
def interpreted(params: Any) -> Iterator[None]:
    """Run calls traced inside in the interpreter, on any machine, with these parameters."""
    token = _interpret_params.set(params)
    try:
        yield
    finally:
        _interpret_params.reset(token)


def interpreter() -> Any:
    """Return the parameters of the interpreter, or None to run on a chip."""
    return _interpret_params.get()


@contextlib.contextmanager
def sized(**sizes: int) -> Iterator[None]:
    """Make calls traced inside use these block sizes instead of those that measured best on their chip."""
    token = _given_sizes.set(sizes)
    try:
        yield
    finally:
        _given_sizes.reset(token)


def shape_class(problem: Problem) -> dict[str, int | str]:
    """Return the facts that problems with the same best sizes have in common."""
    return {
        "num_rows": 1 << max(0, problem.num_rows - 1).bit_length(),
        "num_outputs": problem.num_outputs,
        "num_inputs": problem.num_inputs,
        "num_groups": problem.num_groups,
        "elements": problem.elements,
    }


def sizes_of(problem: Problem, chip: str) -> dict[str, int]:
    """Return the sizes that replace a backend's defaults: requested ones, else those that measured best."""
    given = _given_sizes.get()
    return measured_sizes(TUNED, chip, shape_class(problem)) if given is None else given
