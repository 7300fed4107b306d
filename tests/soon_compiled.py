"""Compile engines' programs without LLVM's optimisations: in half the time, and tiny models run as fast."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxserve.execution import programs

step_options = programs.step_options


def unoptimized(device_kind: str) -> dict[str, str | bool]:
    """Return the options of an engine's programs, with the lowest optimisation level for a CPU."""
    options = step_options(device_kind)
    return options | {"xla_backend_optimization_level": "0"} if device_kind == "cpu" else options


@contextmanager
def soon_compiled() -> Iterator[None]:
    """Make all engines that start meanwhile compile so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "step_options", unoptimized)
        yield
