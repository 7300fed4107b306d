"""Settings of every test: no silent broadcasting, exact float32 products, one program cache for the whole run.

For writers of tests:

- `tests/e2e/conftest.py` has `start(**options)`: a tiny engine, shared by all tests that ask for the same options. Use
  it without options if you can: each other set of sizes compiles its own programs, a second or two each.
- `llama`, `oracle` and `llm` there are its checkpoint, the model as transformers runs it, and the interface over it.
- Compiled programs are cached in one directory for all workers and child processes of a run: the second engine of equal
  sizes loads them. A test that must see programs compiled passes its own `compilation_cache_dir`.
- Random tests (hypothesis) are in the default run with few examples and in `pytest -m full` with many:
  `@settings(max_examples=examples(25))`, from `random_runs`, is 25 or 100.
- Tests of more than a few seconds run a part by default: `pytest.param(..., marks=pytest.mark.full)` for the rest. Of
  the families of models that is `VARIED`, from `checkpoints`. If no part is quick, the whole test is `long`.
- The start of an engine is mostly compilation. Programs are not optimised, see `soon_compiled`. Where the sizes of
  steps do not matter, `few_programs()` from there halves it.
"""

import atexit
import contextlib
import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import mappings
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests import oracles, random_runs, type_checks
from tests.cost_report import CostReport
from tests.redis_server import RedisServer

type_checks.install()  # must precede the import of jaxserve
# The modules that tests import leave millions of objects, which the collector would go through every few seconds.
gc.set_threshold(50_000, 20, 50)
# Else each of the many processes that tests start would compile all modules again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "JAXSERVE_TEST_CACHE" not in os.environ:  # else inherited from the parent process or set by the caller
    os.environ["JAXSERVE_TEST_CACHE"] = tempfile.mkdtemp(prefix="jaxserve-tests-")
    atexit.register(shutil.rmtree, os.environ["JAXSERVE_TEST_CACHE"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ["JAXSERVE_TEST_CACHE"]
# For programs that tests compile themselves, and for engines whose options do not change their programs.
XLA_CACHE = {
    "jax_compilation_cache_dir": str(Path(os.environ["XDG_CACHE_HOME"]) / "jaxserve" / "compiled"),
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_min_compile_time_secs": 0,
}
for name, value in XLA_CACHE.items():
    os.environ[name.upper()] = str(value)  # child processes inherit it
    jax.config.update(name, value)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Values of -m in pyproject.toml and .ci/run for which programs are compiled soon rather than well.
QUICK_TESTS = {
    "not full and not long and not deviceless and not interpreter",
    "not full and not deviceless and not interpreter",
    "long and not full",
}
NUM_WORKERS = 2  # each holds its own models and programs


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use no worker processes if only some files or tests are named: they begin at once, and debuggers work."""
    named = [Path(argument.partition("::")[0]) for argument in config.args]
    return 0 if all(path.suffix == ".py" for path in named) else NUM_WORKERS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the report of costs, and the list of tests that need torch."""
    parser.addoption("--costs", type=Path, metavar="FILE", help="write seconds and compiled programs by test file")
    parser.addoption("--torch-tests", type=Path, metavar="FILE", help="write the tests that skip as torch is missing")


def pytest_configure(config: pytest.Config) -> None:
    """Use many random examples if full tests are selected."""
    config.pluginmanager.register(oracles.SkippedTests())
    if costs := config.getoption("costs"):
        config.pluginmanager.register(CostReport(costs))
    expression = config.option.markexpr
    is_full = not expression or re.search(r"(?<!not )\bfull\b", expression) is not None
    random_runs.choose(random_runs.FULL if is_full else random_runs.DEFAULT)
    if expression in QUICK_TESTS:
        # A test's own programs, and each operation of a new shape, compile in two thirds of the time. Engines have
        # their own level, see `soon_compiled`. Child processes inherit it.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark random tests as full with many examples, and as default with few."""
    is_random = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
    if is_random and random_runs.are_full():
        item.add_marker(pytest.mark.full)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, so that no worker is left alone with them at the end."""
    items.sort(key=lambda item: "sharded" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Leave modules and tests out of the collector's sight."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def engines_compile_soon() -> Iterator[None]:
    """Compile the programs of engines without LLVM's optimisations, see `soon_compiled`; as shipped in full runs."""
    from tests.soon_compiled import soon_compiled

    with contextlib.nullcontext() if random_runs.are_full() else soon_compiled():
        yield


@pytest.fixture(autouse=True, scope="module")
def old_programs_forgotten() -> Iterator[None]:
    """Forget the programs of finished modules if there are many; the disk cache still has them."""
    yield
    if mappings.are_many():
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a Redis server, and return its address."""
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer(folder):
        yield f"unix:{folder}/socket"


@pytest.fixture
def no_xla_cache() -> Iterator[None]:
    """Disable XLA's own cache for the process: programs loaded from it cannot be stored again."""
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in XLA_CACHE.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def no_type_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls with arguments of wrong types reach the code, as a user's do, instead of the suite's type checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def any_load_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines load all pages that a tier has, as on a machine that computes slowly and reads fast."""
    from jaxserve.core.replica import Replica

    monkeypatch.setattr(Replica, "_load_costs", lambda self, mover: None)
