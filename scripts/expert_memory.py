"""Print the temporaries of steps through some MoE layers, by grouped matmul backend.

    PYTHONPATH=~/.cache/jaxserve/compilers JAX_PLATFORMS=cpu python scripts/expert_memory.py
    ... python scripts/expert_memory.py --targets h200 --tokens 64

Steps are compiled without the hardware, with the Pallas kernel and with XLA's `ragged_dot`, which takes minutes and
much memory for many tokens. Prints one JSON line per case: GB of temporaries, and GB accessed as counted by XLA, each
layer once.
"""

import argparse
import dataclasses
import json
from unittest import mock

import jax.numpy as jnp

from jaxserve.models.arch import ArchConfig
from jaxserve.pallas_kernels.grouped_matmul import GROUPED_MATMUL
from jaxserve.pallas_kernels.ragged_paged_attention import Heads, default_page_size
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.program import StepCompiler, temp_bytes
from jaxserve.tools.planner.targets import parse_target

BFLOAT16 = jnp.dtype("bfloat16")
LAYERS = {"h200": 2, "v6e:1x1": 4}  # few, because GPU programs contain every layer separately
POOL_TOKENS = 20_000


def first_layers(arch: ArchConfig, count: int) -> ArchConfig:
    """Return sizes of a model with only the first `count` layers."""
    return dataclasses.replace(arch, layers=arch.layers[:count])


def measure(model: str, target_name: str, num_tokens: int, product: str) -> dict[str, float]:
    """Compile a step for a chip with one backend for grouped matmuls; return temporaries and bytes accessed, in GB."""
    target = parse_target(target_name)
    assert target.sheet is not None, "a chip has a data sheet"
    arch, backend = first_layers(read_model(model)[1], LAYERS[target_name]), f"mosaic_{target.platform}"
    page_size = default_page_size(backend, Heads(arch.attention.num_kv_heads, arch.attention.head_dim), BFLOAT16)
    schedule = ScheduleConfig(64, 2048, 8192, page_size, POOL_TOKENS // page_size)
    only = {product: GROUPED_MATMUL.backends[product]}
    with mock.patch.dict(GROUPED_MATMUL.backends, only, clear=True):
        (program,) = StepCompiler(target, schedule, BFLOAT16, BFLOAT16, backend).compile(arch, (num_tokens,))
    return {"temporaries_gb": temp_bytes(program) / 1e9, "accessed_gb": program.cost_analysis()["bytes accessed"] / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--targets", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 256, 2048])
    parser.add_argument("--products", nargs="+", choices=["pallas", "xla"], default=["pallas", "xla"])
    args = parser.parse_args()
    for target in args.targets:
        pallas = f"mosaic_{parse_target(target).platform}"
        for num_tokens in args.tokens:
            for product in args.products:
                found = measure(args.model, target, num_tokens, pallas if product == "pallas" else product)
                settings = {"target": target, "layers": LAYERS[target], "tokens": num_tokens, "product": product}
                rounded = {name: round(value, 2) for name, value in found.items()}
                print(json.dumps({"bench": "expert_memory", "model": args.model, **settings, **rounded}), flush=True)


if __name__ == "__main__":
    main()
