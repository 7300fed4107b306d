"""Decode speed with LoRA adapters compared with the base model only, in turns.

    python scripts/bench_adapters.py --rows 64 --adapters 8 --rank 16
    python scripts/bench_adapters.py --model DIR --dtype float32 --vllm ~/vllm/bin/python

"base": an engine without adapters. "idle": an engine with adapters, all rows of the base model. "beside": the same
engine, one row with an adapter. "adapted": the same engine, the adapters in turn over the rows. Without `--model` it
writes a random Llama of about 110M parameters. Prints one JSON line: median output tokens per second, the medians of
each round's ratios to "base", and those per second of processor time, which other programs on the machine disturb less.

`--vllm` measures vLLM in the same rounds, with the same prompts and adapters, in processes that are stopped while
others are measured: "vllm_base", and "vllm_adapted", whose ratio is to "vllm_base".
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from baselines.process import Worker
from baselines.registry import ENGINES, worker_command, worker_environment
from jaxserve import LLM, LoRARequest, SamplingParams
from jaxserve.models.adapted_specs import adapted_specs

ROOT = Path(__file__).parent.parent
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 32000, "head_dim": 64}
BASE, IDLE, BESIDE, ADAPTED = "base", "idle", "beside", "adapted"
VLLM_BASE, VLLM_ADAPTED = "vllm_base", "vllm_adapted"
TIMEOUT_S = 1800.0


def write_model(directory: Path) -> str:
    """Write a random checkpoint; return its path."""
    sys.path.insert(0, str(ROOT))
    from tests.checkpoints import write_plain_checkpoint  # noqa: PLC0415 - needs the test extra

    write_plain_checkpoint(directory, "llama", dtype="bfloat16", **SIZES)
    return str(directory)


def write_adapters(directory: Path, llm: LLM, count: int, rank: int) -> list[Path]:
    """Write random adapters for all matrices in layers; return their directories."""
    rng, arch = np.random.default_rng(0), llm.engine.arch
    paths = [directory / f"adapter-{index}" for index in range(count)]
    for path in paths:
        tensors, modules = {}, set()
        for each in adapted_specs(arch, arch, ()):
            for part in each.parts:
                modules.add(part.module.rsplit(".", 1)[-1])
                for name, shape in {"A": (rank, each.spec.shape[1]), "B": (each.num_rows(part), rank)}.items():
                    drawn = 0.05 * rng.standard_normal(shape, np.float32)
                    tensors[f"base_model.model.{part.module}.lora_{name}.weight"] = drawn
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(modules), "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return paths


def start_vllm(python: str, checkpoint: Path, log: Path, options: dict[str, Any]) -> Worker:
    """Return a loaded vLLM in its own process."""
    spec = ENGINES["vllm"]
    command, env = worker_command(spec, python, checkpoint, options), worker_environment(spec, python)
    worker = Worker(command, env, log, TIMEOUT_S)
    worker.load()
    return worker


class Speed(NamedTuple):
    """Output tokens per second, and per second of processor time; NaN if that was not measured."""

    tok_s: float
    tok_cpu_s: float


def speed(llm: LLM, prompts: list[list[int]], num_tokens: int, adapters: list[LoRARequest | None]) -> Speed:
    """Return the speed of this process; prompts must be new."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    llm.generate(given, params, use_tqdm=False, lora_request=adapters)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return Speed(len(prompts) * num_tokens / wall_s, len(prompts) * num_tokens / cpu_s)


def vllm_speed(worker: Worker, prompts: list[list[int]], num_tokens: int) -> Speed:
    """Return the speed of a vLLM process."""
    message = {"prompts": prompts, "output_lens": [num_tokens] * len(prompts)}
    return Speed(len(prompts) * num_tokens / float(worker.ask(message)["wall_s"]), math.nan)


def main() -> None:
    args = parse()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = args.model or write_model(directory / "model")
        # Steps with a token per row, also of prompts: few programs to compile, all of them before the first round.
        limits = {"max_num_seqs": args.rows, "max_num_batched_tokens": args.rows, "max_model_len": 256}
        options: dict[str, Any] = {**limits, "compile_ahead": "all", "multi_step": args.multi_step}
        options |= {"model": checkpoint, "skip_tokenizer_init": True, "dtype": args.dtype}
        lora = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank}
        plain, adapted = LLM(**options), LLM(**options, **lora)
        paths = write_adapters(directory, plain, args.adapters, args.rank)
        base: list[LoRARequest | None] = [None] * args.rows
        loras = [LoRARequest(path.name, index + 1, str(path)) for index, path in enumerate(paths)]
        mixed: list[LoRARequest | None] = [loras[row % len(loras)] for row in range(args.rows)]
        num_tokens = args.output_tokens
        ways: dict[str, Callable[[list[list[int]]], Speed]] = {
            BASE: lambda prompts: speed(plain, prompts, num_tokens, base),
            IDLE: lambda prompts: speed(adapted, prompts, num_tokens, base),
            BESIDE: lambda prompts: speed(adapted, prompts, num_tokens, [*mixed[:1], *base[1:]]),
            ADAPTED: lambda prompts: speed(adapted, prompts, num_tokens, mixed),
        }
        if args.vllm:
            given: dict[str, Any] = {**limits, "dtype": args.dtype}
            with_adapters = {**given, **lora, "adapters": [str(path) for path in paths]}
            for way, each in {VLLM_BASE: given, VLLM_ADAPTED: with_adapters}.items():
                worker = start_vllm(args.vllm, Path(checkpoint), args.logs / f"{way}.log", each)
                stack.callback(worker.end)
                ways[way] = lambda prompts, worker=worker: vllm_speed(worker, prompts, num_tokens)
        speeds: dict[str, list[Speed]] = {way: [] for way in ways}
        for index in range(args.rounds + 1):
            prompts = np.random.default_rng(index).integers(3, 250, (args.rows, args.prompt_tokens)).tolist()
            for way in list(ways)[:: -1 if index % 2 else 1]:  # none always comes after another
                found = ways[way](prompts)
                print(f"round {index}, {way}: {found.tok_s:.1f} tok/s, {found.tok_cpu_s:.1f} of CPU", file=sys.stderr)
                if index:  # the first round loads the adapters
                    speeds[way].append(found)
    print(json.dumps(summary(args, speeds)))


def summary(args: argparse.Namespace, speeds: dict[str, list[Speed]]) -> dict[str, Any]:
    """Return the medians and the ratios."""
    names = "rows", "adapters", "rank", "prompt_tokens", "output_tokens", "rounds", "dtype"
    result: dict[str, Any] = {"bench": "adapters", **{name: getattr(args, name) for name in names}}
    result |= {
        f"{way}_tok_s": round(statistics.median(each.tok_s for each in found), 1) for way, found in speeds.items()
    }
    for way, other in {IDLE: BASE, BESIDE: BASE, ADAPTED: BASE, VLLM_ADAPTED: VLLM_BASE}.items():
        if way in speeds:
            pairs = list(zip(speeds[way], speeds[other], strict=True))
            result[f"{way}_ratio"] = round(statistics.median(own.tok_s / base.tok_s for own, base in pairs), 3)
            if way != VLLM_ADAPTED:
                ratio = statistics.median(own.tok_cpu_s / base.tok_cpu_s for own, base in pairs)
                result[f"{way}_cpu_ratio"] = round(ratio, 3)
    return result


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint")
    parser.add_argument("--dtype", default="auto", help="dtype of weights; the checkpoint's by default")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=1)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--multi-step", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", help="interpreter that has vLLM, which is then measured too")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="directory for vLLM's logs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
