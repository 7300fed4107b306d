"""`jaxserve bench`: read what to measure, measure it, show and keep the figures."""

import argparse
import contextlib
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.bench import pictures
from jaxserve.bench.load import LoadTrace, TimedRequest, run_load
from jaxserve.bench.report import build_report
from jaxserve.bench.summary import Json, Setting, Slo, summarize
from jaxserve.bench.tables import render
from jaxserve.bench.workloads import Workload, load_workload, poisson_arrivals, token_ids
from jaxserve.errors import ConfigError
from jaxserve.live_stats import LiveStats


@dataclass(frozen=True)
class BenchJob:
    """What to measure, checked. `rates` holds None for the workload's own arrivals."""

    kind: str
    workload: Workload
    rates: tuple[float | None, ...] = (None,)
    time_scale: float = 1.0
    slo: Slo = field(default_factory=Slo)
    price_per_hour: float | None = None
    json_path: Path | None = None
    pictures_dir: Path | None = None
    live: bool = False

    def arrivals(self, rate: float | None) -> list[float]:
        """When the requests of a run are due, in seconds."""
        if self.kind == "offline":
            return [0.0] * len(self.workload.requests)
        if rate is not None:
            return poisson_arrivals(self.workload, rate)
        return [request.arrival_s * self.time_scale for request in self.workload.requests]


def read_job(args: argparse.Namespace) -> BenchJob:
    """The job that the flags ask for; ConfigError before anything is loaded or measured."""
    workload = load_workload(args.workload)
    rates: tuple[float | None, ...] = (None,)
    options: dict[str, Any] = {}
    if args.kind == "offline":
        if args.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, got {args.rounds}")
        rates *= args.rounds
    else:
        rates = _read_rates(args.rates, args.time_scale, workload)
        options["time_scale"] = _positive("time_scale", args.time_scale) or 1.0
        options["slo"] = Slo(_positive("slo_ttft_ms", args.slo_ttft_ms), _positive("slo_tpot_ms", args.slo_tpot_ms))
    return BenchJob(
        kind=args.kind,
        workload=workload,
        rates=rates,
        price_per_hour=_positive("price_per_hour", args.price_per_hour),
        json_path=_output_file(args.json),
        pictures_dir=_output_dir(args.pictures),
        live=args.stats,
        **options,
    )


def run_job(engine: Any, job: BenchJob) -> Json:
    """Measure with an engine that nothing else uses, print the table, write what was asked for; returns the report.

    Raises:
        ConfigError: the engine cannot run the workload; nothing has been measured.
    """
    requests = _prompts(engine, job.workload)
    _warm_up(engine, requests[0][0])  # before the ceilings are measured, which compiles would lower
    setting = Setting(
        engine.schedule.page_size, engine.schedule.num_pages, engine.ceilings, job.slo, job.price_per_hour
    )
    runs = []
    for index, rate in enumerate(job.rates, 1):
        _say(f"{job.workload.name}: run {index} of {len(job.rates)}{_at(rate)}")
        with LiveStats(engine, sys.stderr) if job.live else contextlib.nullcontext():
            trace = _run(engine, requests, job.arrivals(rate))
        runs.append({"rate_per_s": rate, **summarize(trace, setting)})
    report = build_report(engine, job.kind, job.workload, runs, time_scale=job.time_scale)
    print(render(report))
    _write(report, job)
    return report


def _run(engine: Any, prompts: list[tuple[list[int], int]], arrivals: list[float]) -> LoadTrace:
    """One run from an empty prefix cache."""
    engine.reset_prefix_cache()
    timed = [TimedRequest(*prompt, arrival) for prompt, arrival in zip(prompts, arrivals, strict=True)]
    return run_load(engine, timed)


def _warm_up(engine: Any, prompt: list[int]) -> None:
    """Every program compiled and each part of the engine used once."""
    engine.wait_until_warm()
    run_load(engine, [TimedRequest(prompt, output_len=1)])


def _prompts(engine: Any, workload: Workload) -> list[tuple[list[int], int]]:
    """Prompt and output length of every request, known to fit."""
    longest = max(r.prompt_len + r.output_len for r in workload.requests)
    if longest > engine.schedule.max_model_len:
        raise ConfigError(
            f"the workload {workload.name} has requests of up to {longest} tokens, but max_model_len is "
            f"{engine.schedule.max_model_len}; raise it, or choose another workload"
        )
    prompts = token_ids(workload, engine.arch.vocab_size)
    return [(prompt, request.output_len) for prompt, request in zip(prompts, workload.requests, strict=True)]


def _write(report: Json, job: BenchJob) -> None:
    if job.json_path is not None:
        job.json_path.write_text(json.dumps(report, allow_nan=False) + "\n", encoding="utf-8")
        _say(f"figures: {job.json_path}")
    if job.pictures_dir is not None and pictures.reason_missing() is None:
        for path in pictures.draw(report, job.pictures_dir):
            _say(f"picture: {path}")


def _read_rates(given: str | None, time_scale: float | None, workload: Workload) -> tuple[float | None, ...]:
    if given is None:
        if not any(request.arrival_s for request in workload.requests):
            raise ConfigError(f"in the workload {workload.name} all requests arrive at once; give --rate, or --rates")
        return (None,)
    if time_scale is not None:
        raise ConfigError("time_scale stretches the workload's own arrivals; leave it out where --rate is given")
    try:
        rates = [float(rate) for rate in given.split(",")]
    except ValueError:
        raise ConfigError(f"rates must be numbers separated by commas, got {given!r}") from None
    return tuple(_positive("each rate", rate) for rate in rates)


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, got {value}")
    return value


def _output_file(given: str | None) -> Path | None:
    if given is None:
        return None
    path = Path(given)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"json must be a file in a directory that exists, got {given}")
    return path


def _output_dir(given: str | None) -> Path | None:
    if given is None:
        return None
    if (reason := pictures.reason_missing()) is not None:
        _say(reason)
    path = Path(given)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory of pictures {given}: {error.strerror}") from error
    return path


def _at(rate: float | None) -> str:
    return "" if rate is None else f" at {rate:g} requests/s"


def _say(line: str) -> None:
    print(line, file=sys.stderr)
