"""Command `jaxserve bench`: read the flags, run the benchmark, print and save the figures."""

import argparse
import contextlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.api.schema import integer, number
from jaxserve.core.status_line import StatusLine, wait_until_warm
from jaxserve.errors import ConfigError
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.system.environment import openai_api_key
from jaxserve.system.whole_file import check_writable, write_whole
from jaxserve.tools.bench import plots
from jaxserve.tools.bench.flags import DEFAULT_VOCAB_SIZE
from jaxserve.tools.bench.load import LoadTrace, TimedRequest, run_load
from jaxserve.tools.bench.pictures import BenchPrompt, check_pictures, with_pictures
from jaxserve.tools.bench.remote import Server, run_remote
from jaxserve.tools.bench.report import build_remote_report, build_report
from jaxserve.tools.bench.summary import NO_SLO, EngineSizes, Json, Slo, summarize
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

if TYPE_CHECKING:
    from jaxserve.assembly.driven import DrivenEngine

_POSITIVE = number(0, excludes_low=True)
_NUMBERS = {  # types of the flags with numbers
    **dict.fromkeys(("num_requests", "rounds", "max_concurrency"), integer(1)),
    "arrival_seed": integer(0),
    **dict.fromkeys(("time_scale", "slo_ttft_ms", "slo_tpot_ms", "price_per_hour"), _POSITIVE),
    "vocab_size": integer(LOWEST_ID + 1, words=f"an integer of {LOWEST_ID + 1} or more"),
}
_JOB_NUMBERS = {"arrival_seed", "time_scale", "max_concurrency", "price_per_hour"}  # fields of BenchJob


@dataclass(frozen=True)
class BenchJob:
    """Benchmark to run, with checked values.

    Attributes:
        kind: "offline" or "serve".
        workload: requests to send.
        rates: Poisson arrivals per second in each run; None for the workload's arrival times.
        arrival_seed: seed for Poisson arrivals.
        time_scale: factor for the workload's arrival times.
        max_concurrency: maximum number of unfinished requests; None for no limit.
        slo: limits that goodput counts.
        price_per_hour: price of the machine; None if unknown.
        json_path: file for the report; None to write none.
        plots_dir: directory for plots; None to draw none.
        live: True to show live statistics on stderr.
    """

    kind: str
    workload: Workload
    rates: tuple[float | None, ...] = (None,)
    arrival_seed: int = 0
    time_scale: float = 1.0
    max_concurrency: int | None = None
    slo: Slo = NO_SLO
    price_per_hour: float | None = None
    json_path: Path | None = None
    plots_dir: Path | None = None
    live: bool = False

    @property
    def load(self) -> Json:
        """The report's entries about the arrivals."""
        return {name: getattr(self, name) for name in ("time_scale", "arrival_seed", "max_concurrency")}

    def timed(self, prompts: Sequence[BenchPrompt], rate: float | None) -> list[TimedRequest]:
        """Return the workload's requests with their prompts and with arrival times in seconds."""
        requests = self.workload.requests
        if self.kind == "offline":
            arrivals = [0.0] * len(requests)
        elif rate is not None:
            arrivals = poisson_arrivals(self.workload, rate, self.arrival_seed)
        else:
            arrivals = [request.arrival_s * self.time_scale for request in requests]
        timed: list[TimedRequest] = []
        last: dict[int, int] = {}  # index of each session's last request so far
        for index, (request, prompt, arrival_s) in enumerate(zip(requests, prompts, arrivals, strict=True)):
            session = request.session_id
            after = None if session is None else last.get(session)
            pause_s = 0.0 if self.kind == "offline" else request.pause_s * self.time_scale
            if session is not None:
                last[session] = index
            name = "" if session is None else f"session-{session}"
            due_s = arrival_s if after is None else pause_s
            picture = "" if request.picture is None else " x ".join(map(str, request.picture))
            timed.append(TimedRequest(prompt, request.output_len, due_s, after, name, picture))
        return timed


def read_job(args: argparse.Namespace) -> BenchJob:
    """Return the benchmark that the flags describe; ConfigError before anything is loaded or measured."""
    given = _given_numbers(args)
    workload = load_workload(args.workload)
    if "num_requests" in given:
        workload = workload.resized(given["num_requests"])
    return BenchJob(
        kind=args.kind,
        workload=workload,
        rates=(None,) * given["rounds"] if args.kind == "offline" else _read_rates(args, workload),
        slo=Slo(given.get("slo_ttft_ms"), given.get("slo_tpot_ms")),
        json_path=_output_file(args.json),
        plots_dir=_output_dir(args.plots),
        live=args.stats,
        **{name: given[name] for name in _JOB_NUMBERS & given.keys()},
    )


