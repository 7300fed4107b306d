"""Peak memory while loading a checkpoint, relative to the weights in memory.

    python scripts/load_memory.py [--model DIRECTORY] [--devices 1 3]

Without a model, one with 110.9M random numbers is written to a temporary directory, in float32 and in bfloat16, each as
safetensors and with Orbax. Each case is loaded in a separate process, on CPU, as by the engine: whole, or split over
virtual devices. `load_peak_mb` is the growth of its resident set from before to the peak: file pages and compiled
programs count, the code of XLA and TensorStore does not. Linux only.

`weights_mb` is the total over all devices, which on a CPU is host memory: `peak_ratio` - 1 is the overhead of loading.
On accelerators the host holds only that overhead, for all of its devices, since their tensors come and go there.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import tensorstore  # noqa: F401 - for its code to be there before

from jaxserve import weights
from jaxserve.api.config import WEIGHT_FORMATS, EngineConfig
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.assembly.parameters import build_params
from jaxserve.models.params import device_bytes
from jaxserve.models.registry import from_hf_config, param_specs
from synthetic.random_model import SMALL, write_random_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint directory; a random one by default")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 3], help="over how many; 1 and 3 by default")
    parser.add_argument("--measure", nargs=3, metavar=("DIRECTORY", "QUANTIZATION", "DEVICES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        directory, quantization, num_devices = args.measure
        print(json.dumps(measure(directory, quantization, int(num_devices))))
        return
    print(json.dumps({"python": platform.python_version(), "jax": jax.__version__, "machine": platform.machine()}))
    with TemporaryDirectory() as scratch:
        directories = [args.model] if args.model else random_models(Path(scratch))
        for case in product(directories, ("none", *filter(None, WEIGHT_FORMATS)), args.devices):
            directory, quantization, num_devices = case
            row = {"model": directory.name, "quantization": quantization, "devices": num_devices, **load_apart(*case)}
            print(json.dumps(row), flush=True)


def random_models(scratch: Path) -> list[Path]:
    """Return one model in two dtypes and two file formats."""
    specs = param_specs(from_hf_config(SMALL))
    written = [write_random_model(scratch / dtype, dtype) for dtype in ("float32", "bfloat16")]
    converted = [directory.with_name(f"{directory.name}-orbax") for directory in written]
    for source, target in zip(written, converted, strict=True):
        weights.convert(source, target, specs)
    return written + converted


def load_apart(directory: Path, quantization: str, num_devices: int) -> dict[str, float]:
    """Run `measure` in a fresh process, whose memory nothing else has touched."""
    command = [sys.executable, __file__, "--measure", str(directory), quantization, str(num_devices)]
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env).stdout)


def measure(directory: str, quantization: str, num_devices: int) -> dict[str, float]:
    """Load a checkpoint; return sizes in MB."""
    options = {"quantization": None if quantization == "none" else quantization, "tensor_parallel_size": num_devices}
    config = EngineConfig(directory, **options)
    arch = build_arch(config)
    jax.block_until_ready(jax.jit(jnp.sin)(jnp.ones(1)))  # allocates the memory that XLA needs to compile anything
    before = resident_bytes("VmRSS")
    params = jax.block_until_ready(build_params(config, arch))
    peak, after = resident_bytes("VmHWM") - before, resident_bytes("VmRSS") - before
    size = num_devices * device_bytes(params)
    sizes = {"weights_mb": size / 1e6, "load_peak_mb": peak / 1e6, "after_mb": after / 1e6, "peak_ratio": peak / size}
    return {name: round(value, 3) for name, value in sizes.items()}


def resident_bytes(field: str) -> int:
    """Return VmRSS, the resident memory, or VmHWM, its maximum."""
    (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) << 10


if __name__ == "__main__":
    main()
