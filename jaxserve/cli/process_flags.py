"""Flags for runs over many processes."""

from argparse import ArgumentParser, Namespace

from jaxserve import distributed
from jaxserve.cli.config_flags import flag

_FLAGS = {  # arguments of distributed.initialize, in its order
    "coordinator_address": (
        str,
        "HOST:PORT",
        "address at which the others reach process 0; the port must be free on its host",
    ),
    "num_processes": (int, "INT", "number of processes"),
    "process_id": (int, "INT", "index of this process, from 0"),
}


def add_process_flags(parser: ArgumentParser) -> None:
    """Add the flags for a run over many processes."""
    text = "run the same command in every process; the first one does the work, on all processes' devices"
    group = parser.add_argument_group("many processes", text)
    text = "take the following values, unless they are given, from SLURM, Open MPI or the TPU pod"
    group.add_argument("--distributed", action="store_true", help=text)
    for name, (kind, metavar, text) in _FLAGS.items():
        group.add_argument(flag(name), type=kind, metavar=metavar, help=text)


def is_distributed(args: Namespace) -> bool:
    """Return whether the flags ask for a run over many processes."""
    return args.distributed or any(getattr(args, name) is not None for name in _FLAGS)


def join_processes(args: Namespace) -> None:
    """Connect this process to the others if the flags ask for a run over many processes."""
    if is_distributed(args):
        distributed.initialize(*(getattr(args, name) for name in _FLAGS))
