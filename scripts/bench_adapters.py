"""Decode speed with LoRA adapters compared with the base model only, in turns.

    python scripts/bench_adapters.py --rows 64 --adapters 8 --rank 16

"base": an engine without adapters. "idle": an engine with adapters, all rows of the base model. "adapted": the same
engine, the adapters in turn over the rows. Without `--model` it writes a random Llama of about 110M parameters. Prints
one JSON line: median output tokens per second, and the medians of each round's ratios to "base".
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import LLM, LoRARequest, SamplingParams
from jaxserve.models.adapted_specs import adapted_specs

ROOT = Path(__file__).parent.parent
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 32000, "head_dim": 64}
BASE, IDLE, ADAPTED = "base", "idle", "adapted"


def write_model(directory: Path) -> str:
    """Write a random checkpoint; return its path."""
    sys.path.insert(0, str(ROOT))
    from tests.checkpoints import write_plain_checkpoint  # noqa: PLC0415 - needs the test extra

    write_plain_checkpoint(directory, "llama", dtype="bfloat16", **SIZES)
    return str(directory)


def load_adapters(llm: LLM, count: int, rank: int) -> list[LoRARequest | None]:
    """Load random adapters for all matrices in layers."""
    rng, arch = np.random.default_rng(0), llm.engine.arch
    for index in range(count):
        tensors = {}
        for each in adapted_specs(arch, arch, ()):
            for part in each.parts:
                for name, shape in {"A": (rank, each.spec.shape[1]), "B": (each.num_rows(part), rank)}.items():
                    drawn = 0.05 * rng.standard_normal(shape, np.float32)
                    tensors[f"base_model.model.{part.module}.lora_{name}.weight"] = drawn
        llm.update_lora(f"adapter {index}", tensors, {"r": rank, "lora_alpha": rank})
    return [LoRARequest(f"adapter {index}") for index in range(count)]


def speed(llm: LLM, prompts: list[list[int]], num_tokens: int, adapters: list[LoRARequest | None]) -> float:
    """Return the output tokens per second; prompts must be new."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    began_s = time.perf_counter()
    llm.generate(given, params, use_tqdm=False, lora_request=adapters)
    return len(prompts) * num_tokens / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=1)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--multi-step", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        # Steps with a token per row, also of prompts: two programs to compile.
        options: dict[str, Any] = {"max_num_seqs": args.rows, "max_num_batched_tokens": args.rows, "max_model_len": 256}
        options |= {"compile_ahead": "minimal", "multi_step": args.multi_step}
        options |= {"model": args.model or write_model(Path(directory)), "skip_tokenizer_init": True}
        lora = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank}
        plain, adapted = LLM(**options), LLM(**options, **lora)
    loaded = load_adapters(adapted, args.adapters, args.rank)
    base: list[LoRARequest | None] = [None] * args.rows
    mixed = [loaded[row % args.adapters] for row in range(args.rows)]
    ways = {BASE: (plain, base), IDLE: (adapted, base), ADAPTED: (adapted, mixed)}
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for index in range(args.rounds + 1):
        shape = args.rows, args.prompt_tokens
        prompts = np.random.default_rng(index).integers(3, 250, shape).tolist()
        for way in list(ways)[:: -1 if index % 2 else 1]:  # none always comes after another
            llm, adapters = ways[way]
            found = speed(llm, prompts, args.output_tokens, adapters)
            if index:  # the first round loads the adapters
                speeds[way].append(found)
    result: dict[str, Any] = {"bench": "adapters", **{name: getattr(args, name) for name in ("rows", "adapters")}}
    result |= {"rank": args.rank, "rounds": args.rounds}
    result |= {f"{way}_tok_s": round(statistics.median(values), 1) for way, values in speeds.items()}
    for way in (IDLE, ADAPTED):
        ratios = [own / other for own, other in zip(speeds[way], speeds[BASE], strict=True)]
        result[f"{way}_ratio"] = round(statistics.median(ratios), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
