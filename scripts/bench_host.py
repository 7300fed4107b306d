"""Host microseconds per engine step on a null device, by component, over steady steps.

    python scripts/bench_host.py                                  # the grid of rows and queue lengths
    python scripts/bench_host.py --rows 64 --waiting 0 --prefill 256

Every row decodes in every measured step; with --prefill, another row also prefills that many tokens of a long prompt.
`step` is a whole engine step, and `step_cpu` its CPU time, without other load on the machine. `planning` is schedule +
pack + update; `outputs` is the rest of a step except statistics: dispatch and output assembly (no tokenizer is loaded).
`collections` counts garbage collections meanwhile, by generation. Prints one JSON line per case.
"""

import argparse
import gc
import itertools
import json
import platform
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from synthetic.null_device import null_engine
from synthetic.prompts import prompts

WARM_UP_STEPS = 40
PROMPT_LEN = 64
LONG_PROMPT_LEN = 1024
PARTS = {
    "schedule": "scheduler.schedule",
    "pack": "executor.packer.pack",
    "update": "scheduler.update",
    "statistics": "step_stats.write",
}


class Stopwatch:
    """Wraps methods of one engine and sums their times until read."""

    def __init__(self, engine: DrivenEngine) -> None:
        self.spent_ns = dict.fromkeys(PARTS, 0)
        for part, path in PARTS.items():
            owner, _, name = path.rpartition(".")
            target = attrgetter(owner)(engine.replicas[0])
            setattr(target, name, self._timed(part, getattr(target, name)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter_ns()
            result = method(*args, **options)
            self.spent_ns[part] += time.perf_counter_ns() - started
            return result

        return timed

    def read(self) -> dict[str, int]:
        """Return the nanoseconds per component since the last read."""
        spent, self.spent_ns = self.spent_ns, dict.fromkeys(PARTS, 0)
        return spent


def start_engine(num_rows: int, num_steps: int, prefill: int, max_model_len: int, prefix_caching: bool) -> DrivenEngine:
    """Return an engine with a slot and pages for every row, and one more for the prefill."""
    num_slots = num_rows + (prefill > 0)
    pages_per_row = -(-(PROMPT_LEN + output_len(num_rows, num_steps)) // 16) + 1
    return null_engine(
        max_model_len=max_model_len,
        max_num_seqs=num_slots,
        max_num_batched_tokens=num_rows + (prefill or 1024),
        page_size=16,
        num_pages=num_slots * pages_per_row + 2 * (LONG_PROMPT_LEN // 16),
        enable_prefix_caching=prefix_caching,
    )


def output_len(num_rows: int, num_steps: int) -> int:
    """Return a length with which no row ends before the last measured step: at worst every step admits one row."""
    return num_rows + WARM_UP_STEPS + num_steps + 3


def num_collections() -> list[int]:
    """Return the number of garbage collections so far, by generation."""
    return [generation["collections"] for generation in gc.get_stats()]


def measure(
    engine: DrivenEngine, num_rows: int, num_waiting: int, prefill: int, num_steps: int
) -> tuple[dict[str, NDArray[np.float64]], list[int]]:
    """Return the microseconds of each measured step, by component, and the garbage collections meanwhile."""
    decoding = SamplingParams(max_tokens=output_len(num_rows, num_steps), ignore_eos=True)
    for index, prompt in zip(range(num_rows), prompts(PROMPT_LEN, seed=0), strict=False):
        engine.add_request(f"row {index}", prompt, decoding)
    while sum(len(group.output.outputs[0].token_ids) > 0 for group in engine.frontend._groups.values()) < num_rows:
        engine.step()
    for index, prompt in zip(range(num_waiting), prompts(PROMPT_LEN, seed=1), strict=False):
        engine.add_request(f"waiting {index}", prompt, decoding)
    long_prompts = prompts(LONG_PROMPT_LEN, seed=2)
    stopwatch, samples = Stopwatch(engine), []
    gc.collect()
    for index in range(WARM_UP_STEPS + num_steps):
        if index == WARM_UP_STEPS:
            before = num_collections()
        if prefill and index % (LONG_PROMPT_LEN // prefill) == 0:
            engine.add_request(f"long {index}", next(long_prompts), SamplingParams(max_tokens=1))
        started, started_cpu = time.perf_counter_ns(), time.thread_time_ns()
        engine.step()
        cpu, wall = time.thread_time_ns() - started_cpu, time.perf_counter_ns() - started
        samples.append({"step": wall, "step_cpu": cpu} | stopwatch.read())
        assert engine.last_step is not None
        assert engine.last_step.num_decode_tokens >= num_rows or index < 3, engine.last_step
    collections = [after - n for after, n in zip(num_collections(), before, strict=True)]
    parts = {name: np.array([s[name] / 1e3 for s in samples[WARM_UP_STEPS:]]) for name in samples[0]}
    parts["planning"] = parts["schedule"] + parts["pack"] + parts["update"]
    parts["outputs"] = parts["step"] - parts["planning"] - parts["statistics"]
    return parts, collections


def summary(microseconds: NDArray[np.float64]) -> dict[str, float]:
    """Return mean, median, 99th percentile and minimum."""
    values = {"mean": np.mean(microseconds), "median": np.median(microseconds), "p99": np.percentile(microseconds, 99)}
    values["min"] = np.min(microseconds)
    return {name: round(float(value), 1) for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 100_000])
    parser.add_argument("--prefill", type=int, nargs="+", default=[0, 256], help="tokens prefilled beside the rows")
    parser.add_argument("--prefix-caching", type=int, nargs="+", default=[1, 0])
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    grid = itertools.product(args.rows, args.prefix_caching, args.prefill, args.waiting)
    for num_rows, prefix_caching, prefill, num_waiting in grid:
        if prefill and num_waiting:
            continue  # the long prompts would have to wait for the others
        engine = start_engine(num_rows, args.steps, prefill, args.max_model_len, bool(prefix_caching))
        parts, collections = measure(engine, num_rows, num_waiting, prefill, args.steps)
        case = {"rows": num_rows, "waiting": num_waiting, "prefill_tokens": prefill, "prefix_caching": prefix_caching}
        times = {f"{name}_us": summary(values) for name, values in parts.items()} | {"collections": collections}
        versions = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
        print(json.dumps({"bench": "host", **case, "steps": args.steps, **times, **versions}), flush=True)


if __name__ == "__main__":
    main()
