"""Command `jaxserve simulate`: serve a trace in virtual time."""

import dataclasses
from argparse import ArgumentParser, Namespace

from jaxserve.api.config import EngineConfig
from jaxserve.cli.command import Command
from jaxserve.cli.config_flags import NOT_FLAGS, add_config_flags, engine_options
from jaxserve.tools.simulator.flags import SIMULATED, add_simulate


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve simulate`."""
    add_simulate(parser)
    not_simulated = {field.name for field in dataclasses.fields(EngineConfig)} - SIMULATED
    add_config_flags(parser, "engine", EngineConfig, (*NOT_FLAGS, *not_simulated))


def _run(args: Namespace) -> int:
    """Simulate and print the figures; return 0."""
    from jaxserve.tools.simulator.command import run_simulate  # noqa: PLC0415 - imports jax

    return run_simulate(args, engine_options(args))


COMMAND = Command(
    "simulate",
    "serve a trace in virtual time on accelerators without having them",
    _add_flags,
    _run,
    usage="%(prog)s --trace FILE --target NAME [OPTIONS]",
)