def run_job(engine: "DrivenEngine", job: BenchJob) -> Json:
    """Run a benchmark on an engine that serves nothing else; print, write and return its report.

    Raises:
        ConfigError: the engine cannot run the workload; nothing has been measured then.
    """
    for index, request in enumerate(job.workload.requests):
        _check_fits(engine.schedule, f"request {index} of the workload {job.workload.name}", request)
    token_id = engine.arch.image_token_id
    check_pictures(job.workload, token_id, engine.arch.architecture)
    prompts, draws = token_ids(job.workload, engine.arch.vocab_size), itertools.count()
    wait_until_warm(engine, sys.stderr)  # first, since compilation would lower the measured peak rates
    run_load(engine, [TimedRequest(with_pictures(job.workload, prompts, token_id, next(draws))[0], output_len=1)])
    sizes = EngineSizes(
        engine.schedule.page_size, engine.schedule.num_pages, engine.peak_rates(), engine.config.carbon_intensity
    )

    def run(rate: float | None) -> LoadTrace:
        engine.reset_prefix_cache()
        given = with_pictures(job.workload, prompts, token_id, next(draws))
        with StatusLine(engine, sys.stderr) if job.live else contextlib.nullcontext():
            return run_load(engine, job.timed(given, rate), max_concurrency=job.max_concurrency)

    return _measure(job, build_report(engine, job.kind, job.workload, job.load), sizes, run)


def run_remote_job(server: Server, vocab_size: int, job: BenchJob) -> Json:
    """Run a benchmark on a server, which may have other clients; print, write and return its report.

    Args:
        server: the server.
        vocab_size: upper limit of the prompts' token ids.
        job: benchmark to run.

    Raises:
        ConfigError: the server does not answer, or serves no request.
    """
    check_pictures(job.workload, None, "a server; leave out --url")
    prompts = token_ids(job.workload, vocab_size)
    run_remote(server, [TimedRequest(prompts[0], output_len=1)])  # errors show before anything is measured

    def run(rate: float | None) -> LoadTrace:
        return run_remote(server, job.timed(prompts, rate), max_concurrency=job.max_concurrency)

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
    vocab_size = _given_numbers(args).get("vocab_size", DEFAULT_VOCAB_SIZE)
    return Server.at(args.url, engine_options.get("model"), given["api_key"] or openai_api_key()), vocab_size


def _measure(job: BenchJob, report: Json, sizes: EngineSizes | None, run: Callable[[float | None], LoadTrace]) -> Json:
    """Call `run` with each of the job's rates, print the table, write the requested files, and return the report.

    Each run is written when it ends. If a later one fails, the completed ones are still shown.

    Args:
        job: the benchmark.
        report: report without runs, which are added to it.
        sizes: sizes of the engine; None for a server.
        run: function that sends the load at a rate.
    """
    try:
        for index, rate in enumerate(job.rates, 1):
            at = "" if rate is None else f" at {rate:g} requests/s"
            _log(f"{job.workload.name}: run {index} of {len(job.rates)}{at}")
            trace = run(rate)
            if trace.failures:
                _log(f"{len(trace.failures)} requests were not served; the first failed with: {trace.failures[0]}")
            figures = summarize(trace, slo=job.slo, price_per_hour=job.price_per_hour, sizes=sizes)
            report["runs"].append({"rate_per_s": "inf" if rate == math.inf else rate, **figures})
            if job.json_path is not None:
                write_whole(job.json_path, json.dumps(report, allow_nan=False).encode() + b"\n")
    finally:
        if report["runs"]:
            _show(report, job)
    return report


def _check_fits(schedule: ScheduleConfig, name: str, request: WorkloadRequest) -> None:
    """Raise ConfigError for a request that the engine would refuse or end early; `name` names it in the message."""
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


def _show(report: Json, job: BenchJob) -> None:
    """Print the report's table, draw its plots if requested, and name the written files on stderr."""
    print(render(report))
    if job.json_path is not None:
        _log(f"figures: {job.json_path}")
    if job.plots_dir is not None and plotting.reason_missing() is None:
        for path in plots.draw(report, job.plots_dir):
            _log(f"plot: {path}")


def _given_numbers(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the given flags with numbers; ConfigError for one out of its bounds."""
    given = {name: getattr(args, name, None) for name in _NUMBERS}
    return {name: _NUMBERS[name].read(name, value, ConfigError) for name, value in given.items() if value is not None}


def _read_rates(args: argparse.Namespace, workload: Workload) -> tuple[float | None, ...]:
    """Return the arrival rates from `--rate`, or None as the only one for the workload's arrival times."""
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


def _output_file(given: str | None) -> Path | None:
    """Return the file that `--json` names; ConfigError if it cannot be written."""
    if given is None:
        return None
    path = Path(given).resolve()  # resolved, to write through a symbolic link instead of replacing it
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise ConfigError(f"json must be a file in an existing directory, got {given}")
    return _writable(path)


def _output_dir(given: str | None) -> Path | None:
    """Make and return the directory that `--plots` names; ConfigError if files cannot be written in it."""
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
    """Return `path`; ConfigError if the file cannot be written."""
    try:
        check_writable(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


def _log(line: str) -> None:
    print(line, file=sys.stderr)
