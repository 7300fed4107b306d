"""Costs of tests: seconds, processor seconds and compiled programs of each file, by `pytest --costs FILE`.

FILE is a table of JSON: a row for each test file and each test of more than a second, the dearest first. Costs of a
fixture are those of the first test that asks for it.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import jax
import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"
LOADED = "/jax/compilation_cache/cache_hits"
LISTED_S = 1.0


@dataclass
class Costs:
    """What has been spent; of a process so far, of a phase, a test or a file."""

    seconds: float = 0.0
    processor_s: float = 0.0  # processor time of the worker and the processes that it has waited for
    programs: int = 0
    programs_loaded: int = 0  # of the programs, those found in the disk cache
    compile_s: float = 0.0

    def __add__(self, other: Self) -> "Costs":
        return Costs(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __sub__(self, other: Self) -> "Costs":
        return Costs(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))


class CostReport:
    """Plugin that measures each phase where tests run, and sums them up where they are reported."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._programs = Costs()
        self._before = Costs()
        self._tests: dict[str, Costs] = {}
        jax.monitoring.register_event_duration_secs_listener(self._on_timed_event)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_timed_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            self._programs += Costs(programs=1, compile_s=duration_secs)

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        if event == LOADED:
            self._programs += Costs(programs_loaded=1)

    def _so_far(self) -> Costs:
        times = os.times()
        spent = times.user + times.system + times.children_user + times.children_system
        return self._programs + Costs(seconds=time.perf_counter(), processor_s=spent)

    def pytest_runtest_logstart(self) -> None:
        """Leave out what passed between tests."""
        self._before = self._so_far()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Write the costs of a phase into its report, which goes to the reporting process."""
        report: pytest.TestReport = yield
        now = self._so_far()
        report.user_properties = [*report.user_properties, ("costs", asdict(now - self._before))]
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the costs of a phase to those of its test."""
        *_, (name, costs) = report.user_properties or [("", None)]
        if name == "costs":
            self._tests[report.nodeid] = self._tests.get(report.nodeid, Costs()) + Costs(**costs)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the table, in the reporting process alone."""
        if hasattr(session.config, "workerinput"):
            return
        files: dict[str, Costs] = {}
        for test, costs in self._tests.items():
            file = test.partition("::")[0]
            files[file] = files.get(file, Costs()) + costs
        tests = {test: costs for test, costs in self._tests.items() if costs.seconds > LISTED_S}
        table = {"total": _row(sum(files.values(), Costs())), "files": _rows(files), "tests": _rows(tests)}
        self._path.write_text(json.dumps(table, indent=1) + "\n")


def _rows(table: dict[str, Costs]) -> list[dict[str, Any]]:
    dearest_first = sorted(table.items(), key=lambda item: -item[1].seconds)
    return [{"name": name, **_row(costs)} for name, costs in dearest_first]


def _row(costs: Costs) -> dict[str, float]:
    return {name: round(value, 2) for name, value in asdict(costs).items()}
