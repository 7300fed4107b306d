"""Settings that every test runs under: no silent broadcasting, exact float32 products, one compilation cache."""

import tempfile

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Engines of equal shapes share compiled programs within one run of the suite, and nothing outlives it.
_CACHE = tempfile.TemporaryDirectory(prefix="jaxserve-tests-", ignore_cleanup_errors=True)
jax.config.update("jax_compilation_cache_dir", _CACHE.name)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
