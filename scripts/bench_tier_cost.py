"""Cost of keeping pages in lower tiers if no prompt is ever found there.

    python scripts/bench_tier_cost.py --model MODEL --rounds 4

Two engines take turns to serve new random prompts, one without lower tiers, one that writes all pages to disk (or to
host memory, with --host-gib). Prints one JSON line: the seconds of each round, the ratio of their medians, and the
pages stored and dropped. MODEL is a checkpoint; by default the model in the package.
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.offline.llm import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--host-gib", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as path:
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "compile_ahead": "minimal",
            "max_num_seqs": args.prompts,
        }
        options |= {"model": args.model, "max_model_len": args.prompt_tokens + args.output_tokens}
        tiers = {"kv_offloading_size": args.host_gib} if args.host_gib else {"kv_offloading_path": path}
        llms = [LLM(**options), LLM(**options, **tiers)]
        seconds: list[list[float]] = [[], []]
        for turn in range(args.rounds + 1):
            prompts = rng.integers(5, 250, (args.prompts, args.prompt_tokens)).tolist()
            for which in (0, 1) if turn % 2 else (1, 0):
                started_s = time.perf_counter()
                llms[which].generate(prompts, params, use_tqdm=False)
                if turn:  # the first turn warms up
                    seconds[which].append(time.perf_counter() - started_s)
        stats = llms[1].engine.stats
        medians = [statistics.median(each) for each in seconds]
        result = {
            "without_s": seconds[0],
            "with_s": seconds[1],
            "ratio": medians[1] / medians[0],
            "stored": stats.num_stored_pages,
            "dropped": stats.num_dropped_pages,
            "loaded": stats.num_loaded_pages,
        }
        for llm in llms:
            llm.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
