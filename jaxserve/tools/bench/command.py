"""Command `jaxserve bench`: read the flags, run the benchmark, print and save the figures."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.core.status_line import StatusLine, wait_until_warm
from jaxserve.errors import ConfigError
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.system.environment import openai_api_key
from jaxserve.system.whole_file import check_writable, write_whole
from jaxserve.tools.bench import plots
from jaxserve.tools.bench.flags import DEFAULT_VOCAB_SIZE
from jaxserve.tools.bench.load import LoadTrace, MeasuredEngine, TimedRequest, run_load
from jaxserve.tools.bench.remote import Server, run_remote
from jaxserve.tools.bench.report import DescribedEngine, build_remote_report, build_report
from jaxserve.tools.bench.summary import EngineSizes, Json, Setting, Slo, summarize
from jaxserve.tools.bench.tables import render
from jaxserve.tools.bench.workloads import (
    LOWEST_ID,
    Workload,
    WorkloadRequest,
    load_workload,
    poisson_arrivals,
    token_ids,
)
from jaxserve.tools.figures import plotting


@dataclass(frozen=True)
class BenchJob:
    """Benchmark to run, with checked values. A rate is None for the workload's arrivals."""

    kind: str
    workload: Workload
    rates: tuple[float | None, ...] = (None,)
    arrival_seed: int = 0
    time_scale: float = 1.0
    max_concurrency: int | None = None
    slo: Slo = field(default_factory=Slo)
    price_per_hour: float | None = None
    json_path: Path | None = None
    plots_dir: Path | None = None
    live: bool = False

    @property
    def load(self) -> Json:
        """Report entries about the arrivals."""
        return {name: getattr(self, name) for name in ("time_scale", "arrival_seed", "max_concurrency")}

    def arrivals(self, rate: float | None) -> list[float]:
        """Return the requests' arrival times in seconds."""
        if self.kind == "offline":
            return [0.0] * len(self.workload.requests)
        if rate is not None:
            return poisson_arrivals(self.workload, rate, self.arrival_seed)
        return [request.arrival_s * self.time_scale for request in self.workload.requests]


def read_job(args: argparse.Namespace) -> BenchJob:
    """Read the flags; ConfigError before anything is loaded or measured."""
    workload = load_workload(args.workload)
    if (num_requests := _at_least(1, "num_requests", args.num_requests)) is not None:
        workload = workload.resized(num_requests)
    rates: tuple[float | None, ...] = (None,)
    options: dict[str, Any] = {}
    if args.kind == "offline":
        rates *= _at_least(1, "rounds", args.rounds) or 1
    else:
        rates = _read_rates(args, workload)
        options["arrival_seed"] = _at_least(0, "arrival_seed", args.arrival_seed) or 0
        options["time_scale"] = _positive("time_scale", args.time_scale) or 1.0
        options["max_concurrency"] = _at_least(1, "max_concurrency", args.max_concurrency)
        options["slo"] = Slo(_positive("slo_ttft_ms", args.slo_ttft_ms), _positive("slo_tpot_ms", args.slo_tpot_ms))
    return BenchJob(
        kind=args.kind,
        workload=workload,
        rates=rates,
        price_per_hour=_positive("price_per_hour", args.price_per_hour),
        json_path=_output_file(args.json),
        plots_dir=_output_dir(args.plots),
        live=args.stats,
        **options,
    )


def run_job(engine: DescribedEngine, job: BenchJob) -> Json:
    """Measure an engine that serves nothing else; see `_measure`.

    Raises:
        ConfigError: the engine cannot run the workload; nothing has been measured then.
    """
    requests = _prompts(engine, job.workload)
    _warm_up(engine, requests[0][0])  # first, since compilation would lower the measured peak rates
    sizes = EngineSizes(engine.schedule.page_size, engine.schedule.num_pages, engine.peak_rates())

    def run(rate: float | None) -> LoadTrace:
        engine.reset_prefix_cache()
        with StatusLine(engine, sys.stderr) if job.live else contextlib.nullcontext():
            return run_load(engine, _timed(requests, job, rate), max_concurrency=job.max_concurrency)

    return _measure(job, build_report(engine, job.kind, job.workload, job.load), sizes, run)


def run_remote_job(server: Server, vocab_size: int, job: BenchJob) -> Json:
    """Measure a server, which may have other clients; see `_measure`.

    Args:
        server: the server.
        vocab_size: upper limit of the prompts' token ids.
        job: benchmark to run.

    Raises:
        ConfigError: the server does not answer, or serves no request.
    """
    prompts = token_ids(job.workload, vocab_size)
    requests = [(prompt, each.output_len) for prompt, each in zip(prompts, job.workload.requests, strict=True)]
    run_remote(server, [TimedRequest(requests[0][0], output_len=1)])  # errors show before anything is measured

    def run(rate: float | None) -> LoadTrace:
        return run_remote(server, _timed(requests, job, rate), max_concurrency=job.max_concurrency)

    return _measure(job, build_remote_report(server, job.kind, job.workload, job.load), None, run)


def read_server(args: argparse.Namespace, engine_options: Json) -> tuple[Server, int] | None:
    """Return the server from `--url` and the upper limit of prompt token ids; None to benchmark an engine in this
    process.

    Raises:
        ConfigError: flags contradict each other, or the server does not answer.
    """
    given = {"api_key": getattr(args, "api_key", None), "vocab_size": getattr(args, "vocab_size", None)}
    if getattr(args, "url", None) is None:
        if names := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{names[0]} needs a server; give its --url")
        return None
    if others := sorted(engine_options.keys() - {"model"}):
        raise ConfigError(f"a server has its own engine: leave out {others}, or --url")
    if args.stats:
        raise ConfigError("only an engine in this process has stats; leave out --stats or --url")
    vocab_size = _at_least(LOWEST_ID + 1, "vocab_size", given["vocab_size"]) or DEFAULT_VOCAB_SIZE
    return Server.at(args.url, engine_options.get("model"), given["api_key"] or openai_api_key()), vocab_size


