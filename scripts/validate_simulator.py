"""Compare the simulator with this machine's engine: replayed plans, and predicted latencies and throughput.

    python scripts/validate_simulator.py --json scripts/results/simulator-cpu.json

An engine with the embedded model serves a calibration load and, with an event log, three workloads. The calibration
load's steps are fitted by program; with these times alone the simulator then serves the three workloads. Every log must
replay to the same plans. One step per dispatch, because tokens of several steps arrive together at a caller. The
machine must be idle.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core.event_log import read_log
from jaxserve.core.events import replay
from jaxserve.core.status_line import wait_until_warm
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_plan import StepPlan, StepShape
from jaxserve.tools.bench.load import LoadTrace, TimedRequest, run_load
from jaxserve.tools.simulator.simulation import Simulation
from jaxserve.tools.simulator.step_times import ProgramTimes, attention_counts
from jaxserve.tools.simulator.summary import Totals
from jaxserve.tools.simulator.traces import TracedRequest

LIMITS = {"throughput": 0.10, "ttft_p50": 0.15, "ttft_p99": 0.15, "itl_p50": 0.15, "itl_p99": 0.15}
OPTIONS: dict[str, Any] = {  # few programs, so that each is measured often
    "max_num_seqs": 24,
    "max_num_batched_tokens": 128,
    "max_model_len": 1024,
    "multi_step": 1,
    "skip_tokenizer_init": True,
}
BLOCK = 16  # tokens per block id


def chat(draw: Random, rate: float, count: int) -> list[TracedRequest]:
    """Return independent requests at random times."""
    now_s, trace = 0.0, []
    for index in range(count):
        now_s += draw.expovariate(rate)
        trace.append(traced(now_s, index, draw.randrange(20, 200), draw.randrange(20, 120)))
    return trace


def shared(draw: Random, rate: float, count: int) -> list[TracedRequest]:
    """Return longer prompts of which three quarters begin with one of three prefixes."""
    now_s, trace = 0.0, []
    for index in range(count):
        now_s += draw.expovariate(rate)
        family = draw.randrange(4)
        prefix = 256 if family else 0
        trace.append(traced(now_s, index, prefix + draw.randrange(40, 300), draw.randrange(8, 40), prefix, family))
    return trace


def bursts(draw: Random, rate: float, count: int) -> list[TracedRequest]:
    """Return requests that arrive sixteen at a time, so that queues form."""
    return [
        traced(index // 16 * 16 / rate, index, draw.randrange(20, 300), draw.randrange(10, 80))
        for index in range(count)
    ]


def traced(
    arrival_s: float, index: int, prompt_len: int, output_len: int, prefix_len: int = 0, family: int = 0
) -> TracedRequest:
    """Return a request whose first blocks are its family's and whose others are its own."""
    num_blocks = -(-prompt_len // BLOCK)
    blocks = [1000 * family + i if i < prefix_len // BLOCK else 10**6 * (index + 1) + i for i in range(num_blocks)]
    return TracedRequest(arrival_s, prompt_len, output_len, blocks, BLOCK)


WORKLOADS: dict[str, tuple[Callable[[Random, float, int], list[TracedRequest]], float]] = {
    "chat": (chat, 0.6),
    "shared prefixes": (shared, 0.6),
    "bursts": (bursts, 0.5),
}


def timed(trace: Sequence[TracedRequest], vocab_size: int) -> list[TimedRequest]:
    """Return a trace's requests with tokens, which are equal if their blocks are."""
    requests = []
    for request in trace:
        prompt: list[int] = []
        for block in request.blocks:
            prompt += [Random(block).randrange(10, vocab_size) for _ in range(BLOCK)]
        requests.append(TimedRequest(prompt[: request.prompt_len], request.output_len, request.arrival_s))
    return requests


class Sample(NamedTuple):
    """A measured step."""

    program: int  # tokens on its axis
    num_scores: int
    num_read: int  # tokens whose keys and values its rows read
    seconds: float


class Recorder:
    """An engine with an event log, whose plans and times of steps are kept.

    Attributes:
        schedule: the engine's sizes.
        step_s: seconds of each step, by its id.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._engine = DrivenEngine(EngineConfig(event_log=str(log), **OPTIONS))
        self.schedule = self._engine.schedule
        self.step_s: dict[int, float] = {}
        wait_until_warm(self._engine, sys.stderr)
        self.run(chat(Random(99), 50.0, 20))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        """Step the engine, and note the times of the steps that have ended."""
        outputs = self._engine.step()
        for step in self._engine.last_steps:
            self.step_s[step.step_id] = step.wall_ms / 1e3
        return outputs

    def run(self, trace: Sequence[TracedRequest]) -> tuple[LoadTrace, set[int]]:
        """Serve a trace with an empty cache; return the requests' times and the ids of the steps."""
        self._engine.reset_prefix_cache()
        before = set(self.step_s)
        return run_load(self, timed(trace, self._engine.arch.vocab_size)), self.step_s.keys() - before

    def replayed(self) -> tuple[int, dict[int, Sample]]:
        """End the engine; make the log's plans again, and return their number and all steps, by id.

        Raises:
            RuntimeError: a plan differs from the engine's.
        """
        self._engine.close()
        steps: dict[int, Sample] = {}

        def keep(plan: StepPlan, program: StepShape) -> None:
            if plan.step_id in self.step_s:
                counts = attention_counts(plan.starts, plan.counts)
                steps[plan.step_id] = Sample(program.num_tokens, *counts, self.step_s[plan.step_id])

        schedule, tiers, events = read_log(self._log)
        return replay(events, Scheduler(schedule, tiers=tiers), keep), steps


def fit(samples: Iterable[Sample]) -> ProgramTimes:
    """Return the mean times by program, and the attention times, which all programs share."""
    by_program: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_program[sample.program].append(sample)
    counts, seconds = [], []  # differences to each program's means, relative to its median time
    for program, each in by_program.items():
        middle = statistics.median(one.seconds for one in each)
        kept = [one for one in each if one.seconds < 3 * middle]
        by_program[program] = kept
        values = np.array([one[1:] for one in kept], np.float64)
        values = (values - values.mean(axis=0)) / middle
        counts.append(values[:, :2])
        seconds.append(values[:, 2])
    x, y = np.concatenate(counts), np.concatenate(seconds)
    score_s, context_s = np.linalg.lstsq(x, y)[0].tolist()
    if min(score_s, context_s) < 0:  # only one of them, by the better fit
        score_s, context_s = max(
            [max(float(x[:, 0] @ y / (x[:, 0] @ x[:, 0])), 0.0), 0.0],
            [0.0, max(float(x[:, 1] @ y / (x[:, 1] @ x[:, 1])), 0.0)],
            key=lambda each: -float(np.sum((x @ each - y) ** 2)),
        )
    program_s = {
        program: max(
            statistics.fmean(one.seconds - score_s * one.num_scores - context_s * one.num_read for one in each), 0.0
        )
        for program, each in sorted(by_program.items())
    }
    return ProgramTimes(program_s, score_s, context_s)


def slowdown(samples: Sequence[Sample], times: ProgramTimes) -> float:
    """Return the total measured time of steps as a multiple of their fitted times."""
    fitted = sum(
        times.program_s[s.program] + times.score_s * s.num_scores + times.context_s * s.num_read
        for s in samples
        if s.program in times.program_s
    )
    return sum(sample.seconds for sample in samples if sample.program in times.program_s) / fitted


def measured(load: LoadTrace) -> dict[str, float]:
    """Return an engine's figures."""
    ttfts = [request.ttft_s * 1e3 for request in load.requests]
    itls = [1e3 * each for request in load.requests for each in request.itls_s]
    num_tokens = sum(len(request.token_s) for request in load.requests)
    first_s = min(request.arrival_s for request in load.requests)
    return figures(num_tokens / (load.elapsed_s - first_s), ttfts, itls)


def figures(throughput: float, ttfts: Sequence[float], itls: Sequence[float]) -> dict[str, float]:
    """Return the compared figures of times in milliseconds."""
    found = {"throughput": throughput}
    for name, values in (("ttft", ttfts), ("itl", itls)):
        found |= {f"{name}_p{percent}": float(np.percentile(values, percent)) for percent in (50, 99)}
    return found


def predicted(trace: Sequence[TracedRequest], schedule: ScheduleConfig, times: ProgramTimes) -> Totals:
    """Return the simulator's totals."""
    return Simulation(schedule, times).run(trace)


def simulated(totals: Totals) -> dict[str, float]:
    """Return the simulator's figures."""
    report = totals.report(1)
    found = {"throughput": report["output_tokens_per_s"]}
    for name in ("ttft", "itl"):
        found |= {f"{name}_p{percent}": report[f"{name}_ms"][f"p{percent}"] for percent in (50, 99)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--rates", metavar="FILE", help="write the fitted step times, for simulate --step-rates")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each workload (default: 10)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "events.jsonl")
        calibration: set[int] = set()
        for index in range(2):  # before the workloads and after them
            if index == 0:
                probe, ids = recorder.run(chat(Random(1), 1e6, 100))  # all at the start: what the engine can do
                rate = 100 / probe.elapsed_s
                calibration |= ids
            mixed = [
                *chat(Random(20 + index), rate / 3, 60),
                *shared(Random(30 + index), rate / 4, 40),
                *bursts(Random(40 + index), rate / 4, 48),
            ]
            calibration |= recorder.run(sorted(mixed, key=lambda request: request.arrival_s))[1]
            if index == 0:
                runs = {}
                for seed, (name, (workload, load)) in enumerate(WORKLOADS.items(), start=10):
                    trace = workload(Random(seed), load * rate, max(int(load * rate * args.seconds), 32))
                    runs[name] = trace, *recorder.run(trace)
        num_plans, steps = recorder.replayed()
        times = fit(steps[step_id] for step_id in calibration)
        rows = []
        for name, (trace, load_trace, ids) in runs.items():
            real = measured(load_trace)
            totals = predicted(trace, recorder.schedule, times)
            found = simulated(totals)
            errors = {key: found[key] / real[key] - 1 for key in real}
            missed = [key for key, limit in LIMITS.items() if abs(errors[key]) > limit]
            rows.append(
                {
                    "workload": name,
                    "requests": len(trace),
                    "rate": len(trace) / (trace[-1].arrival_s or 1.0),
                    "steps": {"measured": len(ids), "predicted": totals.num_steps},
                    "slowdown": slowdown([steps[step_id] for step_id in ids], times),
                    "measured": real,
                    "predicted": found,
                    "errors": errors,
                    "missed": missed,
                }
            )
    if args.rates is not None:
        Path(args.rates).write_text(json.dumps(asdict(times), indent=1) + "\n", encoding="utf-8")
    if args.json is not None:
        about = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        report = about | {"limits": LIMITS, "plans_replayed": num_plans, "workloads": rows}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{num_plans} plans replayed; steps {[row['steps'] for row in rows]}, {[row['slowdown'] for row in rows]}")
    print("| workload | figure | measured | predicted | error |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        for key in LIMITS:
            values = [f"{row[kind][key]:.4g}" for kind in ("measured", "predicted")]
            print(f"| {row['workload']} | {key} | {' | '.join(values)} | {row['errors'][key]:+.1%} |")


if __name__ == "__main__":
    main()
