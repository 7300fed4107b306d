"""Build the native kernels when the package is installed; without them, installation continues and XLA's code serves.

Instruction sets are compiled in parallel. The user's cache keeps objects by a digest of all inputs, so that a second
installation, or one for another Python, compiles nothing. The library uses no CPython symbols, so that one wheel serves
every version.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import BaseError, CCompilerError, ExecError

# -g0, as interpreters pass on the -g that they were built with: tables for debuggers are nine tenths of the library.
FLAGS = ["-O3", "-g0", "-std=c++17", "-pthread", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-Wall", "-Wno-maybe-uninitialized"]
FAILURE_NOTE = "build_failure.txt"

X86 = ("x86_64", "AMD64")
ARM = ("aarch64", "arm64")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]

# The source is compiled once per instruction set of the machine: floats per vector and the compiler's options. The best
# one that a processor has is chosen when the library is loaded.
BASELINE: tuple[int, list[str]] = (4, [])  # "generic"
INSTRUCTION_SETS: dict[str, tuple[int, list[str]]] = {}
# Sets that extend another one by products of bytes or tiles, and call its kernels for everything else.
PLAIN = {"avxvnni": "avx2", "avx512vnni": "avx512", "amx": "avx512vnni", "neondot": "generic"}
if platform.machine() in X86:
    INSTRUCTION_SETS |= {
        "avx2": (8, AVX2),
        "avxvnni": (8, [*AVX2, "-mavxvnni"]),
        "avx512": (16, AVX512),
        "avx512vnni": (16, [*AVX512, "-mavx512vnni"]),
    }
    if sys.platform == "linux":  # processes ask the system for tiles
        INSTRUCTION_SETS["amx"] = (16, [*AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"])
if platform.machine() in ARM and sys.platform == "linux":  # compilers for macOS have byte products in their baseline
    INSTRUCTION_SETS["neondot"] = (4, ["-march=armv8.2-a+dotprod"])


SOURCES = Path("pallas_kernels/native")
MAX_KEPT = 60  # objects in the cache, enough for about ten builds


class Unit(NamedTuple):
    """A source file, its flags, and include folders with other projects' headers."""

    source: str
    flags: list[str]
    includes: tuple[str, ...] = ()


