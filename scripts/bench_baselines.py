"""jaxserve compared with other engines: the same workloads on the same checkpoint, in turns, as ratios.

    python scripts/bench_baselines.py DIR/tiny --make tiny     # writes a random-weight checkpoint first; needs torch
    python scripts/bench_baselines.py DIR/tiny --python vllm=~/vllm/bin/python --python openvino_genai=~/ov/bin/python
    python scripts/bench_baselines.py DIR/tiny --engines jaxserve vllm --workloads single my.json --json out.json

Greedy, end of sequence ignored, float32 unless `--set ENGINE.dtype` specifies another, with all requests queued
immediately. Each engine loads once, in a separate process, which is stopped while another is measured; a round gives
every engine the same prompts, and no two rounds have any in common. A failing engine is reported and the others
continue. Models converted for an engine, and logs, are kept in DIR/tiny.baselines.

Workloads with several requests are measured in output tokens per second; those with a single request in tokens per
second after the first, (n - 1) / (T(n tokens) - T(1 token, another prompt)). `cores` is the engine's processor use;
`others` the fraction of all processor time that other processes took meanwhile: above a few percent, the figures are
unreliable. `of limit` is the arithmetic limit (`baselines/limit.py`: FLOPs and bytes that no engine can avoid, at this
machine's measured peak rates in the engine's dtype) over the measured time. `equal ids` is the fraction of requests
with exactly the ids of transformers, or of the first engine: float32 sums in another order diverge at nearly tied
tokens.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from baselines.checkpoint import SHAPES, make_checkpoint
from baselines.limit import least_work
from baselines.process import Worker
from baselines.registry import ENGINES, find_python, worker_command, worker_environment
from baselines.rounds import Contest, Record, summarise
from jaxserve.errors import ConfigError
from jaxserve.execution.roofline import best_rates, device_peak_rates, measure_peak_rates
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.tools.bench.workloads import Workload, load_workload

_COLUMNS = (
    *("workload", "engine", "unit", "min", "median", "max"),
    *("jaxserve / it", "of limit", "first token, ms", "equal ids", "cores", "others", "runs"),
)
_WORKLOADS = ("mixed-64", "single", "shared-prefix-64", "long-tail-128")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the workers
    args = _parse()
    try:
        workloads = [load_workload(name) for name in args.workloads]
        if args.make and not (args.checkpoint / "config.json").exists():
            _say(f"{args.checkpoint}: {make_checkpoint(args.make, args.checkpoint):,} parameters")
        vocab_size = _vocab_size(args.checkpoint)
        arch = registry.from_hf_config(json.loads((args.checkpoint / "config.json").read_text(encoding="utf-8")))
        if args.json and not args.json.absolute().parent.is_dir():
            raise ConfigError(f"json must be a file in a directory that exists, got {args.json}")
    except ConfigError as error:
        _say(f"bench_baselines.py: error: {error}")
        sys.exit(2)
    load_before = os.getloadavg()
    with ExitStack() as stack:
        contest = Contest(_start_all(args, stack), vocab_size, _say)
        engines = contest.load()
        for workload in workloads:
            contest.run(workload, args.rounds)
    summary = summarise(contest.runs)
    options = _by_engine(args.set)
    dtypes = {name: options[name].get("dtype", "float32").replace("auto", arch.dtype) for name in engines}
    # Rates are measured when the engines have ended.
    limits = {dtype: _limits(workloads, arch, dtype) for dtype in sorted({*dtypes.values()})}
    for row in summary:
        row["limit_share"] = limits[dtypes[row["engine"]]][row["workload"]] / row["wall_s"]
    report = {
        "machine": {**_machine(), "load_before": load_before, "load_after": os.getloadavg()},
        "checkpoint": args.checkpoint.name,
        "engines": engines,
        "limits_s": limits,
        "summary": summary,
        "runs": contest.runs,
        "failures": contest.failures,
    }
    print(_table(report["summary"]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def _vocab_size(checkpoint: Path) -> int:
    """Return a checkpoint's vocabulary size; ConfigError if there is no checkpoint."""
    file = checkpoint / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"the checkpoint must be a Hugging Face directory, and there is no {file}; "
            f"give another, or --make {next(iter(SHAPES))} to write a random one there"
        )
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} must be a JSON object with a vocab_size, but: {error!r}") from error


