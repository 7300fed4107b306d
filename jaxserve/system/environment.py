"""Process environment: no other module reads or sets its variables."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import ConfigError

RUN_KEY = "JAXSERVE_RUN_KEY"
DEFAULT_GPU_MEMORY_FRACTION = 0.75  # XLA's default
_MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PINNED_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_PINNED_GIB = 64  # XLA's default for pinned host memory


def user_cache_dir() -> Path:
    """Return the directory for results of expensive computations and measurements, shared by processes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve"


def openai_api_key() -> str | None:
    """Return the API key for OpenAI-compatible servers; None without one."""
    return os.environ.get("OPENAI_API_KEY") or None


def run_key() -> str | None:
    """Return the key shared by the processes of a run; None without one."""
    return os.environ.get(RUN_KEY) or None


def child_variables(**changed: str) -> dict[str, str]:
    """Return the environment variables for a child process: this process's, with some changed."""
    return os.environ | changed


def xla_flags() -> str:
    """Return the value of XLA_FLAGS; "" if it is not set."""
    return os.environ.get("XLA_FLAGS", "")


def gpu_memory_fraction() -> float | None:
    """Return the GPU memory fraction that the environment sets for XLA's client; None if it is not set."""
    name = next((name for name in _MEMORY_FRACTIONS if os.environ.get(name)), None)
    if name is None:
        return None
    value = os.environ[name]
    try:
        fraction = float(value)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise ConfigError(f"{name} must be a number in (0, 1], got {value!r}; unset it for gpu_memory_utilization")
    return fraction


@contextlib.contextmanager
def claiming_gpu_memory(fraction: float) -> Iterator[float]:
    """Make XLA's client claim this fraction of GPU memory unless the environment sets one; yield the effective
    fraction.

    Enter this around the start of jax's backend, which reads the setting. Child processes do not inherit it.
    """
    given = gpu_memory_fraction()
    if given is not None:
        yield given
        return
    os.environ[_MEMORY_FRACTIONS[0]] = str(fraction)
    try:
        yield fraction
    finally:
        del os.environ[_MEMORY_FRACTIONS[0]]


def pinned_memory_gib() -> int | None:
    """Return the limit on pinned host memory for GPUs that the environment sets; None if it sets none."""
    value = os.environ.get(_PINNED_GIB)
    if not value:
        return None
    if not value.isdecimal():
        raise ConfigError(f"{_PINNED_GIB} must be a number of GiB, got {value!r}; unset it for kv_offloading_size")
    return int(value)


@contextlib.contextmanager
def allowing_pinned_memory(extra_gib: float) -> Iterator[None]:
    """Raise XLA's limit on pinned host memory for GPUs by `extra_gib`, unless the environment sets it.

    Enter this around the start of jax's backend, which reads the setting. Child processes do not inherit it.
    """
    if pinned_memory_gib() is not None or not extra_gib:
        yield
        return
    os.environ[_PINNED_GIB] = str(DEFAULT_PINNED_GIB + math.ceil(extra_gib))
    try:
        yield
    finally:
        del os.environ[_PINNED_GIB]


def libtpu_args() -> str | None:
    """Return the value of LIBTPU_INIT_ARGS; None if it is not set."""
    return os.environ.get("LIBTPU_INIT_ARGS")


def leave_tpus_alone() -> None:
    """Restrict libtpu to compilation: it neither looks for TPUs nor locks them. Call this before libtpu is loaded."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def ray_address() -> str:
    """Return the Ray cluster named by the environment, or "local" for a loopback-only cluster on this machine.

    Call this before importing Ray, which reads the variables set here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # calls to an actor that has ended fail as expected
    if address := os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # attempts of half a minute each; the default is 20
        return address
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # restricts Ray to loopback, on Linux too
    if "ray" not in sys.modules:  # else Ray's servers would read the mode, but this process would not any more
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # the default, but Ray warns unless it is set
    return "local"
