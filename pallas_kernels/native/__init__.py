"""C++ kernels for CPUs: vectorised for AVX-512, AVX2 or NEON, run as custom calls on XLA's own threads.

They are built when the package is installed, if there is a C++ compiler (`build.py`), and registered with jax at first
use. Without them everything runs on XLA's own code.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

ATTENTION = "jaxserve_attention"
SPAN_ATTENTION = "jaxserve_span_attention"
LINEAR = "jaxserve_linear"
GROUPED_LINEAR = "jaxserve_grouped_linear"
ZEROS = "jaxserve_zeros"
ACTIVATION_DTYPES = ("float32", "bfloat16")
ABI = 19  # version of the calls' signatures and of packed weights; ffi.cc has the same number

_DIRECTORY = Path(__file__).parent
_LIBRARY = _DIRECTORY / "_kernels.so"
_BUILD_FAILURE = _DIRECTORY / "build_failure.txt"  # written by build.py


@functools.cache  # jax keeps registered targets for ever: register once per process
def unavailable() -> str | None:
    """Return the reason why the kernels cannot be called, or None once they are registered."""
    if not _LIBRARY.exists():
        reason = _BUILD_FAILURE.read_text().strip() if _BUILD_FAILURE.exists() else "the package was not built"
        return f"there are no native kernels: {reason}"
    try:
        library = _library()
        if (built := library.jaxserve_native_abi()) != ABI:
            return f"the native kernels are of version {built}, not {ABI}; reinstall the package"
        for name in (ATTENTION, SPAN_ATTENTION, LINEAR, GROUPED_LINEAR, ZEROS):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        return f"the native kernels do not load, reinstall the package: {error}"
    return None


def activation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype in which the kernels read and write activations of a dtype: itself, or float32."""
    return jnp.dtype(dtype if jnp.dtype(dtype).name in ACTIVATION_DTYPES else jnp.float32)


def zeros(shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Return zeros on a CPU; the system provides a large array's memory in the background."""
    result: Array = jax.ffi.ffi_call(ZEROS, jax.ShapeDtypeStruct(shape, dtype))()
    return result


def instruction_sets() -> list[str]:
    """Return the instruction sets that this processor and the library both have, best first; the first is in use."""
    name = _library().jaxserve_native_instruction_set
    name.restype = ctypes.c_char_p
    return [found.decode() for found in iter(map(name, itertools.count()).__next__, None)]


@contextmanager
def using(instruction_set: str) -> Iterator[None]:
    """Make all kernels of the process use another instruction set than the best, for tests."""
    _library().jaxserve_native_use(instruction_sets().index(instruction_set))
    try:
        yield
    finally:
        _library().jaxserve_native_use(0)


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_LIBRARY))
