"""Flags of `jaxserve plan` without the engine options. The imports are light, so that a wrong flag fails early."""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from jaxserve.system.environment import user_cache_dir

PLANNED = {  # engine options that change what is planned
    "attention_backend",
    "linear_backend",
    "multi_step",
    "dtype",
    "enable_dp_attention",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "kv_offloading_size",
    "max_logprobs",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "page_size",
    "quantization",
}


def add_plan(plan: argparse.ArgumentParser) -> None:
    """Add the flags for the model, the targets and the output."""
    text = "checkpoint directory, config.json or name of a known model, such as llama-3.1-8b"
    plan.add_argument("--model", metavar="DIR|FILE|NAME", help=f"{text} (default: the embedded model)")
    where = plan.add_mutually_exclusive_group(required=True)
    text = (
        "chips that the model is split over: a100, a100-40gb, h100, h200, b200, l4, l40s, rtx4090, rtx5090, "
        "rtxpro6000, or two to eight of them, such as h200x8; TPUs by the number in each direction, such as v5e:4x4, "
        "v6e:2x4, v4:2x2x1, v5p:2x2x2 or tpu7x:2x2x1, or one, such as v6e; or cpu, this machine's"
    )
    where.add_argument("--target", metavar="NAME", help=text)
    text = "compare these targets; without names, a selection of all types"
    where.add_argument("--sweep", nargs="*", metavar="NAME", help=text)
    text = "prices for a sweep, in dollars per chip and hour: a TOML file with lines such as v6e = 2.7"
    plan.add_argument("--prices", metavar="FILE", help=text)
    text = (
        "requests that a sweep serves in a simulation on each target that fits, for TTFT, ITL and tokens/s: a trace as "
        "for jaxserve simulate, or a workload of jaxserve bench"
    )
    plan.add_argument("--trace", metavar="FILE", help=text)
    text = "number of requests of the trace (default: all)"
    plan.add_argument("--max-requests", type=int, metavar="INT", help=text)
    text = "prompt length in tokens for the predicted time to first token (default: 1024, or max_model_len)"
    plan.add_argument("--prompt-len", type=int, metavar="INT", help=text)
    text = "context length in tokens for the predicted decode steps (default: 1024, or max_model_len)"
    plan.add_argument("--context-len", type=int, metavar="INT", help=text)
    text = "additional number of requests in a predicted decode step; a sweep compares this one"
    plan.add_argument("--batch", type=int, metavar="INT", help=text)
    text = "write a PNG plot with the number of requests that fit, by length (extra: bench)"
    plan.add_argument("--plot", metavar="FILE", help=text)
    text = (
        "compile nothing, even if the chips' compilers are installed; step temporaries and exchanges between chips are "
        "then not counted"
    )
    plan.add_argument("--no-compile", action="store_true", help=text)
    text = "compile all of the engine's programs and show the time for each on this machine; takes minutes"
    plan.add_argument("--programs", action="store_true", help=text)
    text = (
        "folder into which pip install --target installed the chips' compilers; no other command sees them "
        f"(default: {find_compilers(None)})"
    )
    plan.add_argument("--compilers", metavar="DIR", help=text.replace("%", "%%"))
    plan.add_argument("--json", action="store_true", help="print all figures as JSON instead of text")
    plan.add_argument("--tensor-parallel-size", nargs="?", action=_TargetDecides, help=argparse.SUPPRESS)


class _TargetDecides(argparse.Action):
    """Action for a flag of other commands that the target replaces: reports that and ends the program."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: Any, values: Any, option_string: str | None = None
    ) -> NoReturn:
        parser.error(
            f"the target gives the number of devices, as in --target h200x2 or v6e:2x4; leave out {option_string}"
        )


def find_compilers(given: str | None) -> Path:
    """Return the compilers' folder: the given one, or by default one in the user's cache directory."""
    return user_cache_dir() / "compilers" if given is None else Path(given)


def use_compilers(directory: Path) -> None:
    """Make the compilers in `directory` importable. Call this before importing jax, which discovers plugins on import.

    They are kept out of the environment because every process that imports jax loads all plugins in it, and a CUDA
    plugin without a GPU prints a traceback.
    """
    path = str(directory.absolute())
    if directory.is_dir() and path not in sys.path:
        sys.path.append(path)  # last, so that an installed plugin has priority
