"""On what a process measures: device, driver, versions."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def with_jax() -> dict[str, Any]:
    """As jax sees it."""
    import jax  # noqa: PLC0415 - takes the device's memory

    from jaxserve.engine.roofline import describe_device  # noqa: PLC0415 - imports jax

    device = describe_device()
    return {
        "device": device.kind,
        "platform": jax.default_backend(),
        "driver": driver(),
        "versions": versions("jax", "jaxlib", "libtpu"),
    }


def with_torch() -> dict[str, Any]:
    """As torch sees it; without torch or a GPU, the reason is found by the points."""
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
    """Of the NVIDIA GPU; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return None


def versions(*packages: str) -> dict[str, str | None]:
    """Of Python and of the packages; None of those that are missing."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
