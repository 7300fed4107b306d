"""Time to the first token of a prompt whose pages are on disk, compared with computing it.

    python scripts/bench_pages_on_disk.py --model MODEL --prompt-tokens 4096 --rounds 3

MODEL is a checkpoint. One engine computes the prompts and writes their pages; a second one, with an empty pool, finds
them on disk. Prints one JSON line: medians in seconds, their ratio, the pages moved, and whether both engines sampled
the same tokens.
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

NUM_TOKENS = 8  # sampled per prompt, to be compared
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
MORE = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def time_prompts(options: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Serve the prompts with a new engine; return the times to their first tokens, and the tokens that followed."""
    llm = LLM(**options)
    llm.generate([prompts[0][:64][::-1]], MORE, use_tqdm=False)  # programs and threads have started
    seconds, token_ids = [], []
    for prompt in prompts:
        start = time.perf_counter()
        llm.generate([prompt], FIRST, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        token_ids.append(llm.generate([prompt], MORE, use_tqdm=False)[0].outputs[0].token_ids)
    stats = llm.engine.stats
    llm.close()
    return {
        "seconds": seconds,
        "token_ids": token_ids,
        "loaded": stats.num_loaded_pages,
        "stored": stats.num_stored_pages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 5000, args.prompt_tokens).tolist() for _ in range(args.rounds)]
    with tempfile.TemporaryDirectory() as path:
        options = {
            "model": args.model,
            "dtype": args.dtype,
            "skip_tokenizer_init": True,
            "max_model_len": args.prompt_tokens + 64,
            "max_num_seqs": 4,
            "compile_ahead": "all",
            "kv_offloading_path": path,
        }
        computed, restored = time_prompts(options, prompts), time_prompts(options, prompts)
    medians = [statistics.median(each["seconds"]) for each in (computed, restored)]
    print(
        json.dumps(
            {
                "model": args.model,
                "prompt_tokens": args.prompt_tokens,
                "computed_s": medians[0],
                "restored_s": medians[1],
                "ratio": medians[0] / medians[1],
                "pages_stored": computed["stored"],
                "pages_loaded": restored["loaded"],
                "tokens_equal": computed["token_ids"] == restored["token_ids"],
            }
        )
    )


if __name__ == "__main__":
    main()