class BuildKernels(build_ext):
    """Compile `isa.cc` once per instruction set and `ffi.cc` against the headers that come with jaxlib.

    An instruction set that the compiler does not know is skipped, with all sets that need it.
    """

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without the Python version: the library does not depend on it."""
        return f"{os.path.join(*fullname.split('.'))}.so"

    def get_source_files(self) -> list[str]:
        """Return all that a build from the source archive needs."""
        return [str(path) for path in sorted(SOURCES.iterdir()) if path.suffix in (".cc", ".h", ".py")]

    def build_extension(self, ext: Extension) -> None:
        """Build the library, or leave a note with the reason why it could not be built."""
        target = Path(self.get_ext_fullpath(ext.name))
        failure = target.parent / FAILURE_NOTE
        for old in (failure, target):  # a stale library must not be taken for this build
            old.unlink(missing_ok=True)
        try:
            objects = self._compile_all()
            self.compiler.link_shared_object(objects, str(target), target_lang="c++", extra_postargs=["-pthread"])
        except (BaseError, CCompilerError, ExecError, OSError) as error:
            self.warn(f"the native kernels could not be built: {error}")
            target.parent.mkdir(parents=True, exist_ok=True)
            failure.write_text(f"{error}\n")

    def copy_extensions_to_source(self) -> None:
        """Copy the library, or the note, to the source folder, which an editable install reads."""
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name))  # in the source folder, since `inplace` is set
            built = Path(self.build_lib, *ext.name.split(".")[:-1])
            for name in (target.name, FAILURE_NOTE):
                (target.parent / name).unlink(missing_ok=True)
                if (built / name).exists():
                    self.copy_file(str(built / name), str(target.parent / name))

    def _compile_all(self) -> list[str]:
        units = {"generic": Unit("isa.cc", _defines("generic", *BASELINE))}
        units |= {name: Unit("isa.cc", _defines(name, *options)) for name, options in INSTRUCTION_SETS.items()}
        with ThreadPoolExecutor(num_cores := os.cpu_count() or 1) as pool:
            started = time.monotonic()
            _report(f"{len(units) + 1} native kernels, compiled on {num_cores} cores, some minutes on one")
            # Sets with the widest vectors take longest: they must not start last.
            compiled = {name: pool.submit(self._compile, name, unit) for name, unit in reversed(units.items())}
            handlers = pool.submit(self._compile, "ffi", _handlers(INSTRUCTION_SETS))
            objects = {"generic": compiled["generic"].result()}
            for name in INSTRUCTION_SETS:
                if path := self._built(name, compiled[name], objects):
                    objects[name] = path
            if len(objects) < len(units):
                handlers = pool.submit(self._compile, "ffi", _handlers(list(objects)[1:]))
            # The linker takes the first copy of an inline function: that copy must run on every processor.
            result = [handlers.result(), *objects.values()]
        _report(f"native kernels are built after {time.monotonic() - started:.0f} s: {', '.join(objects)}")
        _forget_oldest()
        return result

    def _built(self, name: str, compiled: Future[str], objects: Iterable[str]) -> str | None:
        if (plain := PLAIN.get(name, "generic")) not in objects:
            self.warn(f"the native kernels are built without {name}, which needs {plain}")
            return None
        try:
            return compiled.result()
        except CCompilerError as error:
            self.warn(f"the native kernels are built without {name}: {error}")
            return None

    def _compile(self, name: str, unit: Unit) -> str:
        """Return the unit's object, from the cache if it has been compiled before."""
        kept = _cache() / f"{self._key(unit)}.o"
        directory = Path(self.build_temp) / name
        directory.mkdir(parents=True, exist_ok=True)
        if kept.exists():
            _report(f"  {name}: compiled before")
            with contextlib.suppress(OSError):
                kept.touch()  # `_forget_oldest` goes by time
            return str(shutil.copy(kept, directory / f"{unit.source}.o"))
        started = time.monotonic()
        flags = [*FLAGS, *unit.flags, *(f"-isystem{path}" for path in unit.includes)]
        (path,) = self.compiler.compile([str(SOURCES / unit.source)], output_dir=str(directory), extra_postargs=flags)
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=_cache()) as there:
            os.replace(shutil.copy(path, there), kept)
        _report(f"  {name}: {time.monotonic() - started:.0f} s")
        return str(path)

    def _key(self, unit: Unit) -> str:
        """Return a digest over the compiler, its flags, the source and all headers, XLA's included."""
        command = getattr(self.compiler, "compiler_so_cxx", ["c++"])
        version = subprocess.run([command[0], "--version"], check=False, capture_output=True).stdout
        digest = hashlib.sha256(repr([command, FLAGS, unit.source, unit.flags, platform.machine(), version]).encode())
        headers = [path for folder in unit.includes for path in sorted(Path(folder, "xla/ffi/api").rglob("*.h"))]
        for path in (SOURCES / unit.source, *sorted(SOURCES.glob("*.h")), *headers):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
        return digest.hexdigest()


class TagWheel(bdist_wheel):
    """Tag the wheel for every Python: its library is loaded by ctypes and called by XLA."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class ArchiveSources(sdist):
    """Leave the tests out of the source archive: setuptools adds some test files by their names."""

    def make_distribution(self) -> None:
        self.filelist.exclude_pattern(None, prefix="tests")
        super().make_distribution()


def _defines(name: str, width: int, flags: list[str]) -> list[str]:
    plain = [f"-DNATIVE_PLAIN={PLAIN[name]}"] if name in PLAIN else []
    # Hidden, as only the handlers are called from outside: names would take a megabyte, and calls would be indirect.
    return [f"-DNATIVE_ISA={name}", f"-DNATIVE_WIDTH={width}", "-fvisibility=hidden", *plain, *flags]


def _handlers(sets: Iterable[str]) -> Unit:
    return Unit("ffi.cc", [f"-DNATIVE_HAS_{name}" for name in sets], (_xla_headers(),))


def _xla_headers() -> str:
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise OSError("jaxlib, whose headers are needed, is not installed in the build environment")
    return str(Path(spec.origin).parent / "include")


def _cache() -> Path:
    """Return the object folder in jaxserve's cache; builds run without jaxserve's `environment`."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "objects"
    with contextlib.suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
    return path


def _forget_oldest() -> None:
    with contextlib.suppress(OSError):
        for path in sorted(_cache().glob("*.o"), key=lambda path: path.stat().st_mtime)[:-MAX_KEPT]:
            path.unlink(missing_ok=True)


def _report(text: str) -> None:
    """Write to standard output, and to the terminal if pip hides the output."""
    print(text, flush=True)
    if sys.stdout.isatty():
        return
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        if os.tcgetpgrp(terminal.fileno()) == os.getpgrp():  # not from the background
            terminal.write(f"\r{text}\n")
