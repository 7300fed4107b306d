"""Tensor parallelism over eight virtual devices: what is in `devices/` runs in a process that has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = sorted((Path(__file__).parent / "devices").glob("check_*.py"))
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"  # compiles faster
DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.stem)
def test_on_eight_devices(check: Path) -> None:
    run_checks(check, "not full")


@pytest.mark.full
@pytest.mark.parametrize(
    "check", [path for path in CHECKS if "@given" in path.read_text()], ids=lambda check: check.stem
)
def test_more_on_eight_devices(check: Path) -> None:
    """What the checks themselves mark as full, and more random requests."""
    run_checks(check, "full")


def run_checks(check: Path, selection: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", selection, str(check)]
    done = subprocess.run(
        command, env={**os.environ, **DEVICES}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
