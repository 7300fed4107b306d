"""Command `jaxserve batch`: serve a file of requests."""

import contextlib
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxserve.api.config import EngineConfig
from jaxserve.api.lora_request import LoRARequest
from jaxserve.cli.command import Command
from jaxserve.cli.config_flags import add_engine_flags, engine_options
from jaxserve.cli.loading import load_llm, status_line
from jaxserve.cli.logs import add_log_level
from jaxserve.cli.process_flags import add_process_flags, is_distributed
from jaxserve.errors import ConfigError, RequestError
from jaxserve.server.lora_modules import read_modules
from jaxserve.system import signals
from jaxserve.system.ticker import Ticker


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve batch`."""
    parser.add_argument("input", metavar="IN", help="request file: JSON lines in OpenAI's batch format")
    text = "result file: JSON lines in any order; if it exists, only missing records are added"
    parser.add_argument("output", metavar="OUT", help=text)
    text = "exit with code 1 if lines have failed (default: 0; their records have the errors)"
    parser.add_argument("--strict", action="store_true", help=text)
    text = "model names accepted in requests (default: any; with --lora-modules the path and its last part)"
    parser.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help=text)
    text = "LoRA adapters that requests name as `model`, each as NAME=PATH or JSON; see jaxserve serve"
    parser.add_argument("--lora-modules", nargs="+", default=(), metavar="NAME=PATH", help=text)
    text = (
        "show live statistics on stderr about once a second instead of the progress bar; "
        "starts when all programs are compiled"
    )
    parser.add_argument("--stats", action="store_true", help=text)
    text = "spread the requests over engines on the Ray cluster at RAY_ADDRESS, or on a local one (extra: ray)"
    parser.add_argument("--ray", action="store_true", help=text)
    text = "number of engines (default: as many as fit on the cluster's GPUs or TPUs; one on a cluster without any)"
    parser.add_argument("--ray-actors", type=int, metavar="INT", help=text)
    add_log_level(parser)
    add_process_flags(parser)
    add_engine_flags(parser)


def _run(args: Namespace) -> int:
    """Serve the batch that the flags describe; return 1 if `--strict` and lines have failed, else 0."""
    from jaxserve.openai.batch_files import find_finished, run_batch  # noqa: PLC0415 - fcntl, which not every system has

    if args.ray_actors is not None and not args.ray:
        raise ConfigError("--ray-actors needs --ray")
    if args.ray and args.stats:
        raise ConfigError("--stats shows the steps of one engine, and --ray runs several; leave out one of them")
    if args.ray and is_distributed(args):
        raise ConfigError("--ray runs each engine in one process; leave out --ray or the flags for many processes")
    adapters = read_modules(args.lora_modules)
    if adapters and not engine_options(args).get("enable_lora"):
        raise ConfigError("lora_modules needs enable_lora; add --enable-lora")
    if adapters and args.ray:
        raise ConfigError("--lora-modules are loaded by one engine, and --ray runs several; leave out one of them")
    config = EngineConfig(**engine_options(args))
    names = args.served_model_name
    if adapters and not names:  # any other name could be an adapter's, misspelt
        own = str(config.model or config.model_path)
        names = (Path(own).name, own)
    if both := [each.lora_name for each in adapters if each.lora_name in names]:
        raise ConfigError(f"--lora-modules must not have a name of the model's, got {both[0]!r}; choose another name")
    summary = None
    if not is_distributed(args):  # the other processes would wait for this one's engine
        summary = find_finished(args.input, args.output, config.seed)
    if summary is None:
        with _engine(args, adapters) as engine:
            summary = run_batch(engine, args.input, args.output, model_names=names, use_tqdm=not args.stats)
    resumed = f" ({summary.num_resumed} from before)" if summary.num_resumed else ""
    failed = "no line failed"
    if summary.num_errors:
        failed = f"{summary.num_errors} of {summary.num_records} lines failed, and their records have the errors"
    records = "1 record" if summary.num_records == 1 else f"{summary.num_records} records"
    print(
        f"{args.output}: {records}{resumed}; {failed}; {summary.completion_tokens} tokens in {summary.elapsed_s:.1f} s",
        file=sys.stderr,
    )
    return 1 if args.strict and summary.num_errors else 0


@contextlib.contextmanager
def _engine(args: Namespace, adapters: Sequence[LoRARequest]) -> Iterator[Any]:
    """Yield what serves the batch: an `LLM` with adapters in this process, or a fleet of engines on Ray."""
    if not args.ray:
        with contextlib.nullcontext() if sys.stderr.isatty() else Ticker(_loading(time.monotonic())):
            llm = load_llm(args)
            for adapter in adapters:
                try:
                    llm.load_lora(adapter)
                except RequestError as error:
                    raise ConfigError(f"lora_modules: {error}") from error
        with status_line(args.stats, llm):
            yield llm
        return
    from jaxserve.fleet.ray_fleet import ray_fleet  # noqa: PLC0415 - slows the start of every command

    with signals.unwinding(), ray_fleet(args.ray_actors, **engine_options(args)) as fleet:
        yield fleet


def _loading(started_s: float) -> Callable[[], str]:
    """Return a function that returns a line with the seconds for which the model has been loading."""
    return lambda: f"batch: loading the model, for {time.monotonic() - started_s:.0f} s"


COMMAND = Command(
    "batch",
    "serve a file of OpenAI batch requests; the same command resumes it",
    _add_flags,
    _run,
    on_interrupt="; run the same command again to resume",
    usage="%(prog)s [OPTIONS] IN OUT",
)
