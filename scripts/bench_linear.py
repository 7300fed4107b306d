"""Matmuls of the native CPU kernels compared with numpy's, by shape, tokens, weight dtype and instruction set.

    python scripts/bench_linear.py [--shapes 4096x4096 1376x256] [--tokens 1 48] [--dtypes float32 int4] [--json FILE]

All sides of a table row take turns, so that other load affects each equally. A side runs one program with several
matmuls in sequence, and the figure is the median over rounds. The matmuls in a program have separate matrices, together
larger than caches for one token, so that weights stream from memory. With `--threads 1` all sides have one core, and
their CPU time is measured, without other load.

numpy's BLAS runs the kernels of the same instruction set, in a separate process for each. Columns are GB/s of weights
and GFLOP/s, the bytes per second relative to float32, and the rate relative to numpy's `x @ w.T`.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import native, packed_linear
from jaxserve.pallas_kernels.packed_linear import PackedMatrix

SHAPES = ("4096x4096", "8192x256", "1376x256")
TOKENS = (1, 8, 48, 256)
ROUNDED = "+int8"  # suffix of weight dtypes for matmuls whose inputs are rounded to int8
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int4", f"int8{ROUNDED}", f"int4{ROUNDED}")
GROUP_SIZE = 64
STREAM_BYTES = 160 << 20  # weight bytes per program, larger than caches
MAX_PRODUCTS = 64
MIN_SECONDS = 0.02  # minimum time of one measurement
PAUSE_SECONDS = 0.1  # OpenBLAS threads keep their cores busy for about 30 ms after a matmul
WARM_UP_SECONDS = 0.1
BLAS_CORES = {
    "amx": "SKYLAKEX",
    "avx512vnni": "SKYLAKEX",
    "avx512": "SKYLAKEX",
    "avxvnni": "HASWELL",
    "avx2": "HASWELL",
    "generic": "HASWELL",
}  # OpenBLAS has no kernels without AVX2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x columns of the matrices")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--isa", nargs="+", default=native.instruction_sets()[:-1] or native.instruction_sets())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="cores of each side; all by default")
    parser.add_argument("--json", type=Path, help="file for all figures, one JSON object per line")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        (instruction_set,) = args.isa
        os.sched_setaffinity(0, range(args.threads))  # jax has not started its threads yet
        clock = time.process_time if args.threads == 1 else time.perf_counter
        print(json.dumps({"blas": blas_core(), "isa": instruction_set}), flush=True)
        for shape in args.shapes:
            rows, columns = map(int, shape.split("x"))
            for num_tokens in args.tokens:
                for row in compare(rows, columns, num_tokens, args.dtypes, instruction_set, args.rounds, clock):
                    print(json.dumps(row), flush=True)
        return
    print(json.dumps({"jax": jax.__version__, "numpy": np.__version__, "cores": os.cpu_count()}))
    lines = [line for name in args.isa for line in measured_apart(name, args.threads)]
    if args.json:
        args.json.write_text("".join(lines))


def measured_apart(instruction_set: str, num_threads: int) -> list[str]:
    """Run this script for one instruction set, with BLAS kernels of the same, and print the table as it arrives."""
    hidden = ("OPENBLAS_L2_SIZE",)
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"OPENBLAS_CORETYPE": BLAS_CORES.get(instruction_set, ""), "OPENBLAS_NUM_THREADS": str(num_threads)}
    # Outputs reuse the same memory pages, like an engine's steps: page faults would take longer than some matmuls.
    env |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", "--isa", instruction_set]
    lines = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print_row(json.loads(line))
    if process.returncode:
        sys.exit(process.returncode)
    return lines


def print_row(row: dict[str, Any]) -> None:
    if "blas" in row:
        print(f"\n{row['isa']}, numpy's BLAS: {row['blas']}")
        print("     shape tokens       weights       ms   GB/s  GFLOP/s /float32 /numpy")
        return
    print(
        f"{row['shape']:>10} {row['tokens']:>6} {row['dtype']:>13} {row['ms']:>8.3f} {row['gb_per_s']:>6.1f}"
        f" {row['gflop_per_s']:>8.1f} {row['bytes_over_float32']:>8.2f} {row['over_numpy']:>6.2f}",
        flush=True,
    )


def compare(
    rows: int,
    columns: int,
    num_tokens: int,
    dtypes: list[str],
    instruction_set: str,
    rounds: int,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """Return one table row per dtype, and one for numpy."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
    x = rng.standard_normal((num_tokens, columns), np.float32)
    sides: dict[str, tuple[Callable[[], Any], int, int]] = {}  # function, its number of matmuls, bytes of a matrix
    floats = [weight.copy() for _ in range(num_products(weight.nbytes, num_tokens))]
    out = np.empty((num_tokens, rows), np.float32)
    sides["numpy"] = (lambda: [np.matmul(x, w.T, out=out) for w in floats], len(floats), weight.nbytes)
    for dtype in dtypes:
        first = packed(weight, dtype.removesuffix(ROUNDED))
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
        copies = [jax.tree.map(lambda leaf: leaf.copy(), first) for _ in range(num_products(num_bytes, num_tokens))]
        input_format = "int8" if dtype.endswith(ROUNDED) else "float32"
        sides[dtype] = (partial(run_products, copies, x, input_format), len(copies), num_bytes)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with native.using(instruction_set):
        repeats = {name: num_repeats(run, clock) for name, (run, _, _) in sides.items()}
        for _ in range(rounds):
            for name, (run, products_per_run, _) in sides.items():
                warm_up(run)
                began = clock()
                for _ in range(repeats[name]):
                    run()
                seconds[name].append((clock() - began) / repeats[name] / products_per_run)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    rate = {name: num_bytes / median[name] for name, (_, _, num_bytes) in sides.items()}
    return [
        {
            "isa": instruction_set,
            "shape": f"{rows}x{columns}",
            "tokens": num_tokens,
            "dtype": name,
            "ms": round(median[name] * 1e3, 4),
            "min_ms": round(min(seconds[name]) * 1e3, 4),
            "gb_per_s": round(rate[name] / 1e9, 2),
            "gflop_per_s": round(2 * rows * columns * num_tokens / median[name] / 1e9, 1),
            "bytes_over_float32": round(rate[name] / rate.get("float32", rate["numpy"]), 3),
            "over_numpy": round(median["numpy"] / median[name], 3),
        }
        for name in sides
    ]


