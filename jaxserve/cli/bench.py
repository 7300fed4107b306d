"""Command `jaxserve bench`: measure an engine or a server."""

from argparse import ArgumentParser, Namespace

from jaxserve.cli.command import Command
from jaxserve.cli.config_flags import add_engine_flags, engine_options
from jaxserve.cli.loading import load_driven
from jaxserve.cli.logs import add_log_level
from jaxserve.cli.process_flags import add_process_flags
from jaxserve.tools.bench.flags import add_bench


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve bench`."""
    add_process_flags(parser)
    add_bench(parser, _add_engine)


def _add_engine(parser: ArgumentParser) -> None:
    """Add the log level and the engine options, without the tokenizer, which no benchmark uses."""
    add_log_level(parser)
    add_engine_flags(parser, leave_out=("tokenizer",))


def _run(args: Namespace) -> int:
    """Measure the engine or server that the flags describe; return 0."""
    from jaxserve.tools.bench.command import (  # noqa: PLC0415 - imports jax
        read_job,
        read_server,
        run_job,
        run_remote_job,
    )

    job, remote = read_job(args), read_server(args, engine_options(args))
    if remote is not None:
        run_remote_job(*remote, job)
    else:
        run_job(load_driven(args), job)
    return 0


COMMAND = Command("bench", "measure throughput, or latency under load, of an engine or a server", _add_flags, _run)
