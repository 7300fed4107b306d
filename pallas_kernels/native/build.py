"""Build the native kernels when the package is installed; without them, installation goes on and XLA's code serves."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext
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
# Sets with byte products, and the set whose attention they call.
PLAIN = {"avxvnni": "avx2", "avx512vnni": "avx512", "neondot": "generic"}
if platform.machine() in X86:
    INSTRUCTION_SETS |= {
        "avx2": (8, AVX2),
        "avxvnni": (8, [*AVX2, "-mavxvnni"]),
        "avx512": (16, AVX512),
        "avx512vnni": (16, [*AVX512, "-mavx512vnni"]),
    }
if platform.machine() in ARM and sys.platform == "linux":  # compilers for macOS have byte products in their baseline
    INSTRUCTION_SETS["neondot"] = (4, ["-march=armv8.2-a+dotprod"])


class BuildKernels(build_ext):
    """Compile `isa.cc` once per instruction set and `ffi.cc` against the headers that come with jaxlib.

    An instruction set that the compiler does not know is left out, with those that need it.
    """

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
        """Copy the library, or the note, beside the sources, where an editable install looks for it."""
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name))  # beside the sources, since `inplace` is set
            built = Path(self.build_lib, *ext.name.split(".")[:-1])
            for name in (target.name, FAILURE_NOTE):
                (target.parent / name).unlink(missing_ok=True)
                if (built / name).exists():
                    self.copy_file(str(built / name), str(target.parent / name))

    def _compile_all(self) -> list[str]:
        objects = self._compile_set("generic", *BASELINE)
        built = ["generic"]
        for name, (width, flags) in INSTRUCTION_SETS.items():
            if (plain := PLAIN.get(name, "generic")) not in built:
                self.warn(f"the native kernels are built without {name}, whose attention would be that of {plain}")
                continue
            try:
                objects += self._compile_set(name, width, flags)
            except CCompilerError as error:
                self.warn(f"the native kernels are built without {name}: {error}")
            else:
                built.append(name)
        has = [f"-DNATIVE_HAS_{name}" for name in built[1:]]
        # The linker takes the first copy of an inline function that several objects have: that of every processor.
        return self._compile("ffi.cc", "ffi", ["-isystem", _xla_headers(), *has]) + objects

    def _compile_set(self, name: str, width: int, flags: list[str]) -> list[str]:
        plain = [f"-DNATIVE_PLAIN={PLAIN[name]}"] if name in PLAIN else []
        return self._compile("isa.cc", name, [f"-DNATIVE_ISA={name}", f"-DNATIVE_WIDTH={width}", *plain, *flags])

    def _compile(self, source: str, name: str, flags: list[str]) -> list[str]:
        path = Path("pallas_kernels/native") / source
        directory = Path(self.build_temp) / name
        objects: list[str] = self.compiler.compile([str(path)], output_dir=str(directory), extra_postargs=FLAGS + flags)
        return objects


def _xla_headers() -> str:
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise OSError("jaxlib, whose headers are needed, is not installed in the build environment")
    return str(Path(spec.origin).parent / "include")
