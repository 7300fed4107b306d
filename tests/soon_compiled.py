"""Compile engines' programs in less time: without LLVM's optimisations, as tiny models run as fast, or fewer.

Without them a program takes half the time or less. `tests/conftest.py` does so in all tests but those that use
`as_shipped`: those of the plain engine and of servers. Commands in processes of their own compile as a user's do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from jaxserve.assembly import build
from jaxserve.execution import lowering

step_options, build_schedule = lowering.step_options, build.build_schedule


def unoptimized(device_kind: str) -> dict[str, str | bool]:
    """Return the options of an engine's programs, with the lowest optimisation level for a CPU, in one LLVM module."""
    options = step_options(device_kind)
    soon = {"xla_backend_optimization_level": "0", "xla_cpu_parallel_codegen_split_count": "1"}
    return options | soon if device_kind == "cpu" else options


@contextmanager
def soon_compiled() -> Iterator[None]:
    """Make all engines that start meanwhile compile so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "step_options", unoptimized)
        yield


@contextmanager
def as_shipped() -> Iterator[None]:
    """Make all engines that start meanwhile compile as a user's do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "step_options", step_options)
        yield


@contextmanager
def few_programs() -> Iterator[None]:
    """Give all engines that start meanwhile the few sizes of steps that they have on a TPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_schedule", lambda *args: replace(build_schedule(*args), few_programs=True))
        yield


def are_few() -> bool:
    """Return whether engines that start now have few programs."""
    return build.build_schedule is not build_schedule
