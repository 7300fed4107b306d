"""Compiled programs on disk, so that a second start neither traces, lowers nor compiles.

XLA's own persistent cache saves only compilation, but tracing and lowering a step take several times as long as loading
it. A program is found by a digest of everything it depends on, including our source.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import pickle
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxserve.execution.jax_events import EventCounter
from jaxserve.execution.roofline import num_cores
from jaxserve.system.environment import libtpu_args, xla_flags
from jaxserve.system.whole_file import write_whole

logger = logging.getLogger(__name__)

Compiled = Any  # jax.stages.Compiled
_SETTINGS = (  # jax settings that affect tracing
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)
compile_counter = EventCounter("/jax/core/compile/backend_compile_duration")  # programs that XLA was asked for
_cache_hits = EventCounter("/jax/compilation_cache/cache_hits")  # programs from XLA's own cache
_FUNCTION = re.compile(r"<function [\w.]+ at 0x([0-9a-f]+)>")  # excludes names with <locals>, which may be ambiguous
MAX_BYTES = 1 << 30  # maximum on disk: the least recently used programs beyond it are removed


class ProgramStore:
    """An engine's compiled programs on disk.

    Several processes may use the directory: a file appears complete, and may vanish at any time.

    Args:
        directory: directory of the files; None stores nothing.
        key_parts: everything the programs depend on except our source, jax, its settings and the device; distinguished
            by `repr`.
        devices: devices on which they run; None for the default device.
    """

    def __init__(
        self, directory: Path | None, key_parts: Iterable[object], devices: Sequence[jax.Device] | None = None
    ) -> None:
        self._directory = directory
        self._devices = devices or jax.devices()[:1]
        key_parts = (*_environment(), *key_parts, [device.id for device in self._devices])
        self._key = hashlib.sha256("\n".join(map(described, key_parts)).encode()).hexdigest()

    def get(self, name: str, compile_program: Callable[[], Compiled]) -> Compiled:
        """Return the program called `name`: loaded from disk, or made by `compile_program` and stored."""
        path = self._path(name)
        if path is None:
            return compile_program()
        program = _read(path, self._devices)
        if program is None:
            compiles, hits = compile_counter.count, _cache_hits.count
            program = compile_program()
            # A program loaded from XLA's cache cannot be serialised again: it lacks functions. The same holds for one
            # that jax has loaded elsewhere and may hand out silently.
            if compile_counter.count > compiles and _cache_hits.count == hits:
                _write(path, program)
        return program

    def has(self, name: str) -> bool:
        """Return whether the program called `name` is on disk."""
        path = self._path(name)
        return path is not None and path.exists()

    def _path(self, name: str) -> Path | None:
        """Return the file for the program called `name`; None if nothing is stored."""
        if self._directory is None:
            return None
        return self._directory / f"{hashlib.sha256(f'{self._key} {name}'.encode()).hexdigest()[:40]}.program"


def described(part: object) -> str:
    """Return the `repr` of `part` with module names in place of function addresses, so that all processes agree."""
    names = {id(each): f"<function {each.__module__}.{each.__qualname__}>" for each in _functions(part)}
    return _FUNCTION.sub(lambda found: names.get(int(found[1], 16), found[0]), repr(part))


def _functions(part: object) -> Iterator[FunctionType]:
    """Yield all functions in the fields and elements of a value, at any depth."""
    if isinstance(part, FunctionType):
        yield part
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _functions(getattr(part, field.name, None))
    elif isinstance(part, Mapping):
        yield from _functions([*part.items()])
    elif isinstance(part, tuple | list | frozenset | set):
        for element in part:
            yield from _functions(element)


def _read(path: Path, devices: Sequence[jax.Device]) -> Compiled | None:
    """Load a program for `devices`; None if its file is missing, unsafe or unusable."""
    try:
        check_owner(path.parent)
        check_owner(path)
        content, in_tree, out_tree = pickle.loads(path.read_bytes())
        program = serialize_executable.deserialize_and_load(content, in_tree, out_tree, execution_devices=devices)
        os.utime(path)  # mark as used
        return program
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        _warn_once(path.parent, f"compiled programs are not read: {error}")
        return None
    except Exception as error:  # truncated, or written by an incompatible jax: it is compiled again
        logger.warning("a cached executable cannot be used and is compiled again: %s", error)
        return None


def check_owner(path: Path) -> None:
    """Raise PermissionError unless only this user can write there: loading a program runs code from the file."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} must be writable by this user alone, got owner {found.st_uid} and mode "
            f"{stat.filemode(found.st_mode)}; run chmod go-w on it, or choose another compilation_cache_dir"
        )


def _write(path: Path, program: Compiled) -> None:
    """Store a program, then remove the least recently used programs beyond MAX_BYTES.

    If that fails, log a warning.
    """
    try:
        content = pickle.dumps(serialize_executable.serialize(program))
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        check_owner(path.parent)
        write_whole(path, content)
        path.chmod(0o644)
        prune(path.parent, f"*{path.suffix}")
    except Exception as error:  # a full disk, or a backend that cannot serialise
        _warn_once(path.parent, f"compiled programs cannot be kept: {error}")


_warned: set[Path] = set()


def _warn_once(directory: Path, message: str) -> None:
    """Log a warning, but only once per directory: dozens of programs would repeat it."""
    logger.log(logging.DEBUG if directory in _warned else logging.WARNING, message)
    _warned.add(directory)


def prune(directory: Path, pattern: str, max_bytes: int = MAX_BYTES) -> None:
    """Remove the least recently used files that match `pattern` in a directory, so that at most `max_bytes` remain."""
    ages = []
    for path in directory.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process may prune as well
            ages.append((path.stat().st_mtime, path.stat().st_size, path))
    total = 0
    for _, size, path in sorted(ages, reverse=True):
        total += size
        if total > max_bytes:
            path.unlink(missing_ok=True)


def _environment() -> tuple[object, ...]:
    """Return everything outside an engine that its programs depend on: versions, hardware, settings, our source."""
    device = jax.devices()[0]
    settings = [getattr(jax.config, name) for name in _SETTINGS]
    return (
        (version("jax"), version("jaxlib"), device.client.platform_version),
        (device.platform, device.device_kind, jax.device_count(), _cpu_flags(), num_cores()),
        (settings, xla_flags(), libtpu_args()),
        source_digest("py", "so", "json"),
    )


def _cpu_flags() -> str:
    """Return the processor's features: machine code for one processor may not run on another."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return ""


@cache
def source_digest(*suffixes: str) -> str:
    """Return a digest of our files with these suffixes: "py", "so" (native kernels), "json" (tuned block sizes)."""
    files = {}  # an installed `jaxserve` contains the other two packages, a checkout has them alongside
    endings = tuple(f".{suffix}" for suffix in suffixes)
    for package in ("jaxserve", "jaxserve.pallas_kernels", "jaxserve.weights"):
        (root,) = import_module(package).__path__
        for folder, _, names in os.walk(root):  # strings: hundreds of paths take a fortieth of a second longer
            inside = folder.removeprefix(root).replace(os.sep, "/")
            shown = f"{package.replace('.', '/')}{inside}"
            files.update({f"{shown}/{name}": f"{folder}/{name}" for name in names if name.endswith(endings)})
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(name.encode())
        with open(path, "rb", buffering=0) as file:
            digest.update(file.read())
    return digest.hexdigest()
