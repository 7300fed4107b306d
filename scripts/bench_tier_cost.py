"""Cost of writing all pages to a lower tier if no prompt is ever found there.

    python scripts/bench_tier_cost.py --model MODEL --rounds 30 --add piece1.json

Two engines take turns to serve new random prompts, one without lower tiers, one that writes all pages to disk (or to
host memory, with --host-gib). Each round is a pair of short runs, in an order that changes from round to round, so that
a change of the machine's speed disturbs both alike. Prints one JSON line:

- `cpu_ms_per_step` and `wall_ms_per_step`: medians of the runs of both engines, over the same number of steps;
- `cpu_ratio` and `wall_ratio`: median ratio in a round, with quartiles, and the median's 95% confidence interval,
  by order statistics;
- `core_us_per_page` and `io_us_per_page`: processor time that the tier takes for a page on the core's thread, on CPUs
  with most of the copy itself, and on the thread that writes pages;
- `counted_fraction`: this time relative to the processor time without a tier, free of the noise between two runs.

`--add` names earlier results, whose rounds count as well: a machine is quiet only for so long. MODEL is a checkpoint;
by default it has random weights and Qwen2.5-0.5B's layers.
"""

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.execution.page_mover import PageMover
from jaxserve.offline.llm import LLM
from jaxserve.scheduling.kv_cache.page_store import PageStore
from jaxserve.scheduling.kv_cache.transfers import Transfers
from synthetic.random_model import HALF_BILLION, write_random_model

# Methods that cost time on the core's thread with a tier.
CORE_METHODS = {PageMover: ("start_moves", "take_ended"), PageStore: ("transferred",), Transfers: ("store",)}

Run = dict[str, float]  # seconds, and steps, of an engine in a round
core_s = [0.0]  # processor time in these methods so far; only one of the engines has a tier


def time_run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Run:
    """Serve the prompts, write the last pages, and return elapsed and processor time by thread, steps and pages."""
    before = _now(llm)
    llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - before["wall_s"]
    movers = [replica.mover for replica in llm.engine.host.core.replicas if replica.mover is not None]
    while any(getattr(medium, "_unwritten", ()) for mover in movers for medium in mover.media):
        time.sleep(0.001)
    return {name: value - before[name] for name, value in _now(llm).items()} | {"wall_s": wall_s}


def _now(llm: LLM) -> Run:
    """Return the times since some start, and an engine's totals."""
    io_s = sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name.startswith("jaxserve pages") and thread.ident is not None
    )
    stats = llm.engine.stats
    return {
        "wall_s": time.perf_counter(),
        "cpu_s": time.process_time(),
        "io_s": io_s,
        "core_s": core_s[0],
        "steps": stats.num_steps,
        "stored": stats.num_stored_pages,
        "dropped": stats.num_dropped_pages,
        "loaded": stats.num_loaded_pages,
    }


def count_core_time() -> None:
    """Count processor time in `CORE_METHODS`."""

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            started_s = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                core_s[0] += time.thread_time() - started_s

        return call

    for each, names in CORE_METHODS.items():
        for name in names:
            setattr(each, name, counted(getattr(each, name)))


def compare(options: dict[str, Any], tiers: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Run]]:
    """Serve rounds of prompts with two engines, and return the runs in each round."""
    rng = np.random.default_rng(args.seed)
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    count_core_time()
    llms = {"without": LLM(**options), "with": LLM(**options, **tiers)}
    rounds: list[dict[str, Run]] = []
    until_s = time.perf_counter() + args.seconds
    for turn in range(args.rounds + 1):
        if rounds and time.perf_counter() > until_s:
            break
        prompts = rng.integers(5, 250, (args.prompts, args.prompt_tokens)).tolist()
        names = sorted(llms, reverse=bool(turn % 2))
        runs = {name: time_run(llms[name], prompts, params) for name in names}
        if turn:  # the first turn warms up
            rounds.append(runs)
    for llm in llms.values():
        llm.close()
    return rounds


def summarise(rounds: Sequence[dict[str, Run]]) -> dict[str, Any]:
    """Return the rounds' figures."""

    def median(name: str, figure: Callable[[Run], float]) -> float:
        return statistics.median(figure(runs[name]) for runs in rounds)

    pages = sum(runs["with"]["stored"] for runs in rounds)
    on_core_s, io_s = (sum(runs["with"][name] for runs in rounds) for name in ("core_s", "io_s"))
    result: dict[str, Any] = {"num_rounds": len(rounds), "pages_stored": pages}
    for name in ("dropped", "loaded"):
        result[f"pages_{name}"] = sum(runs["with"][name] for runs in rounds)
    for kind in ("cpu", "wall"):
        seconds = f"{kind}_s"
        result[f"{kind}_ms_per_step"] = {
            name: round(median(name, lambda run, seconds=seconds: 1e3 * run[seconds] / run["steps"]), 4)
            for name in ("without", "with")
        }
        ratios = sorted(runs["with"][seconds] / runs["without"][seconds] for runs in rounds)
        half_width = math.ceil(0.98 * math.sqrt(len(ratios)))  # the interval's, in ranks
        first = max(len(ratios) // 2 - half_width, 0)
        last = min((len(ratios) - 1) // 2 + half_width, len(ratios) - 1)
        result[f"{kind}_ratio"] = {
            "median": round(statistics.median(ratios), 4),
            "quartiles": [round(each, 4) for each in statistics.quantiles(ratios)],
            "interval": [round(ratios[first], 4), round(ratios[last], 4)],
        }
    result["core_us_per_page"] = round(1e6 * on_core_s / pages, 1)
    result["io_us_per_page"] = round(1e6 * io_s / pages, 1)
    result["counted_fraction"] = round((on_core_s + io_s) / sum(runs["without"]["cpu_s"] for runs in rounds), 5)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round later")
    parser.add_argument("--host-gib", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", type=Path, nargs="*", default=[], metavar="FILE")
    args = parser.parse_args()
    rounds = [each for file in args.add for each in json.loads(file.read_text(encoding="utf-8"))["rounds"]]
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
        rounds += compare(options, tiers, args)
    print(json.dumps({**summarise(rounds), "rounds": rounds}))


if __name__ == "__main__":
    main()
