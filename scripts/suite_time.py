"""Test duration, compared with a limit on a quiet machine with two cores.

    python scripts/suite_time.py run FILE pytest    # run the command, and write its times to FILE
    python scripts/suite_time.py check FILE         # exit status 1 if the tests took too long
    python scripts/suite_time.py calibrate          # seconds of a fixed load: REFERENCE_S on the machine of the limit

Before and after the tests two processes compile small programs without a cache and run Python, like the tests. The
limit grows with their time. If other processes used more than a tenth of the processor time meanwhile, there is no
verdict.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

LIMIT_S = 360.0
TOLERANCE = 1.25
REFERENCE_S = 6.0  # measured on two quiet cores of an AMD EPYC with AVX-512
MAX_OTHERS = 0.1  # fraction of the processor time
NUM_PROCESSES = 2
NUM_PROGRAMS = 16
NUM_LOOPS = 20


def load() -> float:
    """Compile and compute; return the seconds."""
    jax.config.update("jax_enable_compilation_cache", False)
    jnp.zeros(1).block_until_ready()
    rng = random.Random(0)
    start = time.perf_counter()
    for index in range(NUM_PROGRAMS):

        def step(x: jax.Array, size: int = 32 + index) -> jax.Array:
            for _ in range(4):
                x = jax.nn.softmax(jnp.tanh(x @ x.T / size) @ x, axis=-1)
            return jnp.sort(x, axis=-1)

        jax.jit(step).lower(jax.ShapeDtypeStruct((16, 32 + index), "float32")).compile()
    for _ in range(NUM_LOOPS):
        numbers = [rng.random() for _ in range(20_000)]
        words = {str(number): number for number in sorted(numbers)}
        assert len(words) == len(numbers)
    return time.perf_counter() - start


def calibrate() -> float:
    """Run the load in all processes simultaneously; return their mean seconds."""
    command = [sys.executable, __file__, "load"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(NUM_PROCESSES)]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("the load has failed; see the errors above")
    return statistics.mean(float(output) for output in outputs)


def run(path: Path, command: list[str]) -> int:
    """Run a command; write its times; return its exit status."""
    before_s = calibrate()
    start_s, spent_s, busy_s = time.monotonic(), _spent_s(), _busy_s()
    status = subprocess.run(command, check=False).returncode
    wall_s, spent_s, busy_s = time.monotonic() - start_s, _spent_s() - spent_s, _busy_s() - busy_s
    times = {
        "wall_s": wall_s,
        "processor_s": spent_s,
        "others": max(0.0, busy_s - spent_s) / (wall_s * (os.cpu_count() or 1)),
        "calibration_s": [before_s, calibrate()],
    }
    path.write_text(json.dumps(times, indent=1) + "\n")
    return status


def check(path: Path) -> int:
    """Print the verdict; return the exit status."""
    times = json.loads(path.read_text())
    factor = max(1.0, *(seconds / REFERENCE_S for seconds in times["calibration_s"]))
    limit_s = LIMIT_S * TOLERANCE * factor
    print(
        f"the tests took {times['wall_s']:.0f} s, {times['processor_s']:.0f} s of processor time; limit "
        f"{limit_s:.0f} s on this machine, {factor:.2f} times as slow as the reference; other processes had "
        f"{times['others']:.0%}; {LIMIT_S:.0f} s on the reference are meant"
    )
    if times["wall_s"] <= limit_s:
        return 0
    if times["others"] > MAX_OTHERS:
        print("no verdict: the machine was not quiet")
        return 0
    print("the tests take too long: `pytest --costs=FILE` shows where; mark what repeats as full, share engines")
    return 1


def _spent_s() -> float:
    """Return the processor time of ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _busy_s() -> float:
    """Return the processor time of all processes, including time denied to a virtual machine."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return _spent_s()
    user, nice, system, _, _, interrupts, soft, stolen, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="what")
    running = commands.add_parser("run")
    running.add_argument("file", type=Path)
    running.add_argument("command", nargs=argparse.REMAINDER)
    commands.add_parser("check").add_argument("file", type=Path)
    commands.add_parser("calibrate")
    commands.add_parser("load")
    args = parser.parse_args()
    if args.what == "run":
        return run(args.file, args.command)
    if args.what == "check":
        return check(args.file)
    print(f"{calibrate() if args.what == 'calibrate' else load():.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
