"""The command line of `jaxserve plan`, engine options aside. Imports nothing heavy: a wrong flag is told at once."""

import argparse

PLANNED = {  # engine options that change what is planned
    "dtype",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "page_size",
}


def add_plan(plan: argparse.ArgumentParser) -> None:
    """Add what is planned, and for what."""
    text = "a checkpoint's directory, a config.json alone, or the name of shapes that come along, as llama-3.1-8b"
    plan.add_argument("--model", metavar="DIR|FILE|NAME", help=f"{text} (default: the model in the package)")
    text = "h200, h200x2, h200x4 or h200x8, over which the model is split, or cpu, the one of this machine"
    plan.add_argument("--target", required=True, metavar="NAME", help=text)
    text = "tokens of the prompt whose time to first token is predicted (default: 1024, or max_model_len)"
    plan.add_argument("--prompt-len", type=int, metavar="INT", help=text)
    text = "tokens that each row has whose decode steps are predicted (default: 1024, or max_model_len)"
    plan.add_argument("--context-len", type=int, metavar="INT", help=text)
    plan.add_argument("--json", action="store_true", help="print all figures as JSON instead")