def num_products(num_bytes: int, num_tokens: int) -> int:
    """Return the matmuls per program: weights from memory for few tokens; for many, enough to hide the dispatch."""
    return max(2, min(MAX_PRODUCTS, (STREAM_BYTES if num_tokens < 48 else 2 << 20) // num_bytes))


def packed(weight: np.ndarray, dtype: str) -> PackedMatrix:
    """Return a weight matrix as the native kernels read it, quantised or converted to `dtype`."""
    if dtype in ("int8", "int4"):
        groups = weight.reshape(len(weight), -1, GROUP_SIZE)
        scales = np.abs(groups).max(axis=-1) / {"int8": 127, "int4": 7}[dtype]
        elements = np.rint(groups / scales[..., None]).astype(np.int8).reshape(weight.shape)
        elements = elements.astype(jnp.dtype(dtype))
        return packed_linear.pack(elements, scales)
    if dtype == "float8_e4m3fn":
        scales = np.abs(weight).max(axis=1, keepdims=True) / 448
        return packed_linear.pack((weight / scales).astype(jnp.float8_e4m3fn), scales)
    return packed_linear.pack(jnp.asarray(weight, dtype))


def run_products(matrices: list[PackedMatrix], x: np.ndarray, input_format: str) -> None:
    products(matrices, x, input_format).block_until_ready()


@partial(jax.jit, static_argnums=2)
def products(matrices: list[PackedMatrix], x: jax.Array, input_format: str) -> jax.Array:
    """Return the sum of all matmuls; each depends on the previous one, so that they run in sequence."""
    y = jnp.zeros((len(x), matrices[0].num_outputs), jnp.float32)
    for matrix in matrices:
        y = packed_linear.multiply(matrix, x, residual=y, input_format=input_format)
    return y


def warm_up(run: Callable[[], Any]) -> None:
    """Let the previous side's threads sleep, then run this one until its buffers have their memory pages."""
    time.sleep(PAUSE_SECONDS)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_UP_SECONDS:
        run()


def num_repeats(run: Callable[[], Any], clock: Callable[[], float]) -> int:
    """Return how often to call `run` for MIN_SECONDS of measurement."""
    run()
    began = clock()
    run()
    return max(1, round(MIN_SECONDS / (clock() - began)))


def blas_core() -> str:
    """Return the kernels chosen by numpy's OpenBLAS, or "unknown"."""
    for library in Path(np.__file__).parent.with_name("numpy.libs").glob("*openblas*"):
        for name in ("scipy_openblas_get_corename64_", "openblas_get_corename64_", "openblas_get_corename"):
            if (corename := getattr(ctypes.CDLL(str(library)), name, None)) is not None:
                corename.restype = ctypes.c_char_p
                return str(corename().decode())
    return "unknown"


if __name__ == "__main__":
    main()
