"""Peak memory of loading a checkpoint, over the size of the weights in memory.

    python scripts/load_memory.py [--model DIRECTORY]

Without a model, one of 110.9M random numbers is written to a temporary directory, in float32 and in bfloat16. Each case
is loaded in a process of its own, on CPU, as the engine loads it. `load_peak_mb` is the growth of its resident set from
before to the peak: pages of the file and compiled programs count, the code of XLA and TensorStore does not. Linux only.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import tensorstore  # noqa: F401 - for its code to be there before

from jaxserve.config import QUANTIZATIONS, EngineConfig
from jaxserve.engine.build import build_arch, build_params
from random_model import write_random_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint directory; a random one by default")
    parser.add_argument("--measure", nargs=2, metavar=("DIRECTORY", "QUANTIZATION"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    print(json.dumps({"python": platform.python_version(), "jax": jax.__version__, "machine": platform.machine()}))
    with TemporaryDirectory() as scratch:
        written = (write_random_model(Path(scratch) / dtype, dtype) for dtype in ("float32", "bfloat16"))
        for directory in [args.model] if args.model else written:
            for quantization in ("none", *QUANTIZATIONS):
                row = {"model": directory.name, "quantization": quantization, **load_apart(directory, quantization)}
                print(json.dumps(row), flush=True)


def load_apart(directory: Path, quantization: str) -> dict[str, float]:
    """`measure` in a fresh process, whose memory nothing else has touched."""
    command = [sys.executable, __file__, "--measure", str(directory), quantization]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return json.loads(done.stdout)


def measure(directory: str, quantization: str) -> dict[str, float]:
    """Load a checkpoint; sizes in MB."""
    config = EngineConfig(directory, quantization=None if quantization == "none" else quantization)
    arch = build_arch(config)
    jax.block_until_ready(jax.jit(jnp.sin)(jnp.ones(1)))  # what XLA takes to compile anything at all
    before = resident_bytes("VmRSS")
    params = jax.block_until_ready(build_params(config, arch))
    peak, after = resident_bytes("VmHWM") - before, resident_bytes("VmRSS") - before
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    sizes = {"weights_mb": size / 1e6, "load_peak_mb": peak / 1e6, "after_mb": after / 1e6, "peak_ratio": peak / size}
    return {name: round(value, 3) for name, value in sizes.items()}


def resident_bytes(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most that ever was."""
    (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) << 10


if __name__ == "__main__":
    main()
