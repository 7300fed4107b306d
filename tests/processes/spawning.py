"""Start the processes of one run on this machine, and wait for their ends."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def start(commands: Sequence[Sequence[str]], devices: int) -> list["subprocess.Popen[str]"]:
    """Start one process for each list of arguments to Python, in which {address} and {count} are filled in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": root}
    filled = [
        [argument.replace("{address}", address).replace("{count}", str(len(commands))) for argument in command]
        for command in commands
    ]
    return [
        subprocess.Popen([sys.executable, *command], env=env, stdout=-1, stderr=subprocess.STDOUT, text=True)
        for command in filled
    ]


def join(processes: Sequence["subprocess.Popen[str]"], timeout_s: float = 240) -> list[tuple[int, str]]:
    """Return exit code and output of each process after its end."""
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def wait_for(
    condition: Callable[[], bool], processes: Sequence["subprocess.Popen[str]"], timeout_s: float = 240
) -> None:
    """Wait until a condition holds, while all processes live; they are ended if it does not come true in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert all(process.poll() is None for process in processes), join(processes)
        if time.monotonic() > end_s:
            for process in processes:
                process.kill()
            raise AssertionError(f"it has not come true in {timeout_s} s: {join(processes)}")
        time.sleep(0.05)
