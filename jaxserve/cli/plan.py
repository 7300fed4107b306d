"""Command `jaxserve plan`: predict a model's memory and speed on accelerators."""

import dataclasses
from argparse import ArgumentParser, Namespace

from jaxserve.api.config import EngineConfig
from jaxserve.cli.command import Command
from jaxserve.cli.config_flags import NOT_FLAGS, add_config_flags, engine_options
from jaxserve.tools.planner.flags import PLANNED, add_plan, find_compilers, use_compilers


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve plan`."""
    add_plan(parser)
    not_planned = {field.name for field in dataclasses.fields(EngineConfig)} - PLANNED
    add_config_flags(parser, "engine", EngineConfig, (*NOT_FLAGS, *not_planned))


def _run(args: Namespace) -> int:
    """Print the plan or the sweep; return 1 if no target of a sweep could be planned, else 0."""
    use_compilers(find_compilers(args.compilers))
    from jaxserve.tools.planner.command import run_plan  # noqa: PLC0415 - imports jax
    from jaxserve.tools.simulator.command import serve_trace  # noqa: PLC0415

    return run_plan(args, engine_options(args), serve_trace)


COMMAND = Command(
    "plan",
    "predict memory and speed on an accelerator without having it",
    _add_flags,
    _run,
    usage="%(prog)s (--target NAME | --sweep [NAME ...]) [OPTIONS]",
)
