import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import pytest

from jaxserve.pallas_kernels import native

ROOT = Path(__file__).parents[2]
CAN_BUILD = platform.system() == "Linux" and any(map(shutil.which, ("g++", "c++", "clang++")))


@pytest.mark.skipif(not CAN_BUILD or jax.default_backend() != "cpu", reason="needs Linux, a C++ compiler and a CPU")
def test_where_there_is_a_compiler_there_are_kernels():
    """All tests of missing kernels would be skipped, and a build failure would go unnoticed."""
    assert native.unavailable() is None


PROCESSOR_FLAGS = {  # of instruction sets in /proc/cpuinfo, best first
    "amx": "avx512f avx512bw avx512vl avx512dq avx512_vnni amx_tile amx_bf16 amx_int8",
    "avx512vnni": "avx512f avx512bw avx512vl avx512dq avx512_vnni",
    "avx512": "avx512f avx512bw avx512vl avx512dq",
    "avxvnni": "avx2 fma f16c avx_vnni",
    "avx2": "avx2 fma f16c",
    "neondot": "asimddp",
}


@pytest.mark.skipif(not CAN_BUILD or native.unavailable() is not None, reason="needs Linux and the kernels")
def test_the_processors_instruction_sets_are_found():
    """Products would be slower, unnoticed, if one that the compiler knows were not built or not detected."""
    pytest.importorskip("setuptools")
    from jaxserve.pallas_kernels.native.build import INSTRUCTION_SETS

    (flags, *_) = re.findall(r"^(?:flags|Features)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))))
    expected = []
    for name, needed in PROCESSOR_FLAGS.items():
        if name in INSTRUCTION_SETS and set(needed.split()) <= set(flags.split()):
            command = [compiler, *INSTRUCTION_SETS[name][1], "-E", "-x", "c++", os.devnull]
            expected += [name] if subprocess.run(command, check=False, capture_output=True).returncode == 0 else []
    found = native.instruction_sets()
    assert [name for name in found if name in expected] == expected


@pytest.mark.parametrize("is_editable", [False, True])
def test_a_build_without_a_compiler_leaves_a_note(is_editable, tmp_path, monkeypatch):
    setuptools = pytest.importorskip("setuptools")
    from jaxserve.pallas_kernels.native.build import BuildKernels

    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("CC", "/nonexistent/cc")
    monkeypatch.chdir(tmp_path)
    package = Path("pallas_kernels/native")
    package.mkdir(parents=True)
    (package / native._LIBRARY.name).write_text("built before")
    extension = setuptools.Extension("jaxserve.pallas_kernels.native._kernels", ["pallas_kernels/native/ffi.cc"])
    mapping = {"jaxserve.pallas_kernels": "pallas_kernels"}
    distribution = setuptools.Distribution({"name": "x", "ext_modules": [extension], "package_dir": mapping})
    command = BuildKernels(distribution)
    command.build_lib, command.build_temp, command.inplace = str(tmp_path / "lib"), str(tmp_path / "temp"), is_editable
    command.ensure_finalized()
    command.run()
    directory = tmp_path / package if is_editable else tmp_path / "lib" / "jaxserve" / package
    (note,) = directory.iterdir()  # no library of an earlier build
    assert "/nonexistent/c" in note.read_text()

    monkeypatch.setattr(native, "_LIBRARY", note.parent / native._LIBRARY.name)
    monkeypatch.setattr(native, "_BUILD_FAILURE", note)
    assert "/nonexistent/c" in native.unavailable.__wrapped__()


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(monkeypatch):
    setuptools = pytest.importorskip("setuptools")
    from setuptools.errors import CompileError

    from jaxserve.pallas_kernels.native import build

    compiled = []

    def compile_one(_, name, unit):
        if "-munknown" in unit.flags:
            raise CompileError("unrecognized option -munknown")
        compiled.append((name, unit.flags))
        return f"{name}.o"

    sets = {"old": (8, ["-mold"]), "new": (8, ["-munknown"]), "old_bytes": (8, ["-mbytes"]), "new_bytes": (8, [])}
    monkeypatch.setattr(build, "INSTRUCTION_SETS", sets)
    monkeypatch.setattr(build, "PLAIN", {"old_bytes": "old", "new_bytes": "new"})  # does not exist
    monkeypatch.setattr(build.BuildKernels, "_compile", compile_one)
    objects = build.BuildKernels(setuptools.Distribution({"name": "x"}))._compile_all()
    assert objects == ["ffi.o", "generic.o", "old.o", "old_bytes.o"]  # every processor runs the first one
    flags_of = dict(compiled)  # of the handlers those of the second time, without what was left out
    assert [flag for flag in flags_of["ffi"] if "NATIVE_HAS" in flag] == ["-DNATIVE_HAS_old", "-DNATIVE_HAS_old_bytes"]
    assert "-DNATIVE_PLAIN=old" in flags_of["old_bytes"]

    monkeypatch.setattr(build, "BASELINE", (4, ["-munknown"]))  # no library can be built
    with pytest.raises(CompileError):
        build.BuildKernels(setuptools.Distribution({"name": "x"}))._compile_all()


@pytest.mark.skipif(not CAN_BUILD, reason="needs Linux and a C++ compiler")
def test_what_was_compiled_before_is_not_compiled_again(tmp_path, monkeypatch, capsys):
    """Build a library of one function twice, for two versions of Python; then a header changes."""
    setuptools = pytest.importorskip("setuptools")
    from jaxserve.pallas_kernels.native import build

    compiled = []

    class Build(build.BuildKernels):
        def build_extensions(self):
            compile_one = self.compiler.compile

            def counted(*args, **kwargs):
                compiled.append(args)
                return compile_one(*args, **kwargs)

            self.compiler.compile = counted
            super().build_extensions()

    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "ffi.cc").write_text('#include "kernels.h"\nextern "C" int answer() { return ANSWER; }\n')
    (sources / "isa.cc").write_text('#include "kernels.h"\nint NATIVE_ISA() { return NATIVE_WIDTH; }\n')
    (sources / "kernels.h").write_text("#define ANSWER 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCES", Path("sources"))
    monkeypatch.setattr(build, "INSTRUCTION_SETS", {"wide": (8, [])})
    monkeypatch.setattr(build, "PLAIN", {})

    def answer(folder):
        extension = setuptools.Extension("native._kernels", ["sources/ffi.cc"])
        command = Build(setuptools.Distribution({"name": "x", "ext_modules": [extension]}))
        command.build_lib, command.build_temp = str(tmp_path / folder / "lib"), str(tmp_path / folder / "temp")
        command.ensure_finalized()
        command.run()
        return ctypes.CDLL(str(tmp_path / folder / "lib/native/_kernels.so")).answer()  # a name without the version

    assert answer("first") == 42
    assert len(compiled) == 3
    shown = capsys.readouterr().out
    assert all(f"  {name}: " in shown for name in ("generic", "wide", "ffi"))
    assert answer("second") == 42
    assert len(compiled) == 3
    assert "  wide: compiled before" in capsys.readouterr().out
    (sources / "kernels.h").write_text("#define ANSWER 43\n")
    assert answer("third") == 43
    assert len(compiled) == 6

    monkeypatch.setattr(build, "MAX_KEPT", 2)
    monkeypatch.setenv("CXXFLAGS", "-DOTHER")
    assert answer("fourth") == 43
    assert len(compiled) == 9
    assert len(list((tmp_path / "cache/jaxserve/objects").iterdir())) == 2


