"""Cost of writing all pages to a lower tier if no prompt is ever found there.

    python scripts/bench_tier_cost.py --model MODEL --rounds 4

Two engines take turns to serve new random prompts, one without lower tiers, one that writes all pages to disk (or to
host memory, with --host-gib). Prints one JSON line: `wall_ratio` compares the engines' fastest rounds.
`cpu_ratio` is the median ratio between their processor times in a round, which other processes disturb less, and
`cpu_quartiles` are its quartiles. `io_fraction` is the processor time of the thread that writes pages as
a fraction of the engine's. MODEL is a checkpoint; by default it has random weights and Qwen2.5-0.5B's layers.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.offline.llm import LLM
from synthetic.random_model import HALF_BILLION, write_random_model


class Times(NamedTuple):
    """Seconds that a round took.

    Attributes:
        wall: elapsed time.
        cpu: processor time of all threads.
        io: processor time of the thread that writes pages.
    """

    wall: float
    cpu: float
    io: float


def time_round(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Times:
    """Serve the prompts, write the last pages, and return the times."""
    before = _now()
    llm.generate(prompts, params, use_tqdm=False)
    wall = time.perf_counter() - before.wall
    for replica in llm.engine.host.core.replicas:
        if replica.mover is not None:
            replica.mover.sync()
    after = _now()
    return Times(wall, after.cpu - before.cpu, after.io - before.io)


def _now() -> Times:
    """Return the times since some start."""
    io_s = sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name.startswith("jaxserve pages") and thread.ident is not None
    )
    return Times(time.perf_counter(), time.process_time(), io_s)


def compare(options: dict[str, Any], tiers: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Serve rounds of prompts with two engines, and return the figures."""
    rng = np.random.default_rng(args.seed)
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    without, with_tiers = LLM(**options), LLM(**options, **tiers)
    rounds: list[tuple[Times, Times]] = []
    for turn in range(args.rounds + 1):
        prompts = rng.integers(5, 250, (args.prompts, args.prompt_tokens)).tolist()
        llms = (without, with_tiers) if turn % 2 else (with_tiers, without)
        times = [time_round(llm, prompts, params) for llm in llms]
        if turn:  # the first turn warms up
            rounds.append((times[0], times[1]) if turn % 2 else (times[1], times[0]))
    stats, ratios = with_tiers.engine.stats, [b.cpu / a.cpu for a, b in rounds]
    result = {
        "wall_ratio": min(b.wall for _, b in rounds) / min(a.wall for a, _ in rounds),
        "cpu_ratio": statistics.median(ratios),
        "cpu_quartiles": statistics.quantiles(ratios),
        "io_fraction": statistics.median(b.io / b.cpu for _, b in rounds),
        "stored": stats.num_stored_pages,
        "dropped": stats.num_dropped_pages,
        "loaded": stats.num_loaded_pages,
        "without": [a._asdict() for a, _ in rounds],
        "with": [b._asdict() for _, b in rounds],
    }
    for llm in (without, with_tiers):
        llm.close()
    return result


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
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        options: dict[str, Any] = {
            "model": args.model or str(write_random_model(path / "model", sizes=HALF_BILLION)),
            "max_model_len": args.prompt_tokens + args.output_tokens,
            "max_num_seqs": args.prompts,
            "skip_tokenizer_init": True,
            "compile_ahead": "minimal",
        }
        tiers = {"kv_offloading_size": args.host_gib} if args.host_gib else {"kv_offloading_path": str(path / "kv")}
        print(json.dumps(compare(options, tiers, args)))


if __name__ == "__main__":
    main()
