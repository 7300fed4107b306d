import platform
import shutil

import jax
import pytest

from jaxserve.pallas_kernels import native

CAN_BUILD = platform.system() == "Linux" and any(map(shutil.which, ("g++", "c++", "clang++")))


@pytest.mark.skipif(not CAN_BUILD or jax.default_backend() != "cpu", reason="needs Linux, a C++ compiler and a CPU")
def test_where_there_is_a_compiler_there_are_kernels():
    """Otherwise every test of them would be skipped, and nobody would notice that they no longer build."""
    assert native.unavailable() is None


def test_a_build_without_a_compiler_leaves_a_note(tmp_path, monkeypatch):
    setuptools = pytest.importorskip("setuptools")
    from jaxserve.pallas_kernels.native.build import BuildKernels

    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("CC", "/nonexistent/cc")
    extension = setuptools.Extension("jaxserve.pallas_kernels.native._kernels", ["pallas_kernels/native/ffi.cc"])
    command = BuildKernels(setuptools.Distribution({"name": "x", "ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(tmp_path / "lib"), str(tmp_path / "temp")
    command.ensure_finalized()
    command.run()
    (note,) = (tmp_path / "lib").rglob("build_failure.txt")
    assert "/nonexistent/c" in note.read_text()

    monkeypatch.setattr(native, "_LIBRARY", note.parent / native._LIBRARY.name)
    monkeypatch.setattr(native, "_BUILD_FAILURE", note)
    assert "/nonexistent/c" in native.unavailable.__wrapped__()


def test_a_library_of_another_version_is_refused(monkeypatch):
    if native.unavailable() is not None:
        pytest.skip(native.unavailable())
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    assert "reinstall" in native.unavailable.__wrapped__()
