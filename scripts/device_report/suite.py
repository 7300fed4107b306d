"""Kernel tests on this device, by pytest if it is installed."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from device_report import machine as machines
from device_report.points import Figures, Point, UnavailableError

ROOT = Path(__file__).parents[2]
TESTS = {
    "gpu": ("test_mosaic_gpu", "test_latents_on_gpus", "test_grouped_kernels", "test_quantized_matmul"),
    "tpu": ("test_mosaic_tpu_kernel", "test_latents_on_tpus", "test_grouped_kernels", "test_quantized_matmul"),
}
NUM_PROCESSES = min(12, os.cpu_count() or 1)  # compilation takes most of the time
# Tests of values; a planted bug may make a device wait forever.
CHOSEN = {"gpu": "match and not (planted or tpu_kernel)", "tpu": "match and not (planted or gpu_kernel)"}
TIMEOUT_S = 60  # a kernel that never ends must not block the device


def machine() -> dict[str, Any]:
    """Return the machine without jax, whose process would keep the device memory from the tests."""
    return {
        "device": None,
        "platform": None,
        "driver": machines.driver(),
        "versions": machines.versions("jax", "pytest"),
    }


def points(device: str, dry_run: bool) -> Iterator[Point]:
    """Yield one point: all tests; in a dry run, one small file."""
    files = ("test_dispatch",) if dry_run else TESTS[device]
    yield Point("suite", {"tests": "tests/kernels"}, partial(run, files, device, dry_run))


def run(files: Sequence[str], device: str, dry_run: bool) -> Figures:
    """Return pytest's last line, and the names of failed tests; all output goes to the log."""
    if find_spec("pytest") is None:
        raise UnavailableError("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "default"]
    command += [f"tests/kernels/{file}.py" for file in files]
    if find_spec("beartype") is None or find_spec("jaxtyping") is None:
        command += ["-q", "-o", "addopts="]  # the project's options check shapes with both
    if not dry_run:
        command += ["-m", "", "-k", CHOSEN[device]]
        command += ["-n", str(NUM_PROCESSES)] if find_spec("xdist") is not None else []
        command += ["--timeout", str(TIMEOUT_S)] if find_spec("pytest_timeout") is not None else []
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in map(str.rstrip, process.stdout):
            print(line, file=sys.stderr, flush=True)  # immediately, in case the time is up before the end
            lines.append(line)
    summary = next((line.strip("= ") for line in reversed(lines) if line), "")
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"summary": summary, "passed": process.returncode == 0, "failures": failures[:20]}
