"""The tests of the kernels, on this device, by pytest where it is installed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from device_report import machine as machines
from device_report.points import Figures, Point, UnavailableError

ROOT = Path(__file__).parents[2]
TESTS = "tests/kernels"
NUM_PROCESSES = min(12, os.cpu_count() or 1)  # most of the time goes to compiling
# A planted bug may keep a device waiting for ever; kernels of another device have reports of their own.
LEFT_OUT = {"gpu": "planted or tpu", "tpu": "planted or gpu"}
TIMEOUT_S = 90  # a kernel that never ends must not keep the device from the others


def machine() -> dict[str, Any]:
    """Return the machine without asking jax, whose process would keep the device's memory from the tests."""
    return {
        "device": None,
        "platform": None,
        "driver": machines.driver(),
        "versions": machines.versions("jax", "pytest"),
    }


def points(device: str, dry_run: bool) -> Iterator[Point]:
    """One: all tests; in a dry run, a file of few."""
    tests = f"{TESTS}/test_dispatch.py" if dry_run else TESTS
    yield Point("suite", {"tests": tests}, partial(run, tests, device, dry_run))


def run(tests: str, device: str, dry_run: bool) -> Figures:
    """Return the last line that pytest says, and the names of what failed; all it says goes to the log."""
    if find_spec("pytest") is None:
        raise UnavailableError("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "default", tests]
    if find_spec("beartype") is None or find_spec("jaxtyping") is None:
        command += ["-q", "-o", "addopts="]  # the project's options check shapes with both
    if not dry_run:
        command += ["-m", "not full and not deviceless", "-k", f"not ({LEFT_OUT[device]})"]
        command += ["-n", str(NUM_PROCESSES)] if find_spec("xdist") is not None else []
        command += ["--timeout", str(TIMEOUT_S)] if find_spec("pytest_timeout") is not None else []
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    print(done.stdout, done.stderr, file=sys.stderr)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"summary": lines[-1].strip("= "), "passed": done.returncode == 0, "failures": failures[:20]}