@pytest.mark.full
@pytest.mark.skipif(platform.system() != "Linux", reason="makes a folder of links to programs")
def test_the_documented_installation_works_without_a_compiler(tmp_path):
    """Run `pip install -e .` in a copy of the tree, with a PATH without a compiler, then `jaxserve --version`."""
    ignored = shutil.ignore_patterns(
        ".git", "*.so", "build", "*.egg-info", "__pycache__", ".*_cache", "tests", ".venv*"
    )
    tree, venv, programs = tmp_path / "tree", tmp_path / "venv", tmp_path / "bin"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith("-packages")]
    (site_packages / "chained.pth").write_text("\n".join(packages))
    programs.mkdir()
    for name in ("sh", "env", "uname"):
        (programs / name).symlink_to(shutil.which(name))
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "PYTHONPATH")}
    environment["PATH"] = str(programs)
    run = partial(subprocess.run, cwd=tree, env=environment, check=True, capture_output=True, text=True, timeout=300)
    run([venv / "bin/python", "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e", "."])
    assert run([venv / "bin/jaxserve", "--version"]).stdout.startswith("jaxserve ")
    code = "from jaxserve.pallas_kernels import native; print(native.__file__, native.unavailable())"
    shown = run([venv / "bin/python", "-c", code]).stdout
    assert shown.startswith(str(tree))
    assert "there are no native kernels: " in shown


def test_a_library_of_another_version_is_refused(monkeypatch):
    if native.unavailable() is not None:
        pytest.skip(native.unavailable())
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    assert "reinstall" in native.unavailable.__wrapped__()
