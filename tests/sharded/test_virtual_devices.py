"""Tensor parallelism over eight virtual devices: the checks in `devices/` run in a process that has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICES_DIR = Path(__file__).parent / "devices"
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"  # the level compiles faster
# Without XLA's own cache: what it has loaded cannot be kept whole, which check_engine.py wants to see.
DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "JAX_ENABLE_COMPILATION_CACHE": "false"}


BASIC = ("engine",)  # its checks are default tests, the others long ones


@pytest.mark.parametrize("is_basic", [True, pytest.param(False, marks=pytest.mark.long)])
def test_on_eight_devices(is_basic: bool) -> None:
    """Run checks in one process: it imports once, and engines share their programs.

    Types and shapes are checked where `types_are_checked` is used; everywhere else in full runs only, as it takes a
    fifth of the time: most functions are those of one device, whose tests check them.
    """
    basic = {DEVICES_DIR / f"check_{name}.py" for name in BASIC}
    checks = basic if is_basic else {*DEVICES_DIR.glob("check_*.py")} - basic
    run_checks(sorted(checks), "not full and not exhaustive", JAXTYPING_DISABLE="1")


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["dp_attention", "engine", "experts", "logits", "replicas", "sampling", "speculation", "stored", "weights"]
)
def test_more_on_eight_devices(name: str) -> None:
    """Run the checks that are marked as full, and more random requests."""
    run_checks([DEVICES_DIR / f"check_{name}.py"], "full and not exhaustive")


def run_checks(checks: list[Path], selection: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", selection, *map(str, checks)]
    done = subprocess.run(
        command, env={**os.environ, **DEVICES, **environment}, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
