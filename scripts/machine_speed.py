"""Time of a fixed load like the tests', against the same load on the machine that the limit of the tests is for.

    python scripts/machine_speed.py             # 1.3: this machine needs 1.3 times as long now
    python scripts/machine_speed.py --seconds   # seconds of the load

Two processes at the same time, as the tests have, compile small programs without a cache and run Python. CI runs it
before and after the tests, so that a slow or busy machine gets the time that it needs.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

REFERENCE_S = 6.0  # on two quiet cores of an AMD EPYC with AVX-512
NUM_PROCESSES = 2
NUM_PROGRAMS = 16
NUM_LOOPS = 20
_LOAD = "--load"


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


def measure() -> float:
    """Run the load in all processes at the same time; return the mean of their seconds."""
    command = [sys.executable, __file__, _LOAD]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(NUM_PROCESSES)]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("the load has failed; see the errors above")
    return statistics.mean(float(output) for output in outputs)


def main() -> None:
    """Print the factor, or the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", action="store_true", help="print the seconds of the load")
    parser.add_argument(_LOAD, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(load())
        return
    seconds = measure()
    print(f"{seconds:.2f}" if args.seconds else f"{seconds / REFERENCE_S:.2f}")


if __name__ == "__main__":
    main()
