"""Measure adaptive drafting on a stream that alternates between easy and hard text, and between 1 and 64 rows.

    python scripts/speculative_stream.py --out stream.json            # the embedded model and its draft, 4 minutes
    python scripts/speculative_stream.py --out s.json --seconds 30    # longer phases, as of the simulated clock's tests
    python scripts/speculative_stream.py --out s.json --multi-step 1  # each plain step in a dispatch of its own

Engines for plain decoding, fixed draft lengths and adaptive drafting take turns in each phase and keep their learned
times between phases. Easy text is greedy and repetitive; hard text is sampled and follows random letters. A new request
replaces each ended one, so that the number of rows stays constant until the phase has lasted its time; then all are
aborted. Speeds cover a whole phase, and its second half, when the choice has settled: medians over the visits with
little load from other processes, or over all if there are none. All engines, phases and repeats take 20 times the
seconds per phase and repeat, plus starting and waiting.
"""

import argparse
import collections
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from jaxserve import SamplingParams
from jaxserve.api.config import DEFAULT_DRAFTS
from jaxserve.api.embedded import embedded_model
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from speculative.runs import start

DEPTHS = (1, 2, 4)
ADAPTIVE = "adaptive"
QUIET = 0.1  # maximum processor fraction of other processes
MAX_TOKENS = 400  # tokens per request: prompts are short, and the embedded model's context ends at 1,024
SPEEDS = ("tokens_per_s", "settled_tokens_per_s", "tokens_per_processor_s")
EASY = ["0, 0, 0, 0, " * 12, "None, None, None, " * 10, "import os\n" * 16, "a, b = b, a\n" * 12]


@dataclass
class Phase:
    """A stretch of the stream.

    Attributes:
        name: name in the results.
        num_rows: simultaneous requests.
        seconds: duration.
        temperature: sampling temperature.
        prompts: alternating prompts.
    """

    name: str
    num_rows: int
    seconds: float
    temperature: float
    prompts: list[str]


@dataclass
class Visits:
    """Measurements for one engine in one phase, with an entry per visit.

    Attributes:
        whole: tokens per second.
        settled: tokens per second in the second half.
        by_processor: tokens per second of this process's processor time, which other load affects less.
        others: processor fraction of other processes.
        counts: drafted and accepted tokens over all visits.
        depths: tokens sampled in rounds and steps, by draft length.
    """

    whole: list[float] = field(default_factory=list)
    settled: list[float] = field(default_factory=list)
    by_processor: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    depths: collections.Counter[int] = field(default_factory=collections.Counter)

    def summary(self) -> dict[str, Any]:
        """Return medians, acceptance and token fractions by draft length."""
        total = sum(self.depths.values())
        quiet = [index for index, share in enumerate(self.others) if share < QUIET]
        kept = quiet or range(len(self.others))
        speeds = dict(zip(SPEEDS, (self.whole, self.settled, self.by_processor), strict=True))
        return {
            **{name: float(np.median([visits[index] for index in kept])) for name, visits in speeds.items()},
            "acceptance": self.counts["accepted"] / max(self.counts["drafted"], 1),
            "share_of_tokens_by_depth": {k: round(n / total, 3) for k, n in sorted(self.depths.items())},
            "num_quiet_visits": len(quiet),
            "visits": {**speeds, "others": self.others},
        }


