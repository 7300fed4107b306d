"""Command line of `jaxserve plan` without the engine options. Imports nothing heavy, so a wrong flag fails at once."""

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
    "expert_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_logprobs",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "page_size",
    "quantization",
}


def add_plan(plan: argparse.ArgumentParser) -> None:
    """Add the flags for the model, the targets and the output."""
    text = "directory of a checkpoint, a config.json alone, or the name of a known model, such as llama-3.1-8b"
    plan.add_argument("--model", metavar="DIR|FILE|NAME", help=f"{text} (default: the model in the package)")
    where = plan.add_mutually_exclusive_group(required=True)
    text = (
        "chips over which the model is split: a100, a100-40gb, h100, h200, b200, l4, l40s, rtx4090, rtx5090, "
        "rtxpro6000, or two to eight of them, such as h200x8; TPUs by the number in each direction, such as v5e:4x4, "
        "v6e:2x4, v4:2x2x1, v5p:2x2x2 or tpu7x:2x2x1, or one, such as v6e; or cpu, the one of this machine"
    )
    where.add_argument("--target", metavar="NAME", help=text)
    text = "compare these targets; without names, a choice of all kinds"
    where.add_argument("--sweep", nargs="*", metavar="NAME", help=text)
    text = "dollars per chip and hour, for a sweep: a TOML file with lines such as v6e = 2.7"
    plan.add_argument("--prices", metavar="FILE", help=text)
    text = "length in tokens of the prompt whose time to first token is predicted (default: 1024, or max_model_len)"
    plan.add_argument("--prompt-len", type=int, metavar="INT", help=text)
    text = "length in tokens of the requests whose decode steps are predicted (default: 1024, or max_model_len)"
    plan.add_argument("--context-len", type=int, metavar="INT", help=text)
    text = "requests in a decode step: one more size that is predicted, and the one that a sweep compares"
    plan.add_argument("--batch", type=int, metavar="INT", help=text)
    text = "file of a plot, a PNG: how many requests fit, by their length (extra: bench)"
    plan.add_argument("--plot", metavar="FILE", help=text)
    text = (
        "only compute memory and speed, even if the chips' compilers are installed; temporaries of steps and exchanges "
        "between chips are then not counted"
    )
    plan.add_argument("--no-compile", action="store_true", help=text)
    text = "compile every program that the engine has there, and show what each takes to compile here: minutes in all"
    plan.add_argument("--programs", action="store_true", help=text)
    text = (
        "folder where compilers of chips were installed by pip install --target; no other command sees them "
        f"(default: {_default_compilers()})"
    )
    plan.add_argument("--compilers", metavar="DIR", help=text.replace("%", "%%"))
    plan.add_argument("--json", action="store_true", help="print all figures as JSON instead of text")
    plan.add_argument("--tensor-parallel-size", nargs="?", action=_TargetDecides, help=argparse.SUPPRESS)


class _TargetDecides(argparse.Action):
    """Flag of other commands, whose value is here part of the target: says so and ends the program."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: Any, values: Any, option_string: str | None = None
    ) -> NoReturn:
        parser.error(
            f"the target gives the number of devices, as in --target h200x2 or v6e:2x4; leave out {option_string}"
        )


def find_compilers(given: str | None) -> Path:
    """Return the folder of the compilers: the one given, or the default in the user's cache directory."""
    return Path(given) if given is not None else _default_compilers()


def use_compilers(directory: Path) -> None:
    """Make the compilers in `directory` importable. Call this before importing jax, which discovers plugins on import.

    They are kept out of the environment's own packages because every process that imports jax loads all plugins found
    there, and a CUDA plugin without a GPU prints a traceback.
    """
    path = str(directory.absolute())
    if directory.is_dir() and path not in sys.path:
        sys.path.append(path)  # last, so that an installed plugin takes precedence


def _default_compilers() -> Path:
    return user_cache_dir() / "compilers"
