"""Settings that every test runs under: no silent broadcasting, exact float32 products, one compilation cache."""

import gc
import tempfile
from collections.abc import Iterator

import jax
import jaxtyping
import mappings
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Engines of equal shapes share compiled programs within one run of the suite, and nothing outlives it.
_CACHE = tempfile.TemporaryDirectory(prefix="jaxserve-tests-", ignore_cleanup_errors=True)
jax.config.update("jax_compilation_cache_dir", _CACHE.name)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Programs of modules that are done are forgotten when there are many; what is compiled again is on disk."""
    yield
    if mappings.are_many():
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def no_type_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with arguments of wrong types meet the code, as a user's do, and not the suite's type checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