def _limits(workloads: Sequence[Workload], arch: ArchConfig, dtype: str) -> dict[str, float]:
    """Return each workload's arithmetic limit in seconds for an engine that computes in `dtype`."""
    # The kept rates may come from an hour in which others shared the machine.
    rates = best_rates(device_peak_rates(jnp.dtype(dtype)), measure_peak_rates(jnp.dtype(dtype)))
    float_bytes = jnp.dtype(dtype).itemsize
    return {workload.name: least_work(workload, arch, float_bytes).seconds(rates) for workload in workloads}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=_path, help="a Hugging Face directory; needs no tokenizer")
    parser.add_argument("--make", choices=SHAPES, help="write a checkpoint of this shape there, if there is none")
    parser.add_argument("--workloads", nargs="+", default=_WORKLOADS, metavar="NAME", help="built in, or JSON files")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="and their order; without, all that are found")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        type=_python,
        metavar="PACKAGE=PATH",
        help="interpreter that has an engine's package: " + ", ".join(sorted({s.package for s in ENGINES.values()})),
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_option,
        metavar="ENGINE.OPTION=JSON",
        help="an option of an engine, e.g. jaxserve.max_num_seqs=32",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=1800, help="longest wait for a load or a run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    return parser.parse_args()


def _path(text: str) -> Path:
    """Return the absolute path for an argument."""
    return Path(text).expanduser().absolute()


def _python(text: str) -> tuple[str, str]:
    """Parse the argument PACKAGE=PATH: an engine's package and the interpreter that has it."""
    package, _, path = text.partition("=")
    if package not in {spec.package for spec in ENGINES.values()} or not _path(path).is_file():
        raise argparse.ArgumentTypeError(f"must be PACKAGE=PATH, an engine's package and an interpreter, got {text!r}")
    return package, str(_path(path))


def _option(text: str) -> tuple[str, str, Any]:
    """Parse the argument ENGINE.OPTION=JSON."""
    name, _, value = text.partition("=")
    engine, _, option = name.rpartition(".")
    try:
        if engine in ENGINES and option:
            return engine, option, json.loads(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be ENGINE.OPTION=JSON with an engine of {list(ENGINES)}, got {text!r}")


def _start_all(args: argparse.Namespace, stack: ExitStack) -> dict[str, Worker]:
    """Start a worker per engine that has an interpreter; they end when the stack unwinds."""
    pythons, options = dict(args.python), _by_engine(args.set)
    logs = args.checkpoint.with_name(f"{args.checkpoint.name}.baselines") / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    workers = {}
    for name in args.engines or ENGINES:
        python = find_python(ENGINES[name], pythons)
        if python is None:
            _say(f"{name}: left out; no interpreter is known to have it, give --python {ENGINES[name].package}=PATH")
            continue
        command = worker_command(ENGINES[name], python, args.checkpoint, options[name])
        workers[name] = Worker(command, worker_environment(ENGINES[name], python), logs / f"{name}.log", args.timeout_s)
        stack.callback(workers[name].end)
    return workers


def _by_engine(options: Sequence[tuple[str, str, Any]]) -> Mapping[str, dict[str, Any]]:
    """Return options as a dict per engine."""
    grouped: dict[str, dict[str, Any]] = defaultdict(dict)
    for engine, option, value in options:
        grouped[engine][option] = value
    return grouped


def _machine() -> Record:
    """Return this machine's processor, number of cores and Python version."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return {"cpu": model or platform.processor(), "cpu_count": os.cpu_count(), "python": platform.python_version()}


def _table(summary: Sequence[Record]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "| --- " * len(_COLUMNS) + "|"]
    for row in summary:
        cells = [
            *(row[name] for name in ("workload", "engine", "unit")),
            *(f"{row[name]:.0f}" for name in ("min", "median", "max")),
            _cell(row["ratio"], "{:.2f}"),
            _cell(row["limit_share"], "{:.0%}"),
            _cell(row["ttft_s"] and row["ttft_s"] * 1000, "{:.0f}"),
            _cell(row["equal_requests_share"], "{:.0%}"),
            _cell(row["cores_used"], "{:.2f}"),
            _cell(row["noise_share"], "{:.0%}"),
            str(row["num_runs"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
