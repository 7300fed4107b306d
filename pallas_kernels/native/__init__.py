"""Kernels in C++ for CPUs: vectorised for AVX-512, AVX2 or NEON, on XLA's own threads, called as its custom calls.

They are built when the package is installed, if a C++ compiler is there (`build.py`), and registered with jax at first
use. Without them everything still runs, on XLA's own code.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import jax

ATTENTION = "jaxserve_attention"
LINEAR = "jaxserve_linear"
ABI = 1  # of the calls; ffi.cc knows the same number

_DIRECTORY = Path(__file__).parent
_BUILD_FAILURE = _DIRECTORY / "build_failure.txt"  # written by build.py


@functools.cache  # jax keeps registered targets for ever: once per process
def unavailable() -> str | None:
    """Why the kernels cannot be called; None if they can, and are registered."""
    libraries = sorted(_DIRECTORY.glob("_kernels*.so"))
    if not libraries:
        reason = _BUILD_FAILURE.read_text().strip() if _BUILD_FAILURE.exists() else "the package was not built"
        return f"there are no native kernels: {reason}"
    try:
        library = ctypes.CDLL(str(libraries[-1]))
        if (built := library.jaxserve_native_abi()) != ABI:
            return f"the native kernels are of version {built}, not {ABI}; reinstall the package"
        for name in (ATTENTION, LINEAR):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        return f"the native kernels do not load, reinstall the package: {error}"
    return None
