"""Properties of the measuring machine: device, driver, versions."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def with_jax() -> dict[str, Any]:
    """Return the device as reported by jax."""
    import jax  # noqa: PLC0415 - takes the device's memory

    from jaxserve.execution.roofline import describe_device  # noqa: PLC0415 - imports jax

    device = describe_device()
    return {
        "device": device.kind,
        "platform": jax.default_backend(),
        "driver": driver(),
        "versions": versions("jax", "jaxlib", "libtpu"),
    }


def with_torch() -> dict[str, Any]:
    """Return the device as reported by torch; without torch or a GPU, the points find the reason."""
    try:
        import torch  # noqa: PLC0415 - may be missing
    except ImportError:
        return {"device": None, "platform": None, "driver": driver(), "versions": versions()}
    has_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_gpu else None,
        "platform": "gpu" if has_gpu else None,
        "driver": driver(),
        "versions": versions("torch", "triton", "transformers"),
    }


def driver() -> str | None:
    """Return the NVIDIA driver's version; None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return None


def versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of Python and packages; None for missing ones."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
