"""Command `jaxserve simulate`: read the command line, simulate, and print the figures."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import Any

import jax

from jaxserve.api.config import EngineConfig
from jaxserve.errors import ConfigError, install_extra
from jaxserve.tools.planner.sizes import Sizes
from jaxserve.tools.planner.sweep import read_prices
from jaxserve.tools.planner.targets import Target, parse_target
from jaxserve.tools.simulator.page import read_report, write_page
from jaxserve.tools.simulator.policy import load_policy
from jaxserve.tools.simulator.roofline_times import RooflineTimes
from jaxserve.tools.simulator.simulation import Limits, Simulation
from jaxserve.tools.simulator.step_times import StepTimes, read_step_rates
from jaxserve.tools.simulator.summary import render
from jaxserve.tools.simulator.traces import TracedRequest, read_log_sizes, read_trace


def run_simulate(args: argparse.Namespace, engine_options: Mapping[str, Any]) -> int:
    """Simulate and print the figures; return 0.

    Raises:
        ConfigError: the trace, the model, the target or an option is not supported.
    """
    jax.config.update("jax_platforms", "cpu")  # leave accelerators to processes that serve
    for name, value in (("replicas", args.replicas), ("max_requests", args.max_requests)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 < args.efficiency <= 1:
        raise ConfigError(f"efficiency must be in (0, 1], got {args.efficiency}")
    if not 0 < args.speed < math.inf:
        raise ConfigError(f"speed must be positive, got {args.speed}")
    if args.page is not None and find_spec("matplotlib") is None:
        raise ConfigError(f"--page needs matplotlib; {install_extra('bench')}")
    if args.beside is not None and args.page is None:
        raise ConfigError("--beside shows a run on a page; give the page's file by --page")
    beside = None if args.beside is None else read_report(args.beside)
    target = parse_target(args.target)
    prices = {} if args.prices is None else read_prices(args.prices)
    chooser = None if args.policy is None else load_policy(args.policy)
    if args.from_log is not None:
        args.trace, engine_options = args.from_log, {**read_log_sizes(args.from_log), **engine_options}
    config = EngineConfig(model=args.model, tensor_parallel_size=target.num_devices, **engine_options)
    sizes = Sizes.resolve(config, target)
    if sizes.memory.missing:
        missing = sizes.memory.missing / 1e9
        raise ConfigError(f"{sizes.name} must fit on {target.name}, and {missing:.1f} GB are missing on each chip")
    simulation = Simulation(
        sizes.schedule,
        _step_times(args, sizes),
        args.replicas,
        limits=Limits(args.max_queued_requests, args.max_queued_tokens),
        chooser=chooser,
        step_ahead=config.step_ahead,
        shares_prefixes=config.enable_prefix_caching,
    )
    simulation.run(_requests(args))
    price = prices.get(target.kind)
    watts = None if target.sheet is None or target.sheet.watts is None else target.sheet.watts * target.num_chips
    report = simulation.totals.report(
        args.replicas,
        None if price is None else price * target.num_chips,
        max_watts=watts,
        carbon_intensity=config.carbon_intensity,
    )
    about = {"model": sizes.name, "target": target.name, "replicas": args.replicas, "trace": args.trace}
    report = about | report
    print(json.dumps(report, indent=2) if args.json else render(report))
    if args.page is not None:  # last: the figures are not lost if it cannot be written
        write_page(args.page, [report] if beside is None else [beside, report])
    return 0


def serve_trace(
    config: EngineConfig, target: Target, trace: str, max_requests: int | None, usd_per_hour: float | None
) -> dict[str, Any]:
    """Return the figures of one replica that serves a trace at the roofline's speed.

    Raises:
        ConfigError: the trace is malformed, or the target has no data sheet.
    """
    sizes = Sizes.resolve(config, target)
    simulation = Simulation(
        sizes.schedule,
        RooflineTimes(sizes.roofline()),
        step_ahead=config.step_ahead,
        shares_prefixes=config.enable_prefix_caching,
    )
    report = simulation.run(islice(read_trace(trace), max_requests)).report(1, usd_per_hour)
    return {name: value for name, value in report.items() if name not in {"timeline", "window_s", "groups"}}


def _requests(args: argparse.Namespace) -> Iterator[TracedRequest]:
    """Return the trace's requests, by the flags."""
    warn = partial(print, "jaxserve: skipped", file=sys.stderr) if args.on_bad_line == "skip" else None
    for request in islice(read_trace(args.trace, warn), args.max_requests):
        yield request if args.speed == 1 else request._replace(arrival_s=request.arrival_s / args.speed)


def _step_times(args: argparse.Namespace, sizes: Sizes) -> StepTimes:
    """Return the step times, from measured rates or from the roofline."""
    if args.step_rates is not None:
        return read_step_rates(args.step_rates)
    if sizes.target.sheet is None:
        raise ConfigError("a CPU has no data sheet; give measured step times by --step-rates, or chips by --target")
    return RooflineTimes(sizes.roofline(), args.efficiency)
