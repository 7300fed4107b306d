"""XLA's cache is used while jaxserve compiles, and the process has its own settings back afterwards."""

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.execution.xla_cache import cache_scope, programs_dir

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_min_compile_time_secs",
)


def settings() -> list[object]:
    return [getattr(jax.config, name) for name in SETTINGS]


def compile_something(factor: float) -> None:
    jax.jit(lambda x: x * factor + 1).lower(jnp.ones(3)).compile()


@pytest.mark.usefixtures("no_xla_cache")
def test_only_programs_compiled_in_the_scope_are_cached(tmp_path: Path) -> None:
    before = settings()
    scope = cache_scope(EngineConfig(compilation_cache_dir=str(tmp_path)))
    with scope():
        compile_something(1.25)
    assert settings() == before
    cached = sorted(tmp_path.glob("*-cache"))
    assert cached
    compile_something(2.25)
    assert sorted(tmp_path.glob("*-cache")) == cached


@pytest.mark.usefixtures("no_xla_cache")
def test_scopes_of_several_threads_end_with_the_last(tmp_path: Path) -> None:
    before = settings()
    scope = cache_scope(EngineConfig(compilation_cache_dir=str(tmp_path)))
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with scope():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    with scope():
        thread.start()
        assert entered.wait(10)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    leave.set()
    thread.join(10)
    assert settings() == before


def test_a_cache_of_the_process_is_used_as_it_is(tmp_path: Path, no_xla_cache: None) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    before, config = settings(), EngineConfig()
    with cache_scope(config)():
        assert settings() == before
    assert programs_dir(config) == tmp_path / "programs"
