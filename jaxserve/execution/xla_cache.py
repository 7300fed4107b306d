"""XLA's persistent compilation cache, used only for jaxserve's own programs.

It holds the small programs that load and quantise weights. Step programs are stored whole
(`program_store.ProgramStore`) and need it only if that is impossible: in a run with many processes, or in a remote
directory.

jax has one such cache per process, selected by its settings. They are changed while jaxserve compiles and restored
afterwards, so that a trainer in the same process neither fills jaxserve's cache nor loses its own.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.api.config import EngineConfig
from jaxserve.execution.program_store import check_owner, prune

logger = logging.getLogger(__name__)

Scope = Callable[[], AbstractContextManager[None]]

_DIRECTORY = "jax_compilation_cache_dir"
_lock = threading.Lock()
_num_open = 0
_saved: dict[str, Any] = {}  # settings outside all scopes
_own: dict[str, Any] = {}  # settings inside


def cache_scope(config: EngineConfig) -> Scope:
    """Return the context to enter while an engine's programs are compiled.

    With "auto", a cache that the process has configured itself is used as it is. A run with many processes uses none:
    GPUs tune kernels jointly while compiling, and one process must not find programs that another lacks.
    """
    is_auto = config.compilation_cache_dir == "auto"
    if is_auto and (jax.process_count() > 1 or _process_directory()):
        return contextlib.nullcontext
    directory = _engine_directory(config)
    if directory and not _is_remote(directory) and not _is_usable(Path(directory)):
        return contextlib.nullcontext
    if is_auto and config.cache_dir:
        # jax's own bound can leave an unwritable cache when a process is killed at a bad moment.
        prune(config.cache_dir, "*-cache")
    return partial(_using, directory)


def programs_dir(config: EngineConfig) -> Path | None:
    """Return the directory for whole programs, next to XLA's cache; None if remote, or with many processes."""
    if jax.process_count() > 1:
        return None
    process_dir = _process_directory() if config.compilation_cache_dir == "auto" else None
    directory = process_dir or _engine_directory(config)
    return Path(directory) / "programs" if directory and not _is_remote(directory) else None


def _is_usable(directory: Path) -> bool:
    """Create a cache directory; return False, and log the reason, unless only this user can write there."""
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:  # the store of whole programs warns of it
        logger.debug("XLA's cache is not used: %s", error)
        return False
    try:
        check_owner(directory)
    except PermissionError as error:
        logger.warning("XLA's cache is not used: %s", error)
        return False
    return True


def _is_remote(directory: str) -> bool:
    return "://" in directory


def _engine_directory(config: EngineConfig) -> str | None:
    """Return the path or URL of the cache directory that the options select; None without caching."""
    return str(config.cache_dir) if config.compilation_cache_dir == "auto" else config.compilation_cache_dir


def _process_directory() -> str | None:
    """Return jax's compilation cache directory as configured outside our scopes."""
    with _lock:
        directory: str | None = (_saved or _current([_DIRECTORY]))[_DIRECTORY]
        return directory


@contextlib.contextmanager
def _using(directory: str | None) -> Iterator[None]:
    """Make jax use the cache in `directory`, or none, within a context.

    Overlapping contexts all use the first one's directory, until the last of them has ended.
    """
    global _num_open  # noqa: PLW0603  # of the process, as jax's own settings
    with _lock:
        if not _num_open:
            _own[_DIRECTORY] = directory
            _own["jax_persistent_cache_min_entry_size_bytes"] = -1
            _own["jax_persistent_cache_min_compile_time_secs"] = 0
            _saved.update(_current(_own))
            _set(_own)
        _num_open += 1
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            if not _num_open:
                now = _current(_own)  # settings changed by the process meanwhile stay as they are
                _set({name: value for name, value in _saved.items() if now[name] == _own[name]})
                _saved.clear()
                _own.clear()


def _set(settings: dict[str, Any]) -> None:
    """Change jax settings, and have jax open its cache again if the directory changes."""
    before = _current(settings)
    for name, value in settings.items():
        jax.config.update(name, value)
    if before.get(_DIRECTORY) != settings.get(_DIRECTORY):
        compilation_cache.reset_cache()  # jax opens its cache once, at the first compilation


def _current(names: Iterable[str]) -> dict[str, Any]:
    """Return the values of jax settings by name."""
    return {name: getattr(jax.config, name) for name in names}
