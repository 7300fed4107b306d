"""XLA's persistent compilation cache, for jaxserve's own programs only.

jax has one such cache per process, which its settings choose. They are changed while jaxserve compiles and restored
afterwards, so that a trainer in the same process neither fills jaxserve's cache nor loses its own.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import EngineConfig
from jaxserve.engine.programs import prune

Scope = Callable[[], AbstractContextManager[None]]

_lock = threading.Lock()
_num_open = 0
_saved: dict[str, Any] = {}


def scope_of(config: EngineConfig) -> Scope:
    """Return what to enter while programs of an engine are compiled.

    With "auto", a cache that the process has set up itself is used as it is. So is none in a run of many processes:
    GPUs tune kernels together while they compile, and one process must not find what another lacks.
    """
    is_auto = config.compilation_cache_dir == "auto"
    if is_auto and (jax.process_count() > 1 or _process_directory()):
        return contextlib.nullcontext
    if is_auto and config.cache_dir:
        # jax's own bound leaves a cache that cannot be written any more when a process is killed at a bad moment.
        prune(config.cache_dir, "*-cache")
    return partial(_using, _own_directory(config))


def programs_dir(config: EngineConfig) -> Path | None:
    """Return where whole programs are kept: beside XLA's cache, unless that is remote or there are many processes."""
    if jax.process_count() > 1:
        return None
    of_process = _process_directory() if config.compilation_cache_dir == "auto" else None
    directory = of_process or _own_directory(config)
    return Path(directory) / "programs" if directory and "://" not in directory else None


def _own_directory(config: EngineConfig) -> str | None:
    return str(config.cache_dir) if config.compilation_cache_dir == "auto" else config.compilation_cache_dir


def _process_directory() -> str | None:
    """Return the cache that the process has outside all scopes."""
    with _lock:
        settings = _saved or _current(("jax_compilation_cache_dir",))
        directory: str | None = settings["jax_compilation_cache_dir"]
        return directory


@contextlib.contextmanager
def _using(directory: str | None) -> Iterator[None]:
    """Use the cache in `directory`, or none. Scopes that overlap share the first one's until the last has ended."""
    global _num_open  # noqa: PLW0603  # of the process, as jax's own settings
    with _lock:
        if not _num_open:
            settings = {
                "jax_compilation_cache_dir": directory,
                "jax_persistent_cache_min_entry_size_bytes": -1,
                "jax_persistent_cache_min_compile_time_secs": 0,
            }
            _saved.update(_replace(settings))
        _num_open += 1
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            if not _num_open:
                _replace(_saved)
                _saved.clear()


def _replace(settings: dict[str, Any]) -> dict[str, Any]:
    """Change settings of jax; returns what they were."""
    before = _current(settings)
    for name, value in settings.items():
        jax.config.update(name, value)
    if before["jax_compilation_cache_dir"] != settings["jax_compilation_cache_dir"]:
        compilation_cache.reset_cache()  # jax opens its cache once, at the first compile
    return before


def _current(names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in names}
