"""torch, the oracle of many tests. Where it is not installed, tests skip when they ask for it, and for no other reason.

There is no build of torch without CUDA for every version of Python, so that the suite must run without it: checkpoints
are then written without transformers, and `tests/models/test_golden.py` has the logits of the main families on file.
Modules import `torch` from here, not by its name. `pytest --torch-tests=FILE` lists the tests that were skipped, which
are to be run where torch is installed: `pytest @FILE`.
"""

import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

NOT_INSTALLED = "torch is not installed"


def skip() -> NoReturn:
    """Skip the test, or the module that is being imported."""
    pytest.skip(NOT_INSTALLED, allow_module_level=True)


def cache_argument(module: Any) -> str:
    """Return the name of the argument by which a module of transformers takes a cache: releases differ."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


class Missing:
    """Torch, or a model that it would run, where torch is not installed."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # only looked at
            raise AttributeError(name)
        skip()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        skip()


has_torch = importlib.util.find_spec("torch") is not None


def __getattr__(name: str) -> Any:
    """Import torch when a module asks for it: the settings of all tests are in want of this module, not of torch."""
    if name != "torch":
        raise AttributeError(name)
    return importlib.import_module("torch") if has_torch else Missing()


def lacks_torch(text: str) -> bool:
    """Return whether an import failed for want of torch, of which transformers has words of its own."""
    return not has_torch and ("No module named 'torch" in text or "PyTorch was not found" in text)


@contextlib.contextmanager
def skipped_without_torch() -> Iterator[None]:
    """Skip the test if something that needs torch could not be imported."""
    try:
        yield
    except ImportError as error:
        if not lacks_torch(str(error)):
            raise
        skip()


class SkippedTests:
    """Plugin of pytest that counts the tests skipped for want of torch, and lists them in a file if asked."""

    def __init__(self) -> None:
        self.skipped: set[str] = set()  # modules are named by the workers, tests in any process

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Any:
        with skipped_without_torch():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Any:
        with skipped_without_torch():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        report = yield
        if report.failed and lacks_torch(str(report.longrepr)):
            report.outcome, report.longrepr = "skipped", (str(collector.path), 0, NOT_INSTALLED)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped and NOT_INSTALLED in str(report.longrepr):
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # xdist tells the main process nothing of skipped modules
            session.config.workeroutput["without_torch"] = sorted(self.skipped)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.skipped.update(getattr(node, "workeroutput", {}).get("without_torch", ()))

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if self.skipped:
            terminalreporter.write_line(f"{len(self.skipped)} tests and modules skipped: {NOT_INSTALLED}")
        if path := config.getoption("torch_tests"):
            path.write_text("".join(f"{name}\n" for name in sorted(self.skipped)))
