"""Compile engines' programs in less time: without LLVM's optimisations, as tiny models run as fast, or fewer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from jaxserve.engine import build
from jaxserve.execution import lowering

step_options, build_schedule = lowering.step_options, build.build_schedule


def unoptimized(device_kind: str) -> dict[str, str | bool]:
    """Return the options of an engine's programs, with the lowest optimisation level for a CPU."""
    options = step_options(device_kind)
    return options | {"xla_backend_optimization_level": "0"} if device_kind == "cpu" else options


@contextmanager
def soon_compiled() -> Iterator[None]:
    """Make all engines that start meanwhile compile so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "step_options", unoptimized)
        yield


@contextmanager
def few_programs() -> Iterator[None]:
    """Give all engines that start meanwhile the few sizes of steps that they have on a TPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_schedule", lambda *args: replace(build_schedule(*args), few_programs=True))
        yield
