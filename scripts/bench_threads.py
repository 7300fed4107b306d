"""Threads that each submit one request simultaneously and stream it, compared with one `generate` of the same requests.

    python scripts/bench_threads.py --threads 200 --rounds 5

The two ways take turns, after one warm-up round each; every round has different prompts. Prints one JSON line: output
tokens per second by way, medians and all rounds, and each pair's ratio.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np

from jaxserve import LLM, SamplingParams


def prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    """Return random prompts without common pages."""
    return np.random.default_rng(seed).integers(3, llm.engine.arch.vocab_size, (count, length)).tolist()


def generate(llm: LLM, requests: list[list[int]], params: SamplingParams) -> float:
    """Return the output tokens per second of one call."""
    started = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - started)


def stream(llm: LLM, requests: list[list[int]], params: SamplingParams) -> float:
    """Return the output tokens per second of one thread per request, which takes every increment. All threads start
    together.
    """
    go = Barrier(len(requests) + 1)

    def read(request: list[int]) -> int:
        go.wait()
        return sum(len(part.outputs[0].token_ids) for part in llm.stream(request, params))

    with ThreadPoolExecutor(len(requests)) as pool:
        counts = [pool.submit(read, request) for request in requests]
        started = time.perf_counter()
        go.wait()
        return sum(count.result() for count in counts) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint; the embedded model by default")
    parser.add_argument("--threads", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {"generate": [], "stream": []}
    with LLM(args.model, compile_ahead="all") as llm:
        for index in range(args.rounds + 1):
            for way in (generate, stream):
                seed = 2 * index + (way is stream)
                rate = way(llm, prompts(llm, args.threads, args.prompt_tokens, seed), params)
                if index:
                    rates[way.__name__].append(round(rate, 1))
    medians = {f"{way}_tok_s": statistics.median(rounds) for way, rounds in rates.items()}
    ratios = [round(b / a, 3) for a, b in zip(rates["generate"], rates["stream"], strict=True)]
    settings = {"threads": args.threads, "prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens}
    print(json.dumps({"bench": "threads", **settings, **medians, "ratio": statistics.median(ratios), "ratios": ratios}))


if __name__ == "__main__":
    main()
