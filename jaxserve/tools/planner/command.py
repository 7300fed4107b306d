"""Command `jaxserve plan`: read the command line and print the plan."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxserve.api.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.tools.planner.flags import find_compilers
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.plan import Plan, make_plan
from jaxserve.tools.planner.plots import check_plot, draw_capacity
from jaxserve.tools.planner.report import Json, build_report, build_sweep_report, render, render_sweep
from jaxserve.tools.planner.sweep import read_prices, sweep
from jaxserve.tools.planner.targets import SWEPT, Target, missing_compiler, parse_target

Serve = Callable[[EngineConfig, Target, str, int | None, float | None], Json]


def run_plan(args: argparse.Namespace, engine_options: Mapping[str, Any], serve: Serve) -> int:
    """Print the plan or the sweep; return the exit code, which is 1 if no target could be planned.

    Args:
        args: the flags.
        engine_options: engine options by name.
        serve: returns a simulation's figures for a configuration, a target, a trace, the number of its requests and
            the dollars per hour.

    Raises:
        ConfigError: the target, the model or an option is not supported by the planner.
    """
    jax.config.update("jax_platforms", "cpu")  # leave accelerators to processes that serve
    if args.prices is not None and args.sweep is None:
        raise ConfigError("prices are compared in a sweep only; give --sweep, or drop --prices")
    if args.trace is not None and args.sweep is None:
        raise ConfigError("a trace is served on swept targets; give --sweep, or jaxserve simulate one target")
    if args.trace is not None and not Path(args.trace).is_file():  # plans may take minutes
        raise ConfigError(f"trace must be a file with requests, got {args.trace}")
    if args.max_requests is not None and (args.trace is None or args.max_requests < 1):
        raise ConfigError(f"--max-requests must be a positive number of requests of --trace, got {args.max_requests}")
    if args.programs and (args.sweep is not None or args.target == "cpu"):
        raise ConfigError("programs are compiled for one target, not for cpu; give it by --target, or drop --programs")
    if args.programs and args.no_compile:
        raise ConfigError("--programs compiles, and --no-compile does not; drop one")
    if args.plot is not None:
        check_plot(args.plot)
    make = partial(_plan, args=args, engine_options=engine_options)
    if args.sweep is None:
        plan = make(args.target)
        plans = [plan]
        print(json.dumps(build_report(plan), indent=2) if args.json else render(plan))
        _suggest_compilers([plan], args)
    elif not (plans := _sweep(args, make, _server(args, engine_options, serve))):
        plot = "" if args.plot is None else f", and {args.plot} is not drawn"
        print(f"jaxserve: error: no target could be computed, for the reasons above{plot}", file=sys.stderr)
        return 1
    if args.plot is not None:
        draw_capacity([plan for plan in plans if plan.fits], args.plot)
    return 0


def _server(
    args: argparse.Namespace, engine_options: Mapping[str, Any], serve: Serve
) -> Callable[[Target, float | None], Json] | None:
    """Return a function that serves the trace on a target; None without a trace."""
    if args.trace is None:
        return None

    def on_target(target: Target, usd_per_hour: float | None) -> Json:
        print(f"serving {args.trace} on {target.name}", file=sys.stderr, flush=True)
        config = EngineConfig(model=args.model, tensor_parallel_size=target.num_devices, **engine_options)
        return serve(config, target, args.trace, args.max_requests, usd_per_hour)

    return on_target


def _plan(name: str, args: argparse.Namespace, engine_options: Mapping[str, Any]) -> Plan:
    """Return the plan for the target with this name, by the flags and engine options."""
    target = parse_target(name)
    missing = missing_compiler(target, find_compilers(args.compilers))
    if missing is not None and args.programs:
        raise ConfigError(f"--programs compiles, but {missing}")
    compiles = not args.no_compile and missing is None
    sizes = {"prompt_tokens": args.prompt_len, "context_tokens": args.context_len, "batch": args.batch}
    try:
        config = EngineConfig(model=args.model, tensor_parallel_size=target.num_devices, **engine_options)
        advises = args.sweep is None  # a sweep shows which targets fit
        return make_plan(config, target, **sizes, compiles=compiles, all_programs=args.programs, advises=advises)
    except ConfigError as error:
        if "tensor_parallel_size" not in error.about:
            raise
        what = f"tensor_parallel_size is here the number of devices of the target, {target.num_devices} for {name}"
        raise ConfigError(f"{error} ({what})") from error


def _sweep(
    args: argparse.Namespace, make: Callable[[str], Plan], serve: Callable[[Target, float | None], Json] | None
) -> list[Plan]:
    """Print the comparison of the swept targets; return the plans, made by name, of those that could be planned."""
    prices = read_prices(args.prices) if args.prices is not None else {}
    read_model(args.model)  # an invalid model would fail on every target

    def make_aloud(target: Target) -> Plan:
        print(f"planning for {target.name}", file=sys.stderr, flush=True)
        return make(target.name)

    candidates = list(sweep(args.sweep or SWEPT, make_aloud, prices=prices, batch=args.batch, serve=serve))
    print(json.dumps(build_sweep_report(candidates), indent=2) if args.json else render_sweep(candidates))
    plans = [candidate.plan for candidate in candidates if candidate.plan is not None]
    _suggest_compilers(plans, args)
    return plans


def _suggest_compilers(plans: Sequence[Plan], args: argparse.Namespace) -> None:
    """Print to stderr how to install the missing compilers that would make the plans more exact."""
    if args.no_compile:
        return
    fitting = {plan.target.platform: plan.target for plan in plans if plan.fits and plan.largest is None}
    for target in fitting.values():
        if (missing := missing_compiler(target, find_compilers(args.compilers))) is not None:
            print(
                f"jaxserve: compilers (about 500 MB) would add step temporaries and exchanges between chips: {missing}",
                file=sys.stderr,
            )