def busy_s() -> tuple[float, float]:
    """Return the processor time of all processes and of this one."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0), time.process_time()


def wait_until_quiet(limit_s: float) -> None:
    """Wait until other processes use little of the processor."""
    end_s = time.monotonic() + limit_s
    while psutil.cpu_percent(0.5) > 100 * QUIET and time.monotonic() < end_s:
        pass


def hard_prompts(count: int) -> list[str]:
    """Return prompts with random letters."""
    rng = random.Random(0)
    words = ("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in itertools.count())
    return [" ".join(itertools.islice(words, 12)) for _ in range(count)]


def visit(engine: DrivenEngine, phase: Phase, visits: Visits) -> None:
    """Serve one phase, and add its measurements to `visits`."""
    engine.reset_prefix_cache()
    indices = itertools.count()
    running: set[str] = set()
    all_before_s, process_before_s = busy_s()
    stats = engine.replicas[0].step_stats.stats
    before = stats.num_sampled_tokens
    began_s = time.perf_counter()
    marks = [(0, began_s)]  # tokens so far, and their times
    while marks[-1][1] < began_s + phase.seconds:
        while len(running) < phase.num_rows:
            index = next(indices)
            params = SamplingParams(temperature=phase.temperature, max_tokens=MAX_TOKENS, ignore_eos=True, seed=index)
            engine.add_request(str(index), phase.prompts[index % len(phase.prompts)], params)
            running.add(str(index))
        running -= {output.request_id for output in engine.step() if output.finished}
        num_tokens = stats.num_sampled_tokens - before
        drafted, accepted, rounds = (
            sum(getattr(step, f"num_{name}") for step in engine.core.last_steps)
            for name in ("drafted_tokens", "accepted_tokens", "draft_rounds")
        )
        visits.counts.update(drafted=drafted, accepted=accepted)
        visits.depths[round(drafted / max(rounds, 1))] += num_tokens - marks[-1][0]
        marks.append((num_tokens, time.perf_counter()))
    for request_id in running:
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
    total, ended_s = marks[-1]
    all_s, process_s = busy_s()
    process_busy_s = process_s - process_before_s
    others_s = all_s - all_before_s - process_busy_s
    visits.others.append(others_s / (time.perf_counter() - began_s) / (psutil.cpu_count() or 1))
    half, half_s = [mark for mark in marks if mark[1] <= (began_s + ended_s) / 2][-1]
    visits.by_processor.append(total / process_busy_s)
    visits.whole.append(total / (ended_s - began_s))
    visits.settled.append((total - half) / (ended_s - half_s))


def compare(by_engine: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return adaptive speed relative to plain decoding and to the best fixed draft length, for each kind of speed."""
    found: dict[str, Any] = {}
    for name in SPEEDS:
        speeds = {engine: summary[name] for engine, summary in by_engine.items()}
        adaptive, plain = speeds.pop(ADAPTIVE), speeds["plain"]
        best = max(speeds, key=speeds.__getitem__)
        found[name] = {"over_plain": adaptive / plain, "over_best": adaptive / speeds[best], "best": best}
    return found


def results(visits: dict[str, dict[str, Visits]]) -> dict[str, Any]:
    """Return figures per phase."""
    found = {}
    for phase, by_engine in visits.items():
        summaries = {name: each.summary() for name, each in by_engine.items()}
        found[phase] = {"adaptive": compare(summaries), "engines": summaries}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write, after each time through the stream")
    parser.add_argument("--rows", type=int, default=64, help="rows of the phases with many")
    parser.add_argument("--seconds", type=float, default=3, help="time of a phase")
    parser.add_argument("--temperature", type=float, default=0.5, help="temperature of hard text")
    parser.add_argument("--multi-step", default="auto", help="most plain steps of a dispatch")
    parser.add_argument("--repeats", type=int, default=4, help="times that the stream goes through all phases")
    parser.add_argument("--wait", type=float, default=2, help="most seconds to wait for other processes per visit")
    args = parser.parse_args()
    hard = hard_prompts(args.rows)
    phases = [
        Phase(f"{name}, {rows} rows", rows, args.seconds, temperature, prompts)
        for rows in (1, args.rows)
        for name, temperature, prompts in (("easy", 0.0, EASY), ("hard", args.temperature, hard))
    ]
    draft = str(embedded_model(DEFAULT_DRAFTS["draft_model"]))
    configs: dict[str, SpeculationConfig | None] = {"plain": None}
    configs |= {f"k = {k}": SpeculationConfig(model=draft, num_speculative_tokens=k, adaptive=False) for k in DEPTHS}
    configs |= {ADAPTIVE: SpeculationConfig(model=draft, num_speculative_tokens=max(DEPTHS))}
    multi_step = args.multi_step if args.multi_step == "auto" else int(args.multi_step)
    engines = {
        name: start(name, config, max_num_seqs=args.rows, multi_step=multi_step).engine
        for name, config in configs.items()
    }
    visits = {phase.name: {name: Visits() for name in engines} for phase in phases}
    settings = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, **vars(args), "out": str(args.out)}
    for _ in range(args.repeats):
        for phase in phases:
            for name, engine in engines.items():
                wait_until_quiet(args.wait)
                visit(engine, phase, visits[phase.name][name])
        args.out.write_text(json.dumps({"facts": settings, "phases": results(visits)}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
