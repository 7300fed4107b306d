"""Count multiply-adds per instruction of products on 64-bit ARM: `python -m tests.kernels.emulated.count`.

`PYTHONPATH=scripts` must be set: matrices are those of `bench_linear.py`. One JSON object per line.
"""

import json

import jax
import numpy as np

import bench_linear
from jaxserve.pallas_kernels import native, packed_linear
from tests.kernels.emulated import calls

ROWS, COLUMNS = 256, 1024
TOKENS = (1, 8, 60)


def main() -> None:
    calls.install()
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((ROWS, COLUMNS), np.float32)
    for name in calls.PROCESSORS:
        machine = calls.machine(name)
        for dtype in bench_linear.DTYPES:
            matrix = bench_linear.packed(weight, dtype)
            for num_tokens in TOKENS:
                x = rng.standard_normal((num_tokens, COLUMNS), np.float32)
                before = machine.num_instructions
                with native.using(name):
                    jax.block_until_ready(jax.jit(packed_linear.multiply)(matrix, x))
                rate = ROWS * COLUMNS * num_tokens / (machine.num_instructions - before)
                print(
                    json.dumps({"isa": name, "dtype": dtype, "tokens": num_tokens, "per_instruction": round(rate, 2)})
                )


if __name__ == "__main__":
    main()