def _measure(job: BenchJob, report: Json, sizes: EngineSizes | None, run: Callable[[float | None], LoadTrace]) -> Json:
    """Run a job, print the table, write the requested files, and return the report.

    Each run is written when it ends. If a later one fails, the completed ones are still shown.
    """
    setting = Setting(job.slo, job.price_per_hour, sizes)
    try:
        for index, rate in enumerate(job.rates, 1):
            _log(f"{job.workload.name}: run {index} of {len(job.rates)}{_at(rate)}")
            trace = run(rate)
            if trace.failures:
                _log(f"{len(trace.failures)} requests were not served; the first failed with: {trace.failures[0]}")
            report["runs"].append({"rate_per_s": "inf" if rate == math.inf else rate, **summarize(trace, setting)})
            _write(report, job.json_path)
    finally:
        if report["runs"]:
            _show(report, job)
    return report


def _timed(prompts: list[tuple[list[int], int]], job: BenchJob, rate: float | None) -> list[TimedRequest]:
    return [TimedRequest(*prompt, arrival) for prompt, arrival in zip(prompts, job.arrivals(rate), strict=True)]


def _warm_up(engine: MeasuredEngine, prompt: list[int]) -> None:
    """Compile every program and run one request through the engine."""
    wait_until_warm(engine, sys.stderr)
    run_load(engine, [TimedRequest(prompt, output_len=1)])


def _prompts(engine: MeasuredEngine, workload: Workload) -> list[tuple[list[int], int]]:
    """Return each request's prompt and output length; ConfigError if one does not fit."""
    for index, request in enumerate(workload.requests):
        _check_fits(engine.schedule, f"request {index} of the workload {workload.name}", request)
    prompts = token_ids(workload, engine.arch.vocab_size)
    return [(prompt, request.output_len) for prompt, request in zip(prompts, workload.requests, strict=True)]


def _check_fits(schedule: ScheduleConfig, name: str, request: WorkloadRequest) -> None:
    """Raise ConfigError for a request that the engine would refuse or end early."""
    num_tokens = request.prompt_len + request.output_len
    tokens = f"{request.prompt_len} prompt and {request.output_len} output tokens"
    if num_tokens > schedule.max_model_len:
        raise ConfigError(
            f"{name} has {tokens}, but max_model_len is {schedule.max_model_len}; raise it, or choose another workload"
        )
    num_pages = schedule.kv_groups.num_pages(num_tokens - 1)  # the last token is never computed
    if num_pages > schedule.num_shard_pages:
        raise ConfigError(
            f"{name} has {tokens}, which need {num_pages} pages of {schedule.page_size} tokens, but num_pages is "
            f"{schedule.num_shard_pages}; raise it, or choose another workload"
        )


def _write(report: Json, path: Path | None) -> None:
    if path is not None:
        write_whole(path, json.dumps(report, allow_nan=False).encode() + b"\n")


def _show(report: Json, job: BenchJob) -> None:
    print(render(report))
    if job.json_path is not None:
        _log(f"figures: {job.json_path}")
    if job.plots_dir is not None and plotting.reason_missing() is None:
        for path in plots.draw(report, job.plots_dir):
            _log(f"plot: {path}")


def _read_rates(args: argparse.Namespace, workload: Workload) -> tuple[float | None, ...]:
    if args.rates is None:
        if args.arrival_seed is not None:
            raise ConfigError("arrival_seed draws Poisson arrivals; give --rate, or --rates")
        if not any(request.arrival_s for request in workload.requests):
            raise ConfigError(f"in the workload {workload.name} all requests arrive simultaneously; give --rate")
        return (None,)
    if args.time_scale is not None:
        raise ConfigError("time_scale stretches the workload's arrivals; leave out --time-scale or --rate")
    try:
        rates = tuple(float(rate) for rate in args.rates.split(","))
    except ValueError:
        raise ConfigError(f"rates must be numbers separated by commas, got {args.rates!r}") from None
    if not all(rate > 0 for rate in rates):
        raise ConfigError(f"each rate must be a positive number or inf, got {args.rates}")
    return rates


def _at_least(lowest: int, name: str, value: int | None) -> int | None:
    if value is not None and value < lowest:
        raise ConfigError(f"{name} must be at least {lowest}, got {value}")
    return value


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, got {value}")
    return value


def _output_file(given: str | None) -> Path | None:
    if given is None:
        return None
    path = Path(given).resolve()  # resolved, to write through a symbolic link instead of replacing it
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise ConfigError(f"json must be a file in an existing directory, got {given}")
    return _writable(path)


def _output_dir(given: str | None) -> Path | None:
    if given is None:
        return None
    if (reason := plotting.reason_missing()) is not None:
        _log(reason)
    path = Path(given)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the plot directory {given}: {error.strerror}") from error
    _writable(path / "plot.png")
    return path


def _writable(path: Path) -> Path:
    try:
        check_writable(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


def _at(rate: float | None) -> str:
    return "" if rate is None else f" at {rate:g} requests/s"


def _log(line: str) -> None:
    print(line, file=sys.stderr)
