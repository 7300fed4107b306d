"""What every test runs under: no silent broadcasting, exact float32 products, one program cache for the whole run.

For writers of tests:

- `tests/e2e/conftest.py` has `start(**options)`: a tiny engine, shared by all tests that ask for the same options. Ask
  for none, if you can: each other set of sizes compiles programs of its own, a second or two each.
- `llama`, `oracle` and `llm` there are its checkpoint, the model as transformers runs it, and the interface over it.
- Compiled programs are kept in one directory for all workers and child processes of a run: the second engine of equal
  sizes loads them. A test that must see programs compiled passes a `compilation_cache_dir` of its own.
- Random tests (hypothesis) are in the default run with few examples and in `pytest -m full` with many:
  `@settings(max_examples=examples(25))`, from `random_runs`, is 25 or 250.
- What takes more than a few seconds is narrowed by default: `pytest.param(..., marks=pytest.mark.full)` for the rest.
"""

import atexit
import gc
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import mappings
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests import random_runs

if "JAXSERVE_TEST_CACHE" not in os.environ:  # else that of the process that started this one, or of the caller
    os.environ["JAXSERVE_TEST_CACHE"] = tempfile.mkdtemp(prefix="jaxserve-tests-")
    atexit.register(shutil.rmtree, os.environ["JAXSERVE_TEST_CACHE"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ["JAXSERVE_TEST_CACHE"]
# For what tests compile themselves, and for engines that differ in what does not change their programs.
XLA_CACHE = {
    "jax_compilation_cache_dir": str(Path(os.environ["XDG_CACHE_HOME"]) / "jaxserve" / "compiled"),
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_min_compile_time_secs": 0,
}
for name, value in XLA_CACHE.items():
    os.environ[name.upper()] = str(value)  # for child processes
    jax.config.update(name, value)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

NUM_WORKERS = 2  # each holds models and programs of its own


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """No worker process where only some files or tests are named: they begin at once, and debuggers work."""
    named = [Path(argument.partition("::")[0]) for argument in config.args]
    return 0 if all(path.suffix == ".py" for path in named) else NUM_WORKERS


def pytest_configure(config: pytest.Config) -> None:
    """Many random examples where full tests are selected."""
    expression = config.option.markexpr
    is_full = not expression or re.search(r"(?<!not )\bfull\b", expression) is not None
    random_runs.choose(random_runs.FULL if is_full else random_runs.DEFAULT)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Random tests are full ones with many examples, and default ones with few."""
    is_random = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
    if is_random and hypothesis.settings.get_current_profile_name() == random_runs.FULL:
        item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Programs of modules that are done are forgotten when there are many; what is compiled again is on disk."""
    yield
    if mappings.are_many():
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def no_xla_cache() -> Iterator[None]:
    """The process has set up no cache of XLA's: programs that come from there cannot be kept again."""
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in XLA_CACHE.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def no_type_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with arguments of wrong types meet the code, as a user's do, and not the suite's type checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
